"""The orders in which a step's gradients and updates may follow each other."""

from enum import StrEnum


class UpdateOrder(StrEnum):
    """When blocks are updated. All give the same parameters, while gradients are finite."""

    ACTIVE = "active"  # as gradients arrive, during the backward pass; not where all must be known first
    KEPT = "kept"  # gradients are kept until all are known; in forward order, under the next step's forward pass
    NAIVE = "naive"  # as ACTIVE, but a chunk is read only when the one before is written: for comparison
    AFTER_BACKWARD = "after_backward"  # as KEPT, and the next step waits for all of them: for comparison

    @property
    def keeps_grads(self) -> bool:
        """Whether gradients wait until all are known."""
        return self in (UpdateOrder.KEPT, UpdateOrder.AFTER_BACKWARD)

    @property
    def is_naive(self) -> bool:
        """Whether an optimizer has one chunk at a time."""
        return self is UpdateOrder.NAIVE

    @property
    def overlaps_steps(self) -> bool:
        """Whether the next step's forward pass may begin before all blocks are updated."""
        return self is not UpdateOrder.AFTER_BACKWARD
