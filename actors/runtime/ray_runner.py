"""Puts the actors of a job on Ray: processes, resources, and the life and death of an attempt.

The runner is detached and named; it makes the placement group and all other actors, which die with it. Once they are
up, the actors send each other messages past Ray (`mail.py`): descriptors only, and their order between two is kept.
"""

import contextlib
import ctypes
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from windlass.actors.job import (
    GPU_WORKER,
    JOURNAL_FILE,
    SCHEDULER,
    JobContext,
    JobSpec,
    Journal,
    arena_free_nbytes,
    keeping_kernel,
    make_context,
    optimizer_index,
    optimizer_name,
    require_planned_device_room,
    require_room,
    ssd_name,
    survey_ssds,
)
from windlass.actors.lifecycle import (
    NICENESS_BESIDE_COMPUTE,
    WAIT_POLICY,
    StopRequest,
    begin_attempt,
    bind_optimizer,
    has_begun,
    join_attempt,
    tell_alive,
)
from windlass.actors.messages import ActorFailed, Message, UserMessage
from windlass.actors.runtime.factory import build_actor, import_for
from windlass.actors.runtime.outbox import Outbox
from windlass.actors.runtime.sockets import MessageClient, MessageServer
from windlass.actors.scheduler import GOES_ON, INTERRUPTED, ActorLostError, Scheduler
from windlass.engine.model import ModelLayout
from windlass.storage.ids import ActorName, Attempt, JobId
from windlass.storage.integrity import StoreError
from windlass.storage.memory import (
    Arena,
    InsufficientSpaceError,
    arena_path,
    is_for_want_of_room,
    may_find_room_later,
    remove_leftovers,
)
from windlass.storage.store import CommitRecord, last_common_commit

NAMESPACE = "windlass"
# The custom resource that stands for what a rank computes on: a GPU, or the CPU of a machine that has none.
DEVICE_RESOURCE = "device"
_NODE_LABEL = "ray.io/node-id"  # Ray gives each node one
# Of whatever trains: it yields the cores to the service.
_NICENESS = 10
_START_DEADLINE_S = 120.0
# For what may compile kernels first, or wait for another process that does; that has deadlines of its own.
_SET_UP_DEADLINE_S = 1500.0
# How long a runner waits for room on the disk to tell how its attempt ended, and between two tries. Less than the
# minute after which a runner without a sign of life counts as hung: meanwhile it gives none.
_ROOM_DEADLINE_S, _ROOM_TRY_S = 45.0, 1.0
# Between the runner's signs of life.
_PULSE_S = 1.0
# Of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

_Send = Callable[[ActorName, Message], None]


def runner_name(job: JobId, attempt: Attempt) -> str:
    """The Ray name of a job's runner."""
    return f"job-{job}-{attempt}"


class ActorShell:
    """One worker process: builds its actor there, passes messages on, reports what goes wrong."""

    def __init__(
        self, name: ActorName, context: JobContext, num_threads: int, niceness: int, *, uses_gpu: bool
    ) -> None:
        if not uses_gpu:
            _hide_gpus()
        # Read by OpenMP and MKL when torch is imported, which comes next; Ray's default is one thread.
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(num_threads)
        os.environ.update(WAIT_POLICY)
        # The C library keeps a heap for each thread, and what one frees another does not find: one heap for all.
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
        # Seconds of computing, meanwhile SSD servers open their files. This thread yields no cores: none computes yet.
        self._importing = threading.Thread(target=import_for, args=(name, context), daemon=True)
        self._importing.start()
        os.nice(niceness)
        self.name = name
        self.context = context
        self._uses_gpu = uses_gpu
        self._mailbox = MessageServer(self._post)
        self._stopped = threading.Event()

    def address(self) -> str:
        """Of its mailbox."""
        return self._mailbox.address

    def connect(self, addresses: Mapping[ActorName, str]) -> None:
        """Learns whom to send to."""
        self._outbox = Outbox(MessageClient(addresses).deliver)

    def join_attempt(self) -> None:
        """From now on the attempt is not over while this process lives. Before it opens anything."""
        self._attempt_lock = join_attempt(Path(self.context.spec.job_dir), self.context.spec.attempt)

    def setup(self, commit: CommitRecord | None = None) -> None:
        """Builds the actor and opens its devices and files; a failure reaches the caller.

        `commit`: what the job goes on from. SSD servers, who tell of it, are set up without.
        """
        spec, libc = self.context.spec, ctypes.CDLL(None)
        self._importing.join()
        if (index := optimizer_index(self.name)) is not None:
            bind_optimizer(index, spec.num_cpu_optimizers, spec.optimizer_threads)
            # What the fused kernel takes for a slice, some MiB, and frees again would come back as new pages each time,
            # which is a third of its time or more.
            libc.mallopt(_M_TRIM_THRESHOLD, 32 << 20)
            libc.mallopt(_M_MMAP_THRESHOLD, 4 << 20)
        context = keeping_kernel(self.context, commit)
        self.actor = build_actor(self.name, context, self._outbox.send, uses_gpu=self._uses_gpu)
        self.actor.setup()

    def _post(self, messages: Sequence[Message]) -> None:
        for message in messages:
            try:
                self.actor.post(message)
            except Exception as error:  # noqa: BLE001 - the sender does not wait for an answer
                failed = ActorFailed.of(error, actor=self.name, about=message)
                self._outbox.send(SCHEDULER, failed)

    def commits(self) -> list[CommitRecord]:
        """The journal of an SSD server."""
        commits: list[CommitRecord] = self.actor.commits()
        return commits

    def resume_from(self, commit: CommitRecord | None) -> None:
        """Tells an SSD server where the job goes on."""
        self.actor.resume_from(commit)

    def stop(self, delete_store: bool) -> None:
        """Ends the actor's threads and closes its files."""
        if self.name.startswith("ssd-"):
            self.actor.stop(delete_store=delete_store)
        else:
            self.actor.stop()
        self._mailbox.close()
        self._outbox.close()
        self._stopped.set()

    @ray.method(concurrency_group="lifetime")  # type: ignore[untyped-decorator]
    def wait_until_stopped(self) -> None:
        """Returns when the actor was stopped: its reference fails at once when the process dies."""
        self._stopped.wait()


class Runner:
    """The detached actor of one attempt: sets the others up, runs the scheduler in a thread, ends them, ends itself."""

    def __init__(self, spec: JobSpec) -> None:
        _hide_gpus()
        self.spec = spec
        self._scheduler: Scheduler | None = None
        self._stop = StopRequest()
        self._workers: dict[ActorName, Any] = {}
        self._alive: dict[Any, ActorName] = {}
        self._lock = threading.Lock()  # held where messages and the scheduler meet
        self._early: list[Message] = []  # came before there was a scheduler
        self._is_over = False  # the journal has its outcome
        self._waits_for_room = False  # on the disk, for its outcome

    def start(self) -> None:
        """Begins; returns at once, so that the attempt does not depend on who started it."""
        self._attempt_lock = begin_attempt(Path(self.spec.job_dir), self.spec.attempt)
        threading.Thread(target=self._pulse, name="pulse", daemon=True).start()
        threading.Thread(target=self._run, name="runner", daemon=True).start()

    def _post(self, messages: Sequence[Message]) -> None:
        with self._lock:
            for message in messages:
                if self._scheduler is not None:
                    self._scheduler.post(message)
                elif isinstance(message, UserMessage):
                    self._tell_early(message.text)
                else:
                    self._early.append(message)

    def _make_scheduler(self, context: JobContext, send: _Send, commit: CommitRecord | None) -> Scheduler:
        """It takes the messages from now on, and those that came before."""
        with self._lock:
            scheduler = Scheduler(context, send, resume_from=commit, check_actors=self._check_workers, stop=self._stop)
            for message in self._early:
                scheduler.post(message)
            self._scheduler = scheduler
        return scheduler

    def _open_journal(self) -> Journal:
        """Under the lock, for as long as no scheduler has it open: two would give the same numbers."""
        return Journal(Path(self.spec.job_dir) / JOURNAL_FILE, self.spec.attempt)

    def _tell_early(self, text: str) -> None:
        if self._is_over:
            return
        with contextlib.suppress(OSError), contextlib.closing(self._open_journal()) as journal:  # the disk may be full
            journal.append("message", text)

    def cancel(self) -> None:
        """The job ends after its current step."""
        self._stop.cancel()

    def pause(self) -> None:
        """The attempt ends after its current step; the job's states stay for another."""
        self._stop.pause()

    def _pulse(self) -> None:
        """Ray counts a process that hangs among the living."""
        while self._waits_for_room or tell_alive(Path(self.spec.job_dir), self.spec.attempt):
            time.sleep(_PULSE_S)

    def _run(self) -> None:
        try:
            self._attempt()
        except Exception as error:  # noqa: BLE001 - the journal is the only way to tell
            detail = traceback.format_exc()
            with contextlib.suppress(OSError):  # the disk may be full
                Path(self.spec.job_dir, "error.txt").write_text(detail)
            # Ray wraps what an actor raised; the cause is what people need.
            cause = getattr(error, "cause", None) or error
            was_lost = isinstance(cause, ActorLostError | TimeoutError | ray.exceptions.RayActorError)
            was_lost |= may_find_room_later(cause, self.spec.attempt)
            is_for_people = isinstance(
                cause, ActorLostError | TimeoutError | InsufficientSpaceError | StoreError | ValueError
            )
            message = str(cause) if is_for_people else f"{type(cause).__name__}: {cause}"
            code, param = getattr(cause, "code", "start_failed"), getattr(cause, "param", None)
            self._tell_end(INTERRUPTED if was_lost else "failed", message, code=code, param=param)
        finally:
            ray.kill(ray.get_runtime_context().current_actor)

    def _tell_end(self, status: str, message: str, *, code: str = "start_failed", param: str | None = None) -> None:
        """Write the attempt's last record. Where there is no room for it in time, the attempt is lost without.

        The runner gives no sign of life while it waits: that is how the service knows, which the disk cannot tell.
        """
        until_s = time.monotonic() + _ROOM_DEADLINE_S
        while True:
            try:
                with self._lock, contextlib.closing(self._open_journal()) as journal:
                    self._is_over = True
                    error = {"code": code, "message": message, "param": param}
                    journal.append_outcome(status, message, error, model_dir=None)
                return
            except OSError as error:
                if not is_for_want_of_room(error) or time.monotonic() > until_s:
                    raise
            self._waits_for_room = True
            time.sleep(_ROOM_TRY_S)

    def _attempt(self) -> None:
        spec = self.spec
        layout = ModelLayout.from_json(Path(spec.layout_file).read_text())
        path = arena_path(Path(spec.arena_dir), spec.job, spec.attempt)
        remove_leftovers(Path(spec.arena_dir))
        context = make_context(spec, layout, str(path), survey_ssds(spec), free_nbytes=arena_free_nbytes(spec))
        require_planned_device_room(spec)
        require_room(context)
        arena = Arena.create(path, context.plan.arena_nbytes)
        mailbox = MessageServer(self._post)
        has_gpus = num_gpus_here() > 0
        group = device_here(has_gpus=has_gpus)
        try:
            if not group.wait(_START_DEADLINE_S):
                raise TimeoutError(f"no device came free within {_START_DEADLINE_S:g} s; another job holds it")
            addresses = self._make_workers(context, group, has_gpus=has_gpus) | {SCHEDULER: mailbox.address}
            commit = self._set_up_workers(addresses)
            outbox = Outbox(MessageClient(addresses).deliver)
            outcome = self._make_scheduler(context, outbox.send, commit).run()
            if outcome["status"] != INTERRUPTED:  # else the workers are of no use any more
                is_over = outcome["status"] not in GOES_ON
                stops = [handle.stop.remote(is_over) for handle in self._workers.values()]
                ray.wait(stops, num_returns=len(stops), timeout=spec.deadline_s)
        finally:
            for handle in self._workers.values():
                ray.kill(handle)
            remove_placement_group(group)
            arena.close()
            arena.unlink()

    def _make_workers(self, context: JobContext, group: Any, *, has_gpus: bool) -> dict[ActorName, str]:
        """Starts the processes of the job's actors; returns the addresses of their mailboxes."""
        spec = self.spec
        threads = {GPU_WORKER: spec.compute_threads}
        threads |= {optimizer_name(i): spec.optimizer_threads for i in range(spec.num_cpu_optimizers)}
        threads |= {ssd_name(i): 1 for i in range(len(spec.ssd_dirs))}
        for name, num_threads in threads.items():
            computes = name == GPU_WORKER
            uses_gpu = computes and has_gpus
            options = {"resources": {DEVICE_RESOURCE: 1}} if computes else {}
            self._workers[name] = _RemoteShell.options(
                num_cpus=0,
                num_gpus=int(uses_gpu),
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group),
                **options,
            ).remote(name, context, num_threads, niceness=_niceness_of(name, has_gpus), uses_gpu=uses_gpu)
        return _answers_of({name: handle.address.remote() for name, handle in self._workers.items()})

    def _set_up_workers(self, addresses: Mapping[ActorName, str]) -> CommitRecord | None:
        """Returns the commit that they go on from."""
        _answers_of({name: handle.connect.remote(addresses) for name, handle in self._workers.items()})
        _answers_of({name: handle.join_attempt.remote() for name, handle in self._workers.items()})
        servers = {name: self._workers[name] for name in map(ssd_name, range(len(self.spec.ssd_dirs)))}
        _answers_of({name: handle.setup.remote() for name, handle in servers.items()})
        journals = _answers_of({name: handle.commits.remote() for name, handle in servers.items()})
        commit = last_common_commit(list(journals.values()))
        _answers_of({name: handle.resume_from.remote(commit) for name, handle in servers.items()})
        others = {name: handle for name, handle in self._workers.items() if name not in servers}
        _answers_of({name: handle.setup.remote(commit) for name, handle in others.items()}, _SET_UP_DEADLINE_S)
        self._alive = {handle.wait_until_stopped.remote(): name for name, handle in self._workers.items()}
        return commit

    def _check_workers(self) -> None:
        done, _ = ray.wait(list(self._alive), num_returns=1, timeout=0)
        for reference in done:
            name = self._alive[reference]
            raise ActorLostError(f"the process of {name} died; the kernel log tells whether memory ran out")


def _answers_of(asked: Mapping[ActorName, Any], deadline_s: float = _START_DEADLINE_S) -> dict[ActorName, Any]:
    """What all of them answer; raises what one of them raised, and TimeoutError for one that does not answer."""
    until_s, answers = time.monotonic() + deadline_s, {}
    for name, reference in asked.items():
        try:
            answers[name] = ray.get(reference, timeout=max(0.0, until_s - time.monotonic()))
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(
                f"{name} was not ready within {deadline_s:g} s; the machine is overloaded, or a disk hangs"
            ) from error
        except ray.exceptions.ActorDiedError as error:
            raise ActorLostError(
                f"the process of {name} died while it started; the kernel log tells whether memory ran out"
            ) from error
    return answers


def _niceness_of(name: ActorName, has_gpus: bool) -> int:
    is_beside_compute = name != GPU_WORKER and not has_gpus
    return _NICENESS + (NICENESS_BESIDE_COMPUTE if is_beside_compute else 0)


_RemoteShell = ray.remote(concurrency_groups={"lifetime": 1})(ActorShell)


def _hide_gpus() -> None:
    """Keeps this process off every GPU. Ray leaves all of them visible to an actor that asked for none.

    It must come before torch is imported: a CUDA context takes some 500 MiB of a GPU's memory.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def num_gpus_here() -> int:
    """Returns how many GPUs Ray was told of on the node of this process. Other nodes of the cluster do not count."""
    here = ray.get_runtime_context().get_node_id()
    return next((int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["NodeID"] == here), 0)


def device_here(*, has_gpus: bool) -> Any:
    """Returns a placement group with one device of this process's node, because a job's processes share its memory.

    Whatever an actor asks for inside a group must be in the group's bundle, so that a GPU is in it where there are any.
    """
    here = {_NODE_LABEL: ray.get_runtime_context().get_node_id()}
    bundle = {DEVICE_RESOURCE: 1} | ({"GPU": 1} if has_gpus else {})
    return placement_group([bundle], strategy="STRICT_PACK", bundle_label_selector=[here])


def start_runner(spec: JobSpec) -> None:
    """Launches an attempt on the caller's node; Ray must be connected. Returns when the runner has begun.

    The runner may be over by then: one that refuses its job ends within milliseconds, and its journal tells why.
    """
    # It asks for nothing, so that Ray would put it on any node, the head of a cluster too.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    runner = (
        ray.remote(Runner)
        .options(
            name=runner_name(spec.job, spec.attempt),
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            scheduling_strategy=here,
        )
        .remote(spec)
    )
    _await_beginning(runner.start.remote(), spec)


def _await_beginning(started: Any, spec: JobSpec) -> None:
    try:
        ray.get(started, timeout=_START_DEADLINE_S)
    except ray.exceptions.RayActorError:
        # A runner that ends itself at once can take its answer to `start` with it.
        if not has_begun(Path(spec.job_dir), spec.attempt):
            raise


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


def pause_runner(job: JobId, attempt: Attempt) -> None:
    """Asks a runner to end after its current step, and to leave the job's states; does nothing when it is gone."""
    runner = find_runner(job, attempt)
    if runner is not None:
        runner.pause.remote()
