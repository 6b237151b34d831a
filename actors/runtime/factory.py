"""Starts the actors of a job by name. Each imports only the modules that it needs: an SSD server never loads torch."""

import functools
import importlib
from dataclasses import dataclass
from typing import Any

from windlass.actors.job import GPU_WORKER, JobContext, keeping_kernel, optimizer_index
from windlass.storage.ids import ActorName
from windlass.storage.store import CommitRecord, JobSpace

# The base module of all models. transformers loads it when the first model is built, which takes a second or two.
_MODELS = "transformers.modeling_utils"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """The options of actors that all run in one process."""

    partition: Any  # the model's `Partition`
    device: str  # that computes
    poison_released: bool  # fill released buffers with NaN, for tests
    direct: bool  # False for file systems without O_DIRECT


def import_for(name: ActorName) -> None:
    """Imports the modules that an actor will need. These imports are most of its start-up time."""
    if name == GPU_WORKER:
        modules = ["windlass.actors.gpu_worker.worker", _MODELS]
    elif optimizer_index(name) is not None:
        modules = ["windlass.actors.optimizer.worker"]
    else:
        modules = ["windlass.actors.ssd.server"]
    for module in modules:
        importlib.import_module(module)


def open_space(server: ActorName, context: JobContext, *, direct: bool = True) -> JobSpace:
    """Opens the space of the job on the SSD of a server. `direct=False` is for file systems without O_DIRECT.

    Raises the errors of `JobSpace.open`.
    """
    index = _number_of(server)
    return JobSpace.open(
        context.spec.ssd_dirs[index],
        context.geometry(index),
        direct=direct,
        scratch_slot_nbytes=context.plan.activations.slot_nbytes,
        num_scratch_slots=context.num_scratch_slots(index),
    )


def gpu_node(*, uses_gpu: bool) -> int | None:
    """Returns the NUMA node whose memory is nearest to the GPU that Ray gave to this process; None without one.

    Raises:
        GpuUnusableError: PyTorch cannot use that GPU.
    """
    from windlass.engine.device import compute_device, memory_node

    return memory_node(compute_device(uses_gpu=uses_gpu))


def start_actor(
    name: ActorName,
    context: JobContext,
    commit: CommitRecord | None,
    send: Any,
    *,
    space: JobSpace | None = None,
    uses_gpu: bool = False,
    local: LocalOptions | None = None,
) -> Any:
    """Starts the actor of a name. It runs until its `stop` is called. After an error nothing of it stays open.

    Args:
        name: of the actor.
        context: of the attempt.
        commit: from which the job resumes; None: it begins.
        send: sends a message to another actor.
        space: for an SSD server, from `open_space`. The server closes it, also after an error.
        uses_gpu: Ray gave this process a GPU.
        local: all actors run in this process; None: this process is the actor's own.

    Raises:
        GpuUnusableError: PyTorch cannot use that GPU.
    """
    kind, index = name.partition("-")[0], _number_of(name)
    if kind == "ssd":
        from windlass.actors.ssd import SsdServer

        assert space is not None, "an SSD server serves an open space"
        spec, io = context.spec, context.ssds[index].io
        return SsdServer(name, space, commit, context.arena_path, send, io=io, deadline_s=spec.deadline_s)
    context = keeping_kernel(context, commit)
    if kind == "optimizer":
        from windlass.actors.optimizer import CpuOptimizer, ModelProcess

        # A process of its own, which starts in seconds, only saves memory of long jobs.
        start_model_worker = functools.partial(ModelProcess, context) if local is None else None
        return CpuOptimizer(name, index, context, send, start_model_worker=start_model_worker)
    from windlass.actors.gpu_worker import GpuWorker
    from windlass.engine.device import compute_device, retain_freed_memory
    from windlass.engine.model import partition_folder

    if local is not None:
        return GpuWorker(context, local.partition, send, device=local.device, poison_released=local.poison_released)
    device = compute_device(uses_gpu=uses_gpu)
    if device.type == "cpu":
        retain_freed_memory()
    partition = partition_folder(context.spec.model_dir, context.formats.precision)
    return GpuWorker(context, partition, send, device=device.type)


def _number_of(name: ActorName) -> int:
    return int(name.partition("-")[2])
