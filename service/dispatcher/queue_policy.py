"""Whose turn it is on a box, who waits for what, and who makes room for whom: sums only, no clock and no I/O.

The rule and its reasons: docs/decisions/0024-queue.md.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

# Bytes, or pieces, by resource. What is not in it is not taken; of what a box does not tell anything may be taken.
Amounts = Mapping[str, int]

# With more jobs than that on a box nobody looks at every set of them: then nothing begins behind a job that waits.
_MOST_HOLDERS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A job that has a part of the box."""

    job_id: str
    takes: Amounts
    keeps: Amounts = field(default_factory=dict)  # of that, what it goes on to take when it is paused
    priority: int = 0  # smaller goes first
    created_at: float = 0.0
    is_leaving: bool = False  # it was asked to end or to pause, or its processes are about to be gone
    may_be_paused: bool = False  # by a job of higher priority
    may_leave_now: bool = True  # else it has to bring its attempt to a step first


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """A job that waits for its turn."""

    job_id: str
    needs: Amounts
    priority: int = 0
    is_ready: bool = True  # else it keeps its place until it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What becomes of a queued job. If it does not begin, one of the others says why."""

    job_id: str
    begins: bool = False  # or has its place, if it is not ready
    missing: Amounts = field(default_factory=dict)  # beside those that have a part of the box
    never: bool = False  # ... and also without them
    waits_behind: str | None = None  # there is room, but that job would get its turn later
    pauses: tuple[str, ...] = ()  # jobs that are to make room for it
    will_pause: bool = False  # ... once each has a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A queued job, as far as its place in the queue goes."""

    job_id: str
    owner: str | None
    priority: int  # smaller goes first
    created_at: float
    keeps_place: bool = False  # it ran until another job or a crash took its place


def in_turn(
    queued: Sequence[Turn], num_running: Mapping[str | None, int], last_began: Mapping[str | None, float]
) -> Sequence[str]:
    """Order queued jobs: by priority, then who keeps its place, then fairly among owners.

    An owner's first job comes before any other's second, counting those that run. Between jobs of the same number the
    owner goes first whose last job began longest ago, so that owners take turns also where one job runs at a time.
    `num_running`: jobs of each owner that have a part of the box. `last_began`: when an owner's job began last; none
    did of owners that it lacks.
    """
    numbers: Counter[tuple[int, str | None]] = Counter()
    places: list[tuple[tuple[int, bool, int, float, float, str], str]] = []
    for each in sorted(queued, key=lambda turn: (turn.priority, not turn.keeps_place, turn.created_at, turn.job_id)):
        number = num_running.get(each.owner, 0) + numbers[each.priority, each.owner]
        numbers[each.priority, each.owner] += 1
        place = (
            *(each.priority, not each.keeps_place, 0 if each.keeps_place else number),
            *(0.0 if each.keeps_place else last_began.get(each.owner, 0.0), each.created_at, each.job_id),
        )
        places.append((place, each.job_id))
    return [job_id for _, job_id in sorted(places)]


def decide(has: Amounts, holders: Sequence[Holder], queued: Sequence[Queued]) -> Sequence[Decision]:
    """For each queued job, in the order in which they get their turn. `has`: what the box has in all."""
    present, waiting, decisions = list(holders), list[Queued](), list[Decision]()
    for each in queued:
        decision = _decide(has, present, waiting, each)
        decisions.append(decision)
        if decision.begins:
            present.append(Holder(job_id=each.job_id, takes=each.needs, priority=each.priority))
        else:
            waiting.append(each)
        present = [
            replace(holder, is_leaving=True) if holder.job_id in decision.pauses else holder for holder in present
        ]
    return decisions


def total(each: Iterable[Amounts]) -> Amounts:
    """Of every resource, what they take together."""
    found: Counter[str] = Counter()
    for amounts in each:
        found.update(amounts)
    return found


def missing(has: Amounts, taken: Amounts, needs: Amounts) -> Amounts:
    """By how much a job needs more than is left, of every resource of which it does."""
    lacks = {name: taken.get(name, 0) + amount - has[name] for name, amount in needs.items() if amount and name in has}
    return {name: amount for name, amount in lacks.items() if amount > 0}


def _decide(has: Amounts, present: Sequence[Holder], waiting: Sequence[Queued], each: Queued) -> Decision:
    lacks = missing(has, total(holder.takes for holder in present), each.needs)
    if not lacks:
        behind = _first_delayed(has, waiting, each, present)
        if behind is None:
            return Decision(job_id=each.job_id, begins=True)
        found = Decision(job_id=each.job_id, waits_behind=behind)
    elif alone := missing(has, {}, each.needs):
        return Decision(job_id=each.job_id, missing=alone, never=True)
    else:
        found = Decision(job_id=each.job_id, missing=lacks)
    chosen = _who_makes_room(has, present, waiting, each) if each.is_ready else None
    if not chosen:
        return found
    if not all(holder.may_leave_now for holder in chosen):
        return replace(found, will_pause=True)
    return replace(found, pauses=tuple(holder.job_id for holder in chosen))


def _who_makes_room(
    has: Amounts, present: Sequence[Holder], waiting: Sequence[Queued], each: Queued
) -> Sequence[Holder] | None:
    """The fewest jobs of lower priority without which there is room; of as many the lowest, and then the latest.

    None of them where those that leave anyway suffice; None where nobody's pause would help.
    """
    leaving = [holder for holder in present if holder.is_leaving]
    staying = [holder for holder in present if not holder.is_leaving]
    weaker = [holder for holder in staying if holder.may_be_paused and holder.priority > each.priority]
    weaker.sort(key=lambda holder: (-holder.priority, -holder.created_at, holder.job_id))
    for chosen in _sets_of(weaker):
        kept = [holder.keeps for holder in (*leaving, *chosen)]
        # What a job keeps stays somebody's, as long as the job has not ended.
        rest = [*(holder for holder in staying if holder not in chosen), *(_nobody(amounts) for amounts in kept)]
        if not missing(has, total(holder.takes for holder in rest), each.needs) and (
            _first_delayed(has, waiting, each, rest) is None
        ):
            return chosen
    return None


def _first_delayed(has: Amounts, waiting: Sequence[Queued], each: Queued, present: Sequence[Holder]) -> str | None:
    return next((ahead.job_id for ahead in waiting if _delays(has, ahead, each, present)), None)


def _delays(has: Amounts, ahead: Queued, each: Queued, present: Sequence[Holder]) -> bool:
    """Whether jobs may end with whose end `ahead` could begin, but not beside `each`."""
    if len(present) > _MOST_HOLDERS:
        return True
    for staying in _sets_of(present):
        taken = total(holder.takes for holder in staying)
        if not missing(has, taken, ahead.needs) and missing(has, total((taken, each.needs)), ahead.needs):
            return True
    return False


def _sets_of(holders: Sequence[Holder]) -> Iterator[Sequence[Holder]]:
    """The smallest first."""
    for number in range(min(len(holders), _MOST_HOLDERS) + 1):
        yield from combinations(holders, number)


def _nobody(takes: Amounts) -> Holder:
    return Holder(job_id="", takes=takes)
