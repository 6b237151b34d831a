"""The specification of a job's attempt: plain data that is sent to every actor at the launch."""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from windlass.actors.job.pace import Pace
from windlass.actors.policy import Ordering
from windlass.engine.memory_plan import Placement, UpdateOrder
from windlass.storage.ids import Attempt, Formats, JobId, Kernel, ModelKernel, Precision, StatePrecision


class Schedule(StrEnum):
    """The learning rate schedules after warm-up."""

    LINEAR = "linear"
    COSINE = "cosine"
    CONSTANT = "constant"


class Optimizer(StrEnum):
    """The optimizers."""

    ADAMW = "adamw"  # decoupled weight decay
    ADAM = "adam"  # weight decay as a part of the gradient


class Initialization(StrEnum):
    """The sources of the initial weights."""

    WEIGHTS = "weights"  # the model folder's safetensors
    RANDOM = "random"  # the architecture's own initialisation, per block, from the job's seed


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSettings:
    """The settings of a job that decide when blocks are updated, where gradients wait until then, and in which type.

    The runner and the planner both derive these decisions here, so that a job runs as it was planned.
    """

    precision: Precision  # of the model
    clips: bool  # the global gradient norm is clipped
    accumulation_precision: Precision  # of gradient sums over micro-batches: fp32 or the model's precision
    update_order: UpdateOrder | None  # None: ACTIVE if that gives exact results, else KEPT

    @property
    def needs_all_gradients(self) -> bool:
        """True if no block may be updated before all gradients are known."""
        return self.clips or self.precision is Precision.FP16

    @property
    def order_of_updates(self) -> UpdateOrder:
        """The configured order or, without one, the fastest order that gives exact results."""
        return self.update_order or (UpdateOrder.KEPT if self.needs_all_gradients else UpdateOrder.ACTIVE)

    def precision_in_transit(self, num_microbatches: int) -> Precision:
        """Returns the type of gradients on their way to the optimizer.

        With one micro-batch, a gradient has the model's precision. Sums over micro-batches have
        `accumulation_precision`.
        """
        is_summed = num_microbatches > 1 and self.accumulation_precision is Precision.FP32
        return Precision.FP32 if is_summed else self.precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """The settings that change the result. All numbers are final: "auto" has been resolved."""

    epochs: int
    batch_size: int  # examples per step
    num_microbatches: int  # number of parts in which a batch is computed
    sequence_length: int  # tokens; longer examples are truncated
    learning_rate: float  # the peak of the schedule
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
    accumulation_precision: Precision = Precision.FP32  # as in GradientSettings
    update_order: UpdateOrder | None = None  # as in GradientSettings
    kernel: Kernel | None = None  # None: the compiled kernel if there is a compiler
    model_kernels: tuple[ModelKernel, ...] | None = None  # in addition to torch's own; None: all that the device offers
    max_bad_steps: int = 10  # largest number of skipped steps in a row, due to gradients that are not finite

    @property
    def formats(self) -> Formats:
        """The number formats of the model and of the states."""
        return Formats(self.precision, self.state_precision)

    @property
    def gradients(self) -> GradientSettings:
        """The settings that concern gradients."""
        return GradientSettings(
            precision=self.precision,
            clips=self.clip_norm is not None,
            accumulation_precision=self.accumulation_precision,
            update_order=self.update_order,
        )

    @property
    def order_of_updates(self) -> UpdateOrder:
        """The order of updates; see `GradientSettings`."""
        return self.gradients.order_of_updates

    @property
    def keeps_grads(self) -> bool:
        """True if updates wait until all gradients of the step are known."""
        return self.order_of_updates.keeps_grads


class FinalModel(StrEnum):
    """The choices for the weights of the final model."""

    LAST = "last"  # those of the last step
    BEST = "best"  # those with the lowest validation loss


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopping:
    """The rule by which a job ends before its last step."""

    patience: int  # number of evaluations in a row without an improvement after which the job ends
    min_delta: float = 0.0  # a loss is an improvement if it is lower than the last improvement by more than this


_FIRST_ATTEMPT = Attempt(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One attempt at a job. Paths are absolute and the same on every node."""

    job: JobId
    attempt: Attempt = _FIRST_ATTEMPT
    model_dir: str  # config, tokenizer, safetensors
    initialization: Initialization = Initialization.WEIGHTS
    layout_file: str  # the model's blocks, written by `windlass.engine.checkpoint.check_model`
    dataset_dir: str  # the dataset, written by `windlass.engine.data.tokenize`
    num_validation_examples: int = 0  # 0: no validation data
    job_dir: str  # journal and logs
    output_dir: str  # the final model's folder; checkpoints are written to `{output_dir}-step-{n}`
    ssd_dirs: tuple[str, ...]  # one SSD server each; empty: all states are in host memory, and a crash loses the job
    arena_dir: str = "/dev/shm"
    hyperparameters: Hyperparameters
    total_steps: int
    evaluate_every: int | None = None  # steps; None: only at the end. Without validation data: never
    # Checkpoints that are exported besides the final model: every so many steps; at the first commit after so many
    # minutes; after the evaluation with the lowest loss so far. Only the last `keep_checkpoints` of the first two kinds
    # are kept.
    checkpoint_every: int | None = None
    checkpoint_minutes: float | None = None
    keep_best: bool = False
    keep_checkpoints: int | None = None
    early_stopping: EarlyStopping | None = None
    final_model: FinalModel = FinalModel.LAST
    num_cpu_optimizers: int = 1
    compute_threads: int = 1  # of the GPU worker's process
    optimizer_threads: int = 1  # of each optimizer
    kernel_dir: str | None = None  # cache folder of compiled update kernels; None: no cache
    host_memory_nbytes: int | None = None  # budget for the arena; None: limited by the machine's free memory
    device_memory_nbytes: int | None = None  # budget on the device; None: all of its memory
    planned_device_nbytes: int | None = None  # the plan's peak on the device; None: it is counted when the job starts
    # The time of a step by the job's plan or its earlier attempts, used until this attempt has measured its own.
    expected_pace: Pace | None = None
    deadline_s: float  # timeout of a single reply or transfer within a step
    placement: Placement = field(default_factory=Placement)  # places of states, params and activations; may be partial
    ordering: Ordering = field(default_factory=Ordering)  # as configured; the scheduler uses `effective_ordering`

    @property
    def has_validation(self) -> bool:
        """True if the job has validation data."""
        return self.num_validation_examples > 0

    @property
    def keeps_best(self) -> bool:
        """True if the model with the lowest validation loss is kept as a checkpoint."""
        return self.has_validation and (self.keep_best or self.final_model is FinalModel.BEST)

    @property
    def evaluation_decides(self) -> bool:
        """True if an evaluation's result can request a checkpoint or end the job."""
        return self.keeps_best or (self.has_validation and self.early_stopping is not None)

    @property
    def effective_ordering(self) -> Ordering:
        """The ordering in use: `ordering`, but without overlap if updates run after the backward pass."""
        if self.hyperparameters.order_of_updates.overlaps_steps:
            return self.ordering
        return replace(self.ordering, overlaps_steps=False)
