"""The other boxes in a pass over the queue: what each job may have there, and why it cannot."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from windlass.service.dispatcher.placement import BoxState, Demand, Fleet, Holder, JoinedBox, Option, Restoration
from windlass.service.installation import Settings, node_of
from windlass.service.jobs import BoxKind, PlanNumbers, plan_numbers, settings_of
from windlass.service.machine.fleet import HEAD_NAME
from windlass.service.validation import WindlassSettings
from windlass.storage.sql import Box, Database, Job, JobStatus

# Boxes that a reason for waiting names; the others are counted.
_MAX_NAMED = 4


class Boxes:
    """The boxes that have joined, and the numbers of jobs' plans for them."""

    def __init__(self, database: Database, settings: Settings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._fleet = Fleet(database, node_of(settings.home), clock)
        self._restoration = Restoration(settings.home, lease_s=60 * settings.box_lease_minutes, clock=clock)
        self._silent: Sequence[str] = ()
        self._numbers: dict[str, Mapping[str, PlanNumbers]] = {}
        self._asked: dict[str, tuple[Mapping[str, Any], WindlassSettings]] = {}  # with the column of the row
        self.by_name: Mapping[str, JoinedBox] = {}
        # Plans that are still to be made, in the order of the queue.
        self.wanted: list[tuple[Job, BoxKind]] = []

    @property
    def is_used(self) -> bool:
        """Returns whether a box has joined once."""
        return self._fleet.is_used

    @property
    def absent(self) -> Sequence[Box]:
        """The boxes that are away, or were removed."""
        return self._fleet.absent

    @property
    def why_unsure(self) -> str | None:
        """Returns why it is not known yet which jobs have begun on boxes, or None."""
        if not self._silent:
            return None
        verb = "has" if len(self._silent) == 1 else "have"
        return f"the service was restored from a backup; {told_boxes(in_short(self._silent))} {verb} not called yet"

    def read(self) -> None:
        """Reads the boxes and their jobs, for one pass of the dispatcher."""
        self.by_name = {box.name: box for box in self._fleet.read()}
        self._silent = self._restoration.silent(self._fleet.known)
        self.wanted = []

    def may_run_here(self, job: Job) -> bool:
        """Returns whether a job may run on this home's own box. On a joined box itself, each of its jobs may."""
        return bool(job.attempt) or not self._fleet.is_used or self._settings_of(job).box in (None, HEAD_NAME)

    def kinds_for(self, job: Job) -> Mapping[str, BoxKind]:
        """Returns the kinds of the boxes that a job may run on, each with the name of one of its boxes.

        Those that are away or draining count, because they may be back when the job's turn comes.
        """
        asked = self._settings_of(job)
        return {
            name: box.kind
            for name, box in self.by_name.items()
            if asked.box in (None, name) and box.resources.why_too_many(asked.least_gpus) is None
        }

    def forget_all_but(self, job_ids: Collection[str]) -> None:
        """Forgets the plans of jobs that neither wait nor are on a box."""
        held = {job.id for job in self.holders}
        for job_id in self._numbers.keys() - held - set(job_ids):
            del self._numbers[job_id]
        for job_id in self._asked.keys() - held - set(job_ids):
            del self._asked[job_id]

    def forget(self, job_id: str) -> None:
        """Forgets a job's plans, because it has another one."""
        self._numbers.pop(job_id, None)

    @property
    def holders(self) -> Sequence[Job]:
        """The jobs that were given to boxes, and are neither paused nor finished."""
        return [job for box in self.by_name.values() for job in box.holders]

    def states(self, *, highest: int) -> Sequence[BoxState]:
        """Returns the boxes as the policy sees them. `highest`: the priority of the first job in the queue."""
        states = []
        for box in self.by_name.values():
            demands = {job.id: self._demand(job, box) for job in box.holders}
            states.append(
                BoxState(
                    name=box.name,
                    has=box.capacity.has(box.resources, demands.keys()),
                    holders=[_holder(job, box, demands[job.id], highest=highest) for job in box.holders],
                    left_s=self._left_s(box),
                    is_open=box.why_closed is None,
                )
            )
        return states

    def options(self, job: Job) -> tuple[Sequence[Option], Mapping[str, str]]:
        """Returns the boxes on which a job may run, and for the others why it may not.

        A job that began stays where its states are.
        """
        options, why_not = list[Option](), dict[str, str]()
        if job.attempt or not self.by_name:
            return options, why_not
        asked = self._settings_of(job)
        for name, box in self.by_name.items():
            if asked.box not in (None, name):
                continue
            if box.why_closed is not None:
                why_not[name] = f"box {name} {box.why_closed}"
            elif (why := box.resources.why_too_many(asked.least_gpus)) is not None:
                why_not[name] = f"on box {name}: {why}"
            elif box.kind.hardware is not None and (numbers := self.numbers(job).get(box.kind.key)) is None:
                self.wanted.append((job, box.kind))
                why_not[name] = f"its plan for box {name} is being made"
            elif box.kind.hardware is not None and numbers is not None and not numbers.feasible:
                why_not[name] = f"it does not fit box {name}: {numbers.why_not}"
            else:
                needs = box.capacity.needs(job.id, self._demand(job, box))
                options.append(Option(box=name, needs=needs, run_s=self._run_s(job, box.kind)))
        return options, why_not

    def numbers(self, job: Job) -> Mapping[str, PlanNumbers]:
        """Returns the numbers of a job's plans, by the kind of box."""
        if job.id not in self._numbers:
            self._numbers[job.id] = plan_numbers(self._settings, job.id)
        return self._numbers[job.id]

    def _settings_of(self, job: Job) -> WindlassSettings:
        """Returns the settings of a job's request. They are checked once, because that takes long for a long queue."""
        known = self._asked.get(job.id)
        if known is None or known[0] != job.windlass:
            known = self._asked[job.id] = (job.windlass, settings_of(job).windlass)
        return known[1]

    def _demand(self, job: Job, box: JoinedBox) -> Demand:
        asked = self._settings_of(job)
        budget_nbytes = box.kind.bounds(asked).host_memory_nbytes
        return box.demand(
            self.numbers(job).get(box.kind.key), num_devices=asked.least_gpus, budget_nbytes=budget_nbytes
        )

    def _run_s(self, job: Job, kind: BoxKind) -> float | None:
        numbers = self.numbers(job).get(kind.key)
        if numbers is None or numbers.step_s is None or job.total_steps is None:
            return None
        return numbers.step_s * (job.total_steps - job.step)

    def _left_s(self, box: JoinedBox) -> Mapping[str, float]:
        left_s = {}
        for job in box.holders:
            seconds = seconds_to_go(job) if job.attempt else self._run_s(job, box.kind)
            if seconds is not None:
                left_s[job.id] = seconds
        return left_s


def seconds_to_go(job: Job) -> float | None:
    """Returns the predicted seconds until a job ends that has begun, or None if unknown."""
    # A job that runs longer than predicted, or whose attempt has ended, has no prediction. Else jobs would wait for it.
    if job.status is not JobStatus.RUNNING or job.estimated_finish is None:
        return None
    left_s = job.estimated_finish - time.time()
    return left_s if left_s > 0 else None


def told_boxes(names: Sequence[str]) -> str:
    """Lists one or more boxes: "box A", "boxes A, B"."""
    return f"box{'es' if len(names) > 1 else ''} {', '.join(names)}"


def in_short(reasons: Sequence[str]) -> Sequence[str]:
    """Returns the first reasons, and the number of the others."""
    if len(reasons) <= _MAX_NAMED + 1:
        return reasons
    return [*reasons[:_MAX_NAMED], f"and so on for {len(reasons) - _MAX_NAMED} more boxes"]


def _holder(job: Job, box: JoinedBox, demand: Demand, *, highest: int) -> Holder:
    is_leaving = job.status is JobStatus.PAUSING or job.cancel_requested
    return Holder(
        job_id=job.id,
        takes=box.capacity.takes(job.id, demand),
        keeps=box.capacity.keeps(job.id, demand),
        priority=job.priority,
        created_at=job.created_at,
        is_leaving=is_leaving,
        # The box's own queue chooses the moment.
        may_be_paused=not is_leaving and job.priority > highest,
    )
