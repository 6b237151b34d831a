"""Params that come piece by piece while their layer is computed: as `engine.param_pieces.PieceBuffers`.

Which buffer takes which piece follows from the order of uses alone: that which was used longest ago. So an operation's
copies are known as it begins, and each waits for the last use of what lay in its buffer. What the real buffers learn in
the first step is known from the beginning.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import simpy

from windlass.actors.messages import ComputeBlock, PrefetchParams, SpanKind
from windlass.actors.timeline import Tier
from windlass.engine.memory_plan import NUM_PIECE_BUFFERS, largest_piece
from windlass.planner.simulation import Process, Queue, SimulatedMachine
from windlass.storage.ids import BlockIndex

_PIECES = "pieces of params"


@dataclass(slots=True, eq=False)
class _Use:
    """A piece that is computed with."""

    piece: int
    copied: simpy.Event
    over: simpy.Event
    nbytes: int  # that nobody needs after it


@dataclass(slots=True, eq=False)
class _Copy:
    """A piece on its way into a buffer."""

    request: PrefetchParams
    nbytes: int
    free: simpy.Event | None  # the buffer, from then on
    copied: simpy.Event


class Pieces:
    """Buffers for pieces of all streamed layers."""

    def __init__(self, world: SimulatedMachine) -> None:
        self.world = world
        self._to_copy: Queue[_Copy] = Queue(world.env)
        # What lies in each buffer since its last use, that which was used longest ago first.
        self._last: list[_Use | None] = [None] * NUM_PIECE_BUFFERS
        self._uses: dict[int, deque[_Use]] = {}  # by operation: those to come
        self._held: _Use | None = None
        if world.bounds:
            piece_nbytes = largest_piece(list(world.bounds.values())) * world.param_itemsize
            world.allocate(Tier.GPU, _PIECES, NUM_PIECE_BUFFERS * piece_nbytes)
        world.env.process(self._run())

    def shares(self, block: BlockIndex) -> list[float]:
        """The part that each of a block's pieces has in a pass through it; none where it does not come in pieces."""
        bounds = self.world.bounds.get(block, (0,))
        return [(stop - start) / bounds[-1] for start, stop in itertools.pairwise(bounds) if bounds[-1]]

    def begin(self, request: PrefetchParams, order: Sequence[int]) -> None:
        """An operation is given to the device, which will use pieces in this order."""
        bounds, env = self.world.bounds[request.block], self.world.env
        uses = self._uses[request.op] = deque()
        lying: list[_Use | None] = [None] * len(self._last)  # of this operation
        for piece in order:
            place = next((i for i, use in enumerate(lying) if use is not None and use.piece == piece), 0)
            there, last = lying.pop(place), self._last.pop(place)
            nbytes = (bounds[piece + 1] - bounds[piece]) * self.world.param_itemsize
            if there is not None and there.piece == piece:
                use = _Use(piece, there.copied, env.event(), nbytes)
                there.nbytes = 0
            else:
                use = _Use(piece, env.event(), env.event(), nbytes)
                self._to_copy.put(_Copy(request, nbytes, None if last is None else last.over, use.copied))
            lying.append(use)
            self._last.append(use)
            uses.append(use)

    def hold(self, operation: ComputeBlock) -> Process:
        """What an operation uses next is there; it needs nothing any more of what it used before."""
        self._let_go()
        self._held = self._uses[operation.op].popleft()
        yield self._held.copied

    def end(self, operation: ComputeBlock) -> None:
        """It is computed."""
        self._let_go()
        unused = self._uses.pop(operation.op)
        assert not unused, "all pieces were used"

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.over.succeed()
            self.world.level(Tier.GPU, _PIECES, -self._held.nbytes)
            self._held = None

    def _run(self) -> Process:
        while True:
            copy = yield from self._to_copy.get()
            if copy.free is not None:
                yield copy.free
            request = copy.request
            self.world.level(Tier.GPU, _PIECES, copy.nbytes)
            yield from self.world.copy_in(copy.nbytes, SpanKind.COPY_PARAMS_IN, request.step, request.block)
            copy.copied.succeed()
