"""Puts the actors of a job on Ray: processes, resources, and the life and death of an attempt.

The runner is detached and named; it makes the placement group and all other actors, which die with it. Messages between
actors are calls of `post` that nobody waits for: they carry descriptors, and their order between two actors is kept.
"""

import ctypes
import os
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from windlass.actors.admission import require_room
from windlass.actors.context import GPU_WORKER, SCHEDULER, JobContext, make_context, optimizer_name, ssd_name
from windlass.actors.job_spec import JobSpec
from windlass.actors.journal import Journal
from windlass.actors.messages import ActorFailed, Message
from windlass.actors.scheduler import JobFailedError, Scheduler
from windlass.engine.layout import ModelLayout
from windlass.storage.arena import Arena, arena_path
from windlass.storage.ids import ActorName, Attempt, JobId
from windlass.storage.room import NotEnoughRoom

NAMESPACE = "windlass"
# The custom resource that stands for what a rank computes on: a GPU, or the CPU of a machine that has none.
DEVICE_RESOURCE = "device"
_START_DEADLINE_S = 120.0
_NICE = 10
_M_ARENA_MAX = -8  # of malloc.h


def runner_name(job: JobId, attempt: Attempt) -> str:
    """The Ray name of a job's runner."""
    return f"job-{job}-{attempt}"


class ActorShell:
    """One worker process: builds its actor there, passes messages on, reports what goes wrong."""

    def __init__(self, name: ActorName, context: JobContext, num_threads: int, yields_cores: bool) -> None:
        # Read by OpenMP and MKL when torch is imported, which happens in `setup`; Ray's default is one thread.
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(num_threads)
        # Threads that wait must not spin: the optimizer, the copies and the I/O run on the same cores.
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        if yields_cores:
            # Without a GPU the compute runs on the same cores, and what takes one from it stalls all its threads.
            os.nice(_NICE)
        self.name = name
        self.context = context
        self.handles: Mapping[ActorName, Any] = {}
        self._stopped = threading.Event()

    def connect(self, handles: Mapping[ActorName, Any]) -> None:
        """Learns whom to send to."""
        self.handles = handles

    def setup(self) -> None:
        """Builds the actor and opens its devices and files; a failure reaches the caller."""
        # The C library keeps a heap for each thread, and what one frees another does not find: one heap for all.
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
        self.actor = _build(self.name, self.context, self._send)
        self.actor.setup()

    def post(self, message: Message) -> None:
        """Hands a message to the actor."""
        try:
            self.actor.post(message)
        except Exception as error:  # noqa: BLE001 - nobody waits for this call
            self._send(SCHEDULER, ActorFailed.of(error, job=message.job, step=message.step, actor=self.name))

    def stop(self, delete_store: bool) -> None:
        """Ends the actor's threads and closes its files."""
        if self.name.startswith("ssd-"):
            self.actor.stop(delete_store=delete_store)
        else:
            self.actor.stop()
        self._stopped.set()

    @ray.method(concurrency_group="lifetime")  # type: ignore[untyped-decorator]
    def wait_until_stopped(self) -> None:
        """Returns when the actor was stopped: its reference fails at once when the process dies."""
        self._stopped.wait()

    def _send(self, to: ActorName, message: Message) -> None:
        self.handles[to].post.remote(message)


def _build(name: ActorName, context: JobContext, send: Any) -> Any:
    """The actor of a name. Imports here: an SSD server never loads torch."""
    kind, _, number = name.partition("-")
    index = int(number)
    if kind == "ssd":
        from windlass.actors.ssd_server import SsdServer

        directory = Path(context.spec.ssd_dirs[index])
        return SsdServer(name, directory, context.geometry(index), context.arena_path, send)
    if kind == "optimizer":
        from windlass.actors.cpu_optimizer import CpuOptimizer

        return CpuOptimizer(name, index, context, send)
    import torch

    from windlass.actors.gpu_worker import GpuWorker
    from windlass.engine.partition import partition_folder

    partition = partition_folder(context.spec.model_dir, context.precision)
    return GpuWorker(context, partition, send, device="cuda" if torch.cuda.is_available() else "cpu")


class Runner:
    """The detached actor of one attempt: sets the others up, runs the scheduler in a thread, ends them, ends itself."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self._scheduler: Scheduler | None = None
        self._cancelled = threading.Event()
        self._workers: dict[ActorName, Any] = {}
        self._alive: dict[Any, ActorName] = {}
        self._connected = threading.Event()

    def start(self) -> None:
        """Begins; returns at once, so that the attempt does not depend on who started it."""
        threading.Thread(target=self._run, name="runner", daemon=True).start()

    def post(self, message: Message) -> None:
        """Events of the other actors."""
        self._connected.wait()
        assert self._scheduler is not None
        self._scheduler.post(message)

    def cancel(self) -> None:
        """The job ends after its current step."""
        self._cancelled.set()
        if self._scheduler is not None:
            self._scheduler.cancel()

    def _run(self) -> None:
        try:
            self._attempt()
        except Exception as error:  # noqa: BLE001 - the journal is the only way to tell
            Path(self.spec.job_dir, "error.txt").write_text(traceback.format_exc())
            journal = Journal(Path(self.spec.job_dir) / "journal.jsonl", self.spec.attempt)
            # Ray wraps what an actor raised; the cause is what people need.
            cause = getattr(error, "cause", None) or error
            is_for_people = isinstance(cause, JobFailedError | NotEnoughRoom | ValueError)
            message = str(cause) if is_for_people else f"{type(cause).__name__}: {cause}"
            journal.append_outcome(
                "failed", message, {"code": "start_failed", "message": message, "param": None}, model_dir=None
            )
            journal.close()
        finally:
            ray.kill(ray.get_runtime_context().current_actor)

    def _attempt(self) -> None:
        spec = self.spec
        layout = ModelLayout.from_json(Path(spec.layout_file).read_text())
        path = arena_path(Path(spec.arena_dir), spec.job, spec.attempt)
        context = make_context(spec, layout, str(path))
        require_room(context)
        arena = Arena.create(path, context.plan.arena_nbytes)
        group = placement_group([{DEVICE_RESOURCE: 1}], strategy="STRICT_PACK")
        try:
            if not group.wait(_START_DEADLINE_S):
                raise JobFailedError(f"no device came free within {_START_DEADLINE_S:g} s; another job holds it")
            self._make_workers(context, group)
            self._scheduler = Scheduler(context, self._send, check_actors=self._check_workers)
            self._connected.set()
            if self._cancelled.is_set():
                self._scheduler.cancel()
            self._scheduler.run()
            stops = [handle.stop.remote(True) for handle in self._workers.values()]
            ray.wait(stops, num_returns=len(stops), timeout=spec.deadline_s)
        finally:
            for handle in self._workers.values():
                ray.kill(handle)
            remove_placement_group(group)
            arena.close()
            arena.unlink()

    def _make_workers(self, context: JobContext, group: Any) -> None:
        spec = self.spec
        threads = {GPU_WORKER: spec.compute_threads}
        threads |= {optimizer_name(i): spec.optimizer_threads for i in range(spec.num_cpu_optimizers)}
        threads |= {ssd_name(i): 1 for i in range(len(spec.ssd_dirs))}
        num_gpus = ray.cluster_resources().get("GPU", 0)
        for name, num_threads in threads.items():
            options: dict[str, Any] = {"resources": {DEVICE_RESOURCE: 1}} if name == GPU_WORKER else {}
            if name == GPU_WORKER and num_gpus:
                options["num_gpus"] = 1
            self._workers[name] = _RemoteShell.options(
                num_cpus=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group),
                **options,
            ).remote(name, context, num_threads, yields_cores=name != GPU_WORKER and not num_gpus)
        me = ray.get_runtime_context().current_actor
        handles = {**self._workers, SCHEDULER: me}
        ray.get([handle.connect.remote(handles) for handle in self._workers.values()], timeout=_START_DEADLINE_S)
        _await_setup({name: handle.setup.remote() for name, handle in self._workers.items()})
        self._alive = {handle.wait_until_stopped.remote(): name for name, handle in self._workers.items()}

    def _send(self, to: ActorName, message: Message) -> None:
        self._workers[to].post.remote(message)

    def _check_workers(self) -> None:
        done, _ = ray.wait(list(self._alive), num_returns=1, timeout=0)
        for reference in done:
            name = self._alive[reference]
            raise JobFailedError(f"the process of {name} died; the kernel log tells whether memory ran out")


def _await_setup(setups: Mapping[ActorName, Any]) -> None:
    """Returns when all are ready; raises what one of them raised, and JobFailedError for one that never answers."""
    until_s = time.monotonic() + _START_DEADLINE_S
    for name, reference in setups.items():
        try:
            ray.get(reference, timeout=max(0.0, until_s - time.monotonic()))
        except ray.exceptions.GetTimeoutError as error:
            raise JobFailedError(
                f"{name} was not ready within {_START_DEADLINE_S:g} s; the machine is overloaded, or a disk hangs"
            ) from error
        except ray.exceptions.ActorDiedError as error:
            raise JobFailedError(
                f"the process of {name} died while it started; the kernel log tells whether memory ran out"
            ) from error


_RemoteShell = ray.remote(concurrency_groups={"lifetime": 1})(ActorShell)


def start_runner(spec: JobSpec) -> None:
    """Launches an attempt; Ray must be connected. Returns when the runner has begun."""
    runner = (
        ray.remote(Runner)
        .options(name=runner_name(spec.job, spec.attempt), namespace=NAMESPACE, lifetime="detached", num_cpus=0)
        .remote(spec)
    )
    ray.get(runner.start.remote(), timeout=_START_DEADLINE_S)


def find_runner(job: JobId, attempt: Attempt) -> Any | None:
    """The runner of an attempt, or None when there is none."""
    try:
        return ray.get_actor(runner_name(job, attempt), namespace=NAMESPACE)
    except ValueError:
        return None


def cancel_runner(job: JobId, attempt: Attempt) -> None:
    """Asks a runner to end after its current step; does nothing when it is gone."""
    runner = find_runner(job, attempt)
    if runner is not None:
        runner.cancel.remote()
