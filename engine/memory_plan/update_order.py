"""The possible orders of a step's gradients and updates."""

from enum import StrEnum


class UpdateOrder(StrEnum):
    """The times at which blocks are updated. All orders give the same parameters if gradients are finite."""

    ACTIVE = "active"  # as gradients arrive, during the backward pass; impossible if updates need all gradients
    KEPT = "kept"  # after all gradients are known, in forward order, during the next step's forward pass
    NAIVE = "naive"  # like ACTIVE, but a chunk is read only after the previous one is written; for comparison
    AFTER_BACKWARD = "after_backward"  # like KEPT, but the next step waits for all updates; for comparison

    @property
    def keeps_grads(self) -> bool:
        """True if gradients are kept until all are known."""
        return self in (UpdateOrder.KEPT, UpdateOrder.AFTER_BACKWARD)

    @property
    def is_naive(self) -> bool:
        """True if an optimizer has only one chunk at a time."""
        return self is UpdateOrder.NAIVE

    @property
    def overlaps_steps(self) -> bool:
        """True if the next step's forward pass may begin before all blocks are updated."""
        return self is not UpdateOrder.AFTER_BACKWARD
