"""Plans as the API describes them. What a plan tells is the planner's: see `planner.report.PlanReport`."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from windlass.planner.hardware import Hardware


class PlanFields(BaseModel):
    """What the planner says; a plan of an earlier release may say less, and one of a later more."""

    model_config = ConfigDict(extra="allow")

    feasible: bool | None = None
    reasons: list[str] | None = None
    step_s: float | None = None
    bound_s: float | None = None
    tokens_per_s: float | None = None
    tflops: float | None = None
    bottleneck: str | None = None
    busy_s: dict[str, float] | None = None
    peak_gib: dict[str, float] | None = None
    engine_gib: dict[str, float] | None = None
    limit_gib: dict[str, float] | None = None
    missing_bytes: dict[str, float] | None = None
    ssd_write_gb_per_step: float | None = None
    choices: dict[str, Any] | None = None
    example_tokens: dict[str, Any] | None = None


class PlanObject(PlanFields):
    """The answer to what a job would take."""

    object: Literal["fine_tuning.plan"]
    model: str
    hardware: Hardware
    warnings: list[str]


class CorrectedPlan(PlanFields):
    """A plan of a job that was accepted."""

    corrected: bool
    told: Any = None
    from_attempt: int | None = None


class JobPlanObject(CorrectedPlan):
    """The plan that a job runs by, what was measured since, and the plans before it."""

    object: Literal["fine_tuning.job.plan"]
    job_id: str
    simulated: dict[str, Any] | None
    predicted: dict[str, Any] | None
    measured: dict[str, Any] | None
    error: dict[str, Any] | None
    is_estimate: bool | None  # too few steps were measured to tell how good `predicted` is; null without a promise
    min_measured_steps: int  # so many are enough
    before: list[CorrectedPlan]
