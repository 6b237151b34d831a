"""Plans as the API describes them. `planner.report.PlanReport` defines the fields of a plan."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from windlass.planner.hardware import Hardware


class PlanFields(BaseModel):
    """The planner's result. A plan of an older release may have fewer fields."""

    model_config = ConfigDict(extra="allow")

    feasible: bool | None = None
    reasons: list[str] | None = None
    step_s: float | None = None
    step_s_low: float | None = None  # between this and the next the step of nine of ten jobs lies
    step_s_high: float | None = None
    times_from: str | None = None
    num_compared: int | None = None
    bound_s: float | None = None
    tokens_per_s: float | None = None
    tflops: float | None = None
    bottleneck: str | None = None
    busy_s: dict[str, float] | None = None
    peak_gib: dict[str, float] | None = None
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
    hardware: Hardware
    # The object `windlass` of a job with this plan; null if nothing fits, or no job can be so large.
    job_settings: dict[str, Any] | None
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
