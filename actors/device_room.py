"""How much device memory a job takes, as its GPU worker allocates it."""

from windlass.actors.context import JobContext, evaluation_batch_size, grad_precision
from windlass.actors.job_spec import JobSpec
from windlass.engine.dataset import PreparedDataset
from windlass.engine.device_need import device_need
from windlass.engine.partition import Partition
from windlass.planner.device_need import DeviceNeed


def device_need_of_job(context: JobContext, partition: Partition, *, device: str = "cpu") -> DeviceNeed:
    """At the worst moment of a step or an evaluation; its dataset must be there. No runner of the partition may be in
    use.

    Raises:
        DeviceNeedUnknownError: a block cannot be gone through by shapes alone.
    """
    spec, hyper = context.spec, context.spec.hyperparameters
    dataset = PreparedDataset.open(spec.dataset_dir, "train")
    shapes = dataset.largest_shapes(hyper.batch_size, hyper.num_microbatches)
    return device_need(
        partition,
        context.plan,
        shapes[: context.plan.group_size],
        formats=context.formats,
        grad_precision=grad_precision(spec),
        num_microbatches=hyper.num_microbatches,
        num_ahead=spec.effective_ordering.max_prefetched,
        max_tokens=evaluation_batch_size(spec) * hyper.sequence_length,
        evaluation_shapes=evaluation_shapes(spec) if spec.has_validation else (),
        device=device,
    )


def evaluation_shapes(spec: JobSpec) -> list[tuple[int, int]]:
    """(examples, tokens) of the micro-batches of an evaluation's first group, if all were as long as the longest."""
    dataset, size = PreparedDataset.open(spec.dataset_dir, "validation"), evaluation_batch_size(spec)
    ((_, width),) = dataset.largest_shapes(1, 1)
    num_full, num_rest = divmod(min(dataset.num_examples, size * spec.hyperparameters.num_microbatches), size)
    return [(size, width)] * num_full + [(num_rest, width)] * (num_rest > 0)
