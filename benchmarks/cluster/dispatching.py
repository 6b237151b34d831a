"""The real dispatcher over the same workload: its passes against an SQLite database, with boxes that only take jobs."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from sqlalchemy import update

from benchmarks.cluster.workload import GIB, SimulatedJob, Workload
from windlass.actors.job import JobSpec
from windlass.actors.runtime.boxes import LinkConfig
from windlass.actors.runtime.moving import MoveSpec
from windlass.engine.memory_plan import Placement
from windlass.planner.hardware import Gpus, Hardware, Host, Pcie, Ssds
from windlass.planner.question import JobPlan, PlanReport
from windlass.service.dispatcher.boxes import Boxes
from windlass.service.dispatcher.dispatcher import Dispatcher
from windlass.service.dispatcher.lease import Lease
from windlass.service.dispatcher.placement import MachineCapacity, kind_of
from windlass.service.dispatcher.queue import JobQueue
from windlass.service.installation import Settings, node_of
from windlass.service.jobs import MachineResources, keep_numbers, kind_dir
from windlass.service.machine.fleet import BoxFacts, CapacityReport, GpuFacts, SsdSpaceReport
from windlass.storage.ids import Attempt, JobId
from windlass.storage.sql import Database, Job, JobStatus, migrate
from windlass.storage.sql.repositories import BoxRepository, JobRepository, NewJob

_PLAN = "plan_job.json"
_FAR_S = 1e7  # the boxes of the benchmark never count as away


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Seconds of the dispatcher's passes."""

    decision_s: Sequence[float]  # the boxes, the queue and all demands are read, and every waiting job is decided
    pass_s: Sequence[float]  # with all writes: jobs given away, reasons for waiting
    num_given: int


class _NoRunners:
    """The head of the benchmark has no device for jobs, so nothing runs there."""

    def start(self, spec: JobSpec) -> None:
        raise AssertionError(f"job {spec.job} was started on the head")

    def start_first_part(self, specs: Sequence[JobSpec], config: LinkConfig) -> None:
        self.start(specs[0])

    def start_part(self, spec: JobSpec, config: LinkConfig) -> None:
        self.start(spec)

    def start_move(self, move: MoveSpec, config: LinkConfig) -> None:
        self.start(move.any)

    def is_alive(self, job: JobId, attempt: Attempt) -> bool:
        return False

    def cancel(self, job: JobId, attempt: Attempt) -> None:
        """Does nothing."""

    def pause(self, job: JobId, attempt: Attempt) -> None:
        """Does nothing."""

    def kill(self, job: JobId, attempt: Attempt) -> None:
        """Does nothing."""


@dataclass(slots=True)
class _Timer:
    """Adds the times of calls in one pass."""

    spent_s: float = 0.0
    passes_s: list[float] = field(default_factory=list)

    @contextmanager
    def around(self, owner: type, name: str) -> Iterator[None]:
        """Times a method of a class."""
        method = getattr(owner, name)

        def timed(*arguments: object, **more: object) -> object:
            began = time.perf_counter()
            try:
                return method(*arguments, **more)
            finally:
                self.spent_s += time.perf_counter() - began

        with mock.patch.object(owner, name, timed):
            yield

    def end_pass(self) -> None:
        """Stores the time of a pass."""
        self.passes_s.append(self.spent_s)
        self.spent_s = 0.0


class _Fleet:
    """A home with a queue over the boxes of a workload, at a simulated time."""

    def __init__(self, folder: Path, workload: Workload) -> None:
        self.settings = Settings(home=folder / "home")
        self.settings.make_dirs()
        url = f"sqlite:///{self.settings.home / 'windlass.db'}"
        migrate(url)
        self.database = Database(url)
        self.node = node_of(self.settings.home)
        self.workload = workload
        self.facts = {box.name: _facts(box.num_devices, box.speed) for box in workload.boxes}
        self.ids: dict[str, SimulatedJob] = {}  # by the job's id in the database
        self.nodes: dict[str, str] = {}  # the name of each box, by its node
        for box in workload.boxes:
            self._join(box.name, box.num_devices, box.memory_gib, box.ssd_gib)
        lease = Lease(self.database, node=self.node, machine="benchmark", is_alone=True)
        self.dispatcher = Dispatcher(
            self.database,
            self.settings,
            _NoRunners(),
            MachineResources(num_cores=4, num_gpus=0),
            lease,
            look=lambda: MachineCapacity(room_nbytes=0),
        )

    def _join(self, name: str, num_devices: int, memory_gib: int, ssd_gib: int) -> None:
        capacity = CapacityReport(
            num_devices=num_devices,
            host_nbytes=memory_gib * GIB,
            room_nbytes=memory_gib * GIB,
            ssds=(SsdSpaceReport(disk="/ssd", free_nbytes=ssd_gib * GIB),),
        )
        with self.database.write() as session:
            boxes = BoxRepository(session)
            facts = self.facts[name].model_dump(mode="json")
            box = boxes.add(name=name, node=f"node-{name}", head=self.node, certificate=name, address="", facts=facts)
            boxes.set(box.id, capacity=capacity.model_dump(mode="json"), seen_at=time.time() + _FAR_S)
            self.nodes[box.node] = name

    def submit(self, job: SimulatedJob) -> None:
        """Adds a prepared job with its plans for all boxes."""
        windlass = {"gpus": job.gpus, "epochs": 1, "batch_size": job.gpus, "sequence_length": 64}
        new = NewJob(
            model="model",
            training_file="file",
            validation_file=None,
            suffix=None,
            seed=1,
            method={"type": "supervised", "supervised": {"hyperparameters": {}}},
            windlass=windlass,
            metadata={},
            priority=job.priority,
            idempotency_key=None,
            request_digest=None,
            node=self.node,
            owner=job.owner,
        )
        with self.database.write() as session:
            jobs = JobRepository(session)
            job_id = jobs.create(new).id
            values = {"hyperparameters": {}, "total_steps": 1, "status": JobStatus.QUEUED}
            session.execute(update(Job).where(Job.id == job_id).values(**values))
        self.ids[job_id] = job
        prepare_dir = self.settings.jobs_dir / job_id / "prepare"
        prepare_dir.mkdir(parents=True)
        (prepare_dir / _PLAN).write_text(json.dumps(_plan(job, step_s=1.0, feasible=False)))  # the head has no GPU
        answers = {}
        for box in self.workload.boxes:
            key = kind_of(self.facts[box.name]).key
            answers[key] = _plan(job, step_s=box.run_s(job), feasible=box.fits(job))
            folder = kind_dir(self.settings, job_id, key)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _PLAN).write_text(json.dumps(answers[key]))
        keep_numbers(self.settings, job_id, answers)

    def let_pass(self, seconds: float) -> None:
        """Brings the predicted ends closer, because the simulated time has passed."""
        later = update(Job).where(Job.status == JobStatus.RUNNING)
        with self.database.write() as session:
            session.execute(later.values(estimated_finish=Job.estimated_finish - seconds))

    def take_all(self) -> list[tuple[str, SimulatedJob, str]]:
        """Lets the boxes take the jobs that they were given. Returns these, with their boxes."""
        taken = []
        with self.database.write() as session:
            boxes = BoxRepository(session)
            for box in boxes.all(self.node):
                for instruction in boxes.instructions(box.id, limit=1000):
                    boxes.withdraw(instruction.ordinal)
                    taken.append((instruction.job_id, self.ids[instruction.job_id], box.name))
            now_s = time.time()
            for job_id, job, name in taken:
                ends_at = now_s + self.workload.by_name[name].run_s(job)
                values = {"status": JobStatus.RUNNING, "attempt": 1, "launched_at": now_s, "estimated_finish": ends_at}
                session.execute(update(Job).where(Job.id == job_id).values(**values))
        return taken

    def end(self, job_id: str) -> None:
        """Ends a job as its box reports it."""
        with self.database.write() as session:
            values = {"status": JobStatus.SUCCEEDED, "node": self.node, "finished_at": time.time()}
            session.execute(update(Job).where(Job.id == job_id).values(**values))


def run_dispatcher(folder: Path, workload: Workload) -> Passes:
    """Runs all jobs of a workload through the dispatcher, one pass at each arrival and each end.

    Raises RuntimeError if a job never begins.
    """
    fleet, timer, pass_s = _Fleet(folder, workload), _Timer(), list[float]()
    coming, ends, now_s = list(reversed(workload.jobs)), list[tuple[float, str]](), 0.0
    num_given = 0
    with ExitStack() as stack:
        stack.enter_context(timer.around(Boxes, "read"))
        stack.enter_context(timer.around(JobQueue, "verdicts"))
        while coming or ends:
            next_s = min([*([coming[-1].arrives_s] if coming else []), *(end_s for end_s, _ in ends)])
            fleet.let_pass(next_s - now_s)
            now_s = next_s
            for end_s, job_id in [each for each in ends if each[0] <= now_s]:
                ends.remove((end_s, job_id))
                fleet.end(job_id)
            while coming and coming[-1].arrives_s <= now_s:
                fleet.submit(coming.pop())
            began = time.perf_counter()
            fleet.dispatcher.tick()
            pass_s.append(time.perf_counter() - began)
            timer.end_pass()
            for job_id, job, name in fleet.take_all():
                ends.append((now_s + workload.by_name[name].run_s(job) * job.error, job_id))
                num_given += 1
    fleet.dispatcher.close()
    fleet.database.close()
    if num_given != len(workload.jobs):
        raise RuntimeError(f"{len(workload.jobs) - num_given} jobs never began")
    return Passes(decision_s=timer.passes_s, pass_s=pass_s, num_given=num_given)


def _facts(num_devices: int, speed: float) -> BoxFacts:
    hardware = Hardware(
        gpus=Gpus(count=num_devices, memory_gib=24.0, tflops=100 * speed),
        host=Host(memory_gib=64.0, memory_gb_per_s=40, adam_params_per_s=1e9),
        pcie=Pcie(h2d_gb_per_s=12, d2h_gb_per_s=12),
        ssds=Ssds(count=1, read_gb_per_s=8, write_gb_per_s=8, capacity_gib=1000),
    )
    return BoxFacts(
        windlass="1",
        python="3",
        torch="2",
        ray="2",
        num_cores=16,
        num_gpus=num_devices,
        gpus=tuple(GpuFacts(name="card", memory_nbytes=24 * GIB) for _ in range(num_devices)),
        memory_nbytes=64 * GIB,
        hardware=hardware.model_dump(mode="json"),
    )


def _plan(job: SimulatedJob, *, step_s: float, feasible: bool) -> dict[str, object]:
    """A plan of one step that takes as long as the job."""
    peaks = {"gpu": 0.0, "host": float(job.memory_gib), "ssd": float(job.ssd_gib)}
    report = PlanReport(feasible=feasible, reasons=() if feasible else ("too small",), step_s=step_s, peak_gib=peaks)
    plan = JobPlan(report=report, placement=Placement() if feasible else None, arena_nbytes=job.memory_gib * GIB)
    return {"ok": True, **plan.to_json()}
