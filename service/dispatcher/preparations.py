"""Prepares jobs whose files are to be validated, several at once, and queues the prepared jobs."""

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from windlass.service.dispatcher.boxes import Boxes
from windlass.service.dispatcher.job_watch import JobWatches, PreparationWatch
from windlass.service.dispatcher.outcomes import fail_job
from windlass.service.installation import CORES_TO_DIVIDE, Settings, about, is_about_room, room_reason
from windlass.service.jobs import (
    HERE,
    MachineResources,
    answers_by_kind,
    check_fits_a_box,
    gpus_of,
    job_dir,
    keep_numbers,
    preparation_order,
    requests_for_kinds,
    resolve_job,
    resolve_settings,
)
from windlass.service.machine import measured_hardware
from windlass.service.preparation import (
    CHECK_MODEL,
    PLAN_JOB,
    Candidate,
    OwnerShares,
    Preparation,
    PreparationError,
    PreparationMemory,
    PreparationOrder,
    PreparationStep,
    check_model_room,
    choose_running,
    tell_warnings,
)
from windlass.service.preparation.sandbox import LimitedProcess
from windlass.service.validation import model_dir, told_jobs_beside
from windlass.storage.files import sync_path, sync_tree
from windlass.storage.ids import HEAD_NAME
from windlass.storage.sql import Database, Job, JobStatus
from windlass.storage.sql.repositories import EventRepository, FileRepository, JobRepository

_LOG = logging.getLogger(__name__)

# A preparation that computed longer than this leaves the cores to a starting job, if the machine has few cores.
_LONG_S = 5.0
# Interval between writes of the progress, and of a waiting reason in which only numbers or jobs changed.
_REPORT_INTERVAL_S = 2.0
_NUMBER_OR_JOB = re.compile(r"ftjob-\w+|\d+(\.\d+)?")
ROOM_AGAIN = "There is room on the disk again"


class Preparations:
    """All preparations of one dispatcher. If its state is lost, the preparations start anew."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        resources: MachineResources,
        watches: JobWatches,
        boxes: Boxes,
        *,
        prepare: Callable[[PreparationOrder], Preparation],
        is_box_free: Callable[[], bool],
        clock: Callable[[], float],
        memory: PreparationMemory | None = None,
    ) -> None:
        self._database = database
        self._settings = settings
        self._resources = resources
        self._watches = watches
        self._boxes = boxes
        self._prepare = prepare
        self._is_box_free = is_box_free
        self._clock = clock
        self._memory = memory or PreparationMemory()
        # Each preparation computes with one thread for most of its time. Jobs use the other cores.
        self._num_side_by_side = max(1, resources.num_cores // 2)
        self._shares = OwnerShares()
        self._chosen: Collection[str] = ()  # the jobs whose preparations compute now
        # For the jobs that are probably prepared in a moment, because their preparation is not a long one: the most
        # devices that one needs, by priority.
        self.soon_ready: Mapping[int, int] = {}

    @property
    def job_ids(self) -> Collection[str]:
        """Jobs whose preparation has begun."""
        return self._running().keys()

    def arrange(self, jobs: Sequence[Job], *, starting: Sequence[Job] = ()) -> None:
        """Chooses the jobs that are prepared now. Their preparations continue or may begin, and the others are halted.

        `starting`: jobs whose attempt has just begun. On a machine with few cores, preparations that computed for long
        and those of lower priority leave the cores to them. The starting job imports and compiles, and its owner waits
        for the first step.
        """
        self.drop(keep={job.id for job in jobs})
        has_few_cores = self._resources.num_cores < CORES_TO_DIVIDE
        candidates = [self._candidate(job, starting=starting if has_few_cores else ()) for job in jobs]
        self._account(jobs)
        self._shares.update_present({candidate.owner for candidate in candidates if candidate.uses_cores})
        chosen = choose_running(candidates, self._shares.used_s, num_side_by_side=self._num_side_by_side)
        for job_id, preparation in self._running().items():
            if job_id in chosen or preparation.measures:
                preparation.proceed()
            else:
                preparation.halt()
                if preparation.measures:  # it has begun to measure just before it was halted
                    preparation.proceed()
        self._chosen = chosen
        soon = {each.job_id for each in candidates if each.uses_cores and each.computed_s < _LONG_S} & set(chosen)
        # Sorted, so that of each priority the largest number is left.
        self.soon_ready = dict(sorted((job.priority, _num_devices(job)) for job in jobs if job.id in soon))

    def advance(self, job: Job, jobs: Sequence[Job]) -> None:
        """Begins a job's preparation in its turn, checks its progress, and queues the job once it is prepared.

        `jobs`: all jobs to be validated.
        """
        watch = self._watches[job.id].preparing
        why = self._resources.why_too_many(gpus_of(job), cpu_ranks=self._settings.cpu_ranks)
        if why is not None and not self._boxes.kinds_for(job):
            self._drop(job.id)
            with self._database.write() as session:
                fail_job(session, job, "invalid_value", why, "windlass.gpus")
            return
        if watch.preparation is None:
            reason = room_reason(self._settings.home)
            if reason is None and job.id not in self._chosen:
                reason = self._why_it_waits(job, jobs)
            if reason is not None:
                self._report(job, reason, None)
                return
            self._begin(job, watch)
        preparation = watch.preparation
        assert preparation is not None, "it has begun"
        try:
            results = preparation.poll()
            tell_warnings(self._database, job, preparation)
            if results is None:
                self._report_state(job, preparation, jobs)
                return
            self._enqueue(job, results)
        except PreparationError as error:
            tell_warnings(self._database, job, preparation)
            self._drop(job.id)
            if (reason := room_reason(self._settings.home)) is not None:
                self._report(job, reason, None)
                _LOG.warning("the disk is full, and the preparation begins anew: %s", error, extra=about(job.id))
                return
            with self._database.write() as session:
                fail_job(session, job, error.code, error.message, error.param)
        else:
            self._drop(job.id)

    def drop(self, *, keep: Collection[str]) -> None:
        """Ends the preparations of all other jobs."""
        for job_id in self._running().keys() - set(keep):
            self._drop(job_id)
        for job_id in self._watches.keys() - set(keep):
            self._watches[job_id].preparing = PreparationWatch()

    def _running(self) -> Mapping[str, Preparation]:
        """Returns the preparations that have begun, by job."""
        watches = self._watches.items()
        return {job_id: begun for job_id, watch in watches if (begun := watch.preparing.preparation) is not None}

    # --- order of preparations ---------------------------------------------------------------------------------------

    def _account(self, jobs: Sequence[Job]) -> None:
        """Adds the computing time since the last check to its owners' shares."""
        seconds: dict[str | None, float] = {}
        for job in jobs:
            watch = self._watches[job.id].preparing
            if watch.preparation is not None:
                computed_s = watch.preparation.computed_s
                seconds[job.owner] = seconds.get(job.owner, 0.0) + computed_s - watch.computed_s
                watch.computed_s = computed_s
        self._shares.add(seconds)

    def _candidate(self, job: Job, *, starting: Sequence[Job]) -> Candidate:
        preparation = self._watches[job.id].preparing.preparation
        if preparation is None:
            folder = model_dir(
                job.model, models_dir=self._settings.models_dir, fine_tuned_dir=self._settings.fine_tuned_dir
            )
            uses_cores = folder.exists()  # else it is downloaded first
        else:
            uses_cores = preparation.uses_cores and not preparation.waits_for_memory
        computed_s = 0.0 if preparation is None else preparation.computed_s
        return Candidate(
            job_id=job.id,
            owner=job.owner,
            nbytes=self._nbytes_of(job),
            created_at=job.created_at,
            priority=job.priority,
            computed_s=computed_s,
            has_process=preparation is not None,
            uses_cores=uses_cores,
            leaves_cores=any(computed_s >= _LONG_S or job.priority > other.priority for other in starting),
        )

    def _nbytes_of(self, job: Job) -> int:
        watch = self._watches[job.id].preparing
        if watch.files_nbytes is None:
            total = 0
            for file_id in (job.training_file, job.validation_file):
                with contextlib.suppress(OSError):  # its preparation reports the error
                    total += 0 if file_id is None else (self._settings.files_dir / file_id).stat().st_size
            watch.files_nbytes = total
        return watch.files_nbytes

    def _why_it_waits(self, job: Job, jobs: Sequence[Job]) -> str:
        """Explains to a job's owner why its preparation waits. Other users' jobs are counted, not named."""
        chosen = [other for other in jobs if other.id in self._chosen]
        if not chosen:
            return "its turn to be prepared, after a job that starts"
        others = told_jobs_beside([other.id for other in chosen if other.owner == job.owner], len(chosen))
        return f"its turn to be prepared, after {others}"

    # --- a single preparation ----------------------------------------------------------------------------------------

    def _begin(self, job: Job, watch: PreparationWatch) -> None:
        hardware = measured_hardware(self._settings)
        watch.kinds = self._boxes.kinds_for(job)
        with self._database.read() as session:
            filenames = FileRepository(session).filenames([job.training_file, job.validation_file])

        def is_alone() -> bool:
            return self._is_box_free() and len(self._running()) == 1

        order = preparation_order(
            self._settings,
            self._resources,
            job,
            hardware,
            filenames=filenames,
            is_alone=is_alone,
            may_run_here=self._may_run_here(job),
            other_plans=requests_for_kinds(
                self._settings, job, watch.kinds.values(), num_devices=self._resources.most_gpus
            ),
        )
        preparation = self._prepare(order)
        preparation.is_alone = is_alone
        preparation.admit = functools.partial(self._admit, job.id, job.owner)
        watch.preparation, watch.began_at = preparation, self._clock()

    def _may_run_here(self, job: Job) -> bool:
        return self._boxes.may_run_here(job) and self._resources.why_too_many(gpus_of(job)) is None

    def _admit(self, job_id: str, owner: str | None, step: PreparationStep) -> int | None:
        return self._memory.grant(
            job_id, owner, step, lambda: self._process_of(job_id), is_box_free=self._is_box_free()
        )

    def _process_of(self, job_id: str) -> LimitedProcess | None:
        preparation = self._watches[job_id].preparing.preparation
        return None if preparation is None else preparation.process

    def _report_state(self, job: Job, preparation: Preparation, jobs: Sequence[Job]) -> None:
        """Stores a preparation's progress, and the reason why it waits."""
        reason = None
        if preparation.is_halted:
            reason = self._why_it_waits(job, jobs)
        elif preparation.waits_for_memory:
            reason = self._memory.why_not(job.owner)
        progress = preparation.progress()
        if progress is not None:
            progress["elapsed_s"] = round(self._clock() - self._watches[job.id].preparing.began_at, 1)
        self._report(job, reason, progress)

    def _report(self, job: Job, reason: str | None, progress: dict[str, Any] | None) -> None:
        before, now = job.waiting_reason, self._clock()
        is_new = _without_numbers(reason) != _without_numbers(before)
        has_changed = reason != before or progress != job.preparation
        watch = self._watches[job.id].preparing
        is_due = watch.reported_at is None or now - watch.reported_at >= _REPORT_INTERVAL_S
        if not is_new and not (has_changed and is_due):
            return
        watch.reported_at = now
        with self._database.write() as session:
            rows = JobRepository(session)
            if reason is not None and before is None and progress is None:  # only once: later changes are no events
                rows.set_waiting_reason(job.id, reason, seen=job)
            elif reason is None and before is not None and is_about_room(before):
                rows.clear_waiting_reason(job.id, ROOM_AGAIN, seen=job)
            rows.set_fields(job.id, seen=job, waiting_reason=reason, preparation=progress)

    def _enqueue(self, job: Job, results: Mapping[str, dict[str, Any]]) -> None:
        kinds, num_devices = self._watches[job.id].preparing.kinds, self._resources.most_gpus
        if kinds:
            names = {HERE: HEAD_NAME} | {kind.key: name for name, kind in kinds.items()}
            unplanned = any(kind.hardware is None for kind in kinds.values())
            unplanned = unplanned or (self._may_run_here(job) and PLAN_JOB not in results)
            check_fits_a_box(job, dict(results), names, may_run_unplanned=unplanned)
            keep_numbers(self._settings, job.id, answers_by_kind(dict(results)))
            resolved = resolve_settings(job, dict(results), num_devices=num_devices)
        else:
            resolved = resolve_job(job, dict(results), num_devices=num_devices)
        num_params, total_steps = results[CHECK_MODEL]["num_params"], resolved.total_steps
        room = check_model_room(self._settings, job, num_params=num_params, total_steps=total_steps)
        # Durable before the row says so, because a queued job is not prepared again after a power loss.
        sync_tree(job_dir(self._settings, job.id))
        sync_path(self._settings.jobs_dir)
        with self._database.write() as session:
            JobRepository(session).transition(
                job.id,
                JobStatus.VALIDATING_FILES,
                JobStatus.QUEUED,
                message=f"Files validated, moving job to queued state: {resolved.summary}",
                seen=job,
                hyperparameters=resolved.hyperparameters,
                total_steps=resolved.total_steps,
            )
            for warning in (*resolved.warnings, *(() if room is None else (room,))):
                EventRepository(session).add(job.id, attempt=job.attempt, message=warning, level="warn")

    def _drop(self, job_id: str) -> None:
        watch = self._watches[job_id].preparing
        if watch.preparation is not None:
            watch.preparation.stop()
        watch.preparation, watch.computed_s = None, 0.0
        self._memory.give_back(job_id)


def _without_numbers(reason: str | None) -> str | None:
    return reason and _NUMBER_OR_JOB.sub("", reason)


def _num_devices(job: Job) -> int:
    try:
        return gpus_of(job)
    except (ValueError, TypeError, KeyError, AttributeError):  # reported by the job's own preparation
        return 1
