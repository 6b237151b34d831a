"""A test bench of the dispatcher: a real database and home, stand-in runners, and a clock that the test moves."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import update

from windlass.actors.job.journal import Journal
from windlass.actors.job.spec import JobSpec
from windlass.actors.lifecycle.attempt_lock import begin_attempt
from windlass.actors.runtime.boxes.box_link import LinkConfig
from windlass.actors.runtime.moving.division import MoveSpec
from windlass.actors.scheduler.scheduler import PAUSED
from windlass.amounts import GIB
from windlass.engine.memory_plan.plan import Placement
from windlass.planner.question.job_plan import JobPlan
from windlass.planner.question.plan_request import PlanRequest
from windlass.planner.question.report import PlanReport
from windlass.planner.stages.stages_plan import StagesPlan
from windlass.planner.stages.stages_request import StagesRequest
from windlass.service.dispatcher.dispatcher import Dispatcher
from windlass.service.dispatcher.housekeeping import Housekeeping
from windlass.service.dispatcher.lease import BEAT_S, LEASE_S, Lease
from windlass.service.dispatcher.placement.capacity import MachineCapacity
from windlass.service.installation.home import node_of
from windlass.service.installation.settings import Settings
from windlass.service.jobs.machine_resources import MachineResources
from windlass.service.jobs.spec_builder import resolve_job
from windlass.service.preparation.pipeline import Preparation, PreparationError
from windlass.service.preparation.steps import PLAN_JOB, PLAN_STAGES, PreparationOrder
from windlass.storage.ids import Attempt, JobId
from windlass.storage.sql.database import Database
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Dispatcher as DispatcherRow
from windlass.storage.sql.models import Job
from windlass.storage.sql.repositories.audit import AuditRepository
from windlass.storage.sql.repositories.events import EventRepository
from windlass.storage.sql.repositories.jobs import JobRepository, NewJob
from windlass.storage.ssd.volume import Volume
from windlass.storage.ssd.volume_format import UNIT_NBYTES, Demand

PREPARED: Mapping[str, dict[str, Any]] = {
    "check_model": {"ok": True, "num_params": 1000},
    "prepare_data": {
        "ok": True,
        "num_examples": 10,
        "num_validation_examples": 2,
        "num_tokens": 100,
        "num_targets": 60,
        "warnings": ["train.jsonl: 1 examples are longer than 8 tokens and were cut"],
    },
}


def planned(host_gib: float, *, buffers_gib: float = 0.0, ssd_gib: float = 0.0) -> Mapping[str, dict[str, Any]]:
    """The results of a job's preparation whose plan needs this much memory and SSD space, in GiB."""
    peaks = {"gpu": 0.0, "host": host_gib, "ssd": ssd_gib}
    plan = JobPlan(
        report=PlanReport(feasible=True, reasons=(), step_s=1.0, peak_gib=peaks),
        placement=Placement(),
        arena_nbytes=int(buffers_gib * GIB),
    )
    return {**PREPARED, PLAN_JOB: {"ok": True, **plan.to_json()}}


def _leave_results(folder: Path, prepared: Mapping[str, dict[str, Any]]) -> None:
    for name in prepared.keys() & {"prepare_data", PLAN_JOB}:
        (folder / f"{name}.json").write_text(json.dumps(prepared[name]))


@dataclass
class StandInRunners:
    """Runners that live from their start until a test ends them."""

    alive: set[tuple[str, int]] = field(default_factory=set)
    started: list[JobSpec] = field(default_factory=list)
    links: list[LinkConfig] = field(default_factory=list)  # of the parts that were started
    moves: list[MoveSpec] = field(default_factory=list)
    cancelled: list[tuple[str, int]] = field(default_factory=list)
    paused: list[tuple[str, int]] = field(default_factory=list)
    refusal: Exception | None = None
    broken_for: str = ""

    def start(self, spec: JobSpec) -> None:
        if self.refusal is not None:
            raise self.refusal
        os.close(begin_attempt(Path(spec.job_dir), spec.attempt))
        self.started.append(spec)
        self.alive.add((spec.job, spec.attempt))

    def start_first_part(self, specs: Sequence[JobSpec], config: LinkConfig) -> None:
        self.start_part(specs[0], config)

    def start_part(self, spec: JobSpec, config: LinkConfig) -> None:
        self.start(spec)
        self.links.append(config)

    def start_move(self, move: MoveSpec, config: LinkConfig) -> None:
        self.start_part(move.any, config)
        self.moves.append(move)

    def is_alive(self, job: JobId, attempt: Attempt) -> bool:
        if job == self.broken_for:
            raise ConnectionError("Ray does not answer")
        return (job, attempt) in self.alive

    def cancel(self, job: JobId, attempt: Attempt) -> None:
        self.cancelled.append((job, attempt))

    def pause(self, job: JobId, attempt: Attempt) -> None:
        self.paused.append((job, attempt))

    def kill(self, job: JobId, attempt: Attempt) -> None:
        self.alive.discard((job, attempt))


class StandInPreparation(Preparation):
    """A preparation that takes as long, and ends, as the test decides."""

    def __init__(self, order: PreparationOrder, made_for: Database) -> None:
        super().__init__([], work_dir=order.work_dir)
        self.order = order
        self.made_for = made_for  # the database handle of the dispatcher that made it
        self.ending: PreparationError | Mapping[str, dict[str, Any]] | None = None
        self.stopped = False

    def poll(self) -> dict[str, dict[str, Any]] | None:
        if isinstance(self.ending, PreparationError):
            raise self.ending
        if self.ending is None:
            return None
        self.order.work_dir.mkdir(parents=True, exist_ok=True)
        _leave_results(self.order.work_dir, self.ending)
        return dict(self.ending)

    def stop(self) -> None:
        self.stopped = True


class StandInStages(Preparation):
    """A planner process for a job over several boxes; it answers when the test sets `answer`."""

    def __init__(self, work_dir: Path, request: StagesRequest) -> None:
        super().__init__([], work_dir=work_dir)
        self.request = request
        self.answer: PreparationError | StagesPlan | None = None
        self.stopped = False

    def poll(self) -> dict[str, dict[str, Any]] | None:
        if isinstance(self.answer, PreparationError):
            raise self.answer
        return None if self.answer is None else {PLAN_STAGES: {"stages": self.answer.to_json()}}

    def stop(self) -> None:
        self.stopped = True


class StandInPlanner(Preparation):
    """A planner process for a running job; it answers when the test sets `answer`."""

    def __init__(self, work_dir: Path, request: PlanRequest) -> None:
        super().__init__([], work_dir=work_dir)
        self.work_dir, self.request = work_dir, request
        self.answer: PreparationError | dict[str, Any] | None = None
        self.stopped = False

    def poll(self) -> dict[str, dict[str, Any]] | None:
        if isinstance(self.answer, PreparationError):
            raise self.answer
        return None if self.answer is None else {PLAN_JOB: self.answer}

    def stop(self) -> None:
        self.stopped = True


class AtOnce(Executor):
    """An executor that runs each call in the caller's thread, before `submit` returns."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **more: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call(*arguments, **more))
        return done


class Stage:
    """A dispatcher with all that it needs, and short helpers for tests."""

    def __init__(self, home: Path, database: Database, *, num_gpus: int = 0, **settings: Any) -> None:
        self.settings = Settings(home=home, **settings)
        self.settings.make_dirs()
        self.database = database
        self.runners = StandInRunners()
        self.preparations: list[StandInPreparation] = []
        self.planners: list[StandInPlanner] = []
        self.stage_planners: list[StandInStages] = []
        self.box = MachineCapacity(room_nbytes=1 << 60)
        self.now = 1000.0
        self.node = node_of(home)
        self.machine = "boot-1"
        self._resources = MachineResources(num_cores=4, num_gpus=num_gpus)
        self.dispatcher = self.new_dispatcher()

    def new_dispatcher(self) -> Dispatcher:
        """Replaces the dispatcher by a new process, as after a crash.

        It starts without memory, and knows that its predecessor is gone.
        """
        self.dispatcher = self.make_dispatcher(is_alone=True)
        return self.dispatcher

    def make_dispatcher(
        self, *, is_alone: bool, database: Database | None = None, machine: str | None = None
    ) -> Dispatcher:
        """Makes one more dispatcher."""

        database = database or self.database

        def prepare(order: PreparationOrder) -> Preparation:
            self.preparations.append(StandInPreparation(order, database))
            return self.preparations[-1]

        def ask(work_dir: Path, request: PlanRequest) -> Preparation:
            self.planners.append(StandInPlanner(work_dir, request))
            return self.planners[-1]

        def ask_over_boxes(work_dir: Path, request: StagesRequest) -> Preparation:
            self.stage_planners.append(StandInStages(work_dir, request))
            return self.stage_planners[-1]

        def clock() -> float:
            return self.now

        return Dispatcher(
            database,
            self.settings,
            self.runners,
            self._resources,
            Lease(database, node=self.node, machine=machine or self.machine, is_alone=is_alone, clock=clock),
            prepare=prepare,
            ask=ask,
            ask_over_boxes=ask_over_boxes,
            look=lambda: self.box,
            clock=clock,
            jitter=lambda: 0.0,
            housekeeping=Housekeeping(database, self.settings, node=self.node, executor=AtOnce(), clock=clock),
        )

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.dispatcher.tick()

    def let_leases_expire(self) -> None:
        """Lets the leases of all dispatchers expire but that of the last one, which runs on."""
        with self.database.write() as session:
            session.execute(update(DispatcherRow).values(expires_at=DispatcherRow.expires_at - LEASE_S))
        for _ in range(int(LEASE_S / BEAT_S) + 3):
            self.tick()
            self.now += BEAT_S

    def submit(self, *, priority: int = 0, owner: str | None = None, node: str | None = None, **windlass: Any) -> str:
        """Creates a job and returns its id."""
        new = NewJob(
            model="tiny",
            training_file="file-train",
            validation_file="file-valid",
            suffix=None,
            seed=7,
            method={"type": "supervised", "supervised": {"hyperparameters": {}}},
            windlass={"epochs": 2, "batch_size": 5, "sequence_length": 64, **windlass},
            metadata={},
            priority=priority,
            idempotency_key=None,
            request_digest=None,
            node=node,
            owner=owner,
        )
        with self.database.write() as session:
            return JobRepository(session).create(new).id

    def queue(
        self,
        *,
        priority: int = 0,
        owner: str | None = None,
        prepared: Mapping[str, dict[str, Any]] = PREPARED,
        **windlass: Any,
    ) -> str:
        """A prepared job, which waits in the queue if the device is busy."""
        job_id = self.submit(priority=priority, owner=owner, **windlass)
        self.tick()
        self.preparations[-1].ending = prepared
        self.tick()
        return job_id

    def queue_only(self, *, priority: int = 0, prepared: Mapping[str, dict[str, Any]] = PREPARED) -> str:
        """A prepared job, which the next pass would start."""
        job_id = self.submit(priority=priority)
        self.prepare_at_once(job_id, prepared)
        return job_id

    def prepare_at_once(self, job_id: str, prepared: Mapping[str, dict[str, Any]]) -> None:
        """Puts a new job into the queue."""
        with self.database.write() as session:
            jobs = JobRepository(session)
            resolved = resolve_job(jobs.get(job_id), dict(prepared))
            jobs.transition(
                job_id,
                JobStatus.VALIDATING_FILES,
                JobStatus.QUEUED,
                message="",
                hyperparameters=resolved.hyperparameters,
                total_steps=resolved.total_steps,
            )
        folder = self.settings.jobs_dir / job_id / "prepare"
        folder.mkdir(parents=True)
        _leave_results(folder, prepared)

    def run(self) -> tuple[str, Journal]:
        """A running job, and its runner's journal."""
        job_id = self.queue()
        self.tick()
        assert self.job(job_id).status is JobStatus.RUNNING
        return job_id, self.journal(job_id, 1)

    def lose(self, job_id: str, *steps: int) -> None:
        """Loses the job's attempt after it reported some steps, and lets the dispatcher notice."""
        attempt = self.job(job_id).attempt
        journal = self.journal(job_id, attempt)
        for step in steps:
            journal.append("metrics", f"Step {step}", step=step, total_steps=4, train_loss=1.0 / step)
        journal.close()
        self.end_runner(job_id, attempt)
        self.tick()
        if self.job(job_id).status is JobStatus.QUEUED and not steps:
            self.sit_out_the_pause()

    def sit_out_the_pause(self) -> None:
        """Waits for the longest pause before a lost job is started again."""
        self.now += 300
        self.tick()

    @contextmanager
    def worker(self, job_id: str, attempt: int) -> Iterator[subprocess.Popen[str]]:
        """A process of an attempt, beside its runner."""
        code = (
            "import sys; from pathlib import Path; from windlass.actors.lifecycle.attempt_lock import join_attempt\n"
            "join_attempt(Path(sys.argv[1]), int(sys.argv[2])); print('joined', flush=True); sys.stdin.read()"
        )
        command = [sys.executable, "-c", code, str(self.settings.jobs_dir / job_id), str(attempt)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "joined\n"
                yield process
            finally:
                process.kill()

    def put_states(self, job_id: str) -> None:
        """Reserves space on the SSDs as a job whose SSD servers were killed leaves it."""
        for path in self.settings.ssd_dirs:
            volume = Volume.open(path, direct=False)
            volume.reserve(JobId(job_id), Demand(head_nbytes=UNIT_NBYTES, extent_nbytes=UNIT_NBYTES, num_extents=1))
            volume.close()

    def jobs_on_ssds(self) -> list[set[str]]:
        """The jobs that hold space, for each SSD."""
        found: list[set[str]] = []
        for path in self.settings.ssd_dirs:
            volume = Volume.open(path, direct=False)
            found.append(set(volume.allocations()))
            volume.close()
        return found

    def journal(self, job_id: str, attempt: int) -> Journal:
        return Journal(self.settings.jobs_dir / job_id / "journal.jsonl", attempt)

    def export_model(self) -> None:
        """Writes the model as a runner does before it reports success."""
        folder = Path(self.runners.started[-1].output_dir)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    def end_runner(self, job_id: str, attempt: int = 1) -> None:
        self.runners.alive.remove((job_id, attempt))

    def request_cancel(self, job_id: str) -> None:
        with self.database.write() as session:
            JobRepository(session).request_cancel(job_id)

    def request_pause(self, job_id: str) -> None:
        with self.database.write() as session:
            JobRepository(session).request_pause(job_id)

    def pause(self, job_id: str) -> None:
        """Pauses a job that runs, until its runner has ended."""
        attempt = self.job(job_id).attempt
        self.request_pause(job_id)
        journal = self.journal(job_id, attempt)
        journal.append_outcome(PAUSED, "The attempt ended after a commit")
        journal.close()
        self.tick()
        self.end_runner(job_id, attempt)
        self.tick()
        assert self.status(job_id) is JobStatus.PAUSED

    def request_resume(self, job_id: str) -> None:
        with self.database.write() as session:
            JobRepository(session).request_resume(job_id)

    def job(self, job_id: str) -> Job:
        with self.database.read() as session:
            return JobRepository(session).get(job_id)

    def status(self, job_id: str) -> JobStatus:
        return self.job(job_id).status

    def messages(self, job_id: str) -> list[str]:
        with self.database.read() as session:
            return [event.message for event in EventRepository(session).since(0, limit=10_000, job_id=job_id)]

    def audit(self) -> list[tuple[str, str | None, str | None, str | None]]:
        """The action, target, user and address of each event, oldest first."""
        with self.database.read() as session:
            rows = AuditRepository(session).page(limit=1000).rows
        return [(row.action, row.target, row.user, row.peer) for row in reversed(rows)]
