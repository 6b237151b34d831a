"""The state that the actors of a simulated job share: its facts, its resources, and the channels between them.

The resources of one GPU are in `gpu.py`.
"""

import functools
from collections.abc import Callable

from windlass.actors.job import CoreContext, grad_itemsize, piece_bounds
from windlass.actors.messages import Event, Message, SpanKind
from windlass.actors.policy import SchedulerConfig
from windlass.actors.timeline import WHOLE_BLOCK
from windlass.engine.memory_plan import MemoryTier, Pool
from windlass.planner.simulation.clock import Clock, Future
from windlass.planner.simulation.cores import SharedCores
from windlass.planner.simulation.network import SimulatedNetwork
from windlass.planner.simulation.resources import Log, Rates, Spend, Ssd, Work
from windlass.planner.simulation.waiting import Slots
from windlass.storage.ids import ActorName, BlockIndex, ChunkKey

# Names of memory uses that occur on several tiers.
PARAMS = "params"
GRADIENTS = "gradients"
STATES = "states"
ACTIVATIONS = "activations"
LEAVING = "activations leaving"
_READS = tuple(kind for kind in SpanKind if kind.startswith("read_"))  # compared faster than hashed


def _nothing() -> None:
    pass


class SimulatedMachine(Log):
    """One simulated machine, and the job on it."""

    def __init__(
        self,
        context: CoreContext,
        shape: SchedulerConfig,
        rates: Rates,
        work: Work,
        send_to_scheduler: Callable[[Event], None],
        send: Callable[[ActorName, Message], None],
        *,
        keeps_spans: bool,
        clock: Clock | None = None,
        network: SimulatedNetwork | None = None,
    ) -> None:
        """`send_to_scheduler` sends an actor's event to the scheduler, `send` a message to another actor.

        `clock`: see `Log`. `network`: that between the boxes of the job, if it has several.
        """
        super().__init__(rates.num_cores, keeps_spans=keeps_spans, clock=clock)
        self.network = network
        self.step_ends_s: list[float] = []  # by step: time at which its backward pass ended
        self.round_ends_s: list[float] = []  # the same of each round of groups, of all steps
        # Called after each operation of the GPU that completes gradients.
        self.operation_ended: Callable[[], None] = _nothing
        self.context = context
        self.shape = shape
        self.rates = rates
        self.work = work
        self.send_to_scheduler = send_to_scheduler
        self.send = send
        formats, plan = context.formats, context.plan
        layout = context.layout
        # By block: its elements, its chunks, and the elements and the SSD of each chunk. They are needed very often.
        # Blocks of other boxes have no chunks here, but perhaps a gradient sum.
        self.numels = [block.numel for block in layout.blocks]
        self.chunk_keys = [tuple(layout.chunk_keys(block.index)) for block in layout.blocks]
        self.keys_of_sums = [tuple(layout.keys_of_sum(block.index)) for block in layout.blocks]
        geometry = context.geometry(0) if context.ssds else None
        numel = layout.chunk_numel
        self._chunk_numels = [
            [min(numel, self.numels[block] - chunk * numel) for block, chunk in keys] for keys in self.keys_of_sums
        ]
        self._ssds_of = [[geometry.ssd_of(key) for key in keys] for keys in self.chunk_keys] if geometry else []
        self.host_slots = context.host_slots()
        self.param_itemsize = formats.itemsizes[formats.param_kind]
        self.state_itemsize = sum(formats.itemsizes.values())
        self.grad_itemsize = grad_itemsize(context.spec)
        # Where streamed blocks are cut into pieces.
        self.bounds: dict[BlockIndex, tuple[int, ...]] = piece_bounds(context)
        self.cached_params = frozenset(context.cached_params())
        cached_nbytes = plan.num_cached_params * plan.params.slot_nbytes
        self._keep(MemoryTier.HOST, PARAMS, cached_nbytes, cached_nbytes)
        self.grad_slots = self.pool(GRADIENTS, plan.grads)
        ssd_cpu_s = 0.0 if rates.num_cores is None else rates.ssd_cpu_s_per_byte
        self._memory = SharedCores(self.clock, 1.0) if self._memory_may_be_short(context) else None
        in_memory = None if self._memory is None else self._in_memory
        ssds = [context.ssd_server(index) for index in range(len(context.ssds))]
        self._ssds = [Ssd(self, name, ssd_cpu_s, in_memory) for name in ssds]
        self._piece_nbytes = [ssd.io.piece_nbytes for ssd in context.ssds]
        # Chunks with uncommitted data on an SSD. It takes space of its own until the commit.
        self._uncommitted: dict[ActorName, set[ChunkKey]] = {name: set() for name in ssds}
        # The SSDs always hold one committed generation.
        device_nbytes = formats.update_itemsize * sum(layout.blocks[block].numel for block in plan.device_blocks)
        ssd_nbytes = plan.ssd_nbytes if context.ssds else 0
        self._keep(MemoryTier.DEVICE, STATES, device_nbytes, device_nbytes)
        self._keep(MemoryTier.HOST, STATES, plan.host_states.nbytes, plan.host_states.nbytes)
        self._keep(MemoryTier.SSD, STATES, ssd_nbytes, ssd_nbytes // 2)

    @property
    def update_nbytes(self) -> int:
        """The bytes that an update of one parameter reads and writes in the host's memory."""
        return self.context.formats.update_itemsize + self.grad_itemsize + self.state_itemsize

    def through_memory(self, bytes_per_s: float, spend: Spend | None = None) -> Spend | None:
        """Returns a way to spend the time of work that moves so many bytes a second through the host's memory.

        `spend`: spends it if the memory is fast enough for all; None: the log does.
        """
        if self._memory is None:
            return spend
        in_memory = functools.partial(self._memory.work, num_threads=bytes_per_s / self.rates.host_memory_bytes)
        if spend is None:
            return in_memory
        return lambda duration_s: (*spend(duration_s), *in_memory(duration_s))

    def _in_memory(self, duration_s: float, bytes_per_s: float) -> tuple[Future, ...]:
        """Begins work of `duration_s`, or longer while more bytes pass the memory than it can read and write.

        Returns the event of its end; nothing if it takes no time.
        """
        assert self._memory is not None, "it may be short"
        return self._memory.work(duration_s, bytes_per_s / self.rates.host_memory_bytes)

    def _memory_may_be_short(self, context: CoreContext) -> bool:
        """Returns whether all that uses the host's memory at once may take more than it has."""
        rates, num_ranks = self.rates, context.spec.num_ranks
        nbytes = num_ranks * (rates.h2d_bytes + rates.d2h_bytes)
        nbytes += sum(map(max, rates.ssd_read_bytes, rates.ssd_write_bytes))
        nbytes += context.spec.num_cpu_optimizers * rates.optimizer_params * self.update_nbytes
        return rates.num_cores is None and nbytes > rates.host_memory_bytes

    def pool(self, what: str, pool: Pool) -> Slots:
        """Creates slots of the arena, and records how many bytes are taken."""
        self.allocate(MemoryTier.HOST, what, pool.nbytes)
        if not self.keeps_spans:
            return Slots(self.clock, pool.num_slots)
        return Slots(
            self.clock,
            pool.num_slots,
            lambda num_taken: self.level(MemoryTier.HOST, what, num_taken * pool.slot_nbytes),
        )

    def chunk_numel(self, key: ChunkKey) -> int:
        """Returns the number of elements of a chunk."""
        return self._chunk_numels[key.block][key.chunk]

    @property
    def nums_waiting(self) -> tuple[int, ...]:
        """The number of transfers that wait at each SSD, and of free slots for gradients."""
        return (*(ssd.num_waiting for ssd in self._ssds), self.grad_slots.num_free)

    def end_round(self, *, is_last: bool) -> None:
        """Records that a round's backward pass has ended and, if it is the last round, that the step's has."""
        self.round_ends_s.append(self.clock.now)
        if is_last:
            self.step_ends_s.append(self.clock.now)
            self.clock.pause()

    def ssd_of(self, key: ChunkKey) -> int:
        """Returns the index of the SSD that stores a chunk's states."""
        return self._ssds_of[key.block][key.chunk]

    def ssd_move(
        self,
        ssd: int,
        nbytes: int,
        kind: SpanKind,
        step: int,
        priority: tuple[int, int],
        block: int,
        chunk: int = WHOLE_BLOCK,
    ) -> Future:
        """Writes to an SSD or reads from it, as `kind` says. Returns the event of the transfer's end."""
        rate = (self.rates.ssd_read_bytes if kind in _READS else self.rates.ssd_write_bytes)[ssd]
        num_pieces = max(1, -(-nbytes // self._piece_nbytes[ssd]))
        return self._ssds[ssd].move(nbytes / rate, num_pieces, priority, kind, step, block, chunk, nbytes)

    def chunk_move(self, key: ChunkKey, nbytes: int, kind: SpanKind, step: int, priority: tuple[int, int]) -> Future:
        """Moves a chunk's states to or from their SSD. A gradient goes to the same place as the states of its step."""
        ssd = self.ssd_of(key)
        if (
            self.keeps_spans
            and kind not in _READS
            and key not in (uncommitted := self._uncommitted[self.context.ssd_server(ssd)])
        ):
            uncommitted.add(key)
            self.level(MemoryTier.SSD, STATES, self.state_itemsize * self.context.layout.chunk_numel)
        return self.ssd_move(ssd, nbytes, kind, step, priority, key.block, key.chunk)

    def committed(self, ssd: ActorName) -> None:
        """Replaces an SSD's committed data by what was written since the last commit."""
        nbytes = self.state_itemsize * self.context.layout.chunk_numel
        self.level(MemoryTier.SSD, STATES, -nbytes * len(self._uncommitted[ssd]))
        self._uncommitted[ssd].clear()

    def _keep(self, tier: MemoryTier, what: str, allocated_nbytes: int, nbytes: int) -> None:
        self.allocate(tier, what, allocated_nbytes)
        self.level(tier, what, nbytes)
