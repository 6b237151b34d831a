"""Builds the actors of a job by name. Each imports only the modules that it needs: an SSD server never loads torch."""

import functools
import importlib
from typing import Any

from windlass.actors.job import GPU_WORKER, JobContext, optimizer_index
from windlass.storage.ids import ActorName

# The base module of all models. transformers loads it when the first model is built, which takes a second or two.
_MODELS = "transformers.modeling_utils"


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


def build_actor(
    name: ActorName,
    context: JobContext,
    send: Any,
    *,
    uses_gpu: bool = False,
    partition: Any = None,
    device: str | None = None,
    poison_released: bool = False,
    direct: bool = True,
) -> Any:
    """Builds the actor of a name, without setting it up.

    Args:
        name: of the actor.
        context: of the attempt; for all but SSD servers, with the kernels of the commit from which the job resumes.
        send: sends a message to another actor.
        uses_gpu: Ray gave this process a GPU.
        partition: the model's `Partition`; None: it is made from the model's folder.
        device: the device that computes; None: the GPU if there is one.
        poison_released: fill released buffers with NaN, for tests.
        direct: False for file systems without O_DIRECT.

    Raises:
        GpuUnusableError: PyTorch cannot use that GPU.
    """
    kind, _, number = name.partition("-")
    index = int(number)
    if kind == "ssd":
        from windlass.actors.ssd import SsdServer

        path, facts = context.spec.ssd_dirs[index], context.ssds[index]
        return SsdServer(
            name,
            path,
            context.geometry(index),
            context.arena_path,
            send,
            io=facts.io,
            direct=direct,
            scratch_slot_nbytes=context.plan.activations.slot_nbytes,
            num_scratch_slots=context.num_scratch_slots(index),
        )
    if kind == "optimizer":
        from windlass.actors.optimizer import CpuOptimizer, ModelProcess

        start_model_worker = functools.partial(ModelProcess, context)
        return CpuOptimizer(name, index, context, send, start_model_worker=start_model_worker)
    from windlass.actors.gpu_worker import GpuWorker
    from windlass.engine.device import compute_device, retain_freed_memory
    from windlass.engine.model import partition_folder

    if device is None:
        device = compute_device(uses_gpu=uses_gpu).type
        if device == "cpu":
            retain_freed_memory()
    partition = partition or partition_folder(context.spec.model_dir, context.formats.precision)
    return GpuWorker(context, partition, send, device=device, poison_released=poison_released)
