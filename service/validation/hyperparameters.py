"""Settings of a job: their limits, their defaults, and the values that "auto" stands for.

`docs` and these numbers are one: 3 epochs; 0.2 percent of the examples a batch, but at least 8 and at most 64; the
micro-batches of the plan, or without a plan at most 4 examples in each, and as many micro-batches for each GPU and each
lane; a peak learning rate of 2e-5 times the multiplier; 3 percent of the steps to warm up.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from windlass.engine.lanes import rounded_to_lanes
from windlass.engine.memory_plan import LEAST_CUT_NUMEL, UpdateOrder
from windlass.engine.training_config import (
    EarlyStopping,
    FinalModel,
    Initialization,
    Optimizer,
    Schedule,
    TrainingConfig,
    check_accumulation_precision,
    check_lanes,
    check_update_order,
)
from windlass.service.validation.json_numbers import JsonNumbers
from windlass.service.validation.setting_values import (
    LEAST_SEQUENCE_LENGTH,
    MAX_BATCH_SIZE,
    MAX_EPOCHS,
    MAX_GPUS,
    MAX_SEQUENCE_LENGTH,
    MOST_CUT_NUMEL,
    Boxes,
    GpuNumber,
    auto_or_int,
    auto_or_number,
    auto_or_order,
    auto_or_positive,
    cut_of_matrices,
    described_as,
)
from windlass.storage.ids import Formats, Precision, StatePrecision

DEFAULT_EPOCHS = 3
DEFAULT_SEQUENCE_LENGTH = 2048
DEFAULT_WARMUP_RATIO = 0.03
BATCH_RATIO, LEAST_BATCH_SIZE, GREATEST_BATCH_SIZE = 0.002, 8, 64
GREATEST_MICROBATCH_SIZE = 4

# The defaults of settings that a training config has too.
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(TrainingConfig)}
DEFAULT_LEARNING_RATE: float = _DEFAULTS["learning_rate"]
DEFAULT_CLIP_NORM: float = _DEFAULTS["clip_norm"]
_LEAST_EPSILON = 1e-37  # fp32 has no normal numbers below 1.2e-38
_MAX_SEED = 2**63 - 1
_MAX_MINUTES = 525_600  # a year
_MAX_STEPS = 2**31 - 1


# In JSON a word is a string, which is no member of an enum to strict validation.
_WORD = Field(strict=False)


class _Strict(JsonNumbers):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class SupervisedHyperparameters(_Strict):
    """The three that OpenAI's API knows."""

    n_epochs: Annotated[
        int | Literal["auto"],
        PlainValidator(auto_or_int(1, MAX_EPOCHS)),
        described_as({"type": "integer", "minimum": 1, "maximum": MAX_EPOCHS}),
    ] = "auto"
    batch_size: Annotated[
        int | Literal["auto"],
        PlainValidator(auto_or_int(1, MAX_BATCH_SIZE)),
        described_as({"type": "integer", "minimum": 1, "maximum": MAX_BATCH_SIZE}),
    ] = "auto"
    learning_rate_multiplier: Annotated[
        float | Literal["auto"],
        PlainValidator(auto_or_positive),
        described_as({"type": "number", "exclusiveMinimum": 0, "maximum": 1000}),
    ] = "auto"


class Budgets(_Strict):
    """Memory a job may take, at most."""

    host_memory_gib: float | None = Field(default=None, gt=0, le=65536)
    gpu_memory_gib: float | None = Field(default=None, gt=0, le=65536)


class EarlyStoppingSettings(_Strict):
    """The condition on which a job ends before its last step."""

    patience: int = Field(ge=1, le=1000)  # evaluations in a row without an improvement
    min_delta: float = Field(default=0.0, ge=0)  # what a loss must be lower by, more than this, to be one


class WindlassSettings(_Strict):
    """The settings that windlass adds to a request, in its `windlass` object."""

    epochs: int | None = Field(default=None, ge=1, le=MAX_EPOCHS)
    batch_size: int | None = Field(default=None, ge=1, le=MAX_BATCH_SIZE)
    # "auto" is null in a job's row, too, as it is in those of older versions.
    num_microbatches: Annotated[
        int | None,
        PlainValidator(auto_or_number(1, MAX_BATCH_SIZE)),
        WithJsonSchema(
            {
                "anyOf": [
                    {"const": "auto", "type": "string"},
                    {"type": "integer", "minimum": 1, "maximum": MAX_BATCH_SIZE},
                    {"type": "null"},
                ]
            }
        ),
    ] = None
    sequence_length: int | None = Field(default=None, ge=LEAST_SEQUENCE_LENGTH, le=MAX_SEQUENCE_LENGTH)
    learning_rate: float | None = Field(default=None, gt=0, le=1)
    warmup_steps: int | None = Field(default=None, ge=0, le=_MAX_STEPS)
    warmup: float | None = Field(default=None, ge=0, le=1)  # share of all steps
    schedule: Annotated[Schedule, _WORD] = _DEFAULTS["schedule"]
    weight_decay: float = Field(default=_DEFAULTS["weight_decay"], ge=0, le=1)
    clip_norm: float | None = Field(default=DEFAULT_CLIP_NORM, gt=0)  # null: no clipping
    optimizer: Annotated[Optimizer, _WORD] = _DEFAULTS["optimizer"]
    beta1: float = Field(default=_DEFAULTS["beta1"], ge=0, lt=1)
    beta2: float = Field(default=_DEFAULTS["beta2"], ge=0, lt=1)
    epsilon: float = Field(default=_DEFAULTS["epsilon"], gt=0, json_schema_extra={"minimum": _LEAST_EPSILON})
    precision: Annotated[Precision, _WORD] = _DEFAULTS["precision"]
    # Checked against what stands above them.
    state_precision: Annotated[StatePrecision, _WORD] = _DEFAULTS["state_precision"]
    accumulation_precision: Annotated[Precision, _WORD] = _DEFAULTS["accumulation_precision"]
    gradient_updates: Annotated[
        UpdateOrder | Literal["auto"],
        BeforeValidator(auto_or_order),
        WithJsonSchema({"enum": ["auto", *UpdateOrder]}),
    ] = "auto"
    # "auto": as the job's plan says. Else the most elements of a part of a matrix, or "off": no matrix is cut.
    cut_matrices: Annotated[
        int | Literal["auto", "off"],
        PlainValidator(cut_of_matrices),
        WithJsonSchema(
            {
                "anyOf": [
                    {"enum": ["auto", "off"], "type": "string"},
                    {"type": "integer", "minimum": LEAST_CUT_NUMEL, "maximum": MOST_CUT_NUMEL},
                ]
            }
        ),
    ] = "auto"
    # Checked against what stands above it.
    lanes: Annotated[
        int | Literal["auto"],
        PlainValidator(auto_or_int(1, MAX_BATCH_SIZE)),
        described_as({"type": "integer", "minimum": 1, "maximum": MAX_BATCH_SIZE}),
    ] = "auto"
    max_bad_steps: int = Field(default=_DEFAULTS["max_bad_steps"], ge=0, le=1000)
    model_kernels: Literal["auto", "torch"] = "auto"
    seed: int | None = Field(default=None, ge=0, le=_MAX_SEED)
    priority: int = Field(default=0, ge=-1000, le=1000)  # smaller runs first
    commit_minutes: float = Field(default=_DEFAULTS["commit_minutes"], ge=0, le=_MAX_MINUTES)
    checkpoint_every: int | None = Field(default=None, ge=1, le=_MAX_STEPS)  # steps
    checkpoint_minutes: float | None = Field(default=None, gt=0, le=_MAX_MINUTES)
    # Of the two above: the last so many; null: all.
    keep_checkpoints: int | None = Field(default=None, ge=1, le=_MAX_STEPS)
    keep_best: bool = False
    early_stopping: EarlyStoppingSettings | None = None
    final_model: Annotated[FinalModel, _WORD] = _DEFAULTS["final_model"]
    evaluate_every: int | None = Field(default=None, ge=1, le=_MAX_STEPS)  # steps; null: at each epoch's end
    initialization: Annotated[Initialization, _WORD] = _DEFAULTS["initialization"]
    # `num_microbatches` follows from it unless set; "auto": from the most that the job may get.
    gpus: GpuNumber = 1
    # The name of the box that the job asks for; null: any.
    box: str | None = Field(default=None, min_length=1, max_length=64)
    # The number or the names of the boxes that share the job's blocks, the head's own among them; null: one box. One is
    # for jobs that were on several.
    boxes: Boxes = None
    budgets: Budgets = Budgets()
    lora: None = None

    @field_validator("lora", mode="before")
    @classmethod
    def _no_lora_yet(cls, value: Any) -> Any:
        if value is not None:
            raise ValueError("LoRA is not supported yet: windlass trains all parameters")
        return value

    @field_validator("epsilon")
    @classmethod
    def _fp32_has_it(cls, epsilon: float) -> float:
        if epsilon < _LEAST_EPSILON:
            raise ValueError(
                f"must be at least {_LEAST_EPSILON}: fp32 takes less for 0, and then a gradient of 0 makes 0 / 0"
            )
        return epsilon

    @field_validator("state_precision")
    @classmethod
    def _states_fit_the_model(cls, states: StatePrecision, info: ValidationInfo) -> StatePrecision:
        if "precision" in info.data:  # absent where it is wrong itself
            Formats(info.data["precision"], states)
        return states

    @field_validator("accumulation_precision")
    @classmethod
    def _sums_fit_the_model(cls, sums: Precision, info: ValidationInfo) -> Precision:
        check_accumulation_precision(sums, info.data.get("precision", sums))
        return sums

    @field_validator("gradient_updates")
    @classmethod
    def _order_is_exact(cls, order: UpdateOrder | str, info: ValidationInfo) -> UpdateOrder | str:
        if order != "auto":
            # A setting that is wrong itself is absent, and has its own error.
            check_update_order(
                UpdateOrder(order), info.data.get("precision", Precision.BF16), info.data.get("clip_norm")
            )
        return order

    @field_validator("lanes")
    @classmethod
    def _lanes_have_microbatches(cls, lanes: int | str, info: ValidationInfo) -> int | str:
        if isinstance(lanes, int):
            # A setting that is wrong itself is absent, and has its own error.
            num_microbatches = info.data.get("num_microbatches") or MAX_BATCH_SIZE
            check_lanes(lanes, num_microbatches, info.data.get("accumulation_precision", Precision.FP32))
        return lanes

    @field_validator("keep_checkpoints")
    @classmethod
    def _there_are_some_to_keep(cls, number: int | None, info: ValidationInfo) -> int | None:
        asked = [info.data.get(name, "wrong") for name in ("checkpoint_every", "checkpoint_minutes")]
        if number is not None and asked == [None, None]:
            raise ValueError("without checkpoint_every or checkpoint_minutes there are none to keep")
        return number

    @property
    def update_order(self) -> UpdateOrder | None:
        """The order of updates that was asked for; None: the fastest one that is exact."""
        return None if self.gradient_updates == "auto" else self.gradient_updates

    @property
    def asked_cut(self) -> int | None:
        """The most elements of a part of a matrix that was asked for; None: no matrix is cut, or the plan decides."""
        return self.cut_matrices if isinstance(self.cut_matrices, int) else None

    @property
    def leaves_order_open(self) -> bool:
        """Returns whether the plan may choose the order of updates: those that are exact give the same bits."""
        return self.gradient_updates == "auto" and self.clip_norm is None and self.precision is not Precision.FP16

    @property
    def num_lanes(self) -> int:
        """The lanes that micro-batches are dealt to: as asked for, or one.

        One is fastest with any number of GPUs, and so jobs that differ only in their GPUs have the same lanes.
        """
        return 1 if self.lanes == "auto" else self.lanes

    @property
    def least_gpus(self) -> int:
        """The number of GPUs that the job needs: as asked for, or one if the plan chooses."""
        return 1 if self.gpus == "auto" else self.gpus

    def with_most_gpus(self, num_devices: int, most_microbatches: int) -> "WindlassSettings":
        """Returns the settings with the most GPUs that the job may get in place of "auto".

        `num_devices`: of the machine. `most_microbatches`: the micro-batches of a step, or the most that it may have.
        """
        if self.gpus != "auto":
            return self
        return self.model_copy(update={"gpus": max(1, min(num_devices, most_microbatches, MAX_GPUS))})

    @property
    def needs_validation(self) -> str | None:
        """A setting that goes by the validation loss; None if there is none."""
        asked = {
            "keep_best": self.keep_best,
            "early_stopping": self.early_stopping is not None,
            "final_model": self.final_model is FinalModel.BEST,
        }
        return next((name for name, is_asked in asked.items() if is_asked), None)

    @model_validator(mode="after")
    def _one_box_or_several(self) -> Self:
        if self.box is not None and self.boxes is not None:
            raise ValueError(f"give box ({self.box}) for one box or boxes for several, not both")
        return self

    @model_validator(mode="after")
    def _one_warmup(self) -> Self:
        if self.warmup is not None and self.warmup_steps is not None:
            raise ValueError(f"give warmup ({self.warmup}) or warmup_steps ({self.warmup_steps}), not both")
        return self


class SettingError(ValueError):
    """A setting does not go with another one."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param  # the setting, as a request names it


class TooFewMicrobatchesError(SettingError):
    """A step has fewer micro-batches than GPUs or lanes. It is known once the batch size is."""


def _check_microbatches(windlass: WindlassSettings, num_microbatches: int, given: str) -> None:
    """Raises TooFewMicrobatchesError if a GPU or a lane would have none. `given`: the number's origin in words."""
    for name, number, each in (("gpus", windlass.least_gpus, "GPU"), ("lanes", windlass.num_lanes, "lane")):
        if number > num_microbatches:
            param = f"windlass.{name}"
            raise TooFewMicrobatchesError(f"{param} is {number}, {given}: each {each} needs a micro-batch", param)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """All that a request says on how to train, checked; stored with the job as two JSON objects and the seed."""

    supervised: SupervisedHyperparameters
    windlass: WindlassSettings
    seed: int

    def __post_init__(self) -> None:
        """Refuse what is said twice, differently. Raises SettingError."""
        mine, theirs = self.windlass, self.supervised
        for name, value, other in (
            ("epochs", mine.epochs, theirs.n_epochs),
            ("batch_size", mine.batch_size, theirs.batch_size),
        ):
            if value is not None and other not in ("auto", value):
                param = f"windlass.{name}"
                raise SettingError(f"{param} is {value} but the method's hyperparameters say {other}", param)
        if mine.learning_rate is not None and theirs.learning_rate_multiplier != "auto":
            raise SettingError(
                f"give windlass.learning_rate ({mine.learning_rate}) or the method's learning_rate_multiplier "
                f"({theirs.learning_rate_multiplier}), not both",
                "windlass.learning_rate",
            )
        batch_size = mine.batch_size or (None if theirs.batch_size == "auto" else theirs.batch_size)
        if batch_size is not None and mine.num_microbatches is not None and mine.num_microbatches > batch_size:
            raise SettingError(
                f"windlass.num_microbatches is {mine.num_microbatches}, but a batch has only {batch_size} examples",
                "windlass.num_microbatches",
            )
        if batch_size is not None:
            _check_microbatches(mine, batch_size, f"but a batch has only {batch_size} examples")
        if mine.num_microbatches is not None:
            _check_microbatches(mine, mine.num_microbatches, f"but num_microbatches is {mine.num_microbatches}")

    @classmethod
    def from_row(cls, method: dict[str, Any], windlass: dict[str, Any], seed: int) -> "JobSettings":
        """Read what a job's row keeps in its columns `method`, `windlass` and `seed`."""
        return cls(
            supervised=SupervisedHyperparameters.model_validate(method["supervised"]["hyperparameters"]),
            windlass=WindlassSettings.model_validate(windlass),
            seed=seed,
        )

    @property
    def initialization(self) -> Initialization:
        """The source of the first weights."""
        return self.windlass.initialization

    @property
    def sequence_length(self) -> int:
        """Tokens an example may have; longer ones are cut."""
        return self.windlass.sequence_length or DEFAULT_SEQUENCE_LENGTH


def resolve(
    settings: JobSettings,
    num_examples: int,
    *,
    num_devices: int = 1,
    planned_microbatches: int | None = None,
    planned_cut: int | None = None,
) -> TrainingConfig:
    """Turns a request's settings into a training config, once the training data has been counted.

    `num_devices`: the most GPUs that a job with `gpus: auto` may get. Without a plan, the number of micro-batches
    follows from it. `planned_microbatches`: the number that the job's plan chose; None: the job has no plan yet.
    `planned_cut`: the most elements of a part of a matrix by that plan; None: no matrix is cut, as without a plan.

    Raises:
        TooFewMicrobatchesError: the batch is too small for the GPUs or the lanes.
    """
    epochs, batch_size = _epochs(settings), _batch_size(settings, num_examples)
    asked = settings.windlass
    windlass = asked.with_most_gpus(num_devices, min(asked.num_microbatches or batch_size, batch_size))
    lanes = windlass.num_lanes
    num_microbatches = windlass.num_microbatches or planned_microbatches
    num_microbatches = num_microbatches or default_microbatches(batch_size, lanes, windlass.least_gpus)
    num_microbatches = min(num_microbatches, batch_size)
    _check_microbatches(
        windlass,
        num_microbatches,
        f"and {num_examples} training examples give batches of {batch_size} in {num_microbatches} micro-batches",
    )
    total_steps = num_steps(epochs, batch_size, num_examples)
    return with_derived(
        TrainingConfig(
            epochs=epochs,
            batch_size=batch_size,
            num_microbatches=num_microbatches,
            lanes=lanes,
            cut_matrices=planned_cut if asked.cut_matrices == "auto" else asked.asked_cut,
            warmup_steps=_warmup_steps(settings.windlass, total_steps),
            total_steps=total_steps,
            **known_before_data(settings),
        )
    )


def known_before_data(settings: JobSettings) -> dict[str, Any]:
    """Returns the fields of a training config that do not depend on the number of examples."""
    extras, stopping = settings.windlass, settings.windlass.early_stopping
    return {
        "sequence_length": settings.sequence_length,
        "learning_rate": _learning_rate(settings),
        "schedule": extras.schedule,
        "weight_decay": extras.weight_decay,
        "beta1": extras.beta1,
        "beta2": extras.beta2,
        "epsilon": extras.epsilon,
        "clip_norm": extras.clip_norm,
        "precision": extras.precision,
        "seed": settings.seed,
        "optimizer": extras.optimizer,
        "state_precision": extras.state_precision,
        "accumulation_precision": extras.accumulation_precision,
        "update_order": extras.update_order,
        "model_kernels": None if extras.model_kernels == "auto" else (),
        "max_bad_steps": extras.max_bad_steps,
        "initialization": extras.initialization,
        "evaluate_every": extras.evaluate_every,
        "commit_minutes": extras.commit_minutes,
        "checkpoint_every": extras.checkpoint_every,
        "checkpoint_minutes": extras.checkpoint_minutes,
        "keep_best": extras.keep_best,
        "keep_checkpoints": extras.keep_checkpoints,
        "early_stopping": None if stopping is None else EarlyStopping(**stopping.model_dump()),
        "final_model": extras.final_model,
    }


def with_derived(config: TrainingConfig) -> TrainingConfig:
    """Fills in the settings that follow from others unless the request names them."""
    steps_per_epoch = config.total_steps // config.epochs
    every = config.evaluate_every or steps_per_epoch or None
    return replace(config, update_order=config.order_of_updates, evaluate_every=every)


def hypothetical_config(
    asked: WindlassSettings, *, batch_size: int, num_microbatches: int, sequence_length: int
) -> TrainingConfig:
    """Returns the training config of a job that does not exist, for a plan. Its data is one batch of examples.

    Raises ValueError for what a job's settings refuse, such as more micro-batches than examples.
    """
    numbers = {"batch_size": batch_size, "num_microbatches": num_microbatches, "sequence_length": sequence_length}
    # A plan may be larger than a job, so the numbers are not validated again.
    settings = JobSettings(
        supervised=SupervisedHyperparameters(), windlass=asked.model_copy(update=numbers), seed=asked.seed or 0
    )
    return resolve(settings, batch_size)


def default_microbatches(batch_size: int, lanes: int, gpus: int) -> int:
    """Returns the number of parts that a batch is computed in if neither the user nor a plan sets one.

    Each GPU has at least one. Each GPU and each lane has equally many. If that takes more than the batch has examples,
    each lane has equally many, or if that does too, each part has one example.
    """
    least = max(math.ceil(batch_size / GREATEST_MICROBATCH_SIZE), gpus)
    even = rounded_to_lanes(least, math.lcm(lanes, gpus))
    return even if even <= batch_size else min(rounded_to_lanes(least, lanes), batch_size)


def num_steps(epochs: int, batch_size: int, num_examples: int) -> int:
    """Steps of a job. An epoch's last batch may be smaller; no example is left out."""
    if num_examples < 1:
        raise ValueError(f"training needs at least one example, got {num_examples}")
    return epochs * math.ceil(num_examples / batch_size)


def planned_steps(asked: WindlassSettings, *, batch_size: int, num_examples: int) -> int:
    """Returns the steps of a job that does not exist, on a training file with this number of examples."""
    return num_steps(asked.epochs or DEFAULT_EPOCHS, batch_size, num_examples)


def _epochs(settings: JobSettings) -> int:
    asked = settings.supervised.n_epochs
    return settings.windlass.epochs or (DEFAULT_EPOCHS if asked == "auto" else asked)


def _batch_size(settings: JobSettings, num_examples: int) -> int:
    asked = settings.windlass.batch_size or settings.supervised.batch_size
    chosen = min(max(round(BATCH_RATIO * num_examples), LEAST_BATCH_SIZE), GREATEST_BATCH_SIZE)
    return min(chosen if asked == "auto" else asked, max(num_examples, 1))


def _learning_rate(settings: JobSettings) -> float:
    if settings.windlass.learning_rate is not None:
        return settings.windlass.learning_rate
    multiplier = settings.supervised.learning_rate_multiplier
    return DEFAULT_LEARNING_RATE * (1.0 if multiplier == "auto" else multiplier)


def _warmup_steps(extras: WindlassSettings, total_steps: int) -> int:
    if extras.warmup_steps is not None:
        return min(extras.warmup_steps, total_steps)
    if extras.warmup is not None:
        return math.ceil(extras.warmup * total_steps)
    # The first step of a warm-up has a learning rate of 0: a job of one step would learn nothing.
    return min(math.ceil(DEFAULT_WARMUP_RATIO * total_steps), total_steps - 1)
