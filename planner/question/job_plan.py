"""A job's plan as one value, with its JSON: the planner's answer, and the fields that the service adds to it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_serializer

from windlass.amounts import GIB
from windlass.engine.memory_plan import Placement, UpdateOrder
from windlass.planner.hardware import Hardware
from windlass.planner.question.report import PlanReport

# Step times that differ by at most this share count as equal.
EQUAL_SHARE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBounds:
    """The parts of a planner's request that follow from the installation's settings and the job's budgets."""

    num_ranks: int = 1  # GPUs of the job
    chooses_ranks: bool = False  # the planner chooses how many, and `num_ranks` is the maximum
    num_optimizers: int
    host_memory_nbytes: int | None  # budget of the arena; None: all of the machine's
    device_memory_nbytes: int | None  # budget; None: all of the device's


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedInputs:
    """The parts of a planner's request that may change while a job waits. None: those of the request hold."""

    hardware: Hardware | None
    bounds: PlanBounds | None


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
    # Of an estimate: its times follow from the machine's rates, and the model's blocks are about to be measured.
    to_be_measured: bool = False
    # Of the plan as it is told first: what would be faster, and the least GPU memory, are still looked for.
    lacks_advice: bool = False
    # Of a plan whose changes (`what_if`) are not all planned yet: how many are left. Else None.
    num_changes_left: int | None = None
    # If the planner chose the number of GPUs: the plans for the others with which the job fits. They hold no others.
    others: "tuple[JobPlan, ...]" = ()
    # A replan adds:
    changes: bool = False  # the plan differs from the one that the job runs with
    message: str | None = Field(default=None, validation_alias="told", serialization_alias="told")  # for the user
    # The service adds:
    corrected: bool = False  # made by the measurements of the job's first steps
    measured: bool = False  # these steps were measured, for this plan or an earlier one; a job is corrected only once
    # The time that later steps are expected to take, as it was measured, and the last measured step. None: unknown.
    expected_step_s: float | None = None
    expected_from_step: int | None = None
    from_attempt: int | None = None  # the first attempt that runs with this plan, if it differs from the previous one
    hardware: Hardware | None = None
    num_ranks: int = 1  # read with `num_optimizers`; 1 in plans of older releases
    chooses_ranks: bool = False
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
        """Keeps unset fields of the hardware, because a request has them."""
        return None if hardware is None else hardware.model_dump(mode="json")

    @property
    def planned_device_nbytes(self) -> int | None:
        """The plan's peak device memory, without the reserve of PyTorch's allocator.

        It is None for a plan of an older release, which lacks this field.
        """
        of_engine = self.report.engine_gib
        return None if of_engine is None else int(of_engine["gpu"] * GIB)

    @property
    def changed_inputs(self) -> ChangedInputs:
        """The facts for which a renewed plan was made, such as a changed machine or budget."""
        bounds = None
        if self.num_optimizers is not None:
            bounds = PlanBounds(
                num_ranks=self.num_ranks,
                chooses_ranks=self.chooses_ranks,
                num_optimizers=self.num_optimizers,
                host_memory_nbytes=self.host_memory_nbytes,
                device_memory_nbytes=self.device_memory_nbytes,
            )
        return ChangedInputs(hardware=self.hardware, bounds=bounds)

    @property
    def num_gpus(self) -> int:
        """The number of GPUs that the job has by this plan. It is 1 for a plan of an older release."""
        return int((self.report.choices or {}).get("gpus", 1))

    @property
    def num_microbatches(self) -> int | None:
        """The number of micro-batches that the plan was made with; None if nothing fits."""
        number: int | None = (self.report.choices or {}).get("num_microbatches")
        return number

    @property
    def cut_matrices(self) -> int | None:
        """The most elements of a part of a matrix that the plan was made with; None: no matrix is cut."""
        cut: int | None = (self.report.choices or {}).get("cut_matrices")
        return cut

    @property
    def update_order(self) -> UpdateOrder | None:
        """The order of updates that the job runs with by this plan; None: that of its training config."""
        order = (self.report.choices or {}).get("gradient_updates")
        return None if order is None else UpdateOrder(order)

    @property
    def gpu_numbers(self) -> tuple[int, ...]:
        """The numbers of GPUs that there is a plan for, smallest first."""
        return tuple(sorted({self.num_gpus, *(other.num_gpus for other in self.others)}))

    @property
    def step_s_by_gpus(self) -> dict[int, float]:
        """The predicted step time for each number of GPUs that there is a plan for."""
        plans = (self, *self.others)
        return {plan.num_gpus: plan.report.step_s for plan in plans if plan.report.step_s is not None}

    def for_gpus(self, number: int) -> "JobPlan":
        """Returns the plan for another number of GPUs, made for the same facts. This plan is then among its others.

        Raises KeyError if there is no plan for this number.
        """
        if number == self.num_gpus:
            return self
        plans = {plan.num_gpus: plan for plan in (self.model_copy(update={"others": ()}), *self.others)}
        chosen = plans.pop(number)
        facts = {"corrected": self.corrected, "measured": self.measured}
        return chosen.model_copy(update={"others": tuple(plans.values()), **facts}).made_for(self.changed_inputs)

    def made_for(self, inputs: ChangedInputs) -> "JobPlan":
        """Returns the plan as one that was made for these facts."""
        changes: dict[str, object] = {} if inputs.bounds is None else asdict(inputs.bounds)
        if inputs.hardware is not None:
            changes["hardware"] = inputs.hardware
        return self.model_copy(update=changes)


def fewest_of_fastest(step_s: Mapping[int, float]) -> int:
    """Returns the fastest number of GPUs; of numbers that are equal within `EQUAL_SHARE`, the fewest.

    `step_s`: predicted step time by number, of one number at least.
    """
    least_s = min(step_s.values())
    return min(number for number, seconds in step_s.items() if seconds <= (1 + EQUAL_SHARE) * least_s)
