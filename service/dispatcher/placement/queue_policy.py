"""The queue's policy: the order of jobs, the job that each one waits for, and the jobs that pause for others.

It only computes; it reads no clock and does no I/O. The rule and its reasons: docs/decisions/0024-queue.md.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

# Bytes, or pieces, by resource. A missing resource is not taken. A resource that the machine does not report is
# unlimited.
Amounts = Mapping[str, int]

# With more jobs than this, not every subset of them is checked. No job then begins ahead of a waiting one.
_MAX_HOLDERS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A job that holds resources of the machine."""

    job_id: str
    takes: Amounts
    keeps: Amounts = field(default_factory=dict)  # the part of `takes` that it keeps while it is paused
    priority: int = 0  # a smaller number goes first
    created_at: float = 0.0
    is_leaving: bool = False  # it was requested to end or to pause, or its processes are ending
    may_be_paused: bool = False  # by a job of higher priority
    may_leave_now: bool = True  # else its attempt must commit a step first
    is_part: bool = False  # of a job over several boxes, which pauses only for another one, or on its first box


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """A job that waits for its turn."""

    job_id: str
    needs: Amounts
    priority: int = 0
    is_ready: bool = True  # else it keeps its place until it is ready
    is_part: bool = False  # of a job over several boxes


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision about a queued job. If it does not begin, another field gives the reason."""

    job_id: str
    begins: bool = False  # or its resources are reserved, if it is not ready
    missing: Amounts = field(default_factory=dict)  # beside the jobs that hold resources
    never: bool = False  # also without the other jobs
    waits_behind: str | None = None  # there is room, but this waiting job would then begin later
    pauses: tuple[str, ...] = ()  # jobs to pause for it
    will_pause: bool = False  # jobs will pause for it, once each has a step
    is_freed: bool = False  # jobs that are leaving already make room for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The facts of a queued job that decide its place in the queue."""

    job_id: str
    owner: str | None
    priority: int  # a smaller number goes first
    created_at: float
    keeps_place: bool = False  # it ran until another job or a crash took its place


def in_turn(
    queued: Sequence[Turn], num_running: Mapping[str | None, int], last_began: Mapping[str | None, float]
) -> Sequence[str]:
    """Orders queued jobs: by priority, then jobs that keep their place, then fairly among owners.

    An owner's first job comes ahead of any other owner's second, and running jobs count. Among jobs with the same
    number, the owner whose last job began longest ago goes first. So owners take turns also if one job runs at a time.

    `num_running`: jobs of each owner that hold resources. `last_began`: the time of each owner's last launch; an owner
    without one is missing.
    """
    numbers: Counter[tuple[int, str | None]] = Counter()
    places: list[tuple[tuple[int, bool, int, float, float, str], str]] = []
    for turn in sorted(queued, key=lambda turn: (turn.priority, not turn.keeps_place, turn.created_at, turn.job_id)):
        number = num_running.get(turn.owner, 0) + numbers[turn.priority, turn.owner]
        numbers[turn.priority, turn.owner] += 1
        place = (
            *(turn.priority, not turn.keeps_place, 0 if turn.keeps_place else number),
            *(0.0 if turn.keeps_place else last_began.get(turn.owner, 0.0), turn.created_at, turn.job_id),
        )
        places.append((place, turn.job_id))
    return [job_id for _, job_id in sorted(places)]


def decide(has: Amounts, holders: Sequence[Holder], queued: Sequence[Queued]) -> Sequence[Decision]:
    """Decides about each queued job, in the order of the queue. `has`: the machine's total resources."""
    box, decisions = BoxQueue(has, holders), list[Decision]()
    for candidate in queued:
        decisions.append(decision := box.decide(candidate))
        box.enter(candidate, decision)
    return decisions


class BoxQueue:
    """The jobs that hold a box's resources, and those that wait for it, while its queue is decided job by job.

    `has`: the box's total resources.
    """

    def __init__(self, has: Amounts, holders: Sequence[Holder]) -> None:
        self.has = has
        self.present = list(holders)
        self.waiting: list[Queued] = []
        self._taken = Counter(total(holder.takes for holder in holders))

    def decide(self, candidate: Queued) -> Decision:
        """Decides about the next job of the queue. It changes nothing.

        Resources that processes of the job's last attempt still hold are its own, so that no other job takes them.
        """
        present, taken = self.present, self._taken
        if any(holder.job_id == candidate.job_id for holder in present):
            present = [holder for holder in present if holder.job_id != candidate.job_id]
            taken = Counter(total(holder.takes for holder in present))
        return _decide(self.has, present, taken, self.waiting, candidate)

    def enter(self, candidate: Queued, decision: Decision) -> None:
        """Adds a job to those that hold resources, or to those that wait, as was decided."""
        if decision.begins:
            holder = Holder(job_id=candidate.job_id, takes=candidate.needs, priority=candidate.priority)
            self.present.append(holder)
            self._taken.update(candidate.needs)
        else:
            self.waiting.append(candidate)
        if decision.pauses:
            pauses = decision.pauses
            self.present = [
                replace(holder, is_leaving=True) if holder.job_id in pauses else holder for holder in self.present
            ]


def total(several: Iterable[Amounts]) -> Amounts:
    """Sums amounts by resource."""
    sums: Counter[str] = Counter()
    for amounts in several:
        sums.update(amounts)
    return sums


def missing(has: Amounts, taken: Amounts, needs: Amounts) -> Amounts:
    """Returns the shortage of each resource of which less than `needs` is left."""
    lacks = {name: taken.get(name, 0) + amount - has[name] for name, amount in needs.items() if amount and name in has}
    return {name: amount for name, amount in lacks.items() if amount > 0}


def _decide(
    has: Amounts, present: Sequence[Holder], taken: Amounts, waiting: Sequence[Queued], candidate: Queued
) -> Decision:
    lacks = missing(has, taken, candidate.needs)
    if not lacks:
        behind = _first_delayed(has, waiting, candidate, present)
        if behind is None:
            return Decision(job_id=candidate.job_id, begins=True)
        decision = Decision(job_id=candidate.job_id, waits_behind=behind)
    elif alone := missing(has, {}, candidate.needs):
        return Decision(job_id=candidate.job_id, missing=alone, never=True)
    else:
        decision = Decision(job_id=candidate.job_id, missing=lacks)
    chosen = _jobs_to_pause(has, present, waiting, candidate) if candidate.is_ready else None
    if not chosen:
        return replace(decision, is_freed=chosen is not None)
    if not all(holder.may_leave_now for holder in chosen):
        return replace(decision, will_pause=True)
    return replace(decision, pauses=tuple(holder.job_id for holder in chosen))


def _jobs_to_pause(
    has: Amounts, present: Sequence[Holder], waiting: Sequence[Queued], candidate: Queued
) -> Sequence[Holder] | None:
    """Returns the fewest jobs of lower priority whose pause makes room.

    Among equal numbers: the lowest, then the latest jobs.

    Returns no jobs if those that already leave make room, and None if no pause would help.
    """
    leaving = [holder for holder in present if holder.is_leaving]
    staying = [holder for holder in present if not holder.is_leaving]
    weaker = [
        holder
        for holder in staying
        if holder.may_be_paused and holder.priority > candidate.priority and (candidate.is_part or not holder.is_part)
    ]
    if not leaving and not weaker:
        return None
    weaker.sort(key=lambda holder: (-holder.priority, -holder.created_at, holder.job_id))
    for chosen in _sets_of(weaker):
        kept = [holder.keeps for holder in (*leaving, *chosen)]
        # A paused job keeps its `keeps` amounts until it ends.
        rest = [*(holder for holder in staying if holder not in chosen), *(_reserved(amounts) for amounts in kept)]
        if not missing(has, total(holder.takes for holder in rest), candidate.needs) and (
            _first_delayed(has, waiting, candidate, rest) is None
        ):
            return chosen
    return None


def _first_delayed(has: Amounts, waiting: Sequence[Queued], candidate: Queued, present: Sequence[Holder]) -> str | None:
    return next((ahead.job_id for ahead in waiting if _delays(has, ahead, candidate, present)), None)


def _delays(has: Amounts, ahead: Queued, candidate: Queued, present: Sequence[Holder]) -> bool:
    """Returns whether `candidate` would delay `ahead`.

    Then some jobs may end so that `ahead` could begin, but not beside `candidate`.
    """
    if len(present) > _MAX_HOLDERS:
        return True
    for staying in _sets_of(present):
        taken = total(holder.takes for holder in staying)
        if not missing(has, taken, ahead.needs) and missing(has, total((taken, candidate.needs)), ahead.needs):
            return True
    return False


def _sets_of(holders: Sequence[Holder]) -> Iterator[Sequence[Holder]]:
    """Yields all subsets of at most `_MAX_HOLDERS` jobs, smallest first."""
    for number in range(min(len(holders), _MAX_HOLDERS) + 1):
        yield from combinations(holders, number)


def _reserved(takes: Amounts) -> Holder:
    return Holder(job_id="", takes=takes)
