"""Simulates the offload of gradients, as the real `GradOffload` and `PartialGrads` do."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from windlass.actors.messages import (
    ComputeBlock,
    GradChunk,
    GradOffloaded,
    Phase,
    SpanKind,
    SumParts,
    SumPassed,
    SumTaken,
)
from windlass.actors.worker_policy import GradSums, OffloadQueue, ReturningSums, SumSource, Use, rank_of
from windlass.engine.memory_plan import PARTIAL_GRAD_ITEMSIZE, MemoryTier, grad_buffers, lane_buffers
from windlass.planner.simulation import GRADIENTS, Process, Queue, Signal, SimulatedGpu, Slots
from windlass.planner.simulation.workers.grad_pieces import GradPieces
from windlass.storage.ids import BlockIndex, ChunkKey, Span, Step

_PARTIALS = "partial gradients"
_NOWHERE = Span(0, 0)  # simulated slots have no addresses


@dataclass(slots=True, eq=False)
class _Partial:
    """A gradient sum that one group of micro-batches passes to the next."""

    operation: ComputeBlock
    use: Use


class Grads:
    """The gradient buffers on the device, and the copies to and from host memory."""

    def __init__(self, gpu: SimulatedGpu, report: Callable[[ComputeBlock], None]) -> None:
        """`report` tells the scheduler of a gradient: the operation that completed it."""
        self.gpu, self.world = gpu, gpu.world
        world = gpu.world
        self._report = report
        self._offload_queue = OffloadQueue(world.shape.ordering, frozenset(world.context.plan.spilled_blocks))
        self._waiting: dict[tuple[Step, BlockIndex], ComputeBlock] = {}
        clock, layout, plan = world.clock, world.context.layout, world.context.plan
        self._tied = {block for shared in layout.shared for block in shared[1:]}
        self._borrowed = layout.borrowed
        self._resident = world.context.blocks_with_sums_on_device
        self.pieces = GradPieces(gpu)
        self._committed = -1
        # Of these blocks' gradients, those that are in the memory for gradients in pieces.
        self._overlaid_blocks, self._num_overlaid = frozenset(plan.grad_overlaid_blocks), 0
        self._to_offload: Queue[ComputeBlock | _Partial] = Queue(clock)
        self._permits = Slots(clock, plan.num_grad_buffers)
        elsewhere = self.pieces.blocks | self._overlaid_blocks
        whole = [block for block in layout.blocks if block.index not in elsewhere and layout.is_own(block.index)]
        numels: dict[int, int] = {block.index: block.numel for block in whole}
        num_waiting = plan.num_grad_buffers + (1 if plan.num_groups > 1 else 0)
        numbers = grad_buffers(numels, resident=self._resident, num_waiting=num_waiting)
        numbers += Counter(world.numels[block] for shared in layout.shared for block in shared[1:])
        self._lanes, self._group_size = world.context.spec.training.lane_division, plan.group_size
        numbers += lane_buffers(
            [block.numel for block in layout.blocks],
            layout.shared,
            numbers,
            lanes=self._lanes,
            group_size=plan.group_size,
            elsewhere=elsewhere,
        )
        # Sums of tied params are fp32, whatever type they travel in. Here buffers of the same size count as fp32 too.
        wide = {world.numels[block] for block in self._tied}
        self._flat_nbytes = {
            numel: numel * (PARTIAL_GRAD_ITEMSIZE if numel in wide else world.grad_itemsize) for numel in numbers
        }
        self._flats = {
            numel: gpu.slots(GRADIENTS, self._flat_nbytes[numel], number) for numel, number in numbers.items()
        }
        if gpu.rank == 0:  # for all ranks
            nbytes = plan.partial_grads.nbytes + plan.open_lanes.nbytes + plan.num_ranks * plan.running_sums.nbytes
            world.allocate(MemoryTier.HOST, _PARTIALS, nbytes)
        self._with_lane: set[Use] = set()  # sums that have the sum of a lane beside them, on the device
        self._num_leaving = 0  # sums that will be copied out, and have no slots yet
        self._left: dict[Use, SumPassed] = {}  # sums in host memory, for a group of this rank
        # The slots of sums, and of unfinished lanes, that the next rank takes at once.
        self._passing: tuple[Slots, Slots] | None = None
        if plan.passes_sums_at_once and gpu.rank < plan.num_groups - 1:
            sums, lanes = (Slots(clock, pool.num_slots) for pool in world.context.passing_pools(gpu.rank))
            self._passing = sums, lanes
        self._sums = GradSums(layout.shared, self._resident)
        self._returning = ReturningSums(self._resident, self.pieces.blocks | self._overlaid_blocks)
        self._back: set[Use] = set()
        self._changed = Signal(clock)
        clock.process(self._run())
        clock.process(self._bring_back())

    def expect(self, operation: ComputeBlock) -> None:
        """Prefetches the partial sums that an earlier group left for an operation."""
        self._returning.expect(operation)
        self._changed.notify()

    def take_sum(self, message: SumPassed) -> None:
        """Takes note of a sum in host memory, which a group of this rank continues."""
        use = (message.user, message.block)
        self._left[use] = message
        if not self._returning.takes_own_way(use):
            self._returning.left(use)
        self._changed.notify()

    def release_slots(self, message: SumTaken) -> None:
        """Releases the slots of a sum that another rank has taken."""
        assert self._passing is not None, "only sums that pass at once are taken by others"
        for pool, slots in zip(self._passing, (message.slots, message.lane_slots), strict=True):
            pool.give_back(len(slots))

    def take(self, operation: ComputeBlock) -> Process:
        """Acquires buffers for an operation's sums, with the partial sums of the previous group."""
        if operation.block in self.pieces.blocks:
            yield from self._changed.until(lambda: not self._num_overlaid)
            yield from self.pieces.enter(operation.block)
            use, num_chunks = (operation.block, operation.block), len(self.world.chunk_keys[operation.block])
            if operation.group > 0:
                yield from self._changed.until(lambda: use in self._left)
            if operation.group == self.world.context.plan.num_groups - 1:
                yield from self.world.grad_slots.take(num_chunks)
                return
            if self._passing is not None:
                yield from self._changed.until(lambda: not self._num_leaving)  # slots have the order of operations
                yield from self._passing[0].take(num_chunks)
            if operation.group == 0 or self._passing is not None:
                self._leaves_partial(operation.block, 1)
            return
        if operation.block in self._overlaid_blocks:
            yield from self.pieces.all_left()
            yield from self._changed.until(lambda: not self._num_overlaid)
            self._num_overlaid += 1
        for block in operation.blocks:
            use = (operation.block, block)
            source = self._sums.begin(operation, block)
            if source is not SumSource.DEVICE and self._sums.needs_permit(use):
                yield from self._permits.take()
            if source is SumSource.HOST and self._returning.takes_own_way(use):
                self._overlaid_level(block, 1)
                yield from self._changed.until(lambda use=use: use in self._left)  # type: ignore[misc]
                if self._lanes.num_lanes == 1:
                    yield from self._bring(operation, use, self._left.pop(use))
            elif source is SumSource.HOST:
                yield from self._take_back(use)
            elif source is SumSource.NEW_BUFFER and self._returning.takes_own_way(use):
                self._overlaid_level(block, 1)
            elif source is SumSource.NEW_BUFFER and block in self._resident:
                self._stays(block, 1)
            elif source is SumSource.NEW_BUFFER:
                yield from self._flat(block).take()
            is_beside = use in self._with_lane or self._returning.takes_own_way(use)
            if not is_beside and self._lanes.needs_lane_sum(self._microbatches(operation)[1]):
                self._with_lane.add(use)
                yield from self._take_lane(block)

    def bring_totals(self, operation: ComputeBlock) -> Process:
        """Copies the total of earlier lanes in, and out and in between the lanes of a group, where the device has room
        for one sum.

        The real `SumBesideTotal` does it at the end of each lane. Here all copies come at the operation's end.
        """
        use = (operation.block, operation.block)
        if operation.block not in self._overlaid_blocks or self._lanes.num_lanes == 1 or not _goes_backward(operation):
            return
        if use in self._left:
            yield from self._bring(operation, use, self._left.pop(use))
        lanes = {self._lanes.lane_of(microbatch) for microbatch in range(*self._microbatches(operation))}
        for key in (len(lanes) - 1) * self.world.chunk_keys[operation.block]:
            nbytes, step = self._partial_nbytes(key), operation.step
            yield from self.gpu.copy_out(nbytes, SpanKind.COPY_PARTIAL_OUT, step, key.block, key.chunk)
            yield from self.gpu.copy_in(nbytes, SpanKind.COPY_PARTIAL_IN, step, key.block, key.chunk)

    def num_added(self, operation: ComputeBlock) -> int:
        """Returns the elements of lanes that an operation adds to the totals."""
        if not _goes_backward(operation):
            return 0
        numel = sum(self.world.numels[block] for block in operation.blocks)
        return self._lanes.num_added_lanes(*self._microbatches(operation)) * numel

    def end_lanes(self, operation: ComputeBlock) -> None:
        """Frees the sums of lanes that an operation has added to the totals."""
        if self._lanes.has_open_lane(self._microbatches(operation)[1]):
            return
        for block in operation.blocks:
            if (use := (operation.block, block)) in self._with_lane:
                self._with_lane.remove(use)
                self._give_lane_back(block)

    def queue_partial_sums(self, operation: ComputeBlock) -> None:
        """Offloads an operation's partial sums, which the next group will continue."""
        if operation.block in self.pieces.blocks:
            self.world.clock.process(self._pass_pieces_on(operation))
            return
        uses = self._sums.pass_on(operation)
        self._num_leaving += len(uses)
        for use in uses:
            self._to_offload.put(_Partial(operation, use))

    def complete(self, operation: ComputeBlock) -> None:
        """Completes a block's gradient, by adding the sums of other operations that use its params, and offloads it."""
        block = operation.block
        if block in self.pieces.blocks:
            self._end_reading(operation)
            self.world.clock.process(self._end_pieces(operation))
            return
        _, *others = self._sums.complete(block)
        if block in self._resident:
            self._stays(block, -len(others))
            self._report(operation)
        else:
            for _ in others:
                self._flat(block).give_back()
            self._waiting[(operation.step, block)] = operation
            self._start_offloads(self._offload_queue.push(operation.step, block))

    def hand_over(self, operation: ComputeBlock) -> None:
        """Frees the sums of an operation for blocks of other boxes. `SharedParams` has copied them out."""
        for _, block in self._sums.complete_for_others(operation.block, self._borrowed):
            if block in self._resident:
                self._stays(block, -1)
            else:
                self._flat(block).give_back()

    def updated(self, block: BlockIndex) -> None:
        """Frees the gradient of a block whose states are resident on the device."""
        self._stays(block, -1)

    def commit_reached(self, step: Step) -> None:
        """Records a commit, after which gradients may overwrite the states of earlier ones."""
        self._committed = step
        self._changed.notify()
        self._start_offloads(self._offload_queue.commit_reached(step))

    def _start_offloads(self, keys: Sequence[tuple[Step, BlockIndex]]) -> None:
        for key in keys:
            self._to_offload.put(self._waiting.pop(key))

    def _microbatches(self, operation: ComputeBlock) -> tuple[int, int]:
        """Returns the first and past-last micro-batch of an operation's group."""
        start = operation.group * self._group_size
        return start, min(start + self._group_size, self._lanes.num_microbatches)

    def _take_lane(self, block: BlockIndex) -> Process:
        if block in self._resident:
            self._stays(block, 1)
        else:
            yield from self._flat(block).take()

    def _give_lane_back(self, block: BlockIndex) -> None:
        if block in self._resident:
            self._stays(block, -1)
        else:
            self._flat(block).give_back()

    def _stays(self, block: BlockIndex, number: int) -> None:
        """Adds `number` sums of a block to the level of sums that never leave the device."""
        numel = self.world.numels[block]
        self.gpu.level(GRADIENTS, number * self._flat_nbytes[numel])

    def _leaves_partial(self, block: BlockIndex, number: int) -> None:
        """Adds `number` partial sums of a block to the level in host memory."""
        num_chunks = number * len(self.world.keys_of_sums[block])
        self.world.level(MemoryTier.HOST, _PARTIALS, num_chunks * self.world.context.plan.partial_grads.slot_nbytes)

    def _flat(self, block: BlockIndex) -> Slots:
        return self._flats[self.world.numels[block]]

    def _run(self) -> Process:
        world = self.world
        while True:
            request = yield from self._to_offload.get()
            if isinstance(request, _Partial):
                yield from self._copy_out_partial(request)
                continue
            keys = world.chunk_keys[request.block]
            yield from world.grad_slots.take(len(keys))
            self._permits.give_back()
            for key in keys:
                nbytes = world.grad_itemsize * world.chunk_numel(key)
                yield from self.gpu.copy_out(nbytes, SpanKind.COPY_GRAD_OUT, request.step, key.block, key.chunk)
            self._free((request.block, request.block))
            self._copied(request, keys)

    def _free(self, use: Use) -> None:
        """Frees a buffer, or the memory of gradients in pieces where the sum was there."""
        if self._returning.takes_own_way(use):
            self._overlaid_level(use[1], -1)
            self._num_overlaid -= 1
            self._changed.notify()
        else:
            self._flat(use[1]).give_back()

    def _overlaid_level(self, block: BlockIndex, number: int) -> None:
        """Adds the sum of a block that lies in the memory of gradients in pieces to the level there."""
        itemsize = PARTIAL_GRAD_ITEMSIZE if block in self._tied else self.world.grad_itemsize
        self.gpu.level(GRADIENTS, number * self.world.numels[block] * itemsize)

    def _end_pieces(self, operation: ComputeBlock) -> Process:
        """Continues with a gradient in pieces when all have left, and the place to which it may spill is free."""
        yield from self.pieces.all_left(operation.block)
        if operation.block in self.world.context.plan.spilled_blocks:
            yield from self._changed.until(lambda: self._committed >= operation.step - 1)
        self._copied(operation, self.world.context.layout.chunk_keys(operation.block))

    def _copied(self, request: ComputeBlock, keys: Sequence[ChunkKey]) -> None:
        if request.block in self.world.context.plan.spilled_blocks:
            self.world.clock.process(self._spill(request, keys))
        else:
            self._offloaded(request, tuple(GradChunk(key, _NOWHERE) for key in keys))

    def _spill(self, request: ComputeBlock, keys: Sequence[ChunkKey]) -> Process:
        world = self.world

        def spill(key: ChunkKey) -> Process:
            nbytes, step = world.grad_itemsize * world.chunk_numel(key), request.step
            yield world.chunk_move(key, nbytes, SpanKind.WRITE_GRAD, step, (step, request.block))
            world.grad_slots.give_back()

        yield from [world.clock.process(spill(key)) for key in keys]
        self._offloaded(request, tuple(GradChunk(key, None) for key in keys))

    def _offloaded(self, operation: ComputeBlock, chunks: tuple[GradChunk, ...]) -> None:
        shape = self.world.shape
        names = shape.holders(operation.block)
        for name in names:
            share = chunks
            if len(names) > 1:
                share = tuple(chunk for chunk in chunks if shape.optimizer_of(chunk.key) == name)
            self.world.send(
                name, GradOffloaded(job=operation.job, step=operation.step, block=operation.block, chunks=share)
            )
        self._report(operation)
        if operation.block not in self.pieces.blocks:
            self._start_offloads(self._offload_queue.offload_finished())

    # --- between groups ---------------------------------------------------------------------------------------------

    def _take_back(self, use: Use) -> Process:
        yield from self._changed.until(lambda: use in self._back)
        self._back.remove(use)
        self._returning.take(use)
        self._changed.notify()

    def _pass_pieces_on(self, operation: ComputeBlock) -> Process:
        """Passes a sum in pieces to the next group, when all pieces have left."""
        block = operation.block
        self._end_reading(operation)
        yield from self.pieces.all_left(block)
        self._pass_on(_Partial(operation, (block, block)), has_lane=False)

    def _end_reading(self, operation: ComputeBlock) -> None:
        """Frees the slots of the sum in pieces that an operation has continued."""
        if operation.group > 0:
            left = self._left.pop((operation.block, operation.block))
            is_last = operation.group == self.world.context.plan.num_groups - 1
            if is_last or self.world.context.plan.passes_sums_at_once:
                self._leaves_partial(operation.block, -1)
            self._tell_of_taken(operation, left)

    def _copy_out_partial(self, partial: _Partial) -> Process:
        _, block = partial.use
        if self._sums.needs_permit(partial.use):
            self._permits.give_back()
        num_flats, num_chunks = self._num_flats(partial.use), len(self.world.keys_of_sums[block])
        if self._passing is not None:
            for slots in self._passing[:num_flats]:
                yield from slots.take(num_chunks)
        self._num_leaving -= 1
        self._changed.notify()
        self._leaves_partial(block, num_flats)
        for key in num_flats * self.world.keys_of_sums[block]:
            nbytes, step = self._partial_nbytes(key), partial.operation.step
            yield from self.gpu.copy_out(nbytes, SpanKind.COPY_PARTIAL_OUT, step, key.block, key.chunk)
        for _ in range(num_flats):
            self._free(partial.use)
        self._with_lane.discard(partial.use)
        self._pass_on(partial, has_lane=num_flats > 1)

    def _pass_on(self, partial: _Partial, *, has_lane: bool) -> None:
        """Tells the rank of the next group that a sum is in host memory."""
        operation, (user, block) = partial.operation, partial.use
        num_chunks = len(self.world.keys_of_sums[block])
        parts = SumParts(dtype="", touched=(), slots=(_NOWHERE,) * num_chunks)  # simulated sums have no numbers
        lane = parts if has_lane else None
        message = SumPassed(job=operation.job, step=operation.step, user=user, block=block, total=parts, lane=lane)
        following = rank_of(operation.group + 1, self.world.context.spec.num_ranks)
        if following == self.gpu.rank:
            self.take_sum(message)
        else:
            self.world.send(self.world.context.gpu_worker(following), message)

    def _bring_back(self) -> Process:
        while True:
            yield from self._changed.until(lambda: self._returning.is_due)
            operation, uses = self._returning.begin()
            for use in uses:
                left = self._left.pop(use)
                if left.lane is not None:
                    self._with_lane.add(use)
                for _ in range(self._num_flats(use)):
                    yield from self._flat(use[1]).take()
                yield from self._bring(operation, use, left)
            self._back.update(uses)
            self._changed.notify()

    def _bring(self, operation: ComputeBlock, use: Use, left: SumPassed) -> Process:
        """Copies sums of the group before to their buffers."""
        num_flats = self._num_flats(use)
        for key in num_flats * self.world.keys_of_sums[use[1]]:
            nbytes, step = self._partial_nbytes(key), operation.step
            yield from self.gpu.copy_in(nbytes, SpanKind.COPY_PARTIAL_IN, step, key.block, key.chunk)
        self._leaves_partial(use[1], -num_flats)
        self._tell_of_taken(operation, left)

    def _tell_of_taken(self, operation: ComputeBlock, left: SumPassed) -> None:
        """Tells the rank of the group before that its slots are free, if sums pass at once."""
        context = self.world.context
        if context.plan.passes_sums_at_once:
            lane_slots = () if left.lane is None else left.lane.slots
            taken = SumTaken(job=left.job, step=left.step, slots=left.total.slots, lane_slots=lane_slots)
            self.world.send(context.gpu_worker(rank_of(operation.group - 1, context.spec.num_ranks)), taken)

    def _num_flats(self, use: Use) -> int:
        """Returns the number of sums that a group leaves: the total, and an unfinished lane's."""
        return 2 if use in self._with_lane else 1

    def _partial_nbytes(self, key: ChunkKey) -> int:
        """Returns the bytes of a chunk's partial sum: in the type of gradients in transit, or fp32 for tied params."""
        itemsize = PARTIAL_GRAD_ITEMSIZE if key.block in self._tied else self.world.grad_itemsize
        return itemsize * self.world.chunk_numel(key)


def _goes_backward(operation: ComputeBlock) -> bool:
    return operation.phase in (Phase.HEAD, Phase.BACKWARD)
