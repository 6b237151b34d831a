"""The request of one block's params for one operation."""

from dataclasses import dataclass

from windlass.actors.messages import ComputeBlock
from windlass.storage.ids import BlockIndex, Step


@dataclass(frozen=True, slots=True)
class ParamRequest:
    """Asks for the params of a block in a device buffer, which is held until the operation is done."""

    operation: ComputeBlock
    block: BlockIndex
    step: Step  # the step under which the SSDs store the params

    @classmethod
    def of(cls, operation: ComputeBlock) -> "tuple[ParamRequest, ...]":
        """Returns the requests of an operation, for each block whose params it needs."""
        return tuple(cls(operation, params.block, params.step) for params in operation.params)
