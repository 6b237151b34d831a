"""Simulates swapped activations on the SSDs, as the real `SsdActivations` does, with the real buffer queue."""

import functools
from collections.abc import Sequence

from windlass.actors.activations import At, BufferQueue, Moment, Part, ScratchSlots, SsdSwap, cut, slots_of_part
from windlass.actors.job import aligned
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

_STAGED = "activations to and from the SSDs"


class SsdActivations:
    """Tensors in the job's scratch space on the SSDs, in parts that take turns with the staging buffers."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu, self.world = gpu, gpu.world
        world = gpu.world
        context, plan, num_ssds = world.context, world.context.plan, len(world.context.ssds)
        self._slot_nbytes = plan.activations.slot_nbytes
        self._part_slots = slots_of_part(plan.num_staged_activations, num_ssds)
        self._num_buffers = plan.num_staged_activations // self._part_slots  # number of free ones
        self._slots = ScratchSlots(
            [context.num_scratch_slots(ssd) for ssd in range(num_ssds)], [each.weight for each in context.ssds]
        )
        self._to_copy_out: Queue[Part] = Queue(world.clock)
        self._to_copy_in: Queue[Part] = Queue(world.clock)
        self._turns = BufferQueue()
        self._leaving_nbytes = 0
        self._changed = Signal(world.clock)
        world.allocate(MemoryTier.HOST, _STAGED, plan.num_staged_activations * self._slot_nbytes)
        world.allocate(MemoryTier.SSD, ACTIVATIONS, plan.num_ssd_activations * self._slot_nbytes)
        world.clock.process(self._run_out())
        world.clock.process(self._run_in())

    def put(self, nbytes: int, now: Moment) -> ProcessReturning[SsdSwap]:
        """Returns the swap of a tensor when the device has room for bytes on their way out. The copies follow."""
        limit = self.world.context.plan.max_leaving_nbytes
        while self._leaving_nbytes and self._leaving_nbytes + nbytes > limit:
            yield self._changed.next
        swap = SsdSwap(nbytes, now)
        swap.parts = list(cut(swap, self._slots, self._slot_nbytes, self._part_slots))
        swap.num_on_device = swap.num_missing = len(swap.parts)
        self._line_up(swap)
        self._leaving_nbytes += nbytes
        self._level_of_slots(swap.parts, 1)
        self.gpu.level(LEAVING, nbytes)
        self._hand_out_buffers()
        return swap

    def prefetch(self, swap: SsdSwap, now: Moment) -> None:
        """Begins to copy a tensor back."""
        swap.wanted_in = now
        self._line_up(swap)
        self._hand_out_buffers()

    def wait_for(self, swap: SsdSwap) -> Process:
        """Waits until the tensor is back on the device."""
        swap.is_demanded = True
        for part in swap.parts:
            self._turns.wait(part)
        self._hand_out_buffers()
        while swap.num_missing:
            yield self._changed.next

    def _line_up(self, swap: SsdSwap) -> None:
        self._turns.begin(swap)
        for part in swap.parts:
            self._turns.wait(part)

    def _hand_out_buffers(self) -> None:
        while self._num_buffers and (part := self._turns.first()) is not None:
            self._take_buffers(1)
            if part.at is At.DEVICE:
                part.at = At.LEAVING
                self._to_copy_out.put(part)
            else:
                part.at = At.RETURNING
                self._move(part, SpanKind.READ_ACTIVATIONS).then(functools.partial(self._to_copy_in.put, part))

    def _run_out(self) -> Process:
        while True:
            part = yield from self._to_copy_out.get()
            left_in = part.swap.left_in
            kind = SpanKind.COPY_ACTIVATIONS_OUT
            yield from self.gpu.copy_out(part.nbytes, kind, left_in.step, left_in.block)
            self._leaving_nbytes -= part.nbytes
            part.swap.num_on_device -= 1
            if not part.swap.num_on_device:  # the tensor is freed as a whole
                self.gpu.level(LEAVING, -part.swap.nbytes)
            self._changed.notify()
            self._move(part, SpanKind.WRITE_ACTIVATIONS).then(functools.partial(self._written, part))

    def _written(self, part: Part) -> None:
        part.at = At.SSD
        self._take_buffers(-1)
        self._turns.wait(part)
        self._hand_out_buffers()

    def _move(self, part: Part, kind: SpanKind) -> Future:
        step, block = part.asked_in.step, part.swap.left_in.block
        return self.world.ssd_move(part.ssd, aligned(part.nbytes), kind, step, part.priority, block)

    def _run_in(self) -> Process:
        while True:
            part = yield from self._to_copy_in.get()
            swap = part.swap
            kind = SpanKind.COPY_ACTIVATIONS_IN
            yield from self.gpu.copy_in(part.nbytes, kind, swap.left_in.step, swap.left_in.block)
            part.at = At.GONE
            self._slots.give_back(part.ssd, part.slots)
            self._level_of_slots([part], -1)
            self._take_buffers(-1)
            swap.num_missing -= 1
            if not swap.num_missing:
                swap.parts = []  # parts refer to the tensor: only the garbage collector would free them
            self._changed.notify()
            self._hand_out_buffers()

    def _take_buffers(self, number: int) -> None:
        """Acquires staging buffers, or releases them if `number` is negative."""
        self._num_buffers -= number
        self.world.level(MemoryTier.HOST, _STAGED, number * self._part_slots * self._slot_nbytes)

    def _level_of_slots(self, parts: Sequence[Part], number: int) -> None:
        num_slots = number * sum(len(part.slots) for part in parts)
        self.world.level(MemoryTier.SSD, ACTIVATIONS, num_slots * self._slot_nbytes)
