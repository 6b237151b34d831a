"""The life of one block in one step, from its last operation to its update."""

from dataclasses import dataclass, field
from enum import StrEnum

from windlass.actors.policy.pending_replies import UnexpectedEventError
from windlass.storage.ids import ActorName, BlockIndex, Step


class BlockState(StrEnum):
    """The states of a block in a step."""

    COMPUTING = "computing"  # the operation that completes its gradient is granted
    KEPT = "kept"  # its gradient is stored in its final place; the update may not begin yet
    UPDATING = "updating"  # the actors that hold its states update it, or will
    UPDATED = "updated"
    DISCARDED = "discarded"  # the step is skipped


_NEXT: dict[BlockState, frozenset[BlockState]] = {
    BlockState.COMPUTING: frozenset((BlockState.KEPT,)),
    BlockState.KEPT: frozenset((BlockState.UPDATING, BlockState.DISCARDED)),
    BlockState.UPDATING: frozenset((BlockState.UPDATED,)),
    BlockState.UPDATED: frozenset(),
    BlockState.DISCARDED: frozenset(),
}


@dataclass(slots=True)
class BlockInStep:
    """One block in one step."""

    step: Step
    block: BlockIndex
    state: BlockState = BlockState.COMPUTING
    missing: set[ActorName] = field(default_factory=set)  # actors whose share is not updated, while it is UPDATING
    # Actors that reported their update before the GPU worker's report of the gradient came.
    early: set[ActorName] = field(default_factory=set)
    _previous_states: list[BlockState] = field(default_factory=list)

    def become(self, state: BlockState) -> None:
        """Changes the state. Raises UnexpectedEventError, with the previous states, if that is not possible."""
        if state not in _NEXT[self.state]:
            history = ", ".join([*self._previous_states, self.state])
            raise UnexpectedEventError(
                f"block {self.block} of step {self.step} was {history}: it cannot be {state} after that"
            )
        self._previous_states.append(self.state)
        self.state = state
