"""Decides which preparations compute now: by priority, fair among owners, and short preparations first.

A preparation that must wait keeps its process, which is halted. Preparations compete for cores only. One that downloads
uses none. One that waits for memory uses none either, because the preparations behind it may hold that memory. An
owner's number of both kinds is still limited.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

# Maximum number of an owner's preparations with a process. Each holds memory, also while it is halted.
MOST_BEGUN = 3
# The same with those of lower priority than another one, which may be halted because of it.
_MOST_BEGUN_IN_ALL = 2 * MOST_BEGUN
# Computing seconds that separate levels. A preparation on a higher level waits for its owner's preparations on lower
# levels.
_LEVELS_S = (5.0, 30.0, 300.0)
# Difference in computing seconds at which owners take turns. A switch is cheap but not free. An owner whose first
# preparation comes is this far ahead of the others.
_TURN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A job that is being prepared, or waits for it."""

    job_id: str
    owner: str | None
    nbytes: int  # of its files
    created_at: float
    priority: int = 0  # a lower number goes first, as in the queue
    computed_s: float = 0.0  # by its preparation so far
    has_process: bool = False
    uses_cores: bool = True
    leaves_cores: bool = False  # to a starting job, so it is not chosen now


class OwnerShares:
    """Counts the computing time of owners' preparations, so that the owners who want cores now share them evenly.

    Time that an owner used while no other owner waited does not count against it, and an owner gets no credit for time
    away. So an owner that comes starts at the virtual time, which is that of the owners who compute, less one turn.
    It therefore goes first at first, also beside an owner with many short preparations. This is start-time fair
    queueing (Goyal, Vin and Cheng, 1996) with a small advantage for those who come.
    """

    def __init__(self) -> None:
        self._used_s: dict[str | None, float] = {}
        self._present: frozenset[str | None] = frozenset()
        self._now_s = 0.0  # the virtual time

    @property
    def used_s(self) -> Mapping[str | None, float]:
        """Computing seconds by owner, to compare with each other only."""
        return self._used_s

    def update_present(self, owners: Collection[str | None]) -> None:
        """Records the owners who want cores now. A preparation that downloads or waits for memory wants none."""
        present = frozenset(owners)
        first_s = self._now_s - _TURN_S
        if not present & self._present:  # no owner waited for another before
            self._used_s.clear()
            first_s = self._now_s = 0.0
        for owner in present - self._present:
            self._used_s[owner] = max(self._used_s.get(owner, first_s), first_s)
        self._present = present

    def add(self, seconds: Mapping[str | None, float]) -> None:
        """Adds the computing time of owners' preparations since the last call."""
        for owner, each_s in seconds.items():
            self._used_s[owner] = self._used_s.get(owner, self._now_s - _TURN_S) + each_s
        computed = [self._used_s[owner] for owner, each_s in seconds.items() if each_s > 0]
        self._now_s = max(self._now_s, min(computed, default=self._now_s))


def choose_running(
    candidates: Sequence[Candidate], used_s: Mapping[str | None, float], *, num_side_by_side: int
) -> Sequence[str]:
    """Chooses the jobs whose preparations continue now. All others are halted or wait.

    `used_s`: computing seconds of each owner's preparations. Preparations that need no cores are chosen first. Of the
    others, higher priorities go first. Within one, owners take turns, the one with the least time first. Among an
    owner's own, one that has computed for long goes last, and the smallest of the others goes first.
    """
    by_owner: dict[str | None, list[Candidate]] = {}
    for each in sorted(candidates, key=_own_order):
        by_owner.setdefault(each.owner, []).append(each)
    admitted = [each for owned in by_owner.values() for each in _may_have_process(owned) if not each.leaves_cores]
    chosen = [each for each in admitted if not each.uses_cores]
    computing: list[Candidate] = []
    for priority in sorted({each.priority for each in admitted}):
        computing += _in_turns([each for each in admitted if each.uses_cores and each.priority == priority], used_s)
    return [each.job_id for each in (*chosen, *computing[:num_side_by_side])]


def _in_turns(candidates: Sequence[Candidate], used_s: Mapping[str | None, float]) -> Iterator[Candidate]:
    """Yields candidates of one priority, each owner's first, then each one's second. Each owner's are in order."""
    by_owner: dict[str | None, list[Candidate]] = {}
    for each in candidates:
        by_owner.setdefault(each.owner, []).append(each)
    owners = sorted(by_owner, key=lambda owner: _order_of_owners(by_owner[owner], used_s.get(owner, 0.0)))
    for round_ in zip_longest(*(by_owner[owner] for owner in owners)):
        yield from (each for each in round_ if each is not None)


def _order_of_owners(owned: Sequence[Candidate], used_s: float) -> tuple[float, int, float]:
    return used_s // _TURN_S, _level(owned[0]), min(each.created_at for each in owned)


def _own_order(each: Candidate) -> tuple[int, int, int, float, str]:
    return each.priority, _level(each), each.nbytes, each.created_at, each.job_id


def _level(each: Candidate) -> int:
    return sum(each.computed_s >= least_s for least_s in _LEVELS_S)


def _may_have_process(owned: Sequence[Candidate]) -> Sequence[Candidate]:
    """Leaves out the jobs that would exceed their owner's number of processes. `owned`: in order.

    A job does not count processes of lower priority, because they may be halted until it has ended. There is a limit
    for all together, too.
    """
    began = [each.priority for each in owned if each.has_process]
    found = []
    for each in owned:
        if not each.has_process:
            if sum(priority <= each.priority for priority in began) >= MOST_BEGUN or len(began) >= _MOST_BEGUN_IN_ALL:
                continue
            began.append(each.priority)
        found.append(each)
    return found
