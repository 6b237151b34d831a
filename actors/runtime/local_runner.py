"""Runs all actors of a job in one process: for tests, for the GPU check, and for machines without Ray."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from windlass.actors.gpu_worker import GpuWorker
from windlass.actors.job import (
    GPU_WORKER,
    SCHEDULER,
    JobContext,
    JobSpec,
    SsdFacts,
    arena_free_nbytes,
    keeping_kernel,
    make_context,
    optimizer_name,
    require_planned_device_room,
    require_room,
    ssd_name,
    survey_ssds,
)
from windlass.actors.lifecycle import StopRequest
from windlass.actors.messages import ActorFailed, Message
from windlass.actors.optimizer import CpuOptimizer
from windlass.actors.scheduler import GOES_ON, Scheduler
from windlass.actors.ssd import SsdServer
from windlass.engine.model import Partition, partition_folder
from windlass.storage.ids import ActorName
from windlass.storage.memory import Arena, arena_path, remove_leftovers
from windlass.storage.store import last_common_commit


class _Actor(Protocol):
    def post(self, message: Message) -> None: ...


def run_local(
    spec: JobSpec,
    *,
    partition: Partition | None = None,
    device: str = "cpu",
    poison_released: bool = False,
    direct: bool = True,
    ssds: tuple[SsdFacts, ...] | None = None,
    on_message: Callable[[ActorName, Message], None] | None = None,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Trains a job in this process, from its last commit if it has one, and returns its outcome.

    Without `ssds`, the SSDs' stored measurements are used, or new ones are made. `on_message` is called with every
    message between actors. With `stop`, another thread can end the attempt early. After an exception or a pause, the
    job's states stay on the SSDs.

    Raises:
        TimeoutError: the attempt is over and its outcome is in the journal, but some of its threads hang.
    """
    partition = partition or partition_folder(spec.model_dir, spec.training.precision)
    path = arena_path(Path(spec.arena_dir), spec.job, spec.attempt)
    remove_leftovers(Path(spec.arena_dir))
    ssds = ssds or survey_ssds(spec, direct=direct)
    context = make_context(spec, partition.layout, str(path), ssds, free_nbytes=arena_free_nbytes(spec))
    require_planned_device_room(spec)
    require_room(context, direct=direct)
    actors: dict[ActorName, _Actor] = {}
    is_over = False

    def send(to: ActorName, message: Message) -> None:
        if on_message is not None:
            on_message(to, message)
        try:
            actors[to].post(message)
        except Exception as error:  # noqa: BLE001 - the receiver's error; the sender does not wait for an answer
            actors[SCHEDULER].post(ActorFailed.of(error, actor=to, about=message))

    def end_server(server: SsdServer) -> None:
        server.stop(delete_store=is_over, deadline_s=spec.deadline_s)

    # If one actor hangs at the end, all others are still stopped and the arena is still removed.
    with contextlib.ExitStack() as ending:
        arena = Arena.create(path, context.plan.arena_nbytes)
        ending.callback(arena.unlink)
        ending.callback(arena.close)
        servers = {ssd_name(i): _ssd_server(context, i, send, direct) for i in range(len(spec.ssd_dirs))}
        actors |= servers
        for server in servers.values():
            server.setup()
            ending.callback(end_server, server)
        commit = last_common_commit([server.commits() for server in servers.values()])
        for server in servers.values():
            server.resume_from(commit)
        scheduler = Scheduler(context, send, resume_from=commit, stop=stop)
        resumed = keeping_kernel(context, commit)
        optimizers = {
            optimizer_name(i): CpuOptimizer(optimizer_name(i), i, resumed, send) for i in range(spec.num_cpu_optimizers)
        }
        worker = GpuWorker(resumed, partition, send, device=device, poison_released=poison_released)
        actors |= {**optimizers, GPU_WORKER: worker, SCHEDULER: scheduler}
        others: list[CpuOptimizer | GpuWorker] = [*optimizers.values(), worker]
        for actor in others:
            actor.setup()
            ending.callback(actor.stop)
        outcome = scheduler.run()
        is_over = outcome["status"] not in GOES_ON
    return outcome


def _ssd_server(context: JobContext, index: int, send: Callable[[ActorName, Message], None], direct: bool) -> SsdServer:
    return SsdServer(
        ssd_name(index),
        context.spec.ssd_dirs[index],
        context.geometry(index),
        context.arena_path,
        send,
        io=context.ssds[index].io,
        direct=direct,
        scratch_slot_nbytes=context.plan.activations.slot_nbytes,
        num_scratch_slots=context.num_scratch_slots(index),
    )
