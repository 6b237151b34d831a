"""All actors of a job in one process: for tests, for the GPU check, for machines without Ray."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from windlass.actors.admission import require_room
from windlass.actors.context import GPU_WORKER, SCHEDULER, JobContext, make_context, optimizer_name, ssd_name
from windlass.actors.cpu_optimizer import CpuOptimizer
from windlass.actors.gpu_worker import GpuWorker
from windlass.actors.job_spec import JobSpec
from windlass.actors.messages import Message
from windlass.actors.scheduler import Scheduler
from windlass.actors.ssd_server import SsdServer
from windlass.engine.partition import Partition, partition_folder
from windlass.storage.arena import Arena, arena_path
from windlass.storage.ids import ActorName


class _Actor(Protocol):
    def post(self, message: Message) -> None: ...


def run_local(
    spec: JobSpec,
    *,
    partition: Partition | None = None,
    device: str = "cpu",
    poison_released: bool = False,
    direct: bool = True,
    num_ssd_threads: int = 4,
    on_message: Callable[[ActorName, Message], None] | None = None,
) -> dict[str, Any]:
    """Trains a job in this process and returns its outcome. `on_message` sees every message between actors."""
    partition = partition or partition_folder(spec.model_dir, spec.hyperparameters.precision)
    path = arena_path(Path(spec.arena_dir), spec.job, spec.attempt)
    context = make_context(spec, partition.layout, str(path))
    require_room(context)
    arena = Arena.create(path, context.plan.arena_nbytes)
    actors: dict[ActorName, _Actor] = {}

    def send(to: ActorName, message: Message) -> None:
        if on_message is not None:
            on_message(to, message)
        actors[to].post(message)

    servers = {ssd_name(i): _ssd_server(context, i, send, direct, num_ssd_threads) for i in range(len(spec.ssd_dirs))}
    optimizers = {
        optimizer_name(i): CpuOptimizer(optimizer_name(i), i, context, send) for i in range(spec.num_cpu_optimizers)
    }
    worker = GpuWorker(context, partition, send, device=device, poison_released=poison_released)
    stages: list[SsdServer | CpuOptimizer | GpuWorker] = [*servers.values(), *optimizers.values(), worker]
    started: list[SsdServer | CpuOptimizer | GpuWorker] = []
    try:
        actors |= {**servers, **optimizers, GPU_WORKER: worker}
        scheduler = Scheduler(context, send)
        actors[SCHEDULER] = scheduler
        for actor in stages:
            actor.setup()
            started.append(actor)
        return scheduler.run()
    finally:
        for actor in reversed(started):
            if isinstance(actor, SsdServer):
                actor.stop(delete_store=True)
            else:
                actor.stop()
        arena.close()
        arena.unlink()


def _ssd_server(
    context: JobContext, index: int, send: Callable[[ActorName, Message], None], direct: bool, num_threads: int
) -> SsdServer:
    directory = Path(context.spec.ssd_dirs[index])
    return SsdServer(
        ssd_name(index),
        directory,
        context.geometry(index),
        context.arena_path,
        send,
        num_threads=num_threads,
        direct=direct,
    )
