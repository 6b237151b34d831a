"""Simulates params that are copied piece by piece while their layer is computed, as the real `PieceBuffers` does.

The order of uses alone decides which buffer a piece gets: the least recently used one. So an operation's copies are
known when it begins. Each copy waits for the last use of its buffer. The real buffers learn the order in the first
step; here it is known from the start.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from windlass.actors.messages import ComputeBlock, ParamRequest, SpanKind
from windlass.engine.memory_plan import NUM_PIECE_BUFFERS, largest_piece
from windlass.planner.simulation import Future, Process, Queue, SimulatedGpu
from windlass.storage.ids import BlockIndex

_PIECES = "pieces of params"


# The index of a piece, and whether it is columns of a matrix that is cut. Those are copied anew.
Piece = tuple[int, bool]


@dataclass(slots=True, eq=False)
class _Use:
    """One use of a piece in an operation."""

    piece: Piece
    copied: Future
    over: Future
    nbytes: int  # freed after this use


# A copy of a piece into a buffer: for a request, its bytes, done when the buffer is free (None: it is), and its end.
_Copy = tuple[ParamRequest, int, Future | None, Future]


class Pieces:
    """The buffers for pieces of all streamed layers."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu, self.world = gpu, gpu.world
        world = gpu.world
        self._to_copy: Queue[_Copy] = Queue(world.clock)
        # The last use of each buffer's piece, the least recently used buffer first.
        self._last: list[_Use | None] = [None] * NUM_PIECE_BUFFERS
        self._uses: dict[int, deque[_Use]] = {}  # by operation: uses still to come
        self._held: _Use | None = None
        self._shares = {
            block: [(stop - start) / bounds[-1] for start, stop in itertools.pairwise(bounds) if bounds[-1]]
            for block, bounds in world.bounds.items()
        }
        cut = world.context.spec.training.cut_matrices
        self._have_columns = frozenset(
            block
            for block in world.bounds
            if any(param.is_cut(cut) for param in world.context.layout.blocks[block].params)
        )
        if world.bounds:
            piece_nbytes = largest_piece(list(world.bounds.values())) * world.param_itemsize
            gpu.allocate(_PIECES, NUM_PIECE_BUFFERS * piece_nbytes)
        world.clock.process(self._run())

    def shares(self, block: BlockIndex) -> list[float]:
        """Returns each piece's share of a pass through a block; empty if the block is not streamed."""
        return self._shares.get(block, [])

    def order(self, block: BlockIndex, *, is_back: bool) -> list[Piece]:
        """Returns the pieces that a pass through a block uses, in order.

        The backward pass of an embedding uses no params.
        """
        number = len(self.shares(block))
        if not is_back:
            return [(piece, False) for piece in range(number)]
        of_columns = block in self._have_columns
        return [] if block == 0 else [(piece, of_columns) for piece in reversed(range(number))]

    def begin(self, request: ParamRequest, order: Sequence[Piece]) -> None:
        """Plans the copies for an operation that will use pieces in this order."""
        bounds, clock, itemsize = self.world.bounds[request.block], self.world.clock, self.world.param_itemsize
        uses = self._uses[request.operation.op] = deque()
        lying: list[_Use | None] = [None] * len(self._last)  # pieces of this operation
        pieces: list[Piece | None] = [None] * len(self._last)  # the same
        for piece in order:
            buffer = pieces.index(piece) if piece in pieces else 0
            pieces.pop(buffer)
            pieces.append(piece)
            loaded, last = lying.pop(buffer), self._last.pop(buffer)
            index, _ = piece
            nbytes = (bounds[index + 1] - bounds[index]) * itemsize
            if loaded is not None and loaded.piece == piece:
                use = _Use(piece, loaded.copied, Future(clock), nbytes)
                loaded.nbytes = 0
            else:
                use = _Use(piece, Future(clock), Future(clock), nbytes)
                self._to_copy.put((request, nbytes, None if last is None else last.over, use.copied))
            lying.append(use)
            self._last.append(use)
            uses.append(use)

    def hold(self, operation: ComputeBlock) -> Future:
        """Frees the previous piece, and returns the future of the operation's next one."""
        self._release_held()
        self._held = self._uses[operation.op].popleft()
        return self._held.copied

    def end(self, operation: ComputeBlock) -> None:
        """Frees the last piece of an operation."""
        self._release_held()
        unused = self._uses.pop(operation.op)
        assert not unused, "all pieces were used"

    def _release_held(self) -> None:
        if self._held is not None:
            self._held.over.set_done()
            self.gpu.level(_PIECES, -self._held.nbytes)
            self._held = None

    def _run(self) -> Process:
        while True:
            request, nbytes, free, copied = yield from self._to_copy.get()
            if free is not None:
                yield free
            self.gpu.level(_PIECES, nbytes)
            yield from self.gpu.copy_in(nbytes, SpanKind.COPY_PARAMS_IN, request.step, request.block)
            copied.set_done()
