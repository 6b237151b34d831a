"""The processes of a job on one box: Ray actors that share the box's arena.

Ray places them, starts them and tells of their deaths. After their start, they send messages over sockets, not through
Ray (`sockets.py`). Messages between two actors keep their order.
"""

import contextlib
import ctypes
import functools
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from windlass.actors.job import SCHEDULER, ActorKind, JobContext, JobSpec, append_error, kind_of, optimizer_index
from windlass.actors.lifecycle import (
    COMPUTING_NICENESS,
    NICENESS_BESIDE_COMPUTE,
    WAIT_POLICY,
    allocator_settings,
    bind_optimizer,
    join_attempt,
)
from windlass.actors.messages import ActorFailed, Message
from windlass.actors.runtime.factory import gpu_node, import_for, open_space, read_journal, start_actor, stop_actor
from windlass.actors.runtime.outbox import Outbox
from windlass.actors.runtime.sockets import MessageClient, MessageServer
from windlass.actors.runtime.start_up import (
    START_DEADLINE_S,
    WORKER_DEADLINE_S,
    DuringWait,
    create_arena,
    free_memory_of,
    node_of_all,
    plan_attempt,
    waits_for,
    worker_names,
)
from windlass.actors.scheduler import ActorLostError
from windlass.engine.model import ModelLayout
from windlass.storage.ids import ActorName
from windlass.storage.memory import Arena, has_several_nodes
from windlass.storage.store import CommitRecord, JobSpace, StoreJournal

# The Ray resource that stands for a compute device: a GPU, or the CPU of a machine without one.
DEVICE_RESOURCE = "device"
_NODE_LABEL = "ray.io/node-id"  # a label that Ray sets on each node
_NICENESS_BESIDE_LAUNCHES = 5  # added for optimizers where a GPU computes: a third of the launching thread's share
# Seconds between two looks of a starting attempt whether it is to stop.
_STOP_CHECK_S = 1.0
# Parameters of mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


class ActorShell:
    """A worker process: starts its actor, passes messages to it, and reports its errors to the scheduler."""

    def __init__(
        self, name: ActorName, context: JobContext, num_threads: int, niceness: int, *, uses_gpu: bool
    ) -> None:
        if uses_gpu:
            os.environ.update(allocator_settings(os.environ))
        else:
            hide_gpus()
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


class RayBox:
    """The processes of a job on the box of this process, and their arena. One thread at a time, but for `send`.

    They end with this process.
    """

    def __init__(self, context: JobContext, free_nbytes: int, during_wait: DuringWait) -> None:
        """Internal: use `start`."""
        self.context = context
        self.free_nbytes = free_nbytes  # of host memory, when the attempt was planned
        self.arena: Arena
        self._spec = context.spec
        self._during_wait = during_wait
        self._workers: dict[ActorName, Any] = {}
        self._alive: dict[Any, ActorName] = {}
        self._outbox: Outbox
        self._processes = contextlib.ExitStack()  # ends the processes
        self._arena = contextlib.ExitStack()  # removes the arena

    @classmethod
    def start(
        cls,
        spec: JobSpec,
        layout: ModelLayout,
        mailboxes: Mapping[ActorName, str],
        during_wait: DuringWait,
    ) -> Self:
        """Plans the attempt on this box, and starts its processes, but none of their actors.

        `mailboxes`: addresses of MessageServers of this process, by the actors that they are for. `during_wait` is
        called in the waits of `call`, too.

        Raises:
            PlanError, InsufficientSpaceError: the job does not fit the machine.
            TimeoutError: another job holds the devices, or the machine is overloaded.
            ActorLostError: a process has died.
        """
        free_nbytes = free_memory_of(spec)
        box = cls(plan_attempt(spec, layout, free_nbytes=free_nbytes), free_nbytes, during_wait)
        with contextlib.ExitStack() as failed:
            failed.callback(box.close)
            box._start(mailboxes)
            failed.pop_all()
        return box

    def send(self, to: ActorName, message: Message) -> None:
        """Sends a message to an actor of this box, or to one that `mailboxes` names. Any thread may call it."""
        self._outbox.send(to, message)

    def call(
        self, names: Sequence[ActorName], method: str, *arguments: object, deadline_s: float = START_DEADLINE_S
    ) -> dict[ActorName, Any]:
        """Calls a method of the processes of several actors; see CallActors.

        Raises the error of the first one that fails, ActorLostError if its process died, and TimeoutError if one does
        not answer in time.
        """
        calls = {name: getattr(self._workers[name], method).remote(*arguments) for name in names}
        return _answers_of(calls, deadline_s, functools.partial(self._during_wait, waits_for(method)))

    def check(self) -> None:
        """Raises ActorLostError if a process has died."""
        done, _ = ray.wait(list(self._alive), num_returns=1, timeout=0)
        for reference in done:
            name = self._alive[reference]
            raise ActorLostError(f"the process of {name} died; the kernel log tells whether memory ran out")

    def stop_actors(self, *, is_over: bool) -> None:
        """Stops the actors. `is_over`: the job is, so its states are deleted.

        Errors go to the file of errors, because the outcome is the journal's last record.
        """
        deadline_s = self._spec.deadline_s
        stops = {handle.stop.remote(is_over): name for name, handle in self._workers.items()}
        stopped, late = ray.wait(list(stops), num_returns=len(stops), timeout=deadline_s)
        for reference in late:
            self._note_error(f"{stops[reference]} did not stop within {deadline_s:g} s")
        for reference in stopped:
            try:
                ray.get(reference)
            except Exception as error:  # noqa: BLE001 - the other actors are stopped all the same
                self._note_error(f"{stops[reference]} did not stop cleanly: {error}")

    def end_processes(self) -> None:
        """Kills all processes, and gives the devices back. Errors go to the file of errors."""
        self._processes.close()

    def close(self) -> None:
        """Kills all processes that still live, and removes the arena. Errors go to the file of errors."""
        self.end_processes()
        self._arena.close()

    def _start(self, mailboxes: Mapping[ActorName, str]) -> None:
        has_gpus = num_gpus_here() > 0
        group = devices_here(self._spec.num_ranks, has_gpus=has_gpus)
        self._processes.callback(clean_up, self._spec, remove_placement_group, group)
        self._processes.callback(self._kill_workers)
        self._await_devices(group)
        addresses = self._make_workers(group, has_gpus=has_gpus) | dict(mailboxes)
        node = self._gpu_node() if has_gpus else None
        self.arena = create_arena(self.context, node, self._during_wait)
        self._arena.callback(clean_up, self._spec, self.arena.unlink)
        self._arena.callback(clean_up, self._spec, self.arena.close)
        self._connect(addresses)
        self._outbox = Outbox(MessageClient(addresses).deliver)

    def _await_devices(self, group: Any) -> None:
        until_s = time.monotonic() + START_DEADLINE_S
        while not group.wait(_STOP_CHECK_S):
            self._during_wait("Waiting for devices that another job still holds")
            if time.monotonic() > until_s:
                number = self._spec.num_ranks
                what = "no device" if number == 1 else f"not all {number} devices"
                holds = "another job holds it" if number == 1 else "other jobs hold some of them"
                raise TimeoutError(f"{what} came free within {START_DEADLINE_S:g} s; {holds}")

    def _make_workers(self, group: Any, *, has_gpus: bool) -> dict[ActorName, str]:
        """Starts the processes of the job's actors; returns the addresses of their MessageServers."""
        spec = self._spec
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
                self.context,
                _num_threads_of(name, spec),
                niceness=niceness_of(name, has_gpus=has_gpus),
                uses_gpu=uses_gpu,
            )
        return self.call(list(self._workers), "address")

    def _gpu_node(self) -> int | None:
        """Returns the NUMA node near the GPUs that Ray gave to the GPU workers.

        Returns None on a machine with one node, and if the GPUs are near different nodes.
        """
        if not has_several_nodes():
            return None
        # A worker answers once it has imported PyTorch, which may take minutes from a slow disk.
        names = list(filter(_computes, self._workers))
        return node_of_all(self.call(names, "gpu_node", deadline_s=WORKER_DEADLINE_S).values())

    def _connect(self, addresses: Mapping[ActorName, str]) -> None:
        names = list(self._workers)
        self.call(names, "connect", addresses)
        self.call(names, "join_attempt")
        self._alive = {handle.wait_until_stopped.remote(): name for name, handle in self._workers.items()}

    def _kill_workers(self) -> None:
        for handle in reversed(self._workers.values()):
            clean_up(self._spec, ray.kill, handle)

    def _note_error(self, text: str) -> None:
        append_error(Path(self._spec.job_dir), self._spec.attempt, text)


def clean_up(spec: JobSpec, action: Callable[..., object], *arguments: object) -> None:
    """Does one part of an attempt's clean-up. Its error goes to the file of errors.

    So it neither keeps other parts from being done, nor takes the place of the error that ended the attempt.
    """
    try:
        action(*arguments)
    except Exception:  # noqa: BLE001 - see above
        append_error(Path(spec.job_dir), spec.attempt, traceback.format_exc())


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
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error  # Ray wraps an actor's exception; its cause is the one to show to the user
    except ray.exceptions.ActorDiedError as error:
        raise ActorLostError(
            f"the process of {name} died while it started; the kernel log tells whether memory ran out"
        ) from error
    except ray.exceptions.RayActorError as error:
        raise ActorLostError(f"the process of {name} does not answer while it starts: {error}") from error


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


def hide_gpus() -> None:
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
