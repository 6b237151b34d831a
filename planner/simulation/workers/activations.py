"""Simulates swapped activations, as the real `ActivationTiers` and `HostActivations` do."""

from dataclasses import dataclass

from windlass.actors.activations import Moment, SsdSwap
from windlass.actors.messages import SpanKind
from windlass.engine.memory_plan import MemoryTier
from windlass.planner.simulation import (
    ACTIVATIONS,
    LEAVING,
    Future,
    Process,
    ProcessReturning,
    Queue,
    Signal,
    SimulatedGpu,
)
from windlass.planner.simulation.workers.ssd_activations import SsdActivations

_BACK = "activations back, or coming"


@dataclass(slots=True, eq=False)
class _HostSwap:
    """The part of a tensor in slots of host memory."""

    nbytes: int
    num_slots: int
    left_in: Moment
    left: Future  # set when it has left the device
    back: Future


@dataclass(slots=True, eq=False)
class Away:
    """A swapped tensor: its first bytes in host memory, the rest on the SSDs. Either may be None."""

    nbytes: int
    host: _HostSwap | None
    ssd: SsdSwap | None
    is_wanted: bool = False


class Activations:
    """Swapped activations, in host memory first and then on the SSDs."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu, self.world = gpu, gpu.world
        self._host = _HostActivations(gpu)
        self._ssds = SsdActivations(gpu) if gpu.world.context.plan.num_ssd_activations else None
        self._now = Moment()

    def begin(self, moment: Moment) -> None:
        """Sets the operation that the following calls belong to."""
        self._now = moment

    def put(self, nbytes: int) -> ProcessReturning[Away]:
        """Swaps a tensor out. Waits while too many bytes are on their way."""
        start_s, host_nbytes, ssd, host = self.world.clock.now, nbytes, None, None
        if self._ssds is not None:
            host_nbytes = yield from self._host.room_nbytes(nbytes)
            if host_nbytes < nbytes:
                ssd = yield from self._ssds.put(nbytes - host_nbytes, self._now)
        if host_nbytes:
            host = yield from self._host.put(host_nbytes, self._now)
        self._note_wait(start_s)
        return Away(nbytes, host, ssd)

    def prefetch(self, away: Away) -> None:
        """Begins to copy a tensor back, if this has not begun yet."""
        if away.is_wanted:
            return
        away.is_wanted = True
        self.gpu.level(_BACK, away.nbytes)
        if away.host is not None:
            self._host.prefetch(away.host)
        if away.ssd is not None and self._ssds is not None:
            self._ssds.prefetch(away.ssd, self._now)

    def get(self, away: Away) -> Process:
        """Waits until the tensor is back on the device."""
        start_s = self.world.clock.now
        self.prefetch(away)
        if away.ssd is not None and self._ssds is not None:
            yield from self._ssds.wait_for(away.ssd)
        if away.host is not None and not away.host.back.is_done:
            yield away.host.back
        self._note_wait(start_s)

    def drop(self, away: Away) -> None:
        """Frees a tensor that was copied back and is no longer needed."""
        self.gpu.level(_BACK, -away.nbytes)

    def _note_wait(self, start_s: float) -> None:
        if start_s < self.world.clock.now:
            step, block = self._now
            self.gpu.note(SpanKind.WAIT_ACTIVATIONS, step, block, start_s)


class _HostActivations:
    """Swapped tensors in slots of host memory, with one stream for each direction."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu, self.world = gpu, gpu.world
        world = gpu.world
        self._slot_nbytes = world.context.plan.activations.slot_nbytes
        self._num_free = world.context.plan.num_host_activations
        self._num_returning = 0
        self._leaving_nbytes = 0
        self._outward: Queue[_HostSwap] = Queue(world.clock)
        self._inward: Queue[_HostSwap] = Queue(world.clock)
        self._changed = Signal(world.clock)
        world.allocate(MemoryTier.HOST, ACTIVATIONS, self._num_free * self._slot_nbytes)
        world.clock.process(self._run_outward())
        world.clock.process(self._run_inward())

    def room_nbytes(self, wanted_nbytes: int) -> ProcessReturning[int]:
        """Returns how many of the wanted bytes fit into host memory. Waits for slots that are about to become free."""
        num_slots = -(-wanted_nbytes // self._slot_nbytes)
        while self._num_free < num_slots and self._num_returning:
            yield self._changed.next
        return min(wanted_nbytes, self._num_free * self._slot_nbytes)

    def put(self, nbytes: int, now: Moment) -> ProcessReturning[_HostSwap]:
        """Queues the copy of a tensor to host memory, and returns its swap."""
        clock, limit = self.world.clock, self.world.context.plan.max_leaving_nbytes
        num_slots = -(-nbytes // self._slot_nbytes)
        while self._leaving_nbytes and self._leaving_nbytes + nbytes > limit:
            yield self._changed.next
        while self._num_free < num_slots:
            yield self._changed.next
        swap = _HostSwap(nbytes, num_slots, now, clock.future(), clock.future())
        self._num_free -= num_slots
        self._leaving_nbytes += nbytes
        self.world.level(MemoryTier.HOST, ACTIVATIONS, num_slots * self._slot_nbytes)
        self.gpu.level(LEAVING, nbytes)
        self._outward.put(swap)
        return swap

    def prefetch(self, swap: _HostSwap) -> None:
        """Queues the copy back."""
        self._num_returning += 1
        self._inward.put(swap)

    def _run_outward(self) -> Process:
        while True:
            swap = yield from self._outward.get()
            step, block = swap.left_in
            yield from self.gpu.copy_out(swap.nbytes, SpanKind.COPY_ACTIVATIONS_OUT, step, block)
            self._leaving_nbytes -= swap.nbytes
            self.gpu.level(LEAVING, -swap.nbytes)
            swap.left.set_done()
            self._changed.notify()

    def _run_inward(self) -> Process:
        while True:
            swap = yield from self._inward.get()
            yield swap.left
            step, block = swap.left_in
            yield from self.gpu.copy_in(swap.nbytes, SpanKind.COPY_ACTIVATIONS_IN, step, block)
            self._num_free += swap.num_slots
            self.world.level(MemoryTier.HOST, ACTIVATIONS, -swap.num_slots * self._slot_nbytes)
            self._num_returning -= 1
            swap.back.set_done()
            self._changed.notify()
