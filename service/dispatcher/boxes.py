"""The other boxes in a pass over the queue: what each job may have there, and why it cannot."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import windlass
from windlass.planner.stages import StagePlan, StagesPlan
from windlass.service.dispatcher.placement import (
    BUFFERS,
    DEVICES,
    HOST_MEMORY,
    BoxState,
    Demand,
    Fleet,
    Holder,
    JoinedBox,
    Option,
    Restoration,
    Wait,
    demand_by,
    in_short,
    told_boxes,
)
from windlass.service.installation import Settings, node_of
from windlass.service.jobs import BoxKind, PlanNumbers, is_over_boxes, plan_numbers, settings_of, stages_of
from windlass.service.validation import WindlassSettings
from windlass.storage.ids import HEAD_NAME
from windlass.storage.sql import Box, Database, Job, JobPart, JobStatus
from windlass.storage.sql.repositories import BoxState as BoxRowState
from windlass.storage.sql.repositories import PartState, is_reserved

# Jobs over several boxes that have boxes.
_WORKING = (JobStatus.RUNNING, JobStatus.PAUSING)
# Seconds after which it is tried again to plan a job over boxes that it did not fit. There may be more room by then.
_RULED_OUT_S = 300.0
# Seconds in which a job keeps its boxes while a new division is sent to them. After that, one cannot store it.
_LONGEST_SENT_S = 60.0
_UNREADABLE = "has told facts of itself that this release of windlass cannot read: install the same release there"


class Boxes:
    """The boxes that have joined, and the numbers of jobs' plans for them."""

    def __init__(self, database: Database, settings: Settings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._fleet = Fleet(database, node_of(settings.home), clock)
        self._restoration = Restoration(settings.home, lease_s=60 * settings.box_lease_minutes, clock=clock)
        self._silent: Sequence[str] = ()
        self._numbers: dict[str, Mapping[str, PlanNumbers]] = {}
        self._asked: dict[str, tuple[Mapping[str, Any], WindlassSettings]] = {}  # with the column of the row
        self.by_name: Mapping[str, JoinedBox] = {}
        # Plans over several boxes, by job: the parts for which each was read, and its stages by box.
        self._stages: dict[str, tuple[object, Mapping[str, StagePlan]]] = {}
        # The other boxes of jobs that ask for a number of them: those last chosen, and those that a plan has chosen.
        self._chosen: dict[str, Sequence[str]] = {}
        self._planned: dict[str, Sequence[str]] = {}
        # The open boxes over which a job could not be planned anew, so that it waits for those that it has. With them,
        # why, and when that was found.
        self._ruled_out: dict[str, tuple[frozenset[str], str, float]] = {}
        # When a new division was first missing on a box, by job, home and attempt.
        self._sent_since: dict[tuple[str, str, int], float] = {}
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
        if self.is_over_several(job):
            return False  # not by itself
        return bool(job.attempt) or not self._fleet.is_used or self._settings_of(job).box in (None, HEAD_NAME)

    def kinds_for(self, job: Job) -> Mapping[str, BoxKind]:
        """Returns the kinds of the boxes that a job may run on, each with the name of one of its boxes.

        Those that are away or draining count, because they may be back when the job's turn comes.
        """
        asked = self._settings_of(job)
        if asked.boxes is not None:
            return {}  # its plan over the boxes is made when they are chosen
        return {
            name: box.kind
            for name, box in self.by_name.items()
            if asked.box in (None, name) and box.resources.why_too_many(asked.least_gpus) is None
        }

    def forget_all_but(self, job_ids: Collection[str]) -> None:
        """Forgets the plans of jobs that neither wait nor are on a box."""
        held = {job.id for job in self.holders}
        self._chosen = {job_id: names for job_id, names in self._chosen.items() if job_id in job_ids}
        self._planned = {job_id: names for job_id, names in self._planned.items() if job_id in job_ids}
        self._stages = {job_id: plan for job_id, plan in self._stages.items() if job_id in job_ids}
        self._ruled_out = {job_id: those for job_id, those in self._ruled_out.items() if job_id in job_ids}
        self._sent_since = {key: since for key, since in self._sent_since.items() if key[0] in job_ids}
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

    def states(self, *, highest: int, may_leave_now: Callable[[Job], bool]) -> Sequence[BoxState]:
        """Returns the boxes as the policy sees them.

        `highest`: the priority of the first job in the queue. `may_leave_now`: whether a job of this home may be paused
        at once.
        """
        states = []
        for box in self.by_name.values():
            demands = {job.id: self._demand(job, box) for job in box.holders}
            reserved_for = self._reserved_for(box)
            states.append(
                BoxState(
                    name=box.name,
                    has=box.capacity.has(box.resources, demands.keys()),
                    holders=[
                        *(
                            _holder(job, box, demands[job.id], highest=highest, reserved_for=reserved_for)
                            for job in box.holders
                        ),
                        *(self._whole_holder(job, box, may_leave_now) for job in box.spread),
                    ],
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

    # --- jobs over several boxes -------------------------------------------------------------------------------------

    def is_over_several(self, job: Job) -> bool:
        """Returns whether a job is handled as one over several boxes. On a joined box itself, no job is."""
        return is_over_boxes(job)

    def parts_of(self, job_id: str) -> Sequence[JobPart]:
        """Returns the parts of a job that other boxes have or get, by position."""
        return self._fleet.parts.get(job_id, ())

    @property
    def divided(self) -> Collection[Job]:
        """The jobs of which other boxes have or get parts, as they were when the boxes were read."""
        return self._fleet.divided.values()

    def parts_in_force(self, job: Job) -> Sequence[JobPart]:
        """Returns the parts with which a job goes on. None if it never began and is to be planned anew.

        It is if it asks for other boxes now, or if its stored division is of others: the process was killed between the
        two writes. It also is if one of its boxes has left, or is closed while enough others are open. If no plan over
        these fits, it keeps its parts until other boxes are open.
        """
        parts, asked = self.parts_of(job.id), self._settings_of(job).boxes
        if not parts or asked is None or had_attempt(job, parts):
            return parts
        by_node = {box.node: box for box in self.by_name.values()}
        names = {self._fleet.names.get(part.node) for part in parts}
        asks_the_same = len(names) + 1 == asked if isinstance(asked, int) else {HEAD_NAME, *names} == set(asked)
        if not asks_the_same or any(part.node not in {*by_node, *self._fleet.unreadable} for part in parts):
            return ()
        if (plan := stages_of(self._settings, job.id)) is None or not self.are_of(parts, plan):
            return ()
        found = [by_node[part.node] for part in parts if part.node in by_node]
        if isinstance(asked, list) or (len(found) == len(parts) and not any(map(self.why_no_part, found))):
            return parts
        others = {box.name for box in self._boxes_for_parts(job)}
        ruled_out, _, since = self._ruled_out.get(job.id, (frozenset[str](), "", 0.0))
        is_ruled_out = others <= ruled_out and self._clock() - since < _RULED_OUT_S
        return () if len(others) >= asked - 1 and not is_ruled_out else parts

    def are_of(self, parts: Sequence[JobPart], plan: StagesPlan, after: StagesPlan | None = None) -> bool:
        """Returns whether these are the parts of a division, by position, and then those that `after` adds to it."""
        names, num_before = [self._fleet.names.get(part.node) for part in parts], len(plan.boxes) - 1
        added = set() if after is None else {*after.boxes} - {*plan.boxes}
        return tuple(names[:num_before]) == plan.boxes[1:] and set(names[num_before:]) == added

    def rule_out(self, job: Job, boxes: Sequence[JoinedBox], why: str) -> bool:
        """Notes that a job does not fit these boxes. Returns whether it goes on with the parts that it has."""
        self._ruled_out[job.id] = (frozenset(box.name for box in boxes), why, self._clock())
        return bool(self.parts_in_force(job))

    def boxes_of(self, job: Job) -> tuple[Sequence[JoinedBox], str | None]:
        """Returns the other boxes of a job over several boxes, or why they are not all there.

        They are those that have its parts; before, those that it asks for. If it asks for a number, they are those
        with the fewest jobs, or those that its plan has chosen.
        """
        by_node = {box.node: box for box in self.by_name.values()}
        if parts := self.parts_in_force(job):
            found = [by_node[part.node] for part in parts if part.node in by_node]
            lost = [self._why_lost(part.node) for part in parts if part.node not in by_node]
            why = "; ".join(lost) or _why_away(found)
            if why is not None and job.id in self._ruled_out:
                why += f"; it cannot be planned over other boxes: {self._ruled_out[job.id][1]}"
            return found, why
        asked = self._settings_of(job).boxes
        assert asked is not None, "it asks for several boxes"
        if isinstance(asked, list):
            names = [name for name in asked if name != HEAD_NAME]
            unreadable = {self._fleet.names[node] for node in self._fleet.unreadable}
            if unreadable := unreadable.intersection(names):
                return (), "; ".join(f"box {name} {_UNREADABLE}" for name in sorted(unreadable))
            if unknown := [name for name in names if name not in self.by_name]:
                return (), f"{told_boxes(unknown)}, which it asks for, {'has' if len(unknown) == 1 else 'have'} left"
            found = [self.by_name[name] for name in names]
        else:
            found = list(self._chosen_boxes(job, asked - 1))
            if len(found) < asked - 1:
                return found, f"it asks for {asked} boxes, and {len(found) + 1} are open to it"
        closed = [f"box {box.name} {why}" for box in found if (why := self.why_no_part(box)) is not None]
        return found, "; ".join(closed) or None

    def _why_lost(self, node: str) -> str:
        """Returns why a box cannot be used that has a part of a job."""
        name = self._fleet.names.get(node)
        if node in self._fleet.unreadable:
            return f"box {name}, which has a part of it, {_UNREADABLE}"
        box = "a box" if name is None else f"box {name}"
        return f"{box} that has a part of its states was removed; `windlass restart` begins it again"

    def is_draining(self, job: Job) -> bool:
        """Returns whether a box that has a part of a job is being drained, so that its attempt ends at a commit."""
        nodes = {part.node for part in self.parts_of(job.id)}
        return any(box.is_draining for box in self.by_name.values() if box.node in nodes)

    def why_over(self, job: Job) -> str | None:
        """Returns why the attempt of a running job over several boxes ends at once, or None.

        A box was removed, or could not begin its part. The others would wait for it until their links give up.
        """
        removed = {box.node for box in self._fleet.absent if box.state == BoxRowState.REMOVED.value}
        # The first record of an attempt is written once all boxes are connected.
        has_begun = job.journal_attempt >= job.attempt
        for part in self.parts_of(job.id):
            box = f"box {self._fleet.names.get(part.node)}"
            if part.node in removed:
                return f"{box}, which has a part of it, was removed"
            if part.served == job.attempt and part.state == PartState.READY.value and not has_begun:
                why = part.told or "its processes ended; its log has the reason"
                return f"{box} could not begin its part of it: {why}"
        return None

    def why_not_ready(self, job: Job) -> Wait | None:
        """Returns why an attempt of a job cannot begin yet on the boxes that have its parts, or None."""
        boxes = {box.node: box for box in self.by_name.values()}
        for part in self.parts_in_force(job):
            box, is_soon = boxes[part.node], False
            if part.state == PartState.LOST.value:
                why = f"{part.told}; `windlass restart` begins it again from its newest exported model"
            elif part.state == PartState.COPYING.value:
                why = part.told or f"its files are to be copied to box {box.name}"
                is_soon = part.served > 0 and self._is_new_division_due(job, part)
            elif (why_other := _why_another_release(box)) is not None:
                why = f"box {box.name} {why_other}"
            elif part.state == PartState.RUNNING.value:
                why, is_soon = f"the processes of attempt {part.served} have not ended yet on box {box.name}", True
            elif part.served < job.attempt:
                why, is_soon = f"box {box.name} has not heard of the end of attempt {job.attempt} yet", True
            elif part.port is None:
                why = f"box {box.name} has told no port for other boxes yet{f': {part.told}' if part.told else ''}"
                is_soon = not part.told
            else:
                continue
            return Wait(reason=why, is_soon=is_soon)
        return None

    def _is_new_division_due(self, job: Job, part: JobPart) -> bool:
        """Returns whether a box that has states, and gets the new division only, will have it soon."""
        since = self._sent_since.setdefault((job.id, part.node, job.attempt), self._clock())
        return self._clock() - since < _LONGEST_SENT_S

    def why_no_part(self, box: JoinedBox) -> str | None:
        """Returns why a box gets no part of a job over several boxes, or None."""
        if box.why_closed is not None:
            return box.why_closed
        if (why := _why_another_release(box)) is not None:
            return why
        has_told = box.facts is not None and box.facts.link_host is not None
        return None if has_told else "has not told its address for other boxes"

    def pools_of(self, job: Job, boxes: Sequence[JoinedBox]) -> Sequence[Sequence[JoinedBox]]:
        """Returns the boxes of which the plan of a job may choose its other ones.

        If it asks for boxes by name, or for one, they are `boxes`. Else they are first those on which no job is, and,
        if it fits none of these, all that are open.
        """
        asked = self._settings_of(job).boxes
        if isinstance(asked, list) or asked == 1:
            return [boxes]
        taken, fit = self._taken_by_others(job), self._boxes_for_parts(job)
        free = [box for box in fit if box in boxes or not (box.holders or box.spread or box.name in taken)]
        return [free] if len(free) == len(fit) else [free, fit]

    def wanted_of(self, job: Job, parts: Sequence[JobPart]) -> tuple[int | Sequence[str], Sequence[JoinedBox] | str]:
        """Returns the boxes that a job with states asks for, and those of which a new plan may choose its others.

        The latter may be the reason why there is none.
        """
        asked = self._settings_of(job).boxes
        assert asked is not None, "it asks for several boxes"
        if isinstance(asked, list):
            names = [name for name in asked if name != HEAD_NAME]
            if unknown := [name for name in names if name not in self.by_name]:
                return asked, f"{told_boxes(unknown)}, which it asks for, {'has' if len(unknown) == 1 else 'have'} left"
            found = [self.by_name[name] for name in names]
            closed = [f"box {box.name} {why}" for box in found if (why := self.why_no_part(box)) is not None]
            return asked, "; ".join(closed) or found
        nodes, taken, fit = {part.node for part in parts}, self._taken_by_others(job), self._boxes_for_parts(job)
        free = [box for box in fit if box.node in nodes or not (box.holders or box.spread or box.name in taken)]
        if len(fit) < asked - 1:
            return asked, f"it asks for {asked} boxes, and {len(fit) + 1} are open to it"
        return asked, free if len(free) >= asked - 1 else fit

    def choose(self, job_id: str, names: Sequence[str]) -> None:
        """Makes these the other boxes of a job, because its plan is for them. They stay so until one is closed."""
        self._planned[job_id] = names

    def _chosen_boxes(self, job: Job, number: int) -> Sequence[JoinedBox]:
        fit = self._boxes_for_parts(job)
        planned = [box for box in fit if box.name in self._planned.get(job.id, ())]
        if len(planned) != number:  # some are closed, or it asks for another number now
            self._planned.pop(job.id, None)
            planned = list(fit[:number])
        self._chosen[job.id] = [box.name for box in planned]
        return planned

    def _boxes_for_parts(self, job: Job) -> Sequence[JoinedBox]:
        """Returns the boxes that may get a part of a job, those first that may be free first."""
        least, taken = self._settings_of(job).least_gpus, self._taken_by_others(job)
        fit = [box for box in self.by_name.values() if box.resources.why_too_many(least) is None]
        held = {part.node for part in self.parts_of(job.id)}
        before = {*self._chosen.get(job.id, ()), *(box.name for box in fit if box.node in held)}

        def place(box: JoinedBox) -> tuple[int, bool, int, bool, str]:
            holders = [*box.holders, *box.spread]
            num_in_the_way = sum(holder.priority <= job.priority for holder in holders)  # the others pause for it
            return num_in_the_way, box.name in taken, len(holders), box.name not in before, box.name

        return sorted((box for box in fit if self.why_no_part(box) is None), key=place)

    def _taken_by_others(self, job: Job) -> Collection[str]:
        """Returns the boxes for which other jobs over several boxes wait."""
        return {name for job_id, names in self._chosen.items() if job_id != job.id for name in names}

    def whole_box(self, job: Job, box: JoinedBox) -> Option:
        """Returns the option of a job that needs all devices of a box, as a part of a job does."""
        parts = self.parts_in_force(job)
        key = (job.attempt, [(part.node, part.position) for part in parts])
        if job.id not in self._stages or self._stages[job.id][0] != key or not self._stages[job.id][1]:
            plan = stages_of(self._settings, job.id) if parts else None
            self._stages[job.id] = (key, {} if plan is None else {stage.box: stage for stage in plan.stages})
        num_devices, stage = box.resources.num_devices, self._stages[job.id][1].get(box.name)
        demand = Demand(num_devices=num_devices)
        if stage is not None:
            is_cpu = box.resources.num_gpus == 0
            demand = demand_by(stage.peak_gib, stage.arena_nbytes, num_devices=1, is_cpu=is_cpu)
            demand = replace(demand, num_devices=num_devices)
        return Option(box=box.name, needs=box.capacity.needs(job.id, demand))

    def _reserved_for(self, box: JoinedBox) -> int | None:
        """Returns the priority of the job over several boxes for which a box begins no other job, or None.

        An attempt that runs may end within this pass, and the box stays the job's then.
        """
        parts = (part for parts in self._fleet.parts.values() for part in parts if part.node == box.node)
        jobs = ((self._fleet.divided.get(part.job_id), part) for part in parts)
        held = (
            job.priority
            for job, part in jobs
            if job is not None and (job.status in _WORKING or is_reserved(job, part) or _is_wanted(job, part))
        )
        return min(held, default=None)

    def _whole_holder(self, job: Job, box: JoinedBox, may_leave_now: Callable[[Job], bool]) -> Holder:
        """Returns a job over several boxes that holds all of a box."""
        is_leaving = job.status is not JobStatus.RUNNING or job.cancel_requested or job.yields_to is not None
        option = self.whole_box(job, box)
        return Holder(
            job_id=job.id,
            takes=option.needs,
            keeps={
                name: nbytes for name, nbytes in option.needs.items() if name not in (DEVICES, HOST_MEMORY, BUFFERS)
            },
            priority=job.priority,
            created_at=job.created_at,
            is_leaving=is_leaving,
            may_be_paused=not is_leaving,
            may_leave_now=not is_leaving and may_leave_now(job),
            is_part=True,
        )

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
        for job in (*box.holders, *box.spread):
            seconds = seconds_to_go(job) if job.attempt else self._run_s(job, box.kind)
            if seconds is not None:
                left_s[job.id] = seconds
        return left_s


def had_attempt(job: Job, parts: Sequence[JobPart]) -> bool:
    """Returns whether a job has had an attempt. A head that was restored from a backup may not know of it."""
    return bool(job.attempt) or any(part.served for part in parts)


def _is_wanted(job: Job, part: JobPart) -> bool:
    """Returns whether a box is to serve a part of a job that waits, in an attempt that it has not served."""
    return job.status is JobStatus.QUEUED and part.attempt > part.served


def seconds_to_go(job: Job) -> float | None:
    """Returns the predicted seconds until a job ends that has begun, or None if unknown."""
    # A job that runs longer than predicted, or whose attempt has ended, has no prediction. Else jobs would wait for it.
    if job.status is not JobStatus.RUNNING or job.estimated_finish is None:
        return None
    left_s = job.estimated_finish - time.time()
    return left_s if left_s > 0 else None


def _why_another_release(box: JoinedBox) -> str | None:
    if box.facts is not None and box.facts.windlass == windlass.__version__:
        return None
    return f"runs another release of windlass than the head, {windlass.__version__}"


def _why_away(boxes: Sequence[JoinedBox]) -> str | None:
    closed = [
        f"box {box.name}, which has a part of it, {box.why_closed}" for box in boxes if box.why_closed is not None
    ]
    return "; ".join(closed) or None


def _holder(job: Job, box: JoinedBox, demand: Demand, *, highest: int, reserved_for: int | None) -> Holder:
    is_leaving = job.status is JobStatus.PAUSING or job.cancel_requested
    keeps = box.capacity.keeps(job.id, demand)
    # It does not begin before the job over several boxes.
    is_held = job.status is JobStatus.QUEUED and reserved_for is not None and reserved_for < job.priority
    return Holder(
        job_id=job.id,
        takes=keeps if is_held else box.capacity.takes(job.id, demand),
        keeps=keeps,
        priority=job.priority,
        created_at=job.created_at,
        is_leaving=is_leaving,
        # The box's own queue chooses the moment.
        may_be_paused=not is_leaving and job.priority > highest,
    )
