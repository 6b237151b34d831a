"""The queue of a machine: the order of jobs, the reasons why they wait, and which jobs pause for others."""

import logging
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from windlass.amounts import GIB
from windlass.service.auth import most_running_jobs
from windlass.service.dispatcher.boxes import Boxes, in_short, seconds_to_go, told_boxes
from windlass.service.dispatcher.job_watch import JobWatches, QueueWatch, Retry
from windlass.service.dispatcher.lease import Lease
from windlass.service.dispatcher.outcomes import has_step, last_attempt_with_progress, name_for_owner_of
from windlass.service.dispatcher.placement import (
    BUFFERS,
    DEVICES,
    HOST_MEMORY,
    BoxState,
    Candidate,
    Decision,
    Demand,
    GpuOption,
    Holder,
    JoinedBox,
    MachineCapacity,
    Option,
    Placement,
    PlannedDemands,
    Turn,
    demands_of,
    in_turn,
    place_with_gpus,
)
from windlass.service.installation import Settings, about, needs_room
from windlass.service.jobs import MachineResources, chooses_gpus, gpus_of, load_plan, plan_bounds, plan_for_here
from windlass.service.validation import count_text, told_jobs_beside
from windlass.storage.ids import HEAD_NAME, Attempt
from windlass.storage.memory import directory_free_nbytes, directory_nbytes
from windlass.storage.sql import TERMINAL_STATUSES, Database, Job, JobStatus
from windlass.storage.sql.repositories import JobRepository

_LOG = logging.getLogger(__name__)

# Pauses between a lost attempt without progress and the next one; each pause is longer. A random part, up to half, is
# left out, so that jobs lost together do not start together.
_FIRST_PAUSE_S = 2.0
_PAUSE_FACTOR = 4.0
_MAX_PAUSE_S = 300.0
# Seconds for which a read of the machine's capacity is reused, while the same jobs hold resources.
_MAX_CAPACITY_AGE_S = 5.0
# Minimum time before updating a waiting reason in which only numbers changed. Such updates create no event.
_REWRITE_INTERVAL_S = 60.0
# Seconds in which an attempt counts as starting. Its processes only import then, and ending them loses no progress.
_STARTING_S = 20.0
# Consecutive attempts of a job that may be ended while they start. The next attempt may run to its first step, whatever
# jobs come.
_MAX_PREEMPTED_STARTS = 3
# Seconds that a job waits in all, each time that it is queued, while jobs of higher priority are prepared. Else its
# attempt would be ended while it starts.
_MAX_YIELD_S = 20.0
_AMOUNT = re.compile(r"[\d.]+ [KMGTP]?i?B")
# Parts of a reason that change whenever a job on any box begins or ends.
_JOBS = re.compile(
    r"jobs? ftjob-\w+(, ftjob-\w+)*|\d+ jobs? of others|\band\b|[\d.]+|\bqueued jobs? (is|are) before this one"
)


def is_starting(job: Job) -> bool:
    """Returns whether an attempt of a running job has just begun."""
    return job.launched_at is not None and 0 <= time.time() - job.launched_at < _STARTING_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision about a queued job in this pass. `reason`: why it does not begin."""

    job: Job
    decision: Decision
    reason: str = ""
    is_ready: bool = True  # else it only gets the reason
    box: JoinedBox | None = None  # that gets the job; None: it begins or waits here
    gpus: int | None = None  # that it begins with here; None: those that it has
    over: Sequence[JoinedBox] | None = None  # the other boxes of a job over several boxes
    keeps_boxes: bool = False  # such a job begins on all of its boxes, now or once other jobs have paused for it
    reserves_boxes: bool = False  # the same, but not while jobs on them cannot be paused yet

    @property
    def may_move(self) -> bool:
        """Returns whether the job's plan matters now.

        The job is about to begin, or pauses others, or can never begin by this plan.
        """
        if self.box is not None:
            return False
        return self.is_ready and (self.decision.begins or bool(self.decision.pauses) or self.decision.never)


class JobQueue:
    """The queue of one machine, as one of its dispatchers sees it. Its memory may be lost at any time."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        resources: MachineResources,
        lease: Lease,
        watches: JobWatches,
        *,
        look: Callable[[], MachineCapacity],
        clock: Callable[[], float],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._database = database
        self._settings = settings
        self._resources = resources
        self._lease = lease
        self._watches = watches
        self._look = look
        self._clock = clock
        self._jitter = jitter
        self.boxes = Boxes(database, settings, clock=clock)
        # The queued jobs of this home in the last pass, under any dispatcher.
        self.job_ids: Collection[str] = ()
        self._seen: tuple[float, Collection[str], MachineCapacity] | None = None
        # The GPUs of the jobs that begin in this pass with another number than their plan prefers.
        self._begin_with: Mapping[str, int] = {}

    def wait_for_room(self, job_id: str, path: Path, nbytes: int) -> None:
        """Makes a job wait until a disk has `nbytes` free, because its attempt was lost with less.

        If this is lost, the next attempt finds it out again.
        """
        self._watches[job_id].queued.required_space = (path, nbytes)

    def is_box_free(self) -> bool:
        """Returns whether no job runs on this machine."""
        return not self._present(())

    def verdicts(self, leaving: Collection[str], soon_ready: Mapping[int, int]) -> Sequence[Verdict]:
        """Decides about each queued job that this dispatcher holds, in the order of the queue.

        `leaving`: jobs with an ended attempt whose processes still live. `soon_ready`: for the jobs that will probably
        be queued in a moment, the most devices that one needs, by priority.
        """
        queued = self._queued()
        self.job_ids = {job.id for job in queued}
        self._forget_all_but(self.job_ids)
        self.boxes.forget_all_but(self.job_ids)
        if not queued:
            return []
        present = self._present(leaving)
        everywhere = [*present, *self.boxes.holders]
        queued = self._in_turn(queued, everywhere)
        too_many = self._over_owner_limit(queued, everywhere)
        capacity = self._capacity({job.id for job in present})
        for job_id in self._watches.keys() - {job.id for job in (*present, *queued)}:
            self._watches[job_id].demands = None
        self._begin_with = {}
        pauses = {job.id: self._pause_before_retry(job) for job in queued}
        lacks = {job.id: self._lacks_room(job.id) for job in queued}
        placing = _Placing(capacity=capacity, holders={HEAD_NAME: list(present)})
        placing.holders |= {name: [*box.holders, *box.spread] for name, box in self.boxes.by_name.items()}
        candidates = [
            self._candidate(job, placing, is_ready=pauses[job.id] is None and lacks[job.id] is None)
            for job in queued
            if job.id not in leaving and job.id not in too_many
        ]
        highest = queued[0].priority
        here = BoxState(
            name=HEAD_NAME,
            has=capacity.has(self._resources, [job.id for job in present]),
            holders=[self._holder(job, capacity, job.id in leaving, highest=highest) for job in present],
            left_s={job.id: left_s for job in present if (left_s := seconds_to_go(job)) is not None},
        )
        placements, self._begin_with = place_with_gpus(
            [here, *self.boxes.states(highest=highest, may_leave_now=self._may_leave_now)],
            candidates,
            box=HEAD_NAME,
            fewer={job.id: self._fewer_gpus(job, capacity) for job in queued},
        )
        placed = {each.job_id: each for each in placements}
        verdicts, num_before = list[Verdict](), 0
        for job in queued:
            placement, pause_s = placed.get(job.id), pauses[job.id]
            decision = Decision(job_id=job.id) if placement is None else placement.decision
            name = HEAD_NAME if placement is None or placement.box is None else placement.box
            if job.id in leaving:
                reason = f"the processes of attempt {job.attempt} have not ended yet"
            elif (lack := lacks[job.id]) is not None:
                reason = lack
            elif (most := too_many.get(job.id)) is not None:
                reason = f"one of your running jobs must end first (your limit: {most})"
            elif pause_s is not None:
                reason = f"attempt {job.attempt} was lost; the next one begins about {pause_s:.0f} s later"
            elif placement is not None and (why := placing.why_not_together.get(job.id)) is not None:
                reason = why
            elif decision.begins or placement is None:
                reason = ""
            else:
                reason = self._reason(job, placement, placing, num_before)
            is_ready = job.id not in (*leaving, *too_many, *placing.why_not_together)
            is_ready = is_ready and pause_s is None and lacks[job.id] is None
            begins = is_ready and decision.begins and name == HEAD_NAME
            lacking = self._lacking_devices(job, placing.holders[HEAD_NAME], soon_ready) if begins else ()
            if self._yields_to_preparation(job, lacking):
                decision, reason = replace(decision, begins=False), "a job of higher priority that is being prepared"
            if job.lease_holder == self._lease.holder:
                # A box makes room by itself for a job that it was given.
                over = placing.over.get(job.id)
                if over is None and job.id in too_many and self.boxes.is_over_several(job):
                    over, _ = self.boxes.boxes_of(job)  # they are not reserved meanwhile
                is_given = (
                    over is None
                    and name != HEAD_NAME
                    and (decision.begins or bool(decision.pauses) or decision.will_pause)
                )
                box = self.boxes.by_name[name] if is_given else None
                gpus = self._num_gpus(job)
                verdicts.append(
                    Verdict(
                        job=job,
                        decision=decision,
                        reason=reason,
                        is_ready=is_ready,
                        box=box,
                        gpus=gpus,
                        over=over,
                        keeps_boxes=over is not None
                        and placement is not None
                        and (decision.begins or placement.by_pausing),
                        reserves_boxes=over is not None and placement is not None and placement.reserves,
                    )
                )
            if decision.begins:
                placing.holders[name].append(job)
            watch = self._watches[job.id].queued
            watch.waits_for = None if decision.begins or placement is None else placement.box
            if placement is not None and placement.passes and watch.passed_since is None:
                watch.passed_since = self._clock()
            if not (is_ready and (decision.begins or decision.never)):
                num_before += 1
        return verdicts

    def explain(self, job: Job, reason: str) -> None:
        """Stores the reason why a job waits, if it is new."""
        before = job.waiting_reason or ""
        if reason == before:
            return
        watch, now = self._watches[job.id].queued, self._clock()
        if self._sentence(reason) != self._sentence(before):
            with self._database.write() as session:
                JobRepository(session).set_waiting_reason(job.id, reason, seen=job)
        elif watch.reason_written_at is None or now - watch.reason_written_at >= _REWRITE_INTERVAL_S:
            with self._database.write() as session:
                JobRepository(session).set_fields(job.id, seen=job, waiting_reason=reason)
        else:
            return
        watch.reason_written_at = now

    def _sentence(self, reason: str) -> Collection[str]:
        """Returns what makes a reason another one, with an event. The jobs on several boxes change too often for it."""
        if not self.boxes.by_name:
            return _AMOUNT.sub("", reason)
        return sorted({_JOBS.sub("", part).strip() for part in reason.split("; ")} - {""})

    def make_room(self, job: Job, victims: Collection[str]) -> None:
        """Requests jobs of lower priority to pause. They continue by themselves when there is room again."""
        for victim in victims:
            with self._database.write() as session:
                running = JobRepository(session).get(victim)
                is_kept = has_step(session, running)
                how = "the runner ends its attempt after its step" if is_kept else "its attempt has only just begun"
                preferred = name_for_owner_of(session, running, job.id)
                message = (
                    f"Pausing for {preferred} of higher priority: {how}; the job goes on by itself when there is room"
                )
                JobRepository(session).ask_to_yield(victim, job.id, message=message, seen=running)
            _LOG.info(
                "of priority %d, it makes room for job %s, of priority %d",
                running.priority,
                job.id,
                job.priority,
                extra=about(victim, running.attempt),
            )

    # --- state of the queue and the machine --------------------------------------------------------------------------

    def _queued(self) -> Sequence[Job]:
        """Returns all queued jobs of this home.

        Those of another dispatcher count too, because they keep their place.
        """
        with self._database.read() as session:
            return JobRepository(session).with_status(JobStatus.QUEUED, node=self._lease.node)

    def _in_turn(self, queued: Sequence[Job], present: Sequence[Job]) -> Sequence[Job]:
        """Returns the jobs in the order of the queue."""
        owners = {job.owner for job in queued}
        last_began: Mapping[str | None, float] = {}
        if len(owners) > 1:
            with self._database.read() as session:
                last_began = JobRepository(session).last_began(owners)
        turns = [
            Turn(
                job_id=job.id,
                owner=job.owner,
                priority=job.priority,
                created_at=job.created_at,
                keeps_place=job.keeps_place,
            )
            for job in queued
        ]
        by_id = {job.id: job for job in queued}
        return [by_id[job_id] for job_id in in_turn(turns, Counter(job.owner for job in present), last_began)]

    def _over_owner_limit(self, queued: Sequence[Job], present: Sequence[Job]) -> Mapping[str, int]:
        """Returns the jobs that may not begin because of their owner's limit of jobs at once, with that limit."""
        num_running, over_limit = Counter(job.owner for job in present), dict[str, int]()
        with self._database.read() as session:
            most = {owner: most_running_jobs(session, self._settings, owner) for owner in {job.owner for job in queued}}
        for job in queued:
            limit = most[job.owner]
            num_running[job.owner] += 1
            if limit is not None and num_running[job.owner] > limit:
                over_limit[job.id] = limit
        return over_limit

    def _present(self, leaving: Collection[str]) -> Sequence[Job]:
        """Returns the jobs that hold resources of this machine, under any dispatcher."""
        with self._database.read() as session:
            jobs = JobRepository(session)
            running = jobs.with_status(JobStatus.RUNNING, JobStatus.PAUSING, node=self._lease.node)
            known = {job.id for job in running}
            others = [job for job_id in leaving if job_id not in known and (job := jobs.find(job_id)) is not None]
        return [*running, *others]

    def _capacity(self, present: Collection[str]) -> MachineCapacity:
        now = self._clock()
        if self._seen is None or self._seen[1] != present or now - self._seen[0] >= _MAX_CAPACITY_AGE_S:
            self._seen = (now, present, self._look())
        return self._seen[2]

    def _demand(self, job: Job) -> Demand:
        """Returns the demand of a job with its GPUs, or with those that a waiting one prefers or begins with."""
        demands = self._demands(job)
        return demands.of(self._num_gpus(job) or demands.preferred)

    def _demands(self, job: Job) -> PlannedDemands:
        watch, key = self._watches[job.id], (job.plan_number, (job.windlass.get("gpus"), job.windlass.get("boxes")))
        if watch.demands is None or watch.demands[0] != key:
            watch.demands = (key, self._read_demands(job))
        return watch.demands[1]

    def _num_gpus(self, job: Job) -> int | None:
        """Returns the number of GPUs of a job whose plan chooses it, or None for any other job."""
        demands = self._demands(job)
        if not demands.step_s:
            return None
        if job.status is not JobStatus.QUEUED:
            return gpus_of(job)
        return self._begin_with.get(job.id, demands.preferred)

    def _fewer_gpus(self, job: Job, capacity: MachineCapacity) -> Sequence[GpuOption]:
        """Returns the smaller numbers of GPUs that a waiting job may begin with."""
        demands, num_steps = self._demands(job), (job.total_steps or 0) - (job.step or 0)
        return [
            GpuOption(gpus=gpus, needs=capacity.needs(job.id, demands.of(gpus)), run_s=num_steps * step_s)
            for gpus, step_s in demands.step_s.items()
            if gpus < demands.preferred
        ]

    def _read_demands(self, job: Job) -> PlannedDemands:
        self._watches[job.id].here = None
        if job.status is JobStatus.QUEUED and not job.attempt and self.boxes.is_used:
            plan_for_here(self._settings, job)  # it may have been taken back from a box
        try:
            budget_nbytes = plan_bounds(self._settings, job).host_memory_nbytes
            plan, is_cpu = load_plan(self._settings, job), self._resources.num_gpus == 0
            gpus, chooses = gpus_of(job), chooses_gpus(job)
            if self.boxes.is_over_several(job):
                gpus, chooses = self._resources.num_devices, False
            if plan is not None and not chooses and gpus in plan.gpu_numbers:
                plan = plan.for_gpus(gpus)
            demands = demands_of(plan, num_devices=gpus, chooses=chooses, budget_nbytes=budget_nbytes, is_cpu=is_cpu)
            if plan is not None:
                step_s = demands.step_s.get(demands.preferred, plan.report.step_s)
                self._watches[job.id].here = (job.plan_number, step_s, plan.report.feasible)
            return demands
        # the job's own launch will fail, and other jobs are not affected
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            _LOG.warning("its demand cannot be read from the plan: %s", error, extra=about(job.id, job.attempt))
            return PlannedDemands(demands={1: Demand()})

    def _candidate(self, job: Job, placing: "_Placing", *, is_ready: bool) -> Candidate:
        if self.boxes.is_over_several(job):
            return self._candidate_over_boxes(job, placing, is_ready=is_ready)
        options, why_not = self.boxes.options(job)
        run_s, fits = self._here(job)
        if self.boxes.may_run_here(job) and (fits or not self.boxes.by_name):
            needs = placing.capacity.needs(job.id, self._demand(job))
            options = [Option(box=HEAD_NAME, needs=needs, run_s=run_s), *options]
        watch = self._watches[job.id].queued
        placing.options[job.id] = {option.box: option for option in options}
        placing.why_not[job.id] = why_not
        return Candidate(
            job_id=job.id,
            options=options,
            priority=job.priority,
            is_ready=is_ready,
            waits_for=watch.waits_for,
            passed_s=0.0 if watch.passed_since is None else self._clock() - watch.passed_since,
        )

    def _candidate_over_boxes(self, job: Job, placing: "_Placing", *, is_ready: bool) -> Candidate:
        """Returns a job over several boxes as the policy sees it. It needs each of its boxes as a whole."""
        others, why_not = self.boxes.boxes_of(job)
        parts, demand = self.boxes.parts_of(job.id), Demand(num_devices=self._resources.num_devices)
        options = [Option(box=HEAD_NAME, needs=placing.capacity.needs(job.id, demand))]
        options += [self.boxes.whole_box(job, box) for box in others]
        is_soon = False
        if why_not is None and parts:
            why_not, is_soon = self.boxes.why_not_ready(job)
        if why_not is not None:
            placing.why_not_together[job.id] = why_not
        placing.over[job.id] = others
        placing.options[job.id], placing.why_not[job.id] = {option.box: option for option in options}, {}
        # While a box is away, or files are copied, which may be for long, it keeps no room.
        may_keep = why_not is None or is_soon
        return Candidate(
            job_id=job.id,
            options=options if may_keep else (),
            priority=job.priority,
            is_ready=is_ready and why_not is None,
            together=may_keep,
        )

    def _here(self, job: Job) -> tuple[float | None, bool]:
        """Returns the seconds that the rest of a job takes here, if known, and whether its plan fits this box."""
        self._demand(job)  # reads the plan
        _, step_s, fits = self._watches[job.id].here or (0, None, True)
        run_s = None if step_s is None or job.total_steps is None else step_s * (job.total_steps - job.step)
        return run_s, fits

    def _holder(self, job: Job, capacity: MachineCapacity, is_leaving: bool, *, highest: int) -> Holder:
        demand = self._demand(job)
        is_to_end = job.status is not JobStatus.RUNNING or job.cancel_requested or job.yields_to is not None
        is_leaving = is_leaving or is_to_end
        may_be_paused = not is_leaving and job.priority > highest
        return Holder(
            job_id=job.id,
            takes=capacity.takes(job.id, demand),
            keeps={} if job.status in TERMINAL_STATUSES else capacity.keeps(job.id, demand),
            priority=job.priority,
            created_at=job.created_at,
            is_leaving=is_leaving,
            may_be_paused=may_be_paused,
            may_leave_now=may_be_paused and self._may_leave_now(job),
        )

    def _may_leave_now(self, job: Job) -> bool:
        """Returns whether a job may be paused at once.

        Its attempt has a step, or it just starts and was not ended too often.
        """
        with self._database.read() as session:
            num_without_progress = job.attempt - last_attempt_with_progress(session, job.id)
        return num_without_progress == 0 or (num_without_progress <= _MAX_PREEMPTED_STARTS and is_starting(job))

    def _lacking_devices(self, job: Job, holders: Sequence[Job], soon_ready: Mapping[int, int]) -> Collection[int]:
        """Returns the priorities for which too few devices are left when a job begins beside the holders."""
        num_left = self._resources.num_devices - sum(self._demand(each).num_devices for each in (*holders, job))
        return [priority for priority, num_devices in soon_ready.items() if num_devices > num_left]

    def _yields_to_preparation(self, job: Job, priorities: Collection[int]) -> bool:
        """Returns whether a job does not begin yet, because one of higher priority may need the room in a moment.

        `priorities`: those of the jobs that may need it.
        """
        watch, now = self._watches[job.id].queued, self._clock()
        if any(priority < job.priority for priority in priorities):
            if watch.yields_since is None:
                watch.yields_since = now
            return watch.yielded_s + now - watch.yields_since < _MAX_YIELD_S
        if watch.yields_since is not None:
            watch.yielded_s += now - watch.yields_since
            watch.yields_since = None
        return False

    def _pause_before_retry(self, job: Job) -> float | None:
        """Returns how long a job waits after an attempt that was lost without progress, or None if it need not wait."""
        if not job.num_lost:
            return None
        watch = self._watches[job.id].queued
        retry = watch.retry
        if retry is None or retry.after != job.attempt:
            longest_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * _PAUSE_FACTOR ** (job.num_lost - 1))
            pause_s = longest_s * (1 - self._jitter() / 2)
            retry = watch.retry = Retry(after=Attempt(job.attempt), pause_s=pause_s, at=self._clock() + pause_s)
        return None if self._clock() >= retry.at else retry.pause_s

    def _lacks_room(self, job_id: str) -> str | None:
        """Returns why a job waits for disk space, or None once the space is free.

        Returns None also if the whole disk is smaller. The job would wait forever, while attempts that fail for lack of
        space are limited.
        """
        required = self._watches[job_id].queued.required_space
        if required is None:
            return None
        path, nbytes = required
        try:
            free_nbytes, disk_nbytes = directory_free_nbytes(path), directory_nbytes(path)
        except OSError:  # the folder is gone; the next attempt reports it
            return None
        return needs_room(path, nbytes, free_nbytes) if free_nbytes < nbytes <= disk_nbytes else None

    def _forget_all_but(self, queued: Collection[str]) -> None:
        for job_id in self._watches.keys() - set(queued):
            self._watches[job_id].queued = QueueWatch()

    # --- reasons for waiting -----------------------------------------------------------------------------------------

    def _reason(self, job: Job, placement: Placement, placing: "_Placing", num_before: int) -> str:
        """Explains to its owner why a job waits. Other users' jobs are counted, not named."""
        decisions = dict(placement.elsewhere)
        if placement.box is not None:
            decisions = {placement.box: placement.decision, **decisions}
        parts = []
        begins_at = [name for name, decision in decisions.items() if decision.begins]
        if begins_at and placement.box is not None and job.id not in placing.over:
            free = told_boxes(begins_at)
            parts.append(f"it would end on box {placement.box} sooner than on {free}, though it has to wait there")
        boxes = [
            self._why_not_on(job, name, decision, placing)
            for name, decision in decisions.items()
            if not decision.begins
        ]
        parts += in_short([*filter(None, boxes), *placing.why_not[job.id].values()])
        decision = placement.decision
        if decision.never and len(decisions) == 1:
            return "; ".join(parts)
        holders = placing.holders[placement.box or HEAD_NAME]
        of_boxes = decisions.values() if placement.by_pausing else (decision,)
        is_pausing = any(each.pauses or each.will_pause for each in of_boxes)
        if is_pausing or any(other.yields_to == job.id for other in holders):
            parts.append("jobs of lower priority are paused for it after their step")
        if not parts:
            box = job.windlass.get("box")
            parts.append(
                "no box that it may run on has joined" if box is None else f"box {box}, which it asks for, has left"
            )
        if num_before:
            parts.append(f"{num_before} queued job{'s are' if num_before > 1 else ' is'} before this one")
        return "; ".join(parts)

    def _why_not_on(self, job: Job, name: str, decision: Decision, placing: "_Placing") -> str:
        """Explains why a job does not begin on a box. Without other boxes, this one is not named."""
        needs, holders = placing.options[job.id][name].needs, placing.holders[name]
        is_alone = not self.boxes.by_name
        num_gpus = (self._resources if name == HEAD_NAME else self.boxes.by_name[name].resources).num_gpus
        if decision.never:
            lacks = "; ".join(
                _short_of(each, needs[each], lack, num_gpus=num_gpus) for each, lack in decision.missing.items()
            )
            return f"{lacks}, also with no other job here" if is_alone else f"box {name} is too small for it: {lacks}"
        beside = told_jobs_beside([other.id for other in holders if other.owner == job.owner], len(holders))
        parts = []
        for each, lack in decision.missing.items():
            if each == DEVICES and needs[each] == 1:
                devices = "the CPU" if num_gpus == 0 else "every GPU"
                parts.append(f"{devices} {'' if is_alone else f'of box {name} '}is in use by {beside}")
            else:
                where = "" if is_alone else f"on box {name} it "
                parts.append(f"{where}{_short_of(each, needs[each], lack, num_gpus=num_gpus)} beside {beside}")
        if decision.waits_behind is not None:
            where = "there is room for it" if is_alone else f"box {name} has room for it"
            parts.append(f"{where}, but a job before it would have to wait longer")
        return "; ".join(parts)


@dataclass(slots=True, kw_only=True)
class _Placing:
    """Knowledge of a pass over the queue: the boxes and the jobs' options, for the reasons."""

    capacity: MachineCapacity
    holders: dict[str, list[Job]]  # by box
    options: dict[str, Mapping[str, Option]] = field(default_factory=dict)  # by job and box
    why_not: dict[str, Mapping[str, str]] = field(default_factory=dict)  # by job: why other boxes are no options
    over: dict[str, Sequence[JoinedBox]] = field(default_factory=dict)  # by job over several boxes: the other ones
    why_not_together: dict[str, str] = field(default_factory=dict)  # by such a job: why it cannot begin yet


def _short_of(resource: str, needed: int, lack: int, *, num_gpus: int) -> str:
    """Says how much of a resource a job needs, and how much of it is free."""
    free = max(0, needed - lack)
    if resource == DEVICES:
        devices = count_text(needed, "GPU" if num_gpus else "device")
        return f"needs {devices}; {free} {'is' if free == 1 else 'are'} free"
    where = {HOST_MEMORY: "host memory", BUFFERS: "memory for its buffers"}
    what = where.get(resource, f"space on the SSD {resource}")
    return f"needs {needed / GIB:.1f} GiB of {what}; {free / GIB:.1f} GiB are free"
