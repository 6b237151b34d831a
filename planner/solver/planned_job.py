"""The planner's view of a job, and the bytes that it may use on each tier."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from windlass.engine.lanes import LaneDivision
from windlass.engine.memory_plan import NO_CROSSINGS, Crossings, MemoryTier, ModelSize, UpdateOrder
from windlass.engine.training_config import TrainingConfig
from windlass.planner.cost import ModelProfile, Ways, ways_of_layer

# Numbers of the tiers in the program.
TIER_INDEX = {tier: index for index, tier in enumerate(MemoryTier)}


def values_by_tier(values: Sequence[float]) -> dict[MemoryTier, float]:
    """Returns the program's values for all tiers by tier."""
    return dict(zip(MemoryTier, values, strict=True))


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """The planner's view of a job."""

    model: ModelProfile  # for one micro-batch
    training: TrainingConfig
    num_ranks: int = 1  # GPU workers, each with a GPU of its own
    num_optimizers: int = 1
    num_prefetched: int = 2  # operations whose params are on the device at once
    ways: Ways = ways_of_layer  # options for activations
    # The planner may choose the order of updates, of those that give the same parameters; else it is the config's.
    chooses_order: bool = False
    group_size: int | None = None  # micro-batches that a GPU worker computes together; None: the planner chooses
    # Of a box that has a stage of the model only: what it exchanges with others, and how many groups of a GPU worker
    # have their activations on the device at once.
    crossings: Crossings = NO_CROSSINGS
    num_groups_in_flight: int = 1
    spills: bool | None = None  # kept gradients go to the SSDs; None: the planner chooses
    num_head_slices: int = 1  # parts of a micro-batch that go through the head one after the other
    # The elements of a part of a matrix, of which the planner may choose one, the largest first; none: it is that of
    # the training config. `with_cut`: makes the model of a job without a cut that of one with it.
    cuts: tuple[int, ...] = ()
    with_cut: Callable[[ModelProfile, int], ModelProfile] = lambda model, cut: model
    # Bytes of device memory that every plan with the same buffers and group size needs beyond the cost model's formula.
    # It is called with the `StepCosts` of such plans.
    left_out_nbytes: Callable[..., float] = lambda costs: 0.0

    @cached_property
    def by_order(self) -> "tuple[PlannedJob, ...]":
        """The job with each order of updates that the planner may choose. Each of them has only one order."""
        if not self.chooses_order:
            return (self,)
        orders = dict.fromkeys((self.update_order, UpdateOrder.KEPT))
        return tuple(
            self._changed(order, training=replace(self.training, update_order=order), chooses_order=False)
            for order in orders
        )

    @property
    def cut(self) -> int | None:
        """The most elements of a part of a matrix; None: no matrix is cut."""
        return self.training.cut_matrices

    @cached_property
    def by_cut(self) -> "tuple[PlannedJob, ...]":
        """The job with each of `cuts`, the largest first."""
        return tuple(
            self._changed(
                cut,
                model=self.with_cut(self.model, cut),
                training=replace(self.training, cut_matrices=cut),
                cuts=(),
            )
            for cut in self.cuts
        )

    def leaving_out(self, left_out_nbytes: Callable[..., float]) -> "PlannedJob":
        """Returns the job whose plans need such bytes of device memory. All that is known of it holds, too."""
        changed = replace(self, left_out_nbytes=left_out_nbytes)
        changed.__dict__["known"] = self.known
        return changed

    def _changed(self, choice: object, **changes: Any) -> "PlannedJob":
        """Returns the job with one of its choices made. What is known of it is a part of what is known of this job."""
        changed = replace(self, **changes)
        changed.__dict__["known"] = self.known.setdefault(choice, {})
        return changed

    @cached_property
    def known(self) -> dict[Any, Any]:
        """Parts of cost models that several plans share, so that they are computed once; see `StepCosts`."""
        return {}

    @cached_property
    def blocks_of_own_size(self) -> frozenset[int]:
        """The blocks of which no other one has the same size."""
        numels = [block.numel for block in self.model.blocks]
        number = Counter(numels)
        return frozenset(block for block, numel in enumerate(numels) if number[numel] == 1)

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of a step."""
        return self.training.num_microbatches

    @property
    def is_sliced(self) -> bool:
        """True if the head goes over a micro-batch in several slices."""
        return self.num_head_slices > 1

    @property
    def largest_group(self) -> int:
        """The most micro-batches that a GPU worker may compute together, so that each has a group if possible."""
        return -(-self.num_microbatches // self.num_ranks)

    @cached_property
    def lanes(self) -> LaneDivision:
        """The lanes of a step."""
        return self.training.lane_division

    @cached_property
    def update_order(self) -> UpdateOrder:
        """The order of the blocks' updates."""
        return self.training.order_of_updates

    @property
    def keeps_grads(self) -> bool:
        """True if all gradients must be known before any block is updated."""
        return self.update_order.keeps_grads

    @property
    def commit_period_s(self) -> float:
        """The seconds from one commit to the next, if states rest in memory. Checkpoints are made of commits, too."""
        return 60 * min(self.training.commit_minutes, self.training.checkpoint_minutes or math.inf)

    @cached_property
    def param_itemsize(self) -> int:
        """The bytes of a parameter."""
        formats = self.training.formats
        return formats.itemsizes[formats.param_kind]

    @cached_property
    def state_itemsize(self) -> int:
        """The bytes of all stored states of one parameter."""
        return sum(self.training.formats.itemsizes.values())

    @cached_property
    def read_itemsize(self) -> int:
        """The bytes of those states that an update reads. Only these are resident on a device."""
        return self.training.formats.update_itemsize

    @cached_property
    def grad_itemsize(self) -> int:
        """The bytes of an element of a gradient in transit to the optimizer."""
        return self.training.grad_itemsize

    @cached_property
    def size(self) -> ModelSize:
        """The sizes that the arena depends on."""
        return ModelSize(
            block_numels=tuple(block.numel for block in self.model.blocks),
            chunk_numel=self.model.chunk_numel,
            param_itemsize=self.param_itemsize,
            state_itemsize=self.state_itemsize,
            shared=self.model.shared,
            own=self.model.own,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bytes that a job may use on each tier."""

    device_nbytes: float
    host_nbytes: float
    ssd_nbytes: float

    @property
    def by_tier(self) -> dict[MemoryTier, float]:
        """The limits, in the order of the tiers."""
        return values_by_tier((self.device_nbytes, self.host_nbytes, self.ssd_nbytes))
