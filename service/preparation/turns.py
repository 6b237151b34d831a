"""Decides which preparations compute now. It is fair among owners and prefers short preparations.

A preparation that must wait keeps its process, which is halted. Preparations compete for cores only. One that downloads
uses none. One that waits for memory uses none either, because the preparations behind it may hold that memory. An
owner's number of both kinds is still limited.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

# Maximum number of an owner's preparations with a process. Each holds memory, also while it is halted.
MOST_BEGUN = 3
# Computing seconds that separate levels. A preparation on a higher level waits for its owner's preparations on lower
# levels.
_LEVELS_S = (5.0, 30.0, 300.0)
# Difference in computing seconds at which owners take turns. A switch is cheap but not free.
_TURN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A job that is being prepared, or waits for it."""

    job_id: str
    owner: str | None
    nbytes: int  # of its files
    created_at: float
    computed_s: float = 0.0  # by its preparation so far
    has_process: bool = False
    uses_cores: bool = True
    leaves_cores: bool = False  # to a starting job, so it is not chosen now


def who_computes(
    candidates: Sequence[Candidate], used_s: Mapping[str | None, float], *, num_side_by_side: int
) -> Sequence[str]:
    """Chooses the jobs whose preparations continue now, most urgent first. All others are halted or wait.

    `used_s`: recent computing seconds of each owner's preparations. Owners take turns, the one with the least time
    first. Among an owner's own, one that has computed for long goes last, and the smallest of the others goes first.
    """
    by_owner: dict[str | None, list[Candidate]] = {}
    for each in sorted(candidates, key=_own_order):
        by_owner.setdefault(each.owner, []).append(each)
    owners = sorted(
        by_owner,
        key=lambda owner: (used_s.get(owner, 0.0) // _TURN_S, min(each.created_at for each in by_owner[owner])),
    )
    rounds = zip_longest(*(_may_have_process(by_owner[owner]) for owner in owners))
    chosen, num_computing = [], 0
    for each in (candidate for round_ in rounds for candidate in round_ if candidate is not None):
        if each.leaves_cores or (each.uses_cores and num_computing >= num_side_by_side):
            continue
        num_computing += each.uses_cores
        chosen.append(each.job_id)
    return chosen


def _own_order(each: Candidate) -> tuple[int, int, float, str]:
    level = sum(each.computed_s >= least_s for least_s in _LEVELS_S)
    return level, each.nbytes, each.created_at, each.job_id


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
