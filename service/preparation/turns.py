"""Decides which preparations compute now: by priority, fair among owners, and short preparations first.

A preparation that must wait keeps its process, which is halted. Preparations compete for cores only. One that downloads
uses none. One that waits for memory uses none either, because the preparations behind it may hold that memory. An
owner's number of both kinds is still limited.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

# Maximum number of an owner's preparations with a process. Each holds memory, also while it is halted.
MOST_BEGUN = 3
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

    Time that an owner used while no other owner waited does not count against it, and an owner that was away is owed
    nothing. So an owner that comes starts with the time of the owner that has used least, less one turn. It therefore
    goes first at first, also beside an owner with many short preparations. This is start-time fair queueing
    (Goyal, Vin and Cheng, 1996) with a small advantage for those who come.
    """

    def __init__(self) -> None:
        self._used_s: dict[str | None, float] = {}
        self._present: frozenset[str | None] = frozenset()

    @property
    def used_s(self) -> Mapping[str | None, float]:
        """Computing seconds by owner, to compare with each other only."""
        return self._used_s

    def meet(self, owners: Collection[str | None]) -> None:
        """Notes the owners who have preparations now, and who comes anew."""
        present = frozenset(owners)
        stayed = present & self._present
        if not stayed:  # no owner waited for another before
            self._used_s.clear()
        least_s = min((self._used_s[owner] for owner in stayed), default=0.0) - _TURN_S
        for owner in present - stayed:
            self._used_s[owner] = max(self._used_s.get(owner, least_s), least_s)
        self._present = present

    def add(self, owner: str | None, seconds: float) -> None:
        """Adds computing time of an owner's preparation. The owner is present."""
        self._used_s[owner] += seconds


def who_computes(
    candidates: Sequence[Candidate], used_s: Mapping[str | None, float], *, num_side_by_side: int
) -> Sequence[str]:
    """Chooses the jobs whose preparations continue now, most urgent first. All others are halted or wait.

    `used_s`: computing seconds of each owner's preparations. Higher priorities go first. Within one, owners take turns,
    the one with the least time first. Among an owner's own, one that has computed for long goes last, and the smallest
    of the others goes first.
    """
    by_owner: dict[str | None, list[Candidate]] = {}
    for each in sorted(candidates, key=_own_order):
        by_owner.setdefault(each.owner, []).append(each)
    owners = sorted(by_owner, key=lambda owner: _order_of_owners(by_owner[owner], used_s.get(owner, 0.0)))
    rounds = zip_longest(*(_may_have_process(by_owner[owner]) for owner in owners))
    chosen, num_computing = [], 0
    for each in (candidate for round_ in rounds for candidate in round_ if candidate is not None):
        if each.leaves_cores or (each.uses_cores and num_computing >= num_side_by_side):
            continue
        num_computing += each.uses_cores
        chosen.append(each.job_id)
    return chosen


def _order_of_owners(owned: Sequence[Candidate], used_s: float) -> tuple[int, float, int, float]:
    """`owned`: an owner's candidates in their order."""
    first = owned[0]
    return first.priority, used_s // _TURN_S, _level(first), min(each.created_at for each in owned)


def _own_order(each: Candidate) -> tuple[int, int, int, float, str]:
    return each.priority, _level(each), each.nbytes, each.created_at, each.job_id


def _level(each: Candidate) -> int:
    return sum(each.computed_s >= least_s for least_s in _LEVELS_S)


def _may_have_process(owned: Sequence[Candidate]) -> Sequence[Candidate]:
    """Leaves out the jobs that would exceed their owner's number of processes."""
    num_more = MOST_BEGUN - sum(each.has_process for each in owned)
    found = []
    for each in owned:
        if not each.has_process:
            num_more -= 1
        if each.has_process or num_more >= 0:
            found.append(each)
    return found
