"""The decisions about sums of gradients: where an operation's sums are, and which return to the device next.

Each operation that uses a block's tensors has its own sum until the block's last operation has run. So sums over
micro-batches do not depend on how these are grouped. Between two groups, sums are in host memory, except those of
blocks whose states are resident on the device. If a box has one GPU worker, its sums for other boxes stay there, too.

Pure: the GPU worker's threads and the simulator drive the same classes.
"""

from collections import deque
from collections.abc import Collection, Sequence
from enum import Enum, auto

from windlass.actors.messages import ComputeBlock, Phase
from windlass.storage.ids import BlockIndex

# The block whose operation adds to a sum, and the block whose gradient it is. They differ only if blocks share tensors.
Use = tuple[BlockIndex, BlockIndex]


class SumSource(Enum):
    """The places from which an operation gets the sum that it adds to."""

    NEW_BUFFER = auto()  # it is the first to add
    HOST = auto()  # the group before has left the sum in host memory
    DEVICE = auto()  # the group before has left the sum in its buffer


class GradSums:
    """The sums that are on the device. Not thread-safe."""

    def __init__(self, shared: Sequence[Sequence[BlockIndex]], device_blocks: Collection[int]) -> None:
        """`shared`: per block, the blocks whose params its operation reads.

        `device_blocks`: blocks whose sums stay on the device between groups.
        """
        self._shared = shared
        self._device_blocks = device_blocks
        self._here: set[Use] = set()

    def needs_permit(self, use: Use) -> bool:
        """Returns whether a sum counts among the blocks whose gradients may be on the device at once.

        Only a block's own sum does. The sum of a shared block is held until the step's last operation, which would
        deadlock. Gradients of blocks that are resident on the device stay there in any case.
        """
        user, block = use
        return user == block and block not in self._device_blocks

    def begin(self, operation: ComputeBlock, block: BlockIndex) -> SumSource:
        """Decides where an operation gets the sum of a block's gradient."""
        use = (operation.block, block)
        if use in self._here:
            return SumSource.DEVICE
        self._here.add(use)
        return SumSource.HOST if operation.group > 0 and block not in self._device_blocks else SumSource.NEW_BUFFER

    def pass_on(self, operation: ComputeBlock) -> list[Use]:
        """Removes and returns the sums of an operation that go to host memory, for the next group."""
        uses = leaving_sums(operation, self._device_blocks)
        self._here.difference_update(uses)
        return uses

    def complete_for_others(self, user: BlockIndex, borrowed: Collection[int]) -> list[Use]:
        """Removes and returns the sums of a block's operation for blocks of other boxes, `borrowed`."""
        uses = [(user, block) for block in self._shared[user] if block in borrowed]
        self._here.difference_update(uses)
        return uses

    def complete(self, block: BlockIndex) -> list[Use]:
        """Removes and returns the sums of a block's gradient, in the order of operations. The block's own is last."""
        users = [BlockIndex(user) for user in reversed(range(len(self._shared))) if block in self._shared[user]]
        uses = [(user, block) for user in users]
        self._here.difference_update(uses)
        return uses


class ReturningSums:
    """The sums in host memory, and their way back: those of one operation at a time. Not thread-safe.

    Two at a time would need more buffers on the device.
    """

    def __init__(
        self, device_blocks: Collection[int], own_ways: Collection[int] = (), tied_in_pieces: Collection[int] = ()
    ) -> None:
        """`own_ways`: blocks whose own sums do not return ahead of their operation, but with it, in another way.

        `tied_in_pieces`: of these, those whose sums of other blocks' operations do so, too.
        """
        self._device_blocks, self._own_ways, self._tied = device_blocks, own_ways, tied_in_pieces
        self._expected: deque[ComputeBlock] = deque()
        self._left: set[Use] = set()  # in host memory
        self._returning: set[Use] = set()  # on their way, or back and not taken

    def expect(self, operation: ComputeBlock) -> None:
        """Adds an operation that will need sums of the group before, if there are any. Its turn is after all others."""
        goes_backward = operation.phase in (Phase.HEAD, Phase.BACKWARD)
        if operation.group > 0 and goes_backward and self._returning_sums(operation):
            self._expected.append(operation)

    def left(self, use: Use) -> None:
        """Records that a sum is in host memory."""
        self._left.add(use)

    def takes_own_way(self, use: Use) -> bool:
        """Returns whether a sum returns in another way."""
        user, block = use
        return (user == block and block in self._own_ways) or block in self._tied

    @property
    def is_due(self) -> bool:
        """True if the sums of the first expected operation are in host memory, and those before it were taken."""
        if not self._expected or self._returning:
            return False
        return self._left.issuperset(self._returning_sums(self._expected[0]))

    def begin(self) -> tuple[ComputeBlock, list[Use]]:
        """Begins the return that is due. Returns the operation and its sums."""
        operation = self._expected.popleft()
        uses = self._returning_sums(operation)
        self._left.difference_update(uses)
        self._returning.update(uses)
        return operation, uses

    def take(self, use: Use) -> None:
        """Records that an operation adds to a sum that is back."""
        self._returning.remove(use)

    def _returning_sums(self, operation: ComputeBlock) -> list[Use]:
        uses = leaving_sums(operation, self._device_blocks)
        return [use for use in uses if not self.takes_own_way(use)]


def leaving_sums(operation: ComputeBlock, device_blocks: Collection[int]) -> list[Use]:
    """Returns the sums of an operation that leave the device after its group."""
    return [(operation.block, block) for block in operation.blocks if block not in device_blocks]
