"""The plan of one job over its boxes as one value, with its JSON: the planner's answer to a StagesRequest."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from pydantic import TypeAdapter

from windlass.actors.worker_policy import Stage, check_stages
from windlass.engine.memory_plan import Placement, UpdateOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The part of one box in the plan of a job. Block 0 is the embedding, the last one of the model is the head."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    box: str
    first_block: int
    stop_block: int  # the first block that the box no longer has
    placement: Placement
    num_optimizers: int  # that the box's plan was made with
    # The box's budget of host memory, for a box without `arena_nbytes`. None: its free memory is the limit.
    host_memory_nbytes: int | None = None
    arena_nbytes: int | None = None  # exact size of the arena; None: the engine chooses it when the job starts
    planned_device_nbytes: int | None = None  # peak device memory; None: it is counted when the job starts
    peak_gib: dict[str, float]  # by tier, as in a PlanReport; empty: not known
    # As in a PlanReport; None: not known. By these a job that has come to one box is planned anew.
    busy_s: dict[str, float] | None = None
    choices: dict[str, Any] | None = None
    num_ranks: int | None = None  # GPU workers of the box, if they are fewer than the plan's

    @property
    def stage(self) -> Stage:
        """The blocks of the box."""
        return Stage(self.first_block, self.stop_block)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesPlan:
    """The plan of a job over its boxes, in the order of their blocks. With one stage, one box has all of them."""

    # The plan of a newer version has more fields, which must not be ignored.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    num_ranks: int  # GPU workers of each box whose stage has no other number
    num_microbatches: int
    update_order: UpdateOrder
    cut_matrices: int | None = None  # the job's; see `TrainingConfig`
    step_s: float | None  # by the cost model; None: not known
    stages: tuple[StagePlan, ...]
    notes: tuple[str, ...] = ()  # for the user: what was assumed
    layout_epoch: int = 0  # of the job's divisions: those that replace an earlier one have higher ones
    from_attempt: int = 0  # the first attempt that trains in this division, if it replaces an earlier one

    def __post_init__(self) -> None:
        """Refuses plans that no job can have."""
        if not self.stages:
            raise ValueError("a plan over boxes has one stage at least")
        boxes = [stage.box for stage in self.stages]
        if len(set(boxes)) < len(boxes):
            raise ValueError(f"each box of a job has one stage, and these have: {', '.join(boxes)}")
        check_stages(self.engine_stages, self.stages[-1].stop_block)
        sizes = {stage.placement.group_size for stage in self.stages}
        if len(sizes) > 1 or None in sizes:
            raise ValueError(f"all boxes compute groups of one known size, not of {sizes}")
        numbers = [*self.ranks, self.num_microbatches, self.group_size]
        if min(numbers) < 1 or any(stage.num_optimizers < 1 for stage in self.stages):
            raise ValueError(f"a plan has one GPU, micro-batch, group and optimizer at least, not {numbers}")
        if max(self.ranks) != self.num_ranks:
            raise ValueError(f"num_ranks is {self.num_ranks}; it must be that of a box with most GPUs, of {self.ranks}")
        if self.layout_epoch < 0 or self.from_attempt < 0:
            raise ValueError(
                f"layout_epoch and from_attempt must be 0 or more, not {self.layout_epoch} and {self.from_attempt}"
            )
        if self.step_s is not None and not 0 < self.step_s < math.inf:
            raise ValueError(f"step_s is {self.step_s}; it must be above 0 and finite, or None")

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "StagesPlan":
        """Reads a stored plan. Raises ValueError if a field is missing, unknown or wrong."""
        plan = _PLAN.validate_json(json.dumps(values), strict=True)
        # A job must not run by a part of a newer version's placement.
        unknown = {name for stage in values["stages"] for name in stage["placement"]} - _OF_PLACEMENT
        if unknown:
            raise ValueError(f"this release does not know these fields of a placement: {', '.join(sorted(unknown))}")
        return plan

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as JSON values."""
        values: dict[str, Any] = _PLAN.dump_python(self, mode="json")
        if not self.from_attempt:
            del values["from_attempt"]  # so that plans of releases that lack it keep their bytes, and so their digests
        if self.cut_matrices is None:
            del values["cut_matrices"]  # for the same reason
        for stage in values["stages"]:
            for name in _NEW_OF_STAGE:
                if stage[name] is None:
                    del stage[name]
        return values

    @property
    def group_size(self) -> int:
        """The micro-batches that a GPU worker computes together."""
        size = self.stages[0].placement.group_size
        assert size is not None, "it was checked"
        return size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The number of GPU workers of each box."""
        return tuple(self.num_ranks if stage.num_ranks is None else stage.num_ranks for stage in self.stages)

    @property
    def num_rounds(self) -> int:
        """The number of groups that the first GPU worker of a box with most of them computes in a step."""
        return -(-self.num_microbatches // (self.group_size * self.num_ranks))

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the model, with the embedding and the head."""
        return self.stages[-1].stop_block

    @property
    def is_over_several(self) -> bool:
        """True if the job has more than one box."""
        return len(self.stages) > 1

    @property
    def boxes(self) -> tuple[str, ...]:
        """The names of the boxes, in the order of their blocks."""
        return tuple(stage.box for stage in self.stages)

    @property
    def engine_stages(self) -> tuple[Stage, ...]:
        """The blocks of each box, as the engine takes them."""
        return tuple(stage.stage for stage in self.stages)


_PLAN = TypeAdapter(StagesPlan)
_NEW_OF_STAGE = ("num_ranks", "busy_s", "choices")  # that older releases lack
_OF_PLACEMENT = {field.name for field in fields(Placement)}
