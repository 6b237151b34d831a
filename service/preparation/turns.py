"""Decides which preparations compute now: fair among owners, and short ones before long ones.

A preparation that has to stand back keeps its process, which stands still. Cores are what preparations compete for: one
that downloads uses none, nor does one that waits for memory, which those behind it may hold. Of both, only an owner's
number is limited.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

# Of one owner, preparations that have a process: each holds memory, also while it stands still.
MOST_BEGUN = 3
# From so many seconds of computing on, a preparation lets all others of its owner go first that have computed less.
_LEVELS_S = (5.0, 30.0, 300.0)
# Owners take turns when one has computed so much longer than another: a switch costs little, but is not free.
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
    leaves_cores: bool = False  # to a job that starts: it does not go on now


def who_computes(
    candidates: Sequence[Candidate], used_s: Mapping[str | None, float], *, num_side_by_side: int
) -> Sequence[str]:
    """Choose the jobs whose preparations go on now, most urgent first; all others stand still or wait.

    `used_s`: how long each owner's preparations computed of late. Owners take turns, the one that used least first. Of
    an owner's own, one that has computed for long stands back, and of the others the smallest goes first.
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
    """Leave out those that would need one more process than their owner may have."""
    num_more = MOST_BEGUN - sum(each.has_process for each in owned)
    found = []
    for each in owned:
        if not each.has_process:
            num_more -= 1
        if each.has_process or num_more >= 0:
            found.append(each)
    return found
