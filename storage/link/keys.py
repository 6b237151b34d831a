"""The names of what boxes pull from each other, and the one order in which all of them produce and pull it."""

from dataclasses import dataclass
from enum import StrEnum

from windlass.storage.ids import BlockIndex, Step


class KeyKind(StrEnum):
    """The bytes behind a key."""

    PARAM = "param"  # params of a tensor that two boxes use
    ACTIVATION = "activation"  # the output of the last block of a stage
    ACTIVATION_GRAD = "activation_grad"  # the gradient of the input of the first block of a stage
    EVALUATION = "evaluation"  # the output of the last block of a stage, in an evaluation
    PARAM_GRAD = "param_grad"  # the sum of one box's gradients of a tensor that two boxes use
    EXPORT = "export"  # params of a chunk, for the model's folder


_PHASES = {kind: phase for phase, kind in enumerate(KeyKind)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkKey:
    """A range of bytes that one box has and another needs. It is unique within an attempt."""

    kind: KeyKind
    step: Step
    group: int = 0  # of micro-batches
    block: BlockIndex  # that computed it
    part: int = 0  # a micro-batch of the group, or a chunk

    @property
    def position(self) -> tuple[int, int, int, int, int]:
        """The key's place in the total order.

        There is no deadlock if each box offers and pulls the keys of each kind in this order. Within a group,
        activations go up through the blocks, and their gradients go down.
        """
        goes_down = self.kind is KeyKind.ACTIVATION_GRAD
        return (self.step, _PHASES[self.kind], self.group, -self.block if goes_down else self.block, self.part)

    def __str__(self) -> str:
        kind = self.kind.value.replace("_", " ")
        return f"{kind} of step {self.step}, group {self.group}, block {self.block}, part {self.part}"
