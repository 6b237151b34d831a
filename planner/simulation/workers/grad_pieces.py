"""Simulates gradients that leave piece by piece while their layer is computed, as the real `StreamedGrads` does.

A piece's gradient is complete when the backward pass has used its params. Its sum of earlier micro-batches comes back
before, in the order of the pieces. With several lanes, a lane begins without a sum, and the total comes at its end. So
as many sums come as with one lane, and here they come at the same times.

Sums in fp32 of a gradient with 16 bits, over slices of the head, have buffers of their own in the same memory.
"""

import itertools
from collections import Counter
from collections.abc import Collection

from windlass.actors.messages import ComputeBlock, SpanKind
from windlass.engine.memory_plan import PARTIAL_GRAD_ITEMSIZE, grad_piece_numels, streamed_grads_nbytes
from windlass.planner.simulation import GRADIENTS, Future, Process, Signal, SimulatedGpu, Slots
from windlass.storage.ids import BlockIndex


class GradPieces:
    """The buffers for pieces of all streamed gradients."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu, self.world = gpu, gpu.world
        context = gpu.world.context
        self.blocks = frozenset(map(BlockIndex, context.plan.grad_streamed_blocks))
        numels = {block: context.layout.blocks[block].numel for block in self.blocks}
        # The rest after the last piece counts as a part of it.
        self._bounds = {block: (*gpu.world.bounds[block][:-1], numel) for block, numel in numels.items()}
        self._is_summed = context.spec.training.num_microbatches > 1
        self._lanes, self._is_lane_sum = context.spec.training.lane_division, False
        self._is_between = False  # the sum of the slice goes on, in fp32
        self._in_fp32 = frozenset(map(BlockIndex, context.plan.fp32_in_pieces))
        # The memory of all buffers, which those of blocks in fp32 and of the others share.
        needed_nbytes = streamed_grads_nbytes(
            [block.numel for block in context.layout.blocks],
            {block: gpu.world.bounds[block] for block in numels},
            context.plan.grad_overlaid_blocks,
            itemsize=gpu.world.grad_itemsize,
            summed_in_fp32=[block for shared in context.layout.shared for block in shared[1:]],
            is_summed=self._is_summed,
            fp32_in_pieces=self._in_fp32,
            has_lanes=context.spec.training.lanes > 1,
            chunk_numel=context.layout.chunk_numel,
        )
        gpu.allocate(GRADIENTS, needed_nbytes)
        together = self._slots_for(self.blocks - self._in_fp32)
        self._buffers = dict.fromkeys(self.blocks, together)
        self._buffers |= {block: self._slots_for({block}) for block in self._in_fp32}
        self._last: Slots = together  # of the last operation
        self._sums: dict[BlockIndex, list[Future]] = {}  # by block: the pieces that come back
        self._num_leaving: Counter[BlockIndex] = Counter()
        self._changed = Signal(gpu.world.clock)

    def enter(self, block: BlockIndex) -> Process:
        """Returns when the memory is that of a block's buffers: pieces in other buffers have left."""
        if self._buffers[block] is not self._last:
            yield from self.all_left()
            self._last = self._buffers[block]

    def begin(self, operation: ComputeBlock, microbatch: int, num_slices: int = 0) -> tuple[Future, ...]:
        """Begins a micro-batch of a backward operation, or a slice of it: sums of earlier ones come back.

        `num_slices`: those before this one. Returns what to wait for: nothing.
        """
        number = operation.group * self.world.context.plan.group_size + microbatch
        self._is_lane_sum = self._lanes.lane_of(number) > 0 and not self._lanes.ends_lane(number)
        is_last = number + 1 == self._lanes.num_microbatches and num_slices + 1 == self.world.work.head_slices
        self._is_between = operation.block in self._in_fp32 and not is_last
        if num_slices or (self._is_summed and (operation.group or microbatch)):
            pieces = list(itertools.pairwise(self._bounds[operation.block]))[::-1]
            self._sums[operation.block] = [self.world.clock.future() for _ in pieces]
            itemsize = self._itemsize(operation.block)
            nbytes = [(stop - start) * itemsize for start, stop in pieces]
            self.world.clock.process(self._bring(operation, nbytes, tuple(self._sums[operation.block])))
        return ()

    def leave(self, operation: ComputeBlock, piece: int) -> Process:
        """Adds to a piece and has it copied out. Waits for its buffer, or for its sum to be there."""
        block = operation.block
        if sums := self._sums.get(block):
            yield sums.pop(0)
        else:
            yield from self._buffers[block].take()
        start, stop = self._bounds[block][piece : piece + 2]
        self._num_leaving[block] += 1
        is_partial = self._is_lane_sum or self._is_between or operation.group < self.world.context.plan.num_groups - 1
        itemsize = self._itemsize(block) if is_partial else self.world.grad_itemsize
        self.world.clock.process(self._copy_out(operation, (stop - start) * itemsize, is_partial=is_partial))

    def all_left(self, block: BlockIndex | None = None) -> Process:
        """Waits until all pieces of a block are in host memory; None: of all blocks."""
        leaving = self._num_leaving
        yield from self._changed.until(lambda: not (leaving.total() if block is None else leaving[block]))

    def _itemsize(self, block: BlockIndex) -> int:
        """Returns the bytes of an element of a sum that goes on."""
        return PARTIAL_GRAD_ITEMSIZE if block in self._in_fp32 else self.world.grad_itemsize

    def _slots_for(self, blocks: Collection[BlockIndex]) -> Slots:
        """Returns the buffers of blocks that share them, as slots for pieces. Their memory is allocated."""
        if not blocks:
            return Slots(self.world.clock, 0)
        numels = [self.world.context.layout.blocks[block].numel for block in blocks]
        is_summed = self._is_summed or not self._in_fp32.isdisjoint(blocks)
        pieces, rests = grad_piece_numels([self.world.bounds[block] for block in blocks], numels, is_summed=is_summed)
        itemsize = max(map(self._itemsize, blocks))
        nbytes = (sum(pieces) + sum(rests)) * itemsize // len(pieces)
        return Slots(self.world.clock, len(pieces), lambda taken: self.gpu.level(GRADIENTS, taken * nbytes))

    def _bring(self, operation: ComputeBlock, nbytes: list[int], events: tuple[Future, ...]) -> Process:
        for piece_nbytes, event in zip(nbytes, events, strict=True):
            yield from self._buffers[operation.block].take()
            yield from self.gpu.copy_in(piece_nbytes, SpanKind.COPY_PARTIAL_IN, operation.step, operation.block)
            event.set_done()

    def _copy_out(self, operation: ComputeBlock, nbytes: int, *, is_partial: bool) -> Process:
        kind = SpanKind.COPY_PARTIAL_OUT if is_partial else SpanKind.COPY_GRAD_OUT
        yield from self.gpu.copy_out(nbytes, kind, operation.step, operation.block)
        self._buffers[operation.block].give_back()
        self._num_leaving[operation.block] -= 1
        self._changed.notify()
