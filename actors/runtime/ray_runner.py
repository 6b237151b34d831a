"""Runs an attempt of a job on Ray: its processes, their resources, its start and its end.

The runner is a detached, named actor. It creates the placement group and all other actors, which die with it. After
their start, the actors send messages over sockets, not through Ray (`sockets.py`). Messages between two actors keep
their order.
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
    JOURNAL_FILE,
    SCHEDULER,
    ActorKind,
    JobContext,
    JobSpec,
    Journal,
    append_error,
    kind_of,
    optimizer_index,
)
from windlass.actors.lifecycle import (
    COMPUTING_NICENESS,
    NICENESS_BESIDE_COMPUTE,
    WAIT_POLICY,
    StopRequest,
    allocator_settings,
    begin_attempt,
    bind_optimizer,
    has_begun,
    join_attempt,
    tell_alive,
)
from windlass.actors.messages import ActorFailed, Message, UserMessage
from windlass.actors.runtime.factory import gpu_node, import_for, open_space, read_journal, start_actor, stop_actor
from windlass.actors.runtime.outbox import Outbox
from windlass.actors.runtime.sockets import MessageClient, MessageServer
from windlass.actors.runtime.start_up import (
    START_DEADLINE_S,
    WORKER_DEADLINE_S,
    create_arena,
    node_of_all,
    plan_attempt,
    start_actors,
    worker_names,
)
from windlass.actors.scheduler import CANCELLED, GOES_ON, INTERRUPTED, PAUSED, ActorLostError, Scheduler
from windlass.engine.memory_plan import PlanError
from windlass.engine.model import ModelLayout
from windlass.storage.ids import ActorName, Attempt, JobId
from windlass.storage.integrity import StoreError
from windlass.storage.memory import (
    InsufficientSpaceError,
    has_several_nodes,
    is_out_of_space,
    may_find_room_later,
)
from windlass.storage.store import CommitRecord, JobSpace, StoreJournal

NAMESPACE = "windlass"
# The Ray resource that stands for a compute device: a GPU, or the CPU of a machine without one.
DEVICE_RESOURCE = "device"
_NODE_LABEL = "ray.io/node-id"  # a label that Ray sets on each node
_NICENESS_BESIDE_LAUNCHES = 5  # added for optimizers where a GPU computes: a third of the launching thread's share
# Seconds that a runner waits for disk space to write its outcome, and seconds between two tries. The first is less than
# the minute after which a runner without a sign of life counts as hung, because the runner gives none meanwhile.
_ROOM_DEADLINE_S, _ROOM_TRY_S = 45.0, 1.0
# Seconds between the runner's signs of life.
_PULSE_S = 1.0
# Seconds between two looks of a starting attempt whether it is to stop.
_STOP_CHECK_S = 1.0
# Parameters of mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

_Send = Callable[[ActorName, Message], None]


class _StoppedAtStartError(Exception):
    """The attempt was cancelled or paused before its actors had started.

    The service removes the states of a cancelled job.
    """


def runner_name(job: JobId, attempt: Attempt) -> str:
    """The Ray name of a job's runner."""
    return f"job-{job}-{attempt}"


class ActorShell:
    """A worker process: starts its actor, passes messages to it, and reports its errors to the scheduler."""

    def __init__(
        self, name: ActorName, context: JobContext, num_threads: int, niceness: int, *, uses_gpu: bool
    ) -> None:
        if uses_gpu:
            os.environ.update(allocator_settings(os.environ))
        else:
            _hide_gpus()
        # OpenMP and MKL read these when torch is imported, which happens next. Ray sets one thread by default.
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(num_threads)
        os.environ.update(WAIT_POLICY)
        # One heap for all threads. By default the C library has several, and memory freed in one is not reused by
        # another.
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
        # The imports take seconds, during which the SSD servers open their files. Their thread starts before `os.nice`
        # and so does not yield cores, because no actor of the job computes yet.
        self._importing = threading.Thread(target=import_for, args=(name,), daemon=True)
        self._importing.start()
        os.nice(niceness)
        self.name = name
        self.context = context
        self._uses_gpu = uses_gpu
        self._space: JobSpace | None = None  # of an SSD server
        self._mailbox = MessageServer(self._post)
        self._stopped = threading.Event()

    def address(self) -> str:
        """Returns the address of the process's MessageServer."""
        return self._mailbox.address

    def connect(self, addresses: Mapping[ActorName, str]) -> None:
        """Sets the addresses of the other actors."""
        self._outbox = Outbox(MessageClient(addresses).deliver)

    def join_attempt(self) -> None:
        """Locks the attempt's file, so that the attempt counts as alive while this process lives.

        It must be called before the process opens files of the job.
        """
        self._attempt_lock = join_attempt(Path(self.context.spec.job_dir), self.context.spec.attempt)

    def gpu_node(self) -> int | None:
        """Returns the NUMA node near the GPU of this process; see `gpu_node`. Raises GpuUnusableError."""
        self._importing.join()
        return gpu_node(uses_gpu=self._uses_gpu)

    def read_journal(self) -> StoreJournal:
        """Returns the commits on the SSD of an SSD server, without opening the store. Raises StoreError."""
        self._importing.join()
        return read_journal(self.name, self.context)

    def open_space(self) -> StoreJournal:
        """Opens the SSD of an SSD server. Returns the commits on it. Raises the errors of `JobSpace.open`."""
        self._importing.join()
        self._space = open_space(self.name, self.context)
        return self._space.journal()

    def start(self, commit: CommitRecord | None) -> None:
        """Starts the actor, which opens its devices and files; raises the actor's errors.

        `commit` is the commit from which the job resumes.
        """
        spec, libc = self.context.spec, ctypes.CDLL(None)
        self._importing.join()
        if (index := optimizer_index(self.name)) is not None:
            bind_optimizer(index, spec.num_cpu_optimizers, spec.optimizer_threads)
            # The fused kernel allocates and frees some MiB for each slice. Without these settings, each allocation
            # would map new pages, which is a third of the kernel's time or more.
            libc.mallopt(_M_TRIM_THRESHOLD, 32 << 20)
            libc.mallopt(_M_MMAP_THRESHOLD, 4 << 20)
        self.actor = start_actor(
            self.name, self.context, commit, self._outbox.send, space=self._space, uses_gpu=self._uses_gpu
        )
        libc.malloc_trim(0)  # returns what imports and checks have freed

    def _post(self, messages: Sequence[Message]) -> None:
        for message in messages:
            try:
                self.actor.post(message)
            except Exception as error:  # noqa: BLE001 - the sender does not wait for an answer
                failed = ActorFailed.of(error, actor=self.name, about=message)
                self._outbox.send(SCHEDULER, failed)

    def stop(self, is_over: bool) -> None:
        """Stops the actor; see `stop_actor`."""
        stop_actor(self.name, self.actor, is_over=is_over)
        self._mailbox.close()
        self._outbox.close()
        self._stopped.set()

    @ray.method(concurrency_group="lifetime")  # type: ignore[untyped-decorator]
    def wait_until_stopped(self) -> None:
        """Returns when the actor was stopped. If the process dies, the call fails, which the runner notices."""
        self._stopped.wait()


class Runner:
    """The detached actor of one attempt.

    It starts the other actors, runs the scheduler in a thread, and at the end stops the others and itself.
    """

    def __init__(self, spec: JobSpec) -> None:
        _hide_gpus()
        self.spec = spec
        self._scheduler: Scheduler | None = None
        self._stop = StopRequest()
        self._workers: dict[ActorName, Any] = {}
        self._alive: dict[Any, ActorName] = {}
        self._lock = threading.Lock()  # protects `_scheduler`, `_early`, `_is_over` and the runner's journal writes
        self._early: list[Message] = []  # messages that arrived before the scheduler was made
        self._is_over = False  # the outcome is in the journal
        self._waits_for_room = False  # waiting for disk space to write the outcome

    def start(self) -> None:
        """Starts the attempt's threads and returns at once, so that the attempt does not depend on its caller."""
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
        """Makes the scheduler and passes it the messages so far. Later ones go to it directly."""
        with self._lock:
            scheduler = Scheduler(context, send, resume_from=commit, check_actors=self._check_workers, stop=self._stop)
            for message in self._early:
                scheduler.post(message)
            self._scheduler = scheduler
        return scheduler

    def _open_journal(self) -> Journal:
        """Opens the journal. The caller holds the lock, and no scheduler may have the journal open.

        Two writers would give the same sequence numbers.
        """
        return Journal(Path(self.spec.job_dir) / JOURNAL_FILE, self.spec.attempt)

    def _tell_early(self, text: str) -> None:
        if self._is_over:
            return
        with contextlib.suppress(OSError), contextlib.closing(self._open_journal()) as journal:  # the disk may be full
            journal.append("message", text)

    def cancel(self) -> None:
        """Ends the job after its current step."""
        self._stop.cancel()

    def pause(self) -> None:
        """Ends the attempt after its current step; the job's states stay for another attempt."""
        self._stop.pause()

    def _pulse(self) -> None:
        """Gives signs of life until the attempt is closed, because Ray does not notice a hung process."""
        while self._waits_for_room or tell_alive(Path(self.spec.job_dir), self.spec.attempt):
            time.sleep(_PULSE_S)

    def _run(self) -> None:
        try:
            self._attempt()
        except _StoppedAtStartError:
            if self._stop.is_cancelled:
                self._tell_end(CANCELLED, "The job was cancelled while its attempt started")
            else:
                self._tell_end(PAUSED, "The attempt ended while it started, as requested")
        except Exception as error:  # noqa: BLE001 - the journal is the only place to report it
            detail = traceback.format_exc()
            self._note_error(detail)
            if self._is_over:
                return  # the journal has the outcome, and this error is one of the actors' stop
            # Ray wraps an actor's exception; its cause is the one to show to the user.
            cause = getattr(error, "cause", None) or error
            was_lost = isinstance(cause, ActorLostError | TimeoutError | ray.exceptions.RayActorError)
            was_lost |= may_find_room_later(cause, self.spec.attempt)
            is_for_users = isinstance(
                cause, ActorLostError | TimeoutError | InsufficientSpaceError | StoreError | ValueError
            )
            message = str(cause) if is_for_users else f"{type(cause).__name__}: {cause}"
            code, param = getattr(cause, "code", "start_failed"), getattr(cause, "param", None)
            told = {"code": code, "message": message, "param": param}
            self._tell_end(INTERRUPTED if was_lost else "failed", message, told)
        finally:
            ray.kill(ray.get_runtime_context().current_actor)

    def _note_error(self, text: str) -> None:
        """Appends an error to the job's file of errors."""
        append_error(Path(self.spec.job_dir), self.spec.attempt, text)

    def _tell_end(self, status: str, message: str, error: dict[str, Any] | None = None) -> None:
        """Writes the attempt's last record. If the disk stays full too long, the attempt ends without one.

        The runner gives no signs of life meanwhile. If there is no record, the service learns of the end from that.
        """
        until_s = time.monotonic() + _ROOM_DEADLINE_S
        while True:
            try:
                with self._lock, contextlib.closing(self._open_journal()) as journal:
                    self._is_over = True
                    journal.append_outcome(status, message, error, model_dir=None)
                return
            except OSError as problem:
                if not is_out_of_space(problem) or time.monotonic() > until_s:
                    raise
            self._waits_for_room = True
            time.sleep(_ROOM_TRY_S)

    def _attempt(self) -> None:
        spec = self.spec
        if spec.stages:
            raise PlanError(f"the job has {len(spec.stages)} stages: jobs over several boxes do not run under Ray yet")
        layout = ModelLayout.from_json(Path(spec.layout_file).read_text())
        context = plan_attempt(spec, layout)
        with contextlib.ExitStack() as ending:
            arenas = ending.enter_context(contextlib.ExitStack())  # ends last, because workers use the arena
            mailbox = MessageServer(self._post)
            has_gpus = num_gpus_here() > 0
            group = devices_here(spec.num_ranks, has_gpus=has_gpus)
            ending.callback(self._clean_up, remove_placement_group, group)
            ending.callback(self._kill_workers)
            self._await_devices(group)
            addresses = self._make_workers(context, group, has_gpus=has_gpus) | {SCHEDULER: mailbox.address}
            arena = create_arena(context, self._gpu_node() if has_gpus else None, self._check_stop)
            arenas.callback(self._clean_up, arena.unlink)
            arenas.callback(self._clean_up, arena.close)
            commit = self._start_workers(addresses)
            outbox = Outbox(MessageClient(addresses).deliver)
            outcome = self._make_scheduler(context, outbox.send, commit).run()
            with self._lock:
                self._is_over = True  # the scheduler has written the outcome
            if outcome["status"] != INTERRUPTED:  # after an interruption, workers may be dead or hang: only kill them
                self._stop_workers(is_over=outcome["status"] not in GOES_ON)

    def _stop_workers(self, *, is_over: bool) -> None:
        """Stops the actors. `is_over`: the job is, so its states are deleted.

        Errors go to the file of errors, because the outcome is the journal's last record.
        """
        deadline_s = self.spec.deadline_s
        stops = {handle.stop.remote(is_over): name for name, handle in self._workers.items()}
        stopped, late = ray.wait(list(stops), num_returns=len(stops), timeout=deadline_s)
        for reference in late:
            self._note_error(f"{stops[reference]} did not stop within {deadline_s:g} s")
        for reference in stopped:
            try:
                ray.get(reference)
            except Exception as error:  # noqa: BLE001 - the other actors are stopped all the same
                self._note_error(f"{stops[reference]} did not stop cleanly: {error}")

    def _kill_workers(self) -> None:
        for handle in reversed(self._workers.values()):
            self._clean_up(ray.kill, handle)

    def _clean_up(self, action: Callable[..., object], *arguments: object) -> None:
        """Does one part of the clean-up. Its error goes to the file of errors.

        So it neither keeps other parts from being done, nor takes the place of the error that ended the attempt.
        """
        try:
            action(*arguments)
        except Exception:  # noqa: BLE001 - see above
            self._note_error(traceback.format_exc())

    def _await_devices(self, group: Any) -> None:
        until_s = time.monotonic() + START_DEADLINE_S
        while not group.wait(_STOP_CHECK_S):
            self._check_stop()
            if time.monotonic() > until_s:
                number = self.spec.num_ranks
                what = "no device" if number == 1 else f"not all {number} devices"
                holds = "another job holds it" if number == 1 else "other jobs hold some of them"
                raise TimeoutError(f"{what} came free within {START_DEADLINE_S:g} s; {holds}")

    def _check_stop(self) -> None:
        """Raises _StoppedAtStartError if the attempt is to stop, unless only its report of a complete model is left."""
        if self._stop.is_made and not Path(self.spec.output_dir).is_dir():
            raise _StoppedAtStartError

    def _make_workers(self, context: JobContext, group: Any, *, has_gpus: bool) -> dict[ActorName, str]:
        """Starts the processes of the job's actors; returns the addresses of their MessageServers."""
        spec = self.spec
        for name in worker_names(spec):
            computes = _computes(name)
            uses_gpu = computes and has_gpus
            options = {"resources": {DEVICE_RESOURCE: 1}} if computes else {}
            self._workers[name] = _RemoteShell.options(
                num_cpus=0,
                num_gpus=int(uses_gpu),
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group),
                **options,
            ).remote(
                name,
                context,
                _num_threads_of(name, spec),
                niceness=niceness_of(name, has_gpus=has_gpus),
                uses_gpu=uses_gpu,
            )
        return self._call(list(self._workers), "address")

    def _gpu_node(self) -> int | None:
        """Returns the NUMA node near the GPUs that Ray gave to the GPU workers.

        Returns None on a machine with one node, and if the GPUs are near different nodes.
        """
        if not has_several_nodes():
            return None
        # A worker answers once it has imported PyTorch, which may take minutes from a slow disk.
        names = list(filter(_computes, self._workers))
        return node_of_all(self._call(names, "gpu_node", deadline_s=WORKER_DEADLINE_S).values())

    def _start_workers(self, addresses: Mapping[ActorName, str]) -> CommitRecord | None:
        """Starts the actors of all workers; returns the commit from which the job resumes."""
        names = list(self._workers)
        self._call(names, "connect", addresses)
        self._call(names, "join_attempt")
        commit = start_actors([self.spec], self._call)
        self._alive = {handle.wait_until_stopped.remote(): name for name, handle in self._workers.items()}
        return commit

    def _call(
        self, names: Sequence[ActorName], method: str, *arguments: object, deadline_s: float = START_DEADLINE_S
    ) -> dict[ActorName, Any]:
        calls = {name: getattr(self._workers[name], method).remote(*arguments) for name in names}
        return _answers_of(calls, deadline_s, self._check_stop)

    def _check_workers(self) -> None:
        done, _ = ray.wait(list(self._alive), num_returns=1, timeout=0)
        for reference in done:
            name = self._alive[reference]
            raise ActorLostError(f"the process of {name} died; the kernel log tells whether memory ran out")


def _answers_of(
    calls: Mapping[ActorName, Any], deadline_s: float, check_stop: Callable[[], None]
) -> dict[ActorName, Any]:
    """Waits for the results of Ray calls and returns them by actor. Calls `check_stop` now and then meanwhile.

    Raises the error of the first actor that fails, ActorLostError if its process died, and TimeoutError if one does not
    answer in time.
    """
    names = {reference: name for name, reference in calls.items()}
    pending, answers = list(names), dict[ActorName, Any]()
    until_s = time.monotonic() + deadline_s
    while pending:
        check_stop()
        left_s = until_s - time.monotonic()
        if left_s <= 0.0:
            late = ", ".join(names[reference] for reference in pending)
            raise TimeoutError(
                f"{late} was not ready within {deadline_s:g} s; the machine is overloaded, or a disk hangs"
            )
        # One at a time: others may wait, for example for a compiler, while the first one has failed.
        done, pending = ray.wait(pending, num_returns=1, timeout=min(left_s, _STOP_CHECK_S))
        for reference in done:
            answers[names[reference]] = _answer_of(names[reference], reference)
    return {name: answers[name] for name in calls}


def _answer_of(name: ActorName, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.ActorDiedError as error:
        raise ActorLostError(
            f"the process of {name} died while it started; the kernel log tells whether memory ran out"
        ) from error


def _computes(name: ActorName) -> bool:
    """Returns whether an actor is a GPU worker, which takes a device."""
    return kind_of(name) is ActorKind.GPU_WORKER


def _num_threads_of(name: ActorName, spec: JobSpec) -> int:
    if _computes(name):
        return spec.compute_threads
    return 1 if optimizer_index(name) is None else spec.optimizer_threads


def niceness_of(name: ActorName, *, has_gpus: bool) -> int:
    """Returns the niceness of an actor's process, so that what the device computes with comes first.

    Beside a GPU only the optimizers yield. They keep cores busy for long, and a GPU waits for the thread that launches
    its kernels.
    """
    if _computes(name):
        return COMPUTING_NICENESS
    if not has_gpus:
        return COMPUTING_NICENESS + NICENESS_BESIDE_COMPUTE
    return COMPUTING_NICENESS + (_NICENESS_BESIDE_LAUNCHES if optimizer_index(name) is not None else 0)


_RemoteShell = ray.remote(concurrency_groups={"lifetime": 1})(ActorShell)


def _hide_gpus() -> None:
    """Hides all GPUs from this process. Ray leaves all of them visible to an actor that requested none.

    It must be called before torch is imported, because a CUDA context takes some 500 MiB of a GPU's memory.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def num_gpus_here() -> int:
    """Returns the number of GPUs that Ray manages on the node of this process."""
    here = ray.get_runtime_context().get_node_id()
    return next((int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["NodeID"] == here), 0)


def devices_here(num_devices: int, *, has_gpus: bool) -> Any:
    """Creates a placement group with devices of this process's node, because a job's processes share its memory.

    It has one bundle, so the job gets all devices at once or waits. The bundle includes as many GPUs if there are any,
    because actors in a group get resources only from its bundle.
    """
    here = {_NODE_LABEL: ray.get_runtime_context().get_node_id()}
    bundle = {DEVICE_RESOURCE: num_devices} | ({"GPU": num_devices} if has_gpus else {})
    return placement_group([bundle], strategy="STRICT_PACK", bundle_label_selector=[here])


def start_runner(spec: JobSpec) -> None:
    """Launches an attempt on the caller's node; Ray must be connected. Returns when the runner has begun.

    The runner may already be over then: one that refuses its job ends within milliseconds. Its journal has the reason.
    """
    # The runner requests no resources, so without this Ray could place it on any node, even a cluster's head.
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
        ray.get(started, timeout=START_DEADLINE_S)
    except ray.exceptions.RayActorError:
        # A runner that ends at once may die before its answer to `start` is sent.
        if not has_begun(Path(spec.job_dir), spec.attempt):
            raise


def find_runner(job: JobId, attempt: Attempt) -> Any | None:
    """Returns the runner of an attempt, or None if there is none."""
    try:
        return ray.get_actor(runner_name(job, attempt), namespace=NAMESPACE)
    except ValueError:
        return None


def cancel_runner(job: JobId, attempt: Attempt) -> None:
    """Asks a runner to end its job after the current step; does nothing if the runner is gone."""
    runner = find_runner(job, attempt)
    if runner is not None:
        runner.cancel.remote()


def pause_runner(job: JobId, attempt: Attempt) -> None:
    """Asks a runner to end its attempt after the current step and to keep the job's states.

    Does nothing if the runner is gone.
    """
    runner = find_runner(job, attempt)
    if runner is not None:
        runner.pause.remote()
