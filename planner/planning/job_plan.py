"""A job's plan as one value, with its JSON: the planner's answer, and the fields that the service adds to it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_serializer

from windlass.engine.memory_plan import Placement
from windlass.planner.hardware import Hardware
from windlass.planner.planning.report import PlanReport

# The fields that replace parts of the planner's question.
_CHANGED_INPUTS = ("hardware", "num_optimizers", "host_memory_nbytes", "device_memory_nbytes")


class SimulatedStep(BaseModel):
    """The last step of a plan's simulation."""

    model_config = ConfigDict(frozen=True)

    step_s: float
    summary: dict[str, Any]  # as of a measured step


class JobPlan(BaseModel):
    """The plan of a job.

    A field that was not set is missing in the JSON. Plans of older releases have fewer fields, and unknown fields are
    ignored.
    """

    model_config = ConfigDict(frozen=True, validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    report: PlanReport = Field(validation_alias="plan", serialization_alias="plan")
    placement: Placement | None = None  # None: the job does not fit
    arena_nbytes: int | None = None  # exact size of the arena; with less, the job's runner refuses the placement
    simulated: SimulatedStep | None = None
    warnings: tuple[str, ...] = ()
    # A replan adds:
    changes: bool = False  # the plan differs from the one that the job runs with
    message: str | None = Field(default=None, validation_alias="told", serialization_alias="told")  # for the user
    # The service adds:
    corrected: bool = False  # made by the measurements of the job's first steps
    from_attempt: int | None = None  # the first attempt that runs with this plan, if it differs from the previous one
    hardware: Hardware | None = None
    num_optimizers: int | None = None
    host_memory_nbytes: int | None = None
    device_memory_nbytes: int | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "JobPlan | None":
        """Reads a stored plan or the planner's answer. Returns None for an answer without a plan.

        Raises ValueError if a field has a wrong value.
        """
        return cls.model_validate(values) if "plan" in values else None

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as JSON values."""
        return self.model_dump(mode="json", exclude_unset=True)

    @field_serializer("hardware")
    def _hardware_json(self, hardware: Hardware | None) -> dict[str, Any] | None:
        """Keeps unset fields of the hardware, because a question has them."""
        return None if hardware is None else hardware.model_dump(mode="json")

    @property
    def changed_inputs(self) -> dict[str, Any]:
        """The facts for which a renewed plan was made, such as a changed machine or budget, as in a question."""
        return {name: value for name, value in self.to_json().items() if name in _CHANGED_INPUTS}


class ReplanRequest(BaseModel):
    """A request to plan again with the measurements of a running job."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeline_dir: Path  # spans of its last steps
    first_step: int  # in steady state
    plan: JobPlan  # the plan that the job runs with
    num_steps_left: int
    restart_s: float  # seconds that another attempt costs
