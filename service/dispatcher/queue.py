"""The queue of a machine: the order of jobs, the reasons why they wait, and which jobs pause for others."""

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from windlass.actors.job import OUTCOME, JournalRecord
from windlass.actors.scheduler import ROOM
from windlass.service.auth import most_running_jobs
from windlass.service.dispatcher.boxes import Boxes, seconds_to_go
from windlass.service.dispatcher.job_watch import JobWatches, QueueWatch, Retry
from windlass.service.dispatcher.lease import Lease
from windlass.service.dispatcher.outcomes import has_step, last_attempt_with_progress, name_for_owner_of
from windlass.service.dispatcher.placement import (
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
    Placing,
    PlannedDemands,
    Turn,
    Wait,
    demands_of,
    in_turn,
    place_with_gpus,
    sentence,
)
from windlass.service.dispatcher.preparations import ROOM_AGAIN
from windlass.service.installation import Settings, about, is_out_of_room, needs_room
from windlass.service.jobs import MachineResources, chooses_gpus, gpus_of, load_plan, plan_bounds, plan_for_here
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
# The longest pause between two attempts in which a job over several boxes keeps them. Others would only just have begun
# there. In a longer one, they use the boxes.
_LONGEST_KEPT_PAUSE_S = 60.0
_GOES_ON_WITHOUT_ROOM = "The job goes on, though the disk is still nearly full"


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

    def put_off(self, reason: str) -> "Verdict":
        """Returns the verdict about the same job if it cannot begin for a reason outside the queue."""
        return replace(self, is_ready=False, reserves_boxes=False, reason=reason)

    @property
    def may_move(self) -> bool:
        """Returns whether the job's plan matters now.

        The job is about to begin, or pauses others, or can never begin by this plan.
        """
        if self.box is not None:
            return False
        return self.is_ready and (self.decision.begins or bool(self.decision.pauses) or self.decision.never)


@dataclass(frozen=True, slots=True)
class Divisions:
    """The waiting jobs over several boxes whose divisions a pass has gone on with."""

    waits: Mapping[str, Wait]  # the jobs that wait for theirs
    seen: Mapping[str, Job]  # all of them, as they were then

    def is_seen(self, job: Job) -> bool:
        """Returns whether a job is as it was then. Else it was resumed since, perhaps with other boxes."""
        seen = self.seen.get(job.id)
        return seen is not None and (seen.windlass, seen.attempt) == (job.windlass, job.attempt)


def _box_of(placement: Placement | None) -> str:
    """Returns the box on which a job begins, or for which it waits: the head's own if it is not placed."""
    return HEAD_NAME if placement is None or placement.box is None else placement.box


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

    def wait_for_room(self, job: Job, records: Sequence[JournalRecord]) -> None:
        """Makes the next attempt of a job wait for the disk space that this one lacked, by its records.

        If this is lost, the next attempt finds it out again.
        """
        for record in records:
            if record.kind == OUTCOME and record.attempt == job.attempt and (room := record.data.get(ROOM)) is not None:
                path, nbytes = room
                self._watches[job.id].queued.required_space = (Path(path), nbytes)

    def is_box_free(self) -> bool:
        """Returns whether no job runs on this machine."""
        return not self._present(())

    def verdicts(
        self, leaving: Collection[str], soon_ready: Mapping[int, int], divisions: Divisions
    ) -> Sequence[Verdict]:
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
        for job_id in self._watches.keys() - {job.id for job in (*present, *queued)}:
            self._watches[job_id].demands = None
        placing, self._begin_with = self._placing(present), {}
        for job in queued:
            if (wait := self._wait(job, leaving, too_many)) is not None:
                placing.waits[job.id] = wait
        candidates = [
            self._candidate_over_boxes(job, placing, divisions) if is_over else self._candidate(job, placing)
            for job in queued
            if (is_over := self.boxes.is_over_several(job)) or job.id not in too_many
            if job.id not in leaving
        ]
        placed = self._place(queued, candidates, present, leaving, placing)
        verdicts, num_before = list[Verdict](), 0
        for job in queued:
            placement, is_ready = placed.get(job.id), job.id not in placing.waits
            verdict = self._verdict(job, placement, placing, num_before, soon_ready)
            if job.id in divisions.waits or not self._is_divided(job, divisions):
                verdict = replace(verdict, reserves_boxes=False)
            if job.lease_holder == self._lease.holder:
                verdicts.append(verdict)
            begins = verdict.decision.begins
            if begins:
                placing.holders[_box_of(placement)].append(job)
            watch = self._watches[job.id].queued
            watch.waits_for = None if begins or placement is None else placement.box
            if placement is not None and placement.passes and watch.passed_since is None:
                watch.passed_since = self._clock()
            if not (is_ready and (begins or verdict.decision.never)):
                num_before += 1
        return verdicts

    def _placing(self, present: Sequence[Job]) -> Placing:
        """Returns the boxes of a pass, with the jobs that hold their resources. `present`: those on this machine."""
        resources = {HEAD_NAME: self._resources, **{name: box.resources for name, box in self.boxes.by_name.items()}}
        holders = {name: [*box.holders, *box.spread] for name, box in self.boxes.by_name.items()}
        return Placing(
            capacity=self._capacity({job.id for job in present}),
            num_gpus={name: each.num_gpus for name, each in resources.items()},
            holders={HEAD_NAME: list(present), **holders},
        )

    def _place(
        self,
        queued: Sequence[Job],
        candidates: Sequence[Candidate],
        present: Sequence[Job],
        leaving: Collection[str],
        placing: Placing,
    ) -> Mapping[str, Placement]:
        """Returns the place of each candidate. `queued`: all waiting jobs, in the order of the queue."""
        capacity, highest = placing.capacity, queued[0].priority
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
        return {each.job_id: each for each in placements}

    def _verdict(
        self,
        job: Job,
        placement: Placement | None,
        placing: Placing,
        num_before: int,
        soon_ready: Mapping[int, int],
    ) -> Verdict:
        """Returns the verdict about a job. `num_before`: the jobs before it that wait. `soon_ready`: see `verdicts`."""
        wait, name = placing.waits.get(job.id), _box_of(placement)
        decision = Decision(job_id=job.id) if placement is None else placement.decision
        if wait is not None:
            reason = wait.reason
        elif decision.begins or placement is None:
            reason = ""
        else:
            reason = placing.reason(job, placement, num_before)
        begins = wait is None and decision.begins and name == HEAD_NAME
        lacking = self._lacking_devices(job, placing.holders[HEAD_NAME], soon_ready) if begins else ()
        if self._yields_to_preparation(job, lacking):
            decision, reason = replace(decision, begins=False), "a job of higher priority that is being prepared"
        over = placing.over.get(job.id)
        together = None if over is None else placement
        is_given = over is None and name != HEAD_NAME  # a box makes room by itself for a job that it was given
        is_given = is_given and (decision.begins or bool(decision.pauses) or decision.will_pause)
        return Verdict(
            job=job,
            decision=decision,
            reason=reason,
            is_ready=wait is None,
            box=self.boxes.by_name[name] if is_given else None,
            gpus=self._num_gpus(job),
            over=over,
            keeps_boxes=together is not None and (decision.begins or together.by_pausing),
            reserves_boxes=together is not None and together.reserves,
        )

    def explain(self, job: Job, reason: str) -> None:
        """Stores the reason why a job waits, if it is new."""
        before = job.waiting_reason or ""
        if reason == before:
            return
        watch, now = self._watches[job.id].queued, self._clock()
        has_boxes = bool(self.boxes.by_name)
        if sentence(reason, has_boxes=has_boxes) != sentence(before, has_boxes=has_boxes):
            with self._database.write() as session:
                JobRepository(session).set_waiting_reason(job.id, reason, seen=job)
        elif watch.reason_written_at is None or now - watch.reason_written_at >= _REWRITE_INTERVAL_S:
            with self._database.write() as session:
                JobRepository(session).set_fields(job.id, seen=job, waiting_reason=reason)
        else:
            return
        watch.reason_written_at = now

    def explain_room(self, job: Job, reason: str | None) -> None:
        """Stores that a running job waits for disk space, or that it no longer waits."""
        if reason is not None and job.waiting_reason is None:
            self.explain(job, reason)
        elif reason is None and job.waiting_reason is not None:
            message = _GOES_ON_WITHOUT_ROOM if is_out_of_room(self._settings.home) else ROOM_AGAIN
            with self._database.write() as session:
                JobRepository(session).clear_waiting_reason(job.id, message, seen=job)

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

    def _wait(self, job: Job, leaving: Collection[str], too_many: Mapping[str, int]) -> Wait | None:
        """Returns why a job cannot begin yet wherever it is, or None."""
        pause_s = self._pause_before_retry(job)  # first, because it begins with the end of the attempt
        if job.id in leaving:
            return Wait(reason=f"the processes of attempt {job.attempt} have not ended yet", is_soon=True)
        if (lack := self._lacks_room(job.id)) is not None:
            return Wait(reason=lack)
        if (most := too_many.get(job.id)) is not None:
            return Wait(reason=f"one of your running jobs must end first (your limit: {most})")
        if pause_s is not None:
            reason = f"attempt {job.attempt} was lost; the next one begins about {pause_s:.0f} s later"
            return Wait(reason=reason, is_soon=pause_s <= _LONGEST_KEPT_PAUSE_S)
        return None

    def _candidate(self, job: Job, placing: Placing) -> Candidate:
        """Returns a job on one box as the policy sees it. Until it is ready, it keeps its place."""
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
            is_ready=job.id not in placing.waits,
            waits_for=watch.waits_for,
            passed_s=0.0 if watch.passed_since is None else self._clock() - watch.passed_since,
        )

    def _candidate_over_boxes(self, job: Job, placing: Placing, divisions: Divisions) -> Candidate:
        """Returns a job over several boxes as the policy sees it. It needs each of its boxes as a whole.

        It keeps them until it is ready only if that is soon. A box may be away, or files may be copied, for long.
        """
        others, why_not = self.boxes.boxes_of(job)
        on_boxes = self.boxes.why_not_ready(job) if why_not is None else Wait(reason=why_not)
        unseen = None if self._is_divided(job, divisions) else Wait(reason=job.waiting_reason or "", is_soon=True)
        found = (placing.waits.get(job.id), divisions.waits.get(job.id), on_boxes, unseen)
        waits = [wait for wait in found if wait is not None]
        if waits:
            placing.waits[job.id] = waits[0]
        demand = Demand(num_devices=self._resources.num_devices)
        options = [Option(box=HEAD_NAME, needs=placing.capacity.needs(job.id, demand))]
        options += [self.boxes.whole_box(job, box) for box in others]
        placing.over[job.id] = others
        placing.options[job.id], placing.why_not[job.id] = {option.box: option for option in options}, {}
        keeps = all(wait.is_soon for wait in waits)
        return Candidate(
            job_id=job.id,
            options=options if keeps else (),
            priority=job.priority,
            is_ready=not waits,
            together=keeps,
        )

    def _is_divided(self, job: Job, divisions: Divisions) -> bool:
        """Returns whether the division of a job, if it is over several boxes, is the one that it asks for now."""
        is_here = self.boxes.is_used and job.lease_holder == self._lease.holder  # another dispatcher has seen its own
        return not (is_here and self.boxes.is_over_several(job)) or divisions.is_seen(job)

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
