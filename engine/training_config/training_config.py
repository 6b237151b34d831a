"""The settings of a job's training. They are one object, so that a job runs as it was planned."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from windlass.engine.lanes import LaneDivision
from windlass.engine.memory_plan import UpdateOrder
from windlass.storage.ids import Formats, HeadSlices, Kernel, ModelKernel, Precision, StatePrecision

# The version of the rules that decide the bits of results. A job and its commits keep the version that the job began
# with. Version 2 has lanes; with one lane its bits are those of version 1.
NUMERICS = 2
_KNOWN_NUMERICS = (1, NUMERICS)
_LEAST_NUMERICS_OF_LANES = 2


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


class FinalModel(StrEnum):
    """The choices for the weights of the final model."""

    LAST = "last"  # those of the last step
    BEST = "best"  # those with the lowest validation loss


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopping:
    """The rule by which a job ends before its last step."""

    patience: int  # number of evaluations in a row without an improvement after which the job ends
    min_delta: float = 0.0  # a loss is an improvement if it is lower than the last improvement by more than this


def check_accumulation_precision(accumulation_precision: Precision, precision: Precision) -> None:
    """Raises ValueError if gradients of a model in `precision` cannot be summed in `accumulation_precision`."""
    if accumulation_precision not in (Precision.FP32, precision):
        raise ValueError(
            f"must be fp32 or the model's own precision: {accumulation_precision} sums do not go with precision "
            f"{precision}"
        )


def check_lanes(lanes: int, num_microbatches: int, accumulation_precision: Precision) -> None:
    """Raises ValueError if the micro-batches of a step cannot be summed in so many lanes."""
    LaneDivision(lanes, num_microbatches)
    if lanes > 1 and accumulation_precision is not Precision.FP32:
        raise ValueError(
            f"lanes is {lanes}, but lanes are summed in fp32, and accumulation_precision is {accumulation_precision}"
        )


def check_update_order(order: UpdateOrder, precision: Precision, clip_norm: float | None) -> None:
    """Raises ValueError if updates in this order would begin before the gradients that they depend on are known."""
    if order.keeps_grads:
        return
    why = "every gradient must be known before the first update"
    if precision is Precision.FP16:
        raise ValueError(
            f"with precision fp16 {why}, as one overflow skips the step; choose auto or kept, or precision bf16"
        )
    if clip_norm is not None:
        raise ValueError(
            f"with clip_norm {clip_norm} {why}, as the norm is that of all; set clip_norm to null, or choose auto "
            "or kept"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """The settings of a job's training. All numbers are final: "auto" has been resolved.

    The defaults apply to jobs whose requests leave a setting open, and to rows of older versions that lack a field.
    """

    # The config of a newer version has more fields, which must not be ignored.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    epochs: int = 1
    batch_size: int  # examples per step
    num_microbatches: int = 1  # number of parts in which a batch is computed
    lanes: int = 1  # sums of micro-batches that are made separately and then added
    numerics: int = NUMERICS  # version of the rules that decide the bits; rows of older versions: 1
    sequence_length: int  # tokens; longer examples are truncated
    learning_rate: float = 2e-5  # the peak of the schedule
    warmup_steps: int = 0
    schedule: Schedule = Schedule.LINEAR
    weight_decay: float = 0.0  # not applied to norms and biases
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    clip_norm: float | None = 1.0  # global gradient norm; None: no clipping
    precision: Precision = Precision.BF16
    seed: int = 0
    optimizer: Optimizer = Optimizer.ADAMW
    state_precision: StatePrecision = StatePrecision.FP32
    accumulation_precision: Precision = Precision.FP32  # of gradient sums over micro-batches: fp32 or the model's
    update_order: UpdateOrder | None = None  # None: ACTIVE if that gives exact results, else KEPT
    kernel: Kernel | None = None  # None: the compiled kernel if there is a compiler
    model_kernels: tuple[ModelKernel, ...] | None = None  # in addition to torch's own; None: all that the device offers
    head_slices: HeadSlices = HeadSlices.LARGE  # rows of older versions without this field: SMALL
    # Linear layers with more elements in their matrix compute in parts of at most so many. None: no matrix is cut. Bits
    # depend on it. Requests have `LEAST_CUT_NUMEL` at least.
    cut_matrices: int | None = None
    max_bad_steps: int = 10  # largest number of skipped steps in a row, due to gradients that are not finite
    total_steps: int
    initialization: Initialization = Initialization.WEIGHTS
    # States that rest in memory are committed as rarely as compute of so many minutes allows; see `StepCosts`.
    commit_minutes: float = 5.0
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

    def __post_init__(self) -> None:
        """Refuses settings that no training can have."""
        for name in ("batch_size", "num_microbatches", "sequence_length", "epochs", "total_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("evaluate_every", "checkpoint_every", "keep_checkpoints", "cut_matrices"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise ValueError(f"{name} is {number}; it must be at least 1, or None")
        if not 0 <= self.commit_minutes < math.inf:
            raise ValueError(f"commit_minutes is {self.commit_minutes}; it must be at least 0")
        if self.num_microbatches > self.batch_size:
            raise ValueError(
                f"num_microbatches is {self.num_microbatches}, but a batch has only {self.batch_size} examples"
            )
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps is {self.warmup_steps}; it must be at least 0")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.epsilon > 0):
            raise ValueError(
                f"beta1 is {self.beta1}, beta2 {self.beta2}, epsilon {self.epsilon}; both betas must be at least 0 and "
                "below 1, and epsilon above 0"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm is {self.clip_norm}; it must be above 0, or None")
        if self.numerics not in _KNOWN_NUMERICS:
            raise ValueError(
                f"numerics is {self.numerics}, and this release knows {', '.join(map(str, _KNOWN_NUMERICS))}: the job "
                "must end under the release that it began with, or a later one"
            )
        check_lanes(self.lanes, self.num_microbatches, self.accumulation_precision)
        if self.lanes > 1 and self.numerics < _LEAST_NUMERICS_OF_LANES:
            raise ValueError(f"lanes is {self.lanes}, but jobs of numerics {self.numerics} have one lane")
        Formats(self.precision, self.state_precision)
        check_accumulation_precision(self.accumulation_precision, self.precision)
        if self.update_order is not None:
            check_update_order(self.update_order, self.precision, self.clip_norm)

    @property
    def formats(self) -> Formats:
        """The number formats of the model and of the states."""
        return Formats(self.precision, self.state_precision)

    @property
    def order_of_updates(self) -> UpdateOrder:
        """The configured order or, without one, the fastest order that gives exact results."""
        if self.update_order is not None:
            return self.update_order
        needs_all_gradients = self.clip_norm is not None or self.precision is Precision.FP16
        return UpdateOrder.KEPT if needs_all_gradients else UpdateOrder.ACTIVE

    @property
    def keeps_grads(self) -> bool:
        """True if updates wait until all gradients of the step are known."""
        return self.order_of_updates.keeps_grads

    @property
    def microbatch_size(self) -> int:
        """The number of examples of a micro-batch; the last one of a batch may have fewer."""
        return -(-self.batch_size // self.num_microbatches)

    @property
    def lane_division(self) -> LaneDivision:
        """The division of a step's micro-batches into lanes."""
        return LaneDivision(self.lanes, self.num_microbatches)

    def can_follow(self, numerics: int) -> bool:
        """Returns whether a step under this config has the bits that one under another version of the rules would have.

        A commit of an older version than `_LEAST_NUMERICS_OF_LANES` belongs to a job with one lane. There the versions
        have the same bits.
        """
        if numerics == self.numerics:
            return True
        return self.lanes == 1 and 0 < numerics < _LEAST_NUMERICS_OF_LANES

    @property
    def grad_precision(self) -> Precision:
        """The type of gradients on their way to the optimizer.

        With one micro-batch, a gradient has the model's precision. Sums over micro-batches have
        `accumulation_precision`.
        """
        is_summed = self.num_microbatches > 1 and self.accumulation_precision is Precision.FP32
        return Precision.FP32 if is_summed else self.precision

    @property
    def grad_itemsize(self) -> int:
        """The bytes of an element of a gradient on its way to the optimizer."""
        return 4 if self.grad_precision is Precision.FP32 else 2
