"""What a job is told when it is launched. Plain data: it travels to every actor."""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from windlass.actors.job.pace import Pace
from windlass.actors.policy import Ordering, QueueOrder
from windlass.engine.memory_plan import ActivationChoice, Placement, UpdateOrder
from windlass.storage.ids import Attempt, Formats, JobId, Kernel, ModelKernel, Precision, StatePrecision


class Schedule(StrEnum):
    """How the learning rate falls after warm-up."""

    LINEAR = "linear"
    COSINE = "cosine"
    CONSTANT = "constant"


class Optimizer(StrEnum):
    """What turns gradients into updates."""

    ADAMW = "adamw"  # decoupled weight decay
    ADAM = "adam"  # weight decay as a part of the gradient


class Initialization(StrEnum):
    """Where the first weights come from."""

    WEIGHTS = "weights"  # the model folder's safetensors
    RANDOM = "random"  # the architecture's own initialisation, per block, from the job's seed


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSettings:
    """The settings of a job that decide when blocks are updated, where gradients wait until then, and in which type.

    The runner and the planner both derive these decisions here, so that a job runs as it was planned.
    """

    precision: Precision  # of the model
    clips: bool  # the norm of all gradients is limited
    accumulation_precision: Precision  # of sums over micro-batches: fp32, or that of the model
    update_order: UpdateOrder | None  # None: ACTIVE where that is exact, else KEPT

    @property
    def needs_all_gradients(self) -> bool:
        """Whether nothing may be updated before every gradient is known."""
        return self.clips or self.precision is Precision.FP16

    @property
    def order_of_updates(self) -> UpdateOrder:
        """The order that was asked for, or the fastest one that is exact."""
        return self.update_order or (UpdateOrder.KEPT if self.needs_all_gradients else UpdateOrder.ACTIVE)

    def precision_in_transit(self, num_microbatches: int) -> Precision:
        """The type of gradients on their way to the optimizer.

        With one micro-batch the gradient of a model in half precision is in that to begin with. Sums over micro-batches
        are fp32, unless the job wants less.
        """
        is_summed = num_microbatches > 1 and self.accumulation_precision is Precision.FP32
        return Precision.FP32 if is_summed else self.precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """What changes the result. Every number here is final: "auto" has been resolved."""

    epochs: int
    batch_size: int  # examples a step
    num_microbatches: int  # parts the batch is computed in
    sequence_length: int  # longer examples are cut
    learning_rate: float  # the peak
    warmup_steps: int
    schedule: Schedule
    weight_decay: float  # not applied to norms and biases
    beta1: float
    beta2: float
    epsilon: float
    clip_norm: float | None  # global gradient norm; None: no clipping
    precision: Precision
    seed: int
    optimizer: Optimizer = Optimizer.ADAMW
    state_precision: StatePrecision = StatePrecision.FP32
    accumulation_precision: Precision = Precision.FP32  # of sums over micro-batches: fp32, or that of the model
    update_order: UpdateOrder | None = None  # None: ACTIVE where that is exact, else KEPT
    kernel: Kernel | None = None  # None: compiled where there is a compiler
    model_kernels: tuple[ModelKernel, ...] | None = None  # beside torch's own; None: what the device can have
    max_bad_steps: int = 10  # steps in a row whose loss or gradient is not finite; one more ends the job

    @property
    def formats(self) -> Formats:
        """Of the model and of the states."""
        return Formats(self.precision, self.state_precision)

    @property
    def gradients(self) -> GradientSettings:
        """The settings that decide what becomes of gradients."""
        return GradientSettings(
            precision=self.precision,
            clips=self.clip_norm is not None,
            accumulation_precision=self.accumulation_precision,
            update_order=self.update_order,
        )

    @property
    def order_of_updates(self) -> UpdateOrder:
        """See `GradientSettings`."""
        return self.gradients.order_of_updates

    @property
    def keeps_grads(self) -> bool:
        """Whether gradients wait until all are known."""
        return self.order_of_updates.keeps_grads


class FinalModel(StrEnum):
    """Which weights the job's model has."""

    LAST = "last"  # those of the last step
    BEST = "best"  # those with the lowest validation loss


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopping:
    """After how many evaluations in a row without an improvement a job ends."""

    patience: int
    min_delta: float = 0.0  # a loss is an improvement where it is lower by more than this than the last one that was


_FIRST_ATTEMPT = Attempt(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One attempt at a job. Paths are absolute and on every node the same."""

    job: JobId
    attempt: Attempt = _FIRST_ATTEMPT
    model_dir: str  # config, tokenizer, safetensors
    initialization: Initialization = Initialization.WEIGHTS
    layout_file: str  # what `windlass.engine.checkpoint.check_model` wrote: the model's blocks
    dataset_dir: str  # what `windlass.engine.data.prepare` wrote
    num_validation_examples: int = 0  # 0: no validation data
    job_dir: str  # journal and logs
    output_dir: str  # the final model's folder; checkpoints go beside it as `{output_dir}-step-{n}`
    ssd_dirs: tuple[str, ...]  # one SSD server each; none: all states rest in host memory, and a crash loses the job
    arena_dir: str = "/dev/shm"
    hyperparameters: Hyperparameters
    total_steps: int
    evaluate_every: int | None = None  # steps; None: only at the end. Without validation data never
    # What is exported besides the final model: every so many steps; at the first commit after so many minutes; after
    # the evaluation with the lowest loss so far. Of the first two kinds only the last `keep_checkpoints` stay.
    checkpoint_every: int | None = None
    checkpoint_minutes: float | None = None
    keep_best: bool = False
    keep_checkpoints: int | None = None
    early_stopping: EarlyStopping | None = None
    final_model: FinalModel = FinalModel.LAST
    num_cpu_optimizers: int = 1
    compute_threads: int = 1  # of the GPU worker's process
    optimizer_threads: int = 1  # of each optimizer
    kernel_dir: str | None = None  # where compiled update kernels are kept; None: nowhere
    host_memory_nbytes: int | None = None  # budget for the arena; None: what the machine has free
    device_memory_nbytes: int | None = None  # budget on the device; None: all that is there
    planned_device_nbytes: int | None = None  # what the plan's peak there is; None: it is counted when the job starts
    # What a step is to take, by the job's plan or its earlier attempts: until this one knows better.
    expected_pace: Pace | None = None
    deadline_s: float  # longest wait for any one thing within a step
    placement: Placement = field(default_factory=Placement)  # where things rest, as far as somebody has decided
    ordering: Ordering = field(default_factory=Ordering)  # `effective_ordering` is what holds

    @property
    def has_validation(self) -> bool:
        """A validation file was given."""
        return self.num_validation_examples > 0

    @property
    def keeps_best(self) -> bool:
        """The model with the lowest validation loss is a checkpoint."""
        return self.has_validation and (self.keep_best or self.final_model is FinalModel.BEST)

    @property
    def evaluation_decides(self) -> bool:
        """What an evaluation finds may ask for a checkpoint or end the job."""
        return self.keeps_best or (self.has_validation and self.early_stopping is not None)

    @property
    def effective_ordering(self) -> Ordering:
        """With updates after the backward pass nothing overlaps them, whatever else was asked for."""
        if self.hyperparameters.order_of_updates.overlaps_steps:
            return self.ordering
        return replace(self.ordering, overlaps_steps=False)


class System(StrEnum):
    """Other systems whose schedules the engine can follow, so that one machine shows what each idea is worth."""

    ZERO_OFFLOAD = "zero_offload"  # states rest in host memory, updated after the backward pass
    # States rest on the SSDs, updated after the backward pass; each layer's input goes to host memory.
    ZERO_INFINITY = "zero_infinity"


def behaving_as(spec: JobSpec, system: System, num_blocks: int) -> JobSpec:
    """The job in another system's order: same results, nothing of a step beside the updates of the one before.

    Params come from where the states rest, ZeRO-Infinity's for each micro-batch: ZeRO-Offload's own stay on the device
    throughout. Both compute activations again; for the inputs of layers that ZeRO-Infinity swaps, the job's placement
    must have room.
    Sources: ZeRO-Offload, arXiv:2101.06840; ZeRO-Infinity, arXiv:2104.07857.
    """
    is_infinity = system is System.ZERO_INFINITY
    activations = ActivationChoice.RECOMPUTE_SWAP_INPUT if is_infinity else ActivationChoice.RECOMPUTE
    return replace(
        spec,
        hyperparameters=replace(spec.hyperparameters, update_order=UpdateOrder.AFTER_BACKWARD),
        ordering=replace(spec.ordering, queues=QueueOrder.FIFO, overlaps_steps=False),
        placement=replace(
            spec.placement,
            host_blocks=() if is_infinity else tuple(range(num_blocks)),
            device_blocks=(),
            num_cached_params=0,
            group_size=1 if is_infinity else spec.placement.group_size,
            activations=activations.of_layers(num_blocks - 2),
        ),
    )
