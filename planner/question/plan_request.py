"""The service's request for a plan as one value, with its JSON for the planner's process."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import PlainSerializer, TypeAdapter

from windlass.engine.training_config import TrainingConfig
from windlass.planner.hardware import Hardware
from windlass.planner.question.job_plan import ChangedInputs, JobPlan
from windlass.planner.solver import Limits, budgets_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanRequest:
    """The measurements of a running job, to plan it again."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    timeline_dir: Path  # spans of its last steps
    first_step: int  # in steady state
    plan: Annotated[JobPlan, PlainSerializer(JobPlan.to_json)]  # the plan that the job runs with
    num_steps_left: int
    restart_s: float  # seconds that another attempt costs
    may_change: bool = True  # search another plan; else only the prediction is made again


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A request to plan a job on a machine."""

    # The request of a newer version has more fields, which must not be ignored.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    model_dir: Path  # a model's folder, or the YAML file of a shape
    hardware: Hardware
    training: TrainingConfig
    chooses_microbatches: bool = False  # search the fastest number of micro-batches, instead of the config's
    chooses_cut: bool = False  # choose whether and how matrices are cut, instead of the config's
    chooses_order: bool = False  # choose the order of updates, of those that give the same parameters
    # The prepared data that the job trains on; None: every example has the maximum length.
    dataset_dir: Path | None = None
    num_validation_examples: int = 0
    num_ranks: int = 1  # GPU workers, each with a GPU of its own
    chooses_ranks: bool = False  # search the fastest number of GPU workers, of which `num_ranks` is the maximum
    num_optimizers: int
    host_memory_nbytes: int | None  # budget of the arena
    device_memory_nbytes: int | None
    compute_threads: int | None = None  # threads of a local GPU worker; None: the hardware is another machine
    may_measure: bool = True  # time the model's blocks with these threads; else use stored times or rates
    # Another process is to measure: if times lack, the answer says so, and has no plan.
    measures_apart: bool = False
    # Nothing is measured: times that lack follow from the machine's rates, and the plan tells how long to measure them.
    leaves_unmeasured: bool = False
    kept_times_dir: Path | None = None  # folder of stored block times; None: times are not stored
    # No other job computes on this machine, so new measurements are reliable; see also `disturbed_path`.
    is_alone: bool = False
    simulation_s: float = 0.0  # maximum seconds of the plan's simulation; 0: do not simulate
    # Write to the file of `estimate_path`, as it is known: the best plan by the cost model, then the plan with the
    # changes so far.
    tells_estimate: bool = False
    what_if: bool = False  # also plan the job with one more SSD, more RAM and so on
    running: ReplanRequest | None = None  # plan again with the measurements of a running job

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "PlanRequest":
        """Converts JSON values to a request. Raises ValueError if they are not those of a request."""
        return _REQUEST.validate_python(stored)

    def to_json(self) -> dict[str, Any]:
        """Returns the request as JSON values."""
        values: dict[str, Any] = _REQUEST.dump_python(self, mode="json")
        return values

    @property
    def measures(self) -> bool:
        """True if blocks are measured whose times are not known."""
        return self.may_measure and self.compute_threads is not None

    @property
    def budgets(self) -> Limits:
        """The memory that the job may use: that of the machine, limited by the job's budgets."""
        return budgets_of(
            self.hardware,
            num_ranks=self.num_ranks,
            host_memory_nbytes=self.host_memory_nbytes,
            device_memory_nbytes=self.device_memory_nbytes,
        )

    def with_inputs(self, inputs: ChangedInputs) -> "PlanRequest":
        """Returns the request for a machine or budgets that have changed."""
        changed = self if inputs.hardware is None else replace(self, hardware=inputs.hardware)
        if (bounds := inputs.bounds) is None:
            return changed
        return replace(
            changed,
            num_ranks=bounds.num_ranks,
            chooses_ranks=bounds.chooses_ranks,
            num_optimizers=bounds.num_optimizers,
            host_memory_nbytes=bounds.host_memory_nbytes,
            device_memory_nbytes=bounds.device_memory_nbytes,
        )


# Fields of an answer without a plan.
LACKS_TIMES = "lacks_times"  # true: blocks are to be measured first, by another process
FAILURE = "failure"  # a PlanFailure


class PlanFailure(StrEnum):
    """The kind of an error that the request did not cause."""

    MEMORY = "memory"  # the planner's process got no more memory
    ERROR = "error"  # a defect


_REQUEST = TypeAdapter(PlanRequest)


def estimate_path(result: Path) -> Path:
    """Returns the file of a plan that comes before the result; see `PlanRequest.tells_estimate`."""
    return result.with_suffix(".estimate")


def progress_path(result: Path) -> Path:
    """Returns the file in which a process reports its progress."""
    return result.with_suffix(".progress")


def abandoned_path(result: Path) -> Path:
    """Returns the file whose existence says that the result is not needed any more."""
    return result.with_suffix(".abandoned")


def disturbed_path(result: Path) -> Path:
    """Returns the file whose existence says that another job has computed since the process began to run."""
    return result.with_suffix(".disturbed")
