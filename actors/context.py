"""What every actor of a job derives from its spec in the same way: names, sizes, the plan."""

from dataclasses import dataclass

from windlass.actors.job_spec import JobSpec
from windlass.engine.layout import ModelLayout
from windlass.planner.plan import ModelSize, Plan, make_plan
from windlass.storage.ids import (
    STATE_ITEMSIZE,
    ActorName,
    ChunkKey,
    Precision,
    Rank,
    SsdIndex,
    StateKind,
    param_kind,
)
from windlass.storage.store_format import StoreGeometry
from windlass.storage.transfers import DEFAULT_IO, IoSettings

SCHEDULER = ActorName("scheduler")
GPU_WORKER = ActorName("gpu-0")


def optimizer_name(index: int) -> ActorName:
    """Name of an optimizer of the pool."""
    return ActorName(f"optimizer-{index}")


def ssd_name(index: int) -> ActorName:
    """Name of the server of one SSD."""
    return ActorName(f"ssd-{index}")


def grad_itemsize(spec: JobSpec) -> int:
    """Bytes of a gradient element on its way to the optimizer.

    With one micro-batch the gradient of a bf16 model is bf16 to begin with. Sums over micro-batches are fp32.
    """
    hyper = spec.hyperparameters
    return 2 if hyper.precision is Precision.BF16 and hyper.num_microbatches == 1 else 4


def evaluation_batch_size(spec: JobSpec) -> int:
    """Examples of a micro-batch in evaluation: as many as in training."""
    return -(-spec.hyperparameters.batch_size // spec.hyperparameters.num_microbatches)


def num_evaluation_groups(spec: JobSpec) -> int:
    """Groups of micro-batches that an evaluation takes; 0 without validation data."""
    num_microbatches = -(-spec.num_validation_examples // evaluation_batch_size(spec))
    return -(-num_microbatches // spec.hyperparameters.num_microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdFacts:
    """How one SSD is used by a job."""

    io: IoSettings
    weight: int  # its share of the chunks, beside the other SSDs' weights


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """One attempt at a job, as its actors see it."""

    spec: JobSpec
    layout: ModelLayout
    plan: Plan
    arena_path: str
    ssds: tuple[SsdFacts, ...]  # of each of the job's SSDs

    @property
    def precision(self) -> Precision:
        """The job's number format."""
        return self.spec.hyperparameters.precision

    def geometry(self, ssd: int) -> StoreGeometry:
        """The share of one SSD."""
        return StoreGeometry(
            job=self.spec.job,
            rank=Rank(0),
            attempt=self.spec.attempt,
            ssd=SsdIndex(ssd),
            ssd_weights=tuple(each.weight for each in self.ssds),
            precision=self.precision,
            chunk_numel=self.layout.chunk_numel,
            chunks_per_block=tuple(self.layout.num_chunks(block.index) for block in self.layout.blocks),
        )

    def chunk_numel(self, key: ChunkKey) -> int:
        """Elements that a chunk really holds; the last of a block may be short."""
        start, stop = self.layout.chunk_range(key)
        return stop - start

    def state_offsets(self) -> dict[StateKind, int]:
        """Where each state begins inside an optimizer's slot, in bytes."""
        offsets, offset = {}, 0
        for kind, itemsize in STATE_ITEMSIZE[self.precision].items():
            offsets[kind] = offset
            offset += itemsize * self.layout.chunk_numel
        return offsets


def aligned(nbytes: int, alignment: int = 4096) -> int:
    """`nbytes` rounded up to what O_DIRECT moves; never nothing, as the chunk of a block without params moves too."""
    return max(1, -(-nbytes // alignment)) * alignment


def make_context(
    spec: JobSpec, layout: ModelLayout, arena_path: str, ssds: tuple[SsdFacts, ...] | None = None
) -> JobContext:
    """Plans the job; `ssds` None: all alike. Raises PlanError where its budget is too small."""
    ssds = ssds or tuple(SsdFacts(io=DEFAULT_IO, weight=1) for _ in spec.ssd_dirs)
    itemsizes = STATE_ITEMSIZE[spec.hyperparameters.precision]
    size = ModelSize(
        block_numels=tuple(block.numel for block in layout.blocks),
        chunk_numel=layout.chunk_numel,
        param_itemsize=itemsizes[param_kind(spec.hyperparameters.precision)],
        state_itemsize=sum(itemsizes.values()),
    )
    plan = make_plan(
        size,
        num_optimizers=spec.num_cpu_optimizers,
        grad_itemsize=grad_itemsize(spec),
        keep_grads=spec.hyperparameters.clip_norm is not None,
        host_memory_nbytes=spec.host_memory_nbytes,
    )
    return JobContext(spec=spec, layout=layout, plan=plan, arena_path=arena_path, ssds=ssds)
