"""Simulates gradients that leave piece by piece while their layer is computed, as the real `StreamedGrads` does.

A piece's gradient is complete when the backward pass has used its params. Its sum of earlier micro-batches comes back
before, in the order of the pieces. With several lanes, a lane begins without a sum, and the total comes at its end. So
as many sums come as with one lane, and here they come at the same times.
"""

import itertools
from collections import Counter

from windlass.actors.messages import ComputeBlock, SpanKind
from windlass.engine.memory_plan import grad_piece_numels, streamed_grads_nbytes
from windlass.planner.simulation import GRADIENTS, Future, Process, Signal, SimulatedGpu
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
        pieces, rests = grad_piece_numels(
            [gpu.world.bounds[block] for block in numels], list(numels.values()), is_summed=self._is_summed
        )
        pieces, rests = (pieces, rests) if self.blocks else ([], [])
        nbytes = (sum(pieces) + sum(rests)) * gpu.world.grad_itemsize
        self._buffers = gpu.slots(GRADIENTS, nbytes // max(1, len(pieces)), len(pieces))
        # The memory that these buffers do not have, or share with those of other blocks.
        needed_nbytes = streamed_grads_nbytes(
            [block.numel for block in context.layout.blocks],
            {block: gpu.world.bounds[block] for block in numels},
            context.plan.grad_overlaid_blocks,
            itemsize=gpu.world.grad_itemsize,
            summed_in_fp32=[block for shared in context.layout.shared for block in shared[1:]],
            is_summed=self._is_summed,
            has_lanes=context.spec.training.lanes > 1,
            chunk_numel=context.layout.chunk_numel,
        )
        gpu.allocate(GRADIENTS, needed_nbytes - nbytes // max(1, len(pieces)) * len(pieces))
        self._sums: dict[BlockIndex, list[Future]] = {}  # by block: the pieces that come back
        self._num_leaving: Counter[BlockIndex] = Counter()
        self._changed = Signal(gpu.world.clock)

    def begin(self, operation: ComputeBlock, microbatch: int, num_slices: int = 0) -> tuple[Future, ...]:
        """Begins a micro-batch of a backward operation, or a slice of it: sums of earlier ones come back.

        `num_slices`: those before this one. Returns what to wait for: nothing.
        """
        number = operation.group * self.world.context.plan.group_size + microbatch
        self._is_lane_sum = self._lanes.lane_of(number) > 0 and not self._lanes.ends_lane(number)
        if num_slices or (self._is_summed and (operation.group or microbatch)):
            pieces = list(itertools.pairwise(self._bounds[operation.block]))[::-1]
            self._sums[operation.block] = [self.world.clock.future() for _ in pieces]
            nbytes = [(stop - start) * self.world.grad_itemsize for start, stop in pieces]
            self.world.clock.process(self._bring(operation, nbytes, tuple(self._sums[operation.block])))
        return ()

    def leave(self, operation: ComputeBlock, piece: int) -> Process:
        """Adds to a piece and has it copied out. Waits for its buffer, or for its sum to be there."""
        block = operation.block
        if sums := self._sums.get(block):
            yield sums.pop(0)
        else:
            yield from self._buffers.take()
        start, stop = self._bounds[block][piece : piece + 2]
        self._num_leaving[block] += 1
        nbytes = (stop - start) * self.world.grad_itemsize
        self.world.clock.process(self._copy_out(operation, nbytes, is_lane_sum=self._is_lane_sum))

    def all_left(self, block: BlockIndex | None = None) -> Process:
        """Waits until all pieces of a block are in host memory; None: of all blocks."""
        leaving = self._num_leaving
        yield from self._changed.until(lambda: not (leaving.total() if block is None else leaving[block]))

    def _bring(self, operation: ComputeBlock, nbytes: list[int], events: tuple[Future, ...]) -> Process:
        for piece_nbytes, event in zip(nbytes, events, strict=True):
            yield from self._buffers.take()
            yield from self.gpu.copy_in(piece_nbytes, SpanKind.COPY_PARTIAL_IN, operation.step, operation.block)
            event.set_done()

    def _copy_out(self, operation: ComputeBlock, nbytes: int, *, is_lane_sum: bool) -> Process:
        is_partial = is_lane_sum or operation.group < self.world.context.plan.num_groups - 1
        kind = SpanKind.COPY_PARTIAL_OUT if is_partial else SpanKind.COPY_GRAD_OUT
        yield from self.gpu.copy_out(nbytes, kind, operation.step, operation.block)
        self._buffers.give_back()
        self._num_leaving[operation.block] -= 1
        self._changed.notify()
