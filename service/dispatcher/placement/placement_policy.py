"""The queue's policy over several boxes: the box on which each job begins, or for which it waits.

It only computes; it reads no clock and does no I/O. On each box the rules of `queue_policy` hold: capacity, priorities,
jobs that pause for others, and room that is kept for earlier jobs. This module chooses the box.

The rule, job by job in the order of the queue:

1. Of the boxes on which the job may begin now, it begins on the one where its plan ends first.
2. It waits for another box instead if it would end there sooner by prediction: after the jobs that hold that box's
   resources, and after the earlier jobs that wait for it. The time that it has waited in this way counts, so that it
   ends no later than if it had begun at once. Without a prediction, it does not wait.
3. If it may begin nowhere, jobs of lower priority pause for it on the box where the fewest have to.
4. Else it waits for the box on which it would end first. Only there do later jobs leave it its room. It stays with the
   box for which it waited until it would end elsewhere in half the time. So it is not passed over again and again.

A job over several boxes begins on all of them at once, or waits for all of them. On each it keeps its place. Jobs pause
for it if it then begins on all.

So no open box is idle while a ready job waits that fits it. There are three exceptions. A job may ask for another box.
It may end sooner on the box for which it waits. And it may be behind a job over several boxes.
"""

import bisect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from windlass.service.dispatcher.placement.queue_policy import (
    Amounts,
    BoxQueue,
    Decision,
    Holder,
    Queued,
    missing,
    total,
)

# A waiting job changes to another box if it would end there within this part of the time.
_CHANGES_BELOW = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxState:
    """A box: its total resources, and the jobs that hold them."""

    name: str
    has: Amounts
    holders: Sequence[Holder] = ()
    # Predicted seconds until a holder ends. A holder without a prediction is missing.
    left_s: Mapping[str, float] = field(default_factory=dict)
    is_open: bool = True  # else no job may begin there


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A box on which a job may run: the resources that it needs there, and the seconds that it takes."""

    box: str
    needs: Amounts
    run_s: float | None = None  # None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A job that waits for its turn. Its options are those that it may have: of a job with states, only their box."""

    job_id: str
    options: Sequence[Option]
    priority: int = 0
    is_ready: bool = True  # else it keeps its place until it is ready
    waits_for: str | None = None  # the box for which it waited when the queue was decided last
    together: bool = False  # it needs all of its options at once, and the first one is where its attempts begin
    passed_s: float = 0.0  # seconds since it first might have begun, but waited for a box on which it ends sooner

    def at(self, option: Option) -> Queued:
        """Returns the job as one box's queue sees it."""
        return Queued(
            job_id=self.job_id,
            needs=option.needs,
            priority=self.priority,
            is_ready=self.is_ready,
            is_part=self.together,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The decision about a job. It begins on `box`, or waits for it; None: it can never begin on an open box."""

    job_id: str
    box: str | None
    decision: Decision  # on that box
    end_s: float | None = None  # predicted seconds until it ends there
    passes: bool = False  # it might begin on another box, but waits for this one
    by_pausing: bool = False  # a job over several boxes begins on all of them once other jobs have paused for it
    elsewhere: Mapping[str, Decision] = field(default_factory=dict)  # on the other open boxes of its options

    @property
    def reserves(self) -> bool:
        """True if the boxes of a job over several begin nothing else: it begins, or can pause what is in its way."""
        if not self.by_pausing:
            return self.decision.begins
        return not any(each.will_pause for each in (self.decision, *self.elsewhere.values()))


def place(boxes: Sequence[BoxState], queued: Sequence[Candidate]) -> Sequence[Placement]:
    """Decides about each queued job, in the order of the queue. Equal choices go to the first of `boxes`."""
    rows = {box.name: _Row(box) for box in boxes if box.is_open}
    placements = []
    for candidate in queued:
        placement = _place_together(rows, candidate) if candidate.together else _place(rows, candidate)
        for option in candidate.options if placement.box is not None else ():
            if option.box == placement.box:
                rows[option.box].enter(candidate.at(option), placement.decision, option.run_s)
            elif candidate.together:
                decision = replace(placement.elsewhere[option.box], begins=placement.decision.begins)
                rows[option.box].enter(candidate.at(option), decision, option.run_s)
        placements.append(placement)
    return placements


def _place(rows: Mapping[str, "_Row"], candidate: Candidate) -> Placement:
    options = {option.box: option for option in candidate.options if option.box in rows}
    decisions = {name: rows[name].queue.decide(candidate.at(options[name])) for name in rows if name in options}

    def placed(name: str, decision: Decision, end_s: float) -> Placement:
        others = {box: other for box, other in decisions.items() if box != name}
        told_s = None if math.isinf(end_s) else end_s
        return Placement(job_id=candidate.job_id, box=name, decision=decision, end_s=told_s, elsewhere=others)

    begin_s = {name: _known(options[name].run_s) for name, decision in decisions.items() if decision.begins}
    if begin_s:
        soonest = min(begin_s, key=lambda name: begin_s[name])
        later_s = {
            name: rows[name].start_s(options[name].needs) + _known(options[name].run_s)
            for name, decision in decisions.items()
            if not (decision.begins or decision.never) and _known(options[name].run_s) < begin_s[soonest]
        }
        best = min(later_s, key=lambda name: later_s[name], default=soonest)
        waits_s = candidate.passed_s + later_s.get(best, math.inf)
        if best == soonest or math.isinf(begin_s[soonest]) or waits_s >= begin_s[soonest]:
            return placed(soonest, decisions[soonest], begin_s[soonest])
        # No job is paused for one that may begin elsewhere.
        decision = replace(decisions[best], pauses=(), will_pause=False)
        return replace(placed(best, decision, later_s[best]), passes=True)

    pausing = [name for name, decision in decisions.items() if decision.pauses]
    pausing = pausing or [name for name, decision in decisions.items() if decision.will_pause]
    if pausing:
        best = min(pausing, key=lambda name: (len(decisions[name].pauses), _known(options[name].run_s)))
        return placed(best, decisions[best], _known(options[best].run_s))

    end_s = {
        name: rows[name].start_s(options[name].needs) + _known(options[name].run_s)
        for name, decision in decisions.items()
        if not decision.never
    }
    if end_s:
        best, before = min(end_s, key=lambda name: end_s[name]), candidate.waits_for
        if before in end_s and not end_s[best] < _CHANGES_BELOW * end_s[before]:
            best = before
        return placed(best, decisions[best], end_s[best])
    if len(decisions) == 1:
        [(name, decision)] = decisions.items()
        return placed(name, decision, math.inf)
    nowhere = Decision(job_id=candidate.job_id, never=True)
    return Placement(job_id=candidate.job_id, box=None, decision=nowhere, elsewhere=decisions)


def _place_together(rows: Mapping[str, "_Row"], candidate: Candidate) -> Placement:
    """Decides about a job over several boxes. While a box is not open, it keeps no room.

    Jobs pause for it only if it then begins on all of its boxes, and all at once.
    """
    first = candidate.options[0]
    decisions = {
        option.box: rows[option.box].queue.decide(candidate.at(option))
        for option in candidate.options
        if option.box in rows
    }
    begins = all(each.begins for each in decisions.values())
    by_pausing = not begins and all(
        each.begins or each.is_freed or each.pauses or each.will_pause for each in decisions.values()
    )
    if not by_pausing or any(each.will_pause for each in decisions.values()):
        decisions = {
            box: replace(each, pauses=(), will_pause=by_pausing and not (each.begins or each.is_freed))
            for box, each in decisions.items()
        }
    elsewhere = {box: decision for box, decision in decisions.items() if box != first.box}
    never = any(decision.never for decision in decisions.values())
    if never or len(decisions) < len(candidate.options):
        return Placement(
            job_id=candidate.job_id,
            box=None,
            decision=Decision(job_id=candidate.job_id, never=never),
            elsewhere=decisions,
        )
    here = decisions[first.box]
    start_s = max(rows[option.box].start_s(option.needs) for option in candidate.options)
    end_s = start_s + _known(first.run_s)
    return Placement(
        job_id=candidate.job_id,
        box=first.box,
        decision=replace(here, begins=begins),
        end_s=None if math.isinf(end_s) else end_s,
        by_pausing=by_pausing,
        elsewhere=elsewhere,
    )


class _Row:
    """A box's queue, with the predicted times at which its resources become free.

    The prediction lets the waiting jobs begin one after the other, in their order.
    """

    def __init__(self, box: BoxState) -> None:
        self.queue = BoxQueue(box.has, box.holders)
        self._last_start_s = 0.0  # of the jobs that wait
        # What is taken at that time, and the jobs that then end: their times, and what they free.
        self._taken: Counter[str] = Counter(total(holder.takes for holder in box.holders))
        self._ends: list[tuple[float, int, Amounts]] = []
        for holder in box.holders:
            if holder.is_leaving:
                self._end_at(0.0, {name: nbytes - holder.keeps.get(name, 0) for name, nbytes in holder.takes.items()})
            elif holder.job_id in box.left_s:
                self._end_at(max(0.0, box.left_s[holder.job_id]), holder.takes)

    def start_s(self, needs: Amounts) -> float:
        """Returns the predicted seconds until a job with these needs can begin, infinity if unknown."""
        return self._start(needs)[0]

    def enter(self, job: Queued, decision: Decision, run_s: float | None) -> None:
        """Adds a job that begins here or waits here."""
        self.queue.enter(job, decision)
        if decision.never:
            return
        if decision.begins:
            start_s = 0.0
        else:
            start_s, num_ended = self._start(job.needs)
            if math.isinf(start_s):
                self._last_start_s = math.inf  # nothing is known about the jobs after it either
                return
            for _, _, freed in self._ends[:num_ended]:
                self._taken.subtract(freed)
            del self._ends[:num_ended]
            self._last_start_s = start_s
        end_s = start_s + _known(run_s)
        if end_s > self._last_start_s:
            self._taken.update(job.needs)
            if not math.isinf(end_s):
                self._end_at(end_s, job.needs)

    def _start(self, needs: Amounts) -> tuple[float, int]:
        """Returns the predicted start, and the number of jobs that have ended by then."""
        has, at_s, num_ended = self.queue.has, self._last_start_s, 0
        lacks = Counter(missing(has, self._taken, needs))
        for end_s, _, freed in self._ends:
            if end_s > at_s and not lacks:
                break
            at_s, num_ended = max(at_s, end_s), num_ended + 1
            for name in list(lacks):
                lacks[name] -= freed.get(name, 0)
                if lacks[name] <= 0:
                    del lacks[name]
        return (math.inf if lacks else at_s), num_ended

    def _end_at(self, end_s: float, freed: Amounts) -> None:
        bisect.insort(self._ends, (end_s, len(self._ends), freed), key=lambda end: end[0])


def _known(run_s: float | None) -> float:
    return math.inf if run_s is None else run_s
