"""Simulates the actor that reads params from the SSDs, with its real decisions."""

from collections.abc import Callable, Sequence

from windlass.actors.messages import ParamChunk, ParamsCopied, ParamUse, RequestParams, SpanKind
from windlass.actors.ssd import param_turns
from windlass.actors.worker_policy import ParamActions
from windlass.engine.memory_plan import MemoryTier
from windlass.planner.simulation import PARAMS, SimulatedMachine
from windlass.storage.ids import ActorName, ChunkKey, Step


class ParamServer:
    """The slots of params, from which all GPU workers copy. Messages about params take no time."""

    def __init__(
        self, world: SimulatedMachine, tell: Callable[[ActorName, ParamUse, Sequence[ParamChunk]], None]
    ) -> None:
        """`tell` tells a GPU worker of params that it can copy."""
        self.world = world
        self._tell = tell
        self._turns = param_turns(world.context)
        self._num_free = self._turns.num_free
        self._slot_nbytes = world.context.plan.params.slot_nbytes
        world.allocate(MemoryTier.HOST, PARAMS, self._num_free * self._slot_nbytes)

    def post(self, message: RequestParams | ParamsCopied) -> None:
        """Processes a message of a GPU worker."""
        if isinstance(message, RequestParams):
            self._carry_out(self._turns.request(message))
        else:
            self._carry_out(self._turns.copied(message))

    def _carry_out(self, actions: ParamActions) -> None:
        if self._num_free != self._turns.num_free:
            self.world.level(MemoryTier.HOST, PARAMS, (self._num_free - self._turns.num_free) * self._slot_nbytes)
            self._num_free = self._turns.num_free
        for actor, use, chunks in actions.arrived:
            self._tell(actor, use, chunks)
        for read in actions.reads:
            for key in read.spans:
                self._read(read.use, read.step, key)

    def _read(self, use: ParamUse, step: Step, key: ChunkKey) -> None:
        nbytes = self.world.param_itemsize * self.world.chunk_numel(key)
        read = self.world.chunk_move(key, nbytes, SpanKind.READ_PARAMS, step, (step, 0))
        read.then(lambda: self._carry_out(self._turns.arrived(use, key)))
