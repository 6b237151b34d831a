"""Plans as the API describes them. `planner.report.PlanReport` defines the fields of a plan."""

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from windlass.planner.hardware import Hardware, ModelShape
from windlass.service.validation import (
    LEAST_SEQUENCE_LENGTH,
    MAX_EXAMPLES,
    MAX_PLANNED_BATCH_SIZE,
    MAX_SEQUENCE_LENGTH,
    ApiError,
    JsonNumbers,
    WindlassSettings,
)

# Settings of a job that say where it runs. A plan over HTTP is for one machine, which its request names.
_PLACES = {
    "box": "a plan is for this machine, or for one that `hardware` describes; send the box's as `hardware`",
    "boxes": "a plan over HTTP is for one machine; leave it out, or ask `windlass plan --boxes` on the command line",
}


class CreatePlan(JsonNumbers):
    """The body of `POST /v1/fine_tuning/plans`. `hardware`: describes another machine than this one."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str  # of this service, or the name of a published shape, here or on the hub
    # It may be larger than a job's. Null: `windlass.batch_size`, which must then be given.
    batch_size: Annotated[int | None, Field(ge=1, le=MAX_PLANNED_BATCH_SIZE)] = None
    # Null: `windlass.sequence_length`, or the job's default.
    sequence_length: Annotated[int | None, Field(ge=LEAST_SEQUENCE_LENGTH, le=MAX_SEQUENCE_LENGTH)] = None
    hardware: Hardware | None = None
    num_examples: Annotated[int | None, Field(ge=1, le=MAX_EXAMPLES)] = None  # of a training file; for the job's time
    num_validation_examples: Annotated[int, Field(ge=0, le=MAX_EXAMPLES)] = 0
    windlass: WindlassSettings = WindlassSettings()
    measure: bool = True  # measure blocks whose times on this machine are not known; false: go by its rates, and say so
    what_if: bool = False  # also answer what one more SSD, more RAM and so on would give
    stream: bool = False  # answer with server-sent events: a first estimate by formulas, then the plan

    @field_validator("hardware", mode="before")
    @classmethod
    def _check_is_no_name(cls, value: object) -> object:
        if isinstance(value, str):
            raise ValueError("must be an object, such as hardware in the answer of GET /v1/fine_tuning/machines/{name}")
        return value

    def checked_batch_size(self) -> int:
        """Returns the batch size. Raises ApiError for what only fields together tell, and for what no plan can use."""
        for name, why in _PLACES.items():
            if (value := getattr(self.windlass, name)) is not None:
                raise _wrong(f"windlass.{name}", f"is {value}, but {why}")
        batch_size = self._given("batch_size")
        if batch_size is None:
            raise _wrong("batch_size", "is missing; give it here or as windlass.batch_size")
        return batch_size

    def checked_sequence_length(self) -> int | None:
        """Returns the tokens of an example; None: the job's default. Raises ApiError for two different numbers."""
        return self._given("sequence_length")

    def param_of(self, name: str) -> str:
        """Returns the place in the request of a number that may stand beside `windlass` or in it."""
        return f"windlass.{name}" if getattr(self, name) is None else name

    def _given(self, name: str) -> int | None:
        beside, of_job = getattr(self, name), getattr(self.windlass, name)
        if None not in (beside, of_job) and beside != of_job:
            raise _wrong(f"windlass.{name}", f"is {of_job} but {name} is {beside}; give one of the two")
        number: int | None = of_job if beside is None else beside
        return number


@cache
def plan_limits() -> dict[str, tuple[float | None, float | None]]:
    """Returns the least and the greatest value of each number in a request for a plan; None: there is no limit.

    The settings of `windlass` stand beside the other fields, without those of the same name.
    """
    described = CreatePlan.model_json_schema()
    fields = described["$defs"]["WindlassSettings"]["properties"] | described["properties"]
    limits = {}
    for name, field in fields.items():
        for kind in field.get("anyOf", [field]):
            if kind.get("type") in ("integer", "number"):
                limits[name] = kind.get("minimum", kind.get("exclusiveMinimum")), kind.get("maximum")
    return limits


def _wrong(param: str, why: str) -> ApiError:
    return ApiError(f"{param}: {why}", param=param, code="invalid_value")


class ShapeObject(BaseModel):
    """A published model whose shape plans know by name, without its files. `id` is the `model` of a plan's request."""

    object: Literal["fine_tuning.shape"] = "fine_tuning.shape"
    id: str
    description: str
    num_params: int
    max_sequence_length: int | None  # null: as long as is planned
    shape: ModelShape


class PlanFields(BaseModel):
    """The planner's result. A plan of an older release may have fewer fields."""

    model_config = ConfigDict(extra="allow")

    feasible: bool | None = None
    reasons: list[str] | None = None
    step_s: float | None = None
    step_s_low: float | None = None  # between this and the next the step of nine of ten jobs lies
    step_s_high: float | None = None
    times_from: str | None = None
    measuring_s: float | None = None  # about the seconds that a measurement of the times that lack would take
    num_compared: int | None = None
    bound_s: float | None = None
    tokens_per_s: float | None = None
    tflops: float | None = None
    bottleneck: str | None = None
    busy_s: dict[str, float] | None = None
    peak_gib: dict[str, float] | None = None
    peak_limit_gib: dict[str, float] | None = None
    engine_gib: dict[str, float] | None = None
    limit_gib: dict[str, float] | None = None
    missing_bytes: dict[str, float] | None = None
    missing_together: bool | None = None
    least_gpu_gib: float | None = None
    least_gpu_reason: str | None = None
    ssd_write_gb_per_step: float | None = None
    choices: dict[str, Any] | None = None
    example_tokens: dict[str, Any] | None = None
    what_if: list[dict[str, Any]] | None = None


class PlanObject(PlanFields):
    """The plan of a job that does not exist yet."""

    object: Literal["fine_tuning.plan"]
    model: str
    shape: str | None  # the published shape that was planned; null: the model is of this service
    hardware: Hardware
    # The object `windlass` of a job with this plan; null if nothing fits, or no job can be so large.
    job_settings: dict[str, Any] | None
    # Of a job on `num_examples` examples, in `windlass.epochs` epochs; null if they are not given.
    num_steps: int | None
    job_s: float | None  # the time of so many steps, without loading and evaluations
    ssd_write_tb: float | None  # terabytes (10^12 bytes) that so many steps write to all SSDs together
    # The part of the endurance that this takes, of the SSD with the least; null if no endurance is known.
    ssd_endurance_percent: float | None
    warnings: list[str]


class CorrectedPlan(PlanFields):
    """A plan of an accepted job."""

    corrected: bool
    told: Any = None
    from_attempt: int | None = None


class JobPlanObject(CorrectedPlan):
    """The job's current plan, the values measured since, and its earlier plans."""

    object: Literal["fine_tuning.job.plan"]
    job_id: str
    simulated: dict[str, Any] | None
    predicted: dict[str, Any] | None
    measured: dict[str, Any] | None
    error: dict[str, Any] | None
    is_estimate: bool | None  # too few steps were measured to judge `predicted`; null without a prediction
    min_measured_steps: int  # steps that must be measured before `is_estimate` is false
    before: list[CorrectedPlan]
