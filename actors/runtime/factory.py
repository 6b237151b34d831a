"""Starts the actors of a job by name. Each imports only the modules that it needs: an SSD server never loads torch."""

import functools
import gc
import importlib
import logging
from dataclasses import dataclass
from typing import Any

from windlass.actors.job import ActorKind, JobContext, index_of, keeping_kernel, kind_of
from windlass.engine.model import MODELS_MODULE
from windlass.storage.ids import ActorName
from windlass.storage.integrity import StoreError
from windlass.storage.store import CommitRecord, JobSpace, StoreJournal
from windlass.storage.store import read_journal as read_store_journal

_logger = logging.getLogger(__name__)

# Modules that each kind of actor needs.
_MODULES = {
    ActorKind.SSD_SERVER: ("windlass.actors.ssd.server",),
    ActorKind.OPTIMIZER: ("windlass.actors.optimizer.worker",),
    ActorKind.PARAM_SERVER: ("windlass.actors.ssd.param_server",),
    ActorKind.GPU_WORKER: ("windlass.actors.gpu_worker.worker", MODELS_MODULE),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """The options of actors that all run in one process."""

    partitions: tuple[Any, ...]  # a model's `Partition` for each GPU worker, because each installs params in its own
    devices: tuple[str, ...]  # that compute, one for each GPU worker
    poison_released: bool  # fill released buffers with NaN, for tests
    direct: bool  # False for file systems without O_DIRECT


def import_for(name: ActorName) -> None:
    """Imports the modules that an actor will need. These imports are most of its start-up time."""
    for module in _MODULES[kind_of(name)]:
        importlib.import_module(module)


def read_journal(server: ActorName, context: JobContext, *, direct: bool = True) -> StoreJournal:
    """Returns the job's commits on the SSD of a server, without opening the store. Raises StoreError."""
    index = index_of(server)
    return read_store_journal(context.spec.ssd_dirs[index], context.geometry(index), direct=direct)


def open_space(server: ActorName, context: JobContext, *, direct: bool = True) -> JobSpace:
    """Opens the space of the job on the SSD of a server. `direct=False` is for file systems without O_DIRECT.

    Raises the errors of `JobSpace.open`.
    """
    index = index_of(server)
    return JobSpace.open(
        context.spec.ssd_dirs[index],
        context.geometry(index),
        direct=direct,
        scratch_slot_nbytes=context.plan.activations.slot_nbytes,
        num_scratch_slots=context.num_reserved_slots(index),
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
    actor = _make_actor(name, context, commit, send, space=space, uses_gpu=uses_gpu, local=local)
    # What exists by now stays, above all the modules. Python's collector of cycles would look at all of it again and
    # again, for 0.2 s of a GPU worker's process, in which no thread of it runs Python code.
    gc.freeze()
    return actor


def _make_actor(
    name: ActorName,
    context: JobContext,
    commit: CommitRecord | None,
    send: Any,
    *,
    space: JobSpace | None,
    uses_gpu: bool,
    local: LocalOptions | None,
) -> Any:
    kind, index = kind_of(name), index_of(name)
    if kind is ActorKind.SSD_SERVER:
        from windlass.actors.ssd import SsdServer

        assert space is not None, "an SSD server serves an open space"
        spec, io = context.spec, context.ssds[index].io
        _free_other_epochs(space)  # after `decide`: from now on, no move can put them into force
        return SsdServer(name, space, commit, context.arena_path, send, io=io, deadline_s=spec.deadline_s)
    context = keeping_kernel(context, commit)
    if kind is ActorKind.OPTIMIZER:
        from windlass.actors.optimizer import CpuOptimizer, ModelProcess

        # A process of its own, which starts in seconds, only saves memory of long jobs.
        start_model_worker = functools.partial(ModelProcess, context) if local is None else None
        return CpuOptimizer(name, index, context, send, start_model_worker=start_model_worker)
    if kind is ActorKind.PARAM_SERVER:
        from windlass.actors.ssd import ParamServer

        return ParamServer(name, context, send)
    from windlass.actors.gpu_worker import GpuWorker
    from windlass.engine.device import compute_device, retain_freed_memory
    from windlass.engine.model import partition_folder

    if local is not None:
        partition, device, poisons = local.partitions[index], local.devices[index], local.poison_released
        return GpuWorker(context, partition, send, rank=index, device=device, poison_released=poisons)
    gpu = compute_device(uses_gpu=uses_gpu)
    if gpu.type == "cpu":
        retain_freed_memory()
    partition = partition_folder(context.spec.model_dir, context.formats.precision)
    return GpuWorker(context, partition, send, rank=index, device=str(gpu))


def _free_other_epochs(space: JobSpace) -> None:
    """Frees the space of the job's other layouts. An SSD error is logged, because the attempt can do without it."""
    try:
        space.free_other_epochs()
    except (StoreError, OSError) as error:
        _logger.warning("the space of other layouts of the job is not free: %s", error)
    except BaseException:
        space.close()
        raise


def stop_actor(name: ActorName, actor: Any, *, is_over: bool) -> None:
    """Ends an actor's threads and closes its files. `is_over`: the job is, so an SSD server deletes its states.

    Raises:
        TimeoutError: a thread of the actor hangs.
    """
    gc.unfreeze()
    if kind_of(name) is ActorKind.SSD_SERVER:
        actor.stop(delete_store=is_over)
    else:
        actor.stop()
