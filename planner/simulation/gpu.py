"""One GPU of a simulated machine."""

import functools

from windlass.actors.messages import SpanKind
from windlass.actors.timeline import COMPUTE, FROM_DEVICE, TO_DEVICE, WHOLE_BLOCK, own_resource
from windlass.engine.memory_plan import MemoryTier
from windlass.planner.simulation.clock import Process
from windlass.planner.simulation.cores import SharedCores
from windlass.planner.simulation.machine import SimulatedMachine
from windlass.planner.simulation.resources import Resource
from windlass.planner.simulation.waiting import Slots


class SimulatedGpu:
    """The resources that only one rank of the job uses: its GPU's compute, link and memory.

    The memory levels of a device are those of the GPU that completes gradients.
    """

    def __init__(self, world: SimulatedMachine, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.name = world.context.gpu_worker(rank)
        self._compute, to_device, from_device = (
            own_resource(name, self.name) for name in (COMPUTE, TO_DEVICE, FROM_DEVICE)
        )
        self._has_levels = world.keeps_spans and self.name == world.context.grads_worker
        rates, spend = world.rates, None
        if rates.num_cores is None and rates.duplex_share < 1:
            both_ways = SharedCores(world.clock, 2 * rates.duplex_share)
            spend = functools.partial(both_ways.work, num_threads=1)
        self.compute = Resource(world, self._compute)
        self._to_device = Resource(world, to_device, world.through_memory(rates.h2d_bytes, spend))
        self._from_device = Resource(world, from_device, world.through_memory(rates.d2h_bytes, spend))

    def copy_in(self, nbytes: int, kind: SpanKind, step: int, block: int, chunk: int = WHOLE_BLOCK) -> Process:
        """Copies from host memory to the device."""
        return self._to_device.work(nbytes / self.world.rates.h2d_bytes, kind, step, block, chunk, nbytes)

    def copy_out(self, nbytes: int, kind: SpanKind, step: int, block: int, chunk: int = WHOLE_BLOCK) -> Process:
        """Copies from the device to host memory."""
        return self._from_device.work(nbytes / self.world.rates.d2h_bytes, kind, step, block, chunk, nbytes)

    def note(self, kind: SpanKind, step: int, block: int, start_s: float) -> None:
        """Records a span of the compute that began at `start_s` and ends now."""
        self.world.note(self._compute, kind, step, block, WHOLE_BLOCK, start_s)

    def allocate(self, what: str, nbytes: int) -> None:
        """Records that `nbytes` more of the device are reserved for a use of memory; see `Log.allocate`."""
        if self._has_levels:
            self.world.allocate(MemoryTier.DEVICE, what, nbytes)

    def level(self, what: str, nbytes: int) -> None:
        """Changes the level of a use of the device's memory; see `Log.level`."""
        if self._has_levels:
            self.world.level(MemoryTier.DEVICE, what, nbytes)

    def slots(self, what: str, slot_nbytes: int, num_slots: int) -> Slots:
        """Creates slots on the device for one use of memory."""
        self.allocate(what, num_slots * slot_nbytes)
        if not self._has_levels:
            return Slots(self.world.clock, num_slots)
        return Slots(self.world.clock, num_slots, lambda num_taken: self.level(what, num_taken * slot_nbytes))
