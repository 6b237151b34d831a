"""Counts the device memory that a job's GPU worker will allocate, and compares it with the job's budget."""

from windlass.actors.job.context import JobContext, evaluation_batch_size, grad_precision
from windlass.actors.job.device_budget import require_planned_device_room, too_little_device_memory
from windlass.actors.job.spec import JobSpec
from windlass.engine.data import PreparedDataset
from windlass.engine.memory_estimate import TracedFacts, device_need
from windlass.engine.memory_plan import DeviceNeed
from windlass.engine.memory_plan import evaluation_shapes as shapes_of_evaluation
from windlass.engine.model import Partition


def device_need_of_job(context: JobContext, partition: Partition, *, device: str = "cpu") -> DeviceNeed:
    """Counts the job's peak device memory in a step or an evaluation.

    The job's dataset must be prepared, and no block runner of the partition may be in use.

    Raises:
        DeviceNeedUnknownError: a block cannot be run on shapes only.
    """
    spec, hyper = context.spec, context.spec.training
    dataset = PreparedDataset.open(spec.dataset_dir, "train")
    shapes = dataset.largest_shapes(hyper.batch_size, hyper.num_microbatches)
    return device_need(
        TracedFacts(partition, device=device),
        context.plan,
        shapes[: context.plan.group_size],
        formats=context.formats,
        grad_precision=grad_precision(spec),
        num_microbatches=hyper.num_microbatches,
        num_lanes=hyper.lanes,
        num_ahead=spec.effective_ordering.max_prefetched,
        max_tokens=evaluation_batch_size(spec) * hyper.sequence_length,
        head_slices=hyper.head_slices,
        cut_matrices=hyper.cut_matrices,
        evaluation_shapes=evaluation_shapes(spec) if spec.has_validation else (),
        on_gpu=device != "cpu",
        layout=context.layout,
        num_groups_in_flight=context.num_groups_in_flight,
    )


def require_device_room(
    context: JobContext, partition: Partition, *, device: str = "cpu", gpu_nbytes: int | None = None
) -> None:
    """Checks that the job's device memory budget, if it has one, and the memory of its GPU cover its need.

    The need is that of the plan. Without a plan it is counted by `device_need_of_job`, whose conditions apply. On a
    GPU it includes what PyTorch's allocator reserves beside the job's tensors. `gpu_nbytes`: the memory of the GPU,
    where it is known. Without a budget and a plan nothing is checked.

    Raises:
        PlanError: the budget, or the GPU, is too small.
        DeviceNeedUnknownError: a block cannot be run on shapes only.
    """
    on_gpu = device != "cpu"
    require_planned_device_room(context.spec, on_gpu=on_gpu, gpu_nbytes=gpu_nbytes)
    limit_nbytes = context.spec.device_memory_nbytes
    if limit_nbytes is None or context.spec.planned_device_nbytes is not None:
        return
    limit_nbytes = min(limit_nbytes, gpu_nbytes or limit_nbytes)
    need = device_need_of_job(context, partition, device=device)
    # On a CPU the computing cores also make the copies: they end before the next layer, so no buffer waits for one.
    needed_nbytes = need.reserved_nbytes if on_gpu else need.settled_nbytes
    if needed_nbytes > limit_nbytes:
        raise too_little_device_memory(context.spec, limit_nbytes, needed_nbytes, need.in_words(on_gpu=on_gpu))


def evaluation_shapes(spec: JobSpec) -> list[tuple[int, int]]:
    """Returns the shapes (examples, tokens) of the micro-batches in an evaluation's first group.

    All examples are taken to be as long as the longest.
    """
    dataset, size = PreparedDataset.open(spec.dataset_dir, "validation"), evaluation_batch_size(spec)
    return shapes_of_evaluation(dataset.num_examples, dataset.longest_width, size, spec.training.num_microbatches)
