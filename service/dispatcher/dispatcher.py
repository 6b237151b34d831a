"""Takes jobs from accepted to finished: prepares them, launches them in turn, and imports the records of their runners.

The database is the only authority. This process may lose its own memory at any time: a new dispatcher continues from
the tables, the jobs' journals and the running runners.
"""

import functools
import logging
import math
import random
import time
from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto

from windlass.actors.lifecycle import has_begun, last_sign_of_life
from windlass.planner.question import JobPlan
from windlass.service.data import jobs_with_states
from windlass.service.dispatcher.box_planner import BoxPlanner
from windlass.service.dispatcher.housekeeping import Housekeeping
from windlass.service.dispatcher.job_watch import (
    SILENT_S,
    AttemptPhase,
    AttemptWatch,
    JobWatch,
    JobWatches,
    StopKind,
)
from windlass.service.dispatcher.lease import Lease
from windlass.service.dispatcher.outcomes import (
    fail_attempt,
    fail_job,
    handle_loss,
    handle_preemption,
    has_step,
    import_records,
    open_journal,
    pause_job,
)
from windlass.service.dispatcher.parts import PartsHere, SpreadJobs
from windlass.service.dispatcher.placement import (
    JoinedBox,
    MachineCapacity,
    Wait,
    hand_over,
    read_capacity,
    take_back,
    watch_absent_boxes,
)
from windlass.service.dispatcher.preparations import Preparations
from windlass.service.dispatcher.queue import Divisions, JobQueue, Verdict, is_starting
from windlass.service.dispatcher.replanner import (
    Ask,
    AskStages,
    ChangedMachine,
    MeasuredSteps,
    Replanner,
    ask_planner,
    ask_stages,
    must_end_for_plan,
)
from windlass.service.dispatcher.runners import EndedAttempts, RunnerLostError, Runners
from windlass.service.installation import Settings, about, is_out_of_room, room_reason
from windlass.service.jobs import (
    MachineResources,
    NoPlanForGpusError,
    build_job_spec,
    expected_pace,
    gpus_of,
    job_dir,
    layout_epoch_on_one_box,
    load_plan,
    move_in_words,
    plan_for_gpus,
    seconds_left,
    shown_gpus_of,
    stages_of,
    why_it_waits_for_room,
)
from windlass.service.machine.fleet import PartLink, read_hold
from windlass.service.preparation import Preparation, PreparationMemory, PreparationOrder, preparation_of
from windlass.service.validation import ReportedError
from windlass.storage.ids import Attempt, JobId
from windlass.storage.memory import may_find_room_later
from windlass.storage.sql import (
    ACTIVE_STATUSES,
    TERMINAL_STATUSES,
    Database,
    Job,
    JobPart,
    JobStatus,
    JournalError,
    StatusConflict,
    why_unavailable,
)
from windlass.storage.sql.repositories import DeletionRepository, EventRepository, JobFields, JobRepository

_LOG = logging.getLogger(__name__)

_LOST = (
    "the job's processes ended without an outcome: killed for lack of memory, by hand, with Ray or with the machine, "
    "or the disk was too full to write one"
)

# If the home's disk was full within these seconds, a lost runner counts as a victim of the full disk.
_FULL_LATELY_S = 30.0


class _Runner(Enum):
    """The state of an attempt's runner."""

    ALIVE = auto()
    HUNG = auto()  # it exists, but gives no signs of life
    GONE = auto()


class Dispatcher:
    """Passes repeatedly over all unfinished jobs. No step of a pass blocks for long."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        runners: Runners,
        resources: MachineResources,
        lease: Lease,
        *,
        prepare: Callable[[PreparationOrder], Preparation] = preparation_of,
        ask: Ask = ask_planner,
        ask_over_boxes: AskStages = ask_stages,
        look: Callable[[], MachineCapacity] | None = None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        housekeeping: Housekeeping | None = None,
        preparation_memory: PreparationMemory | None = None,
        hold: Callable[[], str | None] | None = None,
    ) -> None:
        """Uses `hold` to learn why no attempt may run now; None: attempts may run."""
        self._database = database
        self._settings = settings
        self._runners = runners
        self._resources = resources
        self._lease = lease
        self._clock = clock
        self._read_hold = hold or functools.partial(read_hold, settings.home)
        self._hold: str | None = None  # as this pass read it
        self._housekeeping = housekeeping or Housekeeping(database, settings, node=lease.node, clock=clock)
        by_steps = MeasuredSteps(database=database, settings=settings, has_gpus=resources.num_gpus > 0)
        self._corrections = Replanner(database, settings, by_steps, ask=ask)
        changed = ChangedMachine(settings=settings, num_devices=resources.most_gpus)
        self._renewals = Replanner(database, settings, changed, ask=ask)
        self._watches: JobWatches = JobWatches(JobWatch)
        self._ended = EndedAttempts(database, settings, runners, self._watches, clock=clock)
        look = look or functools.partial(read_capacity, settings)
        self._queue = JobQueue(
            database,
            settings,
            resources,
            lease,
            self._watches,
            look=look,
            clock=clock,
            jitter=jitter,
        )
        self._box_planner = BoxPlanner(settings, ask=ask)
        self._parts = PartsHere(database, settings, runners, resources, lease.node, clock, is_busy=self._works_on_jobs)
        self._spread = SpreadJobs(database, settings, runners, resources, ask_over_boxes, look, self._queue.boxes)
        self._preparations = Preparations(
            database,
            settings,
            resources,
            self._watches,
            self._queue.boxes,
            prepare=prepare,
            is_box_free=self._queue.is_box_free,
            clock=clock,
            memory=preparation_memory,
        )
        self._full = (-math.inf, -math.inf)  # when the home's disk became full, and when it was last seen full
        self._last_pass_failed = False  # it raised, so some of its work is undone

    def tick(self) -> None:
        """Makes one pass over all unfinished jobs. An error of one job is logged and does not delay the others.

        Raises SQLAlchemy's error if the database is unavailable. The next pass then does the work that is left.
        """
        if is_out_of_room(self._settings.home):  # noted first, because the database may be on the same disk
            since = self._full[0] if self._was_full_lately else self._clock()
            self._full = (since, self._clock())
        must_adopt, self._last_pass_failed = self._last_pass_failed, True
        if self._lease.renew():
            self._forget()
            must_adopt = True
        self._parts.tick()
        self._hold = self._read_hold() or self._parts.hold
        if must_adopt:
            self._adopt_all()
        for job in self._lease.claim():
            self._guarded(about(job.id, job.attempt), self._adopt, job)
        self._queue.boxes.read()
        running = self._jobs(JobStatus.RUNNING, JobStatus.PAUSING)
        for job in running:
            self._guarded(about(job.id, job.attempt), self._watch, job)
        self._corrections.drop(keep={job.id for job in running})
        for job_id, attempt in self._ended.attempts().items():
            self._guarded(about(job_id, attempt.attempt), self._ended.clean_up, job_id, attempt)
        validating = self._jobs(JobStatus.VALIDATING_FILES)
        self._preparations.arrange(validating, starting=[job for job in running if is_starting(job)])
        for job in validating:
            self._guarded(about(job.id, job.attempt), self._preparations.advance, job, validating)
        if absent := self._queue.boxes.absent:
            if self._queue.boxes.why_unsure is None:
                take_back(self._database, self._settings, self._lease.node, absent)
            watch_absent_boxes(self._database, absent)
        self._launch_next()
        busy = {*self._ended.attempts(), *self._preparations.job_ids}
        self._housekeeping.tick(busy=busy)
        self._forget_all_but({*busy, *self._queue.job_ids, *(job.id for job in (*running, *validating))})
        self._last_pass_failed = False

    @property
    def is_preparing(self) -> bool:
        """Returns whether any job is being prepared."""
        return bool(self._preparations.job_ids)

    def close(self) -> None:
        """Ends the preparations and releases the jobs to another dispatcher. Runners keep running."""
        self._preparations.drop(keep=())
        self._corrections.drop(keep=())
        self._renewals.drop(keep=())
        self._box_planner.close()
        self._spread.close()
        self._housekeeping.close()
        self._lease.give_up()

    # --- jobs of an earlier dispatcher, or of this one before its lease was lost --------------------------------------

    def _forget(self) -> None:
        """Forgets all jobs, because other dispatchers may have held them meanwhile."""
        self._preparations.drop(keep=())
        self._corrections.drop(keep=())
        self._renewals.drop(keep=())
        self._spread.drop(keep=())
        self._watches.clear()

    def _forget_all_but(self, job_ids: Collection[str]) -> None:
        """Forgets jobs that no longer wait or run here."""
        for job_id in self._watches.keys() - set(job_ids):
            del self._watches[job_id]

    def _adopt_all(self) -> None:
        for job_id in jobs_with_states(self._settings):
            with self._database.read() as session:
                job = JobRepository(session).find(job_id)
                deleted = DeletionRepository(session).deleted_job(job_id)
            if job is not None and job.status in TERMINAL_STATUSES:
                self._ended.await_exit(job.id, job.attempt)
            elif deleted is not None:  # this SSD was absent when the job was removed
                self._ended.await_exit(job_id, deleted.attempt)
        with self._database.read() as session:
            doomed = DeletionRepository(session).jobs_to_remove(self._lease.node)
        for deleted_job in doomed:
            self._ended.await_exit(deleted_job.id, deleted_job.attempt)
        for job in self._jobs(*ACTIVE_STATUSES):
            self._guarded(about(job.id, job.attempt), self._adopt, job)

    def _adopt(self, job: Job) -> None:
        if job.status in (JobStatus.RUNNING, JobStatus.PAUSING):
            self._end_unless_begun(job)
        elif job.attempt:
            self._ended.await_exit(job.id, job.attempt)

    # --- running jobs -----------------------------------------------------------------------------------------------

    def _watch(self, job: Job) -> None:
        attempt = self._running_attempt(job)
        # The runner is checked before the journal is read, because an ended runner has already written its outcome.
        runner = self._runner_of(job, attempt)
        is_preempted = runner is _Runner.GONE and job.status is JobStatus.RUNNING and self._yields_at_once(job)
        lost = {
            _Runner.ALIVE: None,
            _Runner.HUNG: f"its runner hung: it gave no sign of life for {SILENT_S:g} s",
            _Runner.GONE: self._queue.boxes.why_over(job) or self._why_lost(),
        }[runner]
        if runner is not _Runner.GONE:  # an error in this request must not keep the journal from being read
            self._guarded(about(job.id, job.attempt), self._stop_if_requested, job, attempt)
        reader, attempt.reader = attempt.reader or open_journal(self._settings, job), None
        records = reader.read_new()
        try:
            is_over = import_records(
                self._database,
                self._settings,
                job,
                records,
                lost=lost,
                when_lost=functools.partial(handle_preemption if is_preempted else handle_loss, self._settings),
            )
        except JournalError as error:
            with self._database.write() as session:
                fail_job(session, job, "journal_damaged", str(error))
            is_over = True
        if is_over:
            self._spread.ended(job.id)
            if self._queue.boxes.parts_of(job.id):
                self._queue.boxes.read()  # if its states were moved, other boxes have its parts
            self._ended.await_exit(job.id, job.attempt, is_hung=runner is _Runner.HUNG)
            self._queue.wait_for_room(job, records)
            self._report_full_disk(job)
        else:
            if (moving := move_in_words(self._settings, job)) is None:
                self._queue.explain_room(job, why_it_waits_for_room(self._settings, job))
            elif moving != job.waiting_reason:  # without an event, because the runner writes some
                with self._database.write() as session:
                    JobRepository(session).set_fields(job.id, seen=job, waiting_reason=moving)
            # Not kept if an error occurred above, because unimported records must be read again.
            attempt.reader = reader

    def _running_attempt(self, job: Job) -> AttemptWatch:
        """Returns the watch of the attempt in a running job's row.

        It begins anew if the attempt seemed to be over, but its end could not be written to the row.
        """
        watch = self._watches[job.id]
        if watch.attempt is None or watch.attempt.attempt != job.attempt or watch.attempt.is_over:
            watch.attempt = AttemptWatch(attempt=Attempt(job.attempt))
        return watch.attempt

    def _runner_of(self, job: Job, attempt: AttemptWatch) -> _Runner:
        if not self._runners.is_alive(JobId(job.id), attempt.attempt):
            return _Runner.GONE
        sign = last_sign_of_life(job_dir(self._settings, job.id), attempt.attempt)
        return _Runner.HUNG if attempt.is_silent(sign, self._clock()) else _Runner.ALIVE

    def _why_lost(self) -> str:
        if self._was_full_lately:
            return (
                f"the disk of {self._settings.home} was full, so that its runner could not go on, or tell how it ended"
            )
        return _LOST

    @property
    def _was_full_lately(self) -> bool:
        return self._clock() - self._full[1] <= _FULL_LATELY_S

    def _report_full_disk(self, job: Job) -> None:
        """Writes an event about a full disk once it has space again, because a full disk cannot store an event."""
        since, until = self._full
        if not self._was_full_lately or job.waiting_reason is not None or is_out_of_room(self._settings.home):
            return
        message = f"The disk of {self._settings.home} was full for {until - since:.0f} s; there is room again"
        with self._database.write() as session:
            EventRepository(session).add(job.id, attempt=job.attempt, message=message, level="warn")

    def _end_unless_begun(self, job: Job) -> None:
        """Kills a runner that was made but never told to begin, because it would wait forever.

        This happens if a dispatcher is killed between the two steps.
        """
        if not has_begun(job_dir(self._settings, job.id), Attempt(job.attempt)):
            self._runners.kill(JobId(job.id), Attempt(job.attempt))

    def _stop_if_requested(self, job: Job, attempt: AttemptWatch) -> None:
        """Requests the runner to end the job or the attempt, if there is a reason."""
        if job.cancel_requested:
            self._request_stop(job, attempt, StopKind.CANCEL, self._runners.cancel)
        elif self._ends_at_once(job):
            self._request_stop(job, attempt, StopKind.PREEMPT, self._runners.kill)
        elif job.status is JobStatus.PAUSING or job.yields_to is not None or self._must_end(job):
            self._request_stop(job, attempt, StopKind.PAUSE, self._runners.pause)
        elif self._corrections.job_id in (None, job.id):  # the planner is not correcting another job's plan
            self._corrections.poll(job)

    def _must_end(self, job: Job) -> bool:
        """Returns whether a running attempt must end at its next commit, and the job goes on by itself afterwards."""
        if self._queue.boxes.parts_of(job.id):
            return self._hold is not None or self._queue.boxes.is_draining(job)
        return self._hold is not None or must_end_for_plan(self._settings, job)

    def _ends_at_once(self, job: Job) -> bool:
        """Returns whether a running attempt need not end by itself."""
        if self._queue.boxes.why_over(job) is not None:
            return True
        return job.status is JobStatus.RUNNING and self._yields_at_once(job)

    def _yields_at_once(self, job: Job) -> bool:
        """Returns whether the attempt ends for another job and has no step yet, so that it need not end by itself."""
        if job.yields_to is None:
            return False
        with self._database.read() as session:
            return not has_step(session, job)

    def _request_stop(
        self, job: Job, attempt: AttemptWatch, kind: StopKind, send: Callable[[JobId, Attempt], None]
    ) -> None:
        is_new, is_due = attempt.requests(kind, self._clock())
        if is_new:
            _LOG.info("sent %s to the runner", kind, extra=about(job.id, job.attempt))
        if is_due:
            send(JobId(job.id), attempt.attempt)

    # --- the queue --------------------------------------------------------------------------------------------------

    def _works_on_jobs(self) -> bool:
        """Returns whether processes of this box's own jobs live, or may still live."""
        leaving = any(attempt.phase is AttemptPhase.EXITING for attempt in self._ended.attempts().values())
        return leaving or bool(self._jobs(JobStatus.RUNNING, JobStatus.PAUSING))

    def _launch_next(self) -> None:
        """Launches the jobs whose turn it is, and stores why the others wait."""
        over = self._ended.attempts().items()
        leaving = {job_id for job_id, attempt in over if attempt.phase is AttemptPhase.EXITING}
        divisions = self._divide_anew(leaving)
        verdicts = self._queue.verdicts(leaving, self._preparations.soon_ready, divisions)
        self._renewals.drop(keep={verdict.job.id for verdict in verdicts})
        planned = {each.job.id for each in verdicts if each.is_ready and each.keeps_boxes}
        self._spread.drop(keep=planned | divisions.waits.keys())
        for verdict in verdicts:
            self._guarded(about(verdict.job.id, verdict.job.attempt), self._execute, verdict)
        for job in self._queue.boxes.divided:
            if job.status is JobStatus.PAUSED and job.lease_holder == self._lease.holder:
                self._guarded(about(job.id, job.attempt), self._spread.free, job)
        self._plan_for_boxes(begun={verdict.job.id for verdict in verdicts if verdict.decision.begins})

    def _divide_anew(self, leaving: Collection[str]) -> Divisions:
        """Goes on with the divisions of waiting jobs over boxes."""
        waits, seen = dict[str, Wait | None](), dict[str, Job]()
        why_not = self._hold or room_reason(self._settings.home)

        def go_on(job: Job) -> None:
            seen[job.id] = job
            waits[job.id] = Wait(reason=why_not or job.waiting_reason or "")  # it stays if an error is raised
            if why_not is not None:
                return  # nothing can be stored, or nothing may begin
            waits[job.id] = self._spread.wait_for_division(job)

        for job in self._jobs(JobStatus.QUEUED) if self._queue.boxes.is_used else ():
            if job.id not in leaving and self._queue.boxes.is_over_several(job):
                self._guarded(about(job.id, job.attempt), go_on, job)
        return Divisions({job_id: wait for job_id, wait in waits.items() if wait is not None}, seen)

    def _plan_for_boxes(self, *, begun: Collection[str]) -> None:
        """Goes on with plans for kinds of boxes that waiting jobs have no plan for yet."""
        is_idle = self._corrections.job_id is None and self._renewals.job_id is None
        waiting = [each for each in self._queue.boxes.wanted if each[0].id not in begun]
        wanted = [each for each in waiting if each[0].lease_holder == self._lease.holder]
        job_id = self._box_planner.poll(wanted, may_begin=is_idle)
        if job_id is not None:
            self._queue.boxes.forget(job_id)

    def _hand_over(self, job: Job, box: JoinedBox) -> None:
        self._watches[job.id].demands = None  # the numbers of another plan
        hand_over(self._database, self._settings, job, box)

    def _execute(self, verdict: Verdict) -> None:
        job = verdict.job
        why_not = self._hold
        if why_not is None and not job.attempt:
            why_not = self._queue.boxes.why_unsure
        if why_not is None and verdict.is_ready:
            why_not = room_reason(self._settings.home)
        if why_not is not None:
            verdict = verdict.put_off(why_not)
        if verdict.over is not None:
            self._execute_over_boxes(verdict, verdict.over)
        elif why_not is not None:
            self._queue.explain(job, why_not)
        elif verdict.is_ready and verdict.box is not None:
            self._hand_over(job, verdict.box)
        else:
            self._execute_here(verdict)

    def _execute_here(self, verdict: Verdict) -> None:
        """Begins a job on this box, renews its plan, or makes room for it."""
        job = verdict.job
        try:
            plan = load_plan(self._settings, job) if verdict.may_move else None
        except ValueError as error:
            with self._database.write() as session:
                fail_attempt(self._settings, session, job, "start_failed", f"the job's plan cannot be read: {error}")
            return
        # A renewal that has begun is completed, because other jobs wait for the planner.
        if (verdict.may_move or job.id == self._renewals.job_id) and self._renewals.poll(job):
            self._queue.explain(
                job, "its plan is made again, as the machine, the settings or the planner have changed since"
            )
        elif verdict.is_ready and verdict.decision.begins:
            try:
                self._launch(job, plan, gpus=verdict.gpus or shown_gpus_of(job))
            except NoPlanForGpusError as error:
                with self._database.write() as session:
                    pause_job(session, job, str(error))
        else:
            self._queue.make_room(job, verdict.decision.pauses)
            self._queue.explain(job, verdict.reason)

    def _execute_over_boxes(self, verdict: Verdict, boxes: Sequence[JoinedBox]) -> None:
        """Begins the next attempt of a job over several boxes, or reserves them, or plans it over them."""
        job, parts, links = verdict.job, self._queue.boxes.parts_in_force(verdict.job), None
        if parts and verdict.is_ready and verdict.decision.begins:
            try:
                links = self._spread.new_attempt(job, boxes, parts)
            except ReportedError as error:
                verdict = verdict.put_off(str(error))  # a person has to mend it first
        if links is not None:
            self._launch(job, None, gpus=shown_gpus_of(job), over=(parts, links))
            return
        held = self._queue.boxes.parts_of(job.id)  # also those that are not in force any more
        self._spread.reserve(job, held, is_wanted=bool(parts) and verdict.reserves_boxes)
        reason: str | None = verdict.reason
        if parts and verdict.is_ready:
            self._queue.make_room(job, verdict.decision.pauses)
        elif verdict.is_ready and verdict.keeps_boxes:
            reason = self._spread.give(job, boxes, self._queue.boxes.pools_of(job, boxes))
        if reason is not None:
            self._queue.explain(job, reason)

    def _launch(
        self,
        job: Job,
        plan: JobPlan | None,
        *,
        gpus: int,
        over: tuple[Sequence[JobPart], Sequence[PartLink]] | None = None,
    ) -> None:
        """Launches an attempt on this number of GPUs. Raises NoPlanForGpusError if the job's plans are for others.

        `over`: the parts of other boxes, and how all boxes reach each other; None: the job is on this box alone.
        """
        # A box may have served attempts that this home does not know, because it was restored from a backup.
        last = max([job.attempt, *(part.served for part in over[0])]) if over is not None else job.attempt
        attempt, fields, message = Attempt(last + 1), JobFields(), ""
        if plan is not None:
            plan, fields, message = plan_for_gpus(self._settings, job, plan, gpus)
        division = stages_of(self._settings, job.id)
        moves = over is not None and over[1][0].move is not None
        with self._database.write() as session:
            pace = expected_pace(plan, division, EventRepository(session).last_paced_step(job.id))
            left_s = None if moves else seconds_left(pace, job)  # how long a move takes is not known
            fields |= {
                "attempt": attempt,
                "estimated_finish": None if left_s is None else time.time() + left_s,
                "finish_is_measured": left_s is not None and pace is not None and pace.is_measured,
            }
            claimed = JobRepository(session).transition(
                job.id,
                JobStatus.QUEUED,
                JobStatus.RUNNING,
                message="Fine-tuning job started" if attempt == 1 else f"Attempt {attempt} started",
                seen=job,
                **fields,
            )
            if claimed.windlass != job.windlass:  # its plan may be for another number of GPUs
                raise StatusConflict(job.id, "as it was read", "resumed with other settings")
            if message:
                EventRepository(session).add(job.id, attempt=attempt, message=message)
            if over is not None:
                self._spread.want(session, job, attempt, *over)
        self._watches[job.id].attempt = AttemptWatch(attempt=attempt)
        try:
            if over is None:
                epoch = layout_epoch_on_one_box(self._settings, job.id)
                self._runners.start(build_job_spec(self._settings, self._resources, claimed, plan, pace, epoch))
            else:
                self._spread.start(claimed, over[1])
        except Exception as error:  # noqa: BLE001  # any error here is this job's error
            _LOG.exception("could not be started", extra=about(job.id, attempt))
            # All started processes must be gone before the next job gets the device.
            self._spread.ended(job.id)
            self._ended.await_exit(job.id, attempt)
            self._runners.kill(JobId(job.id), attempt)
            with self._database.write() as session:
                if isinstance(error, RunnerLostError) or may_find_room_later(error, attempt):
                    handle_loss(self._settings, session, claimed, str(error))
                else:
                    code, message = getattr(error, "code", "start_failed"), str(error) or repr(error)
                    param = getattr(error, "param", None)
                    fail_attempt(self._settings, session, claimed, code, message, param)
        else:
            has, num_gpus = gpus_of(claimed), self._resources.num_gpus
            devices = f"{'one' if has == 1 else has} of {num_gpus} GPUs" if num_gpus else "the CPU"
            _LOG.info("launched on %s", devices, extra=about(job.id, attempt))

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _jobs(self, *statuses: JobStatus) -> Sequence[Job]:
        """Returns the jobs with these statuses that this dispatcher holds."""
        with self._database.read() as session:
            return JobRepository(session).with_status(*statuses, lease_holder=self._lease.holder)

    def _guarded(self, subject: dict[str, object], handle: Callable[..., None], *arguments: object) -> None:
        try:
            handle(*arguments)
        except StatusConflict as conflict:
            # The job was cancelled or claimed between the read and the write. The next pass reads its new state.
            _LOG.info("%s", conflict, extra=subject)
        except Exception as error:  # one job's error must not stop the other jobs
            if why_unavailable(error) is not None:
                raise  # the database fails for all jobs
            _LOG.exception("%s failed; it will be tried again", handle.__qualname__, extra=subject)
