"""Simulates what passes between boxes: hidden states, their gradients, and shared params, as the real `edges` do."""

import functools

from windlass.actors.messages import ComputeBlock, Crossing, OfferSpan, OfferTaken, Phase, SpanKind
from windlass.actors.worker_policy import params_version
from windlass.engine.memory_plan import PARTIAL_GRAD_ITEMSIZE, MemoryTier
from windlass.planner.simulation import GRADIENTS, PARAMS, Future, Process, Queue, SimulatedGpu, Slots
from windlass.storage.ids import BlockIndex, Span, Step

_HIDDEN = "hidden states from and to other boxes"
_SHARED = "shared params from and to other boxes"
_EMBEDDING = BlockIndex(0)


class StageEdges:
    """The hidden states and gradients on their way from and to the boxes with the blocks before and after."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu, self.world = gpu, gpu.world
        context = gpu.world.context
        self._box, self._stage = context.spec.box, context.stage
        self._nbytes = gpu.world.work.crossing_nbytes
        self._arrived: dict[Crossing, Future] = {}
        neighbours = [box for box in (self._box - 1, self._box + 1) if 0 <= box < len(context.spec.stages)]
        pools = [gpu.world.pool(_HIDDEN, pool) for pool in context.crossing_pools(gpu.rank)]
        self._outboxes: dict[int, Slots] = dict(zip(neighbours, pools[::2], strict=True))
        self._inboxes: dict[int, Slots] = dict(zip(neighbours, pools[1::2], strict=True))
        self._expected: dict[int, Queue[Crossing]] = {box: Queue(gpu.world.clock) for box in neighbours}
        for box in neighbours:
            gpu.world.clock.process(self._pull(box))

    def source_of(self, operation: ComputeBlock) -> int | None:
        """Returns the box whose results an operation takes; None if it takes none."""
        if self._stage.takes_hidden(operation.phase, operation.block):
            return self._box - 1
        return self._box + 1 if self._stage.takes_grads(operation.phase, operation.block) else None

    def expect(self, operation: ComputeBlock, num_microbatches: int) -> None:
        """Queues the pulls for an operation, after those of operations that were queued earlier."""
        if (box := self.source_of(operation)) is None:
            return
        for crossing in _crossings(operation, operation.phase, operation.block, num_microbatches):
            self._arrived[crossing] = self.world.clock.future()
            self._expected[box].put(crossing)

    def receive(self, operation: ComputeBlock, num_microbatches: int) -> Process:
        """Waits for what an operation takes, and copies it to the device."""
        if (box := self.source_of(operation)) is None:
            return
        copies = []
        for crossing in _crossings(operation, operation.phase, operation.block, num_microbatches):
            yield self._arrived.pop(crossing)
            copies.append(self.world.clock.process(self._copy_in(box, operation)))
        yield from copies

    def send(self, operation: ComputeBlock, num_microbatches: int) -> Process:
        """Copies an operation's results to slots and offers them, if another box takes them. It may wait for slots."""
        taker = self._stage.taker_of(operation.phase, operation.block, self.world.shape.num_blocks)
        if taker is None:
            return
        box = self._box + (1 if taker[1] >= self._stage.stop else -1)
        for crossing in _crossings(operation, *taker, num_microbatches):
            yield from self._outboxes[box].take()
            self.world.clock.process(self._offer(box, operation, crossing))

    def _pull(self, box: int) -> Process:
        assert self.world.network is not None, "the job has several boxes"
        while True:
            crossing = yield from self._expected[box].get()
            yield from self._inboxes[box].take()
            pulled = self.world.network.pull(box, self._box, crossing)
            pulled.then(self._arrived[crossing].set_done)

    def _copy_in(self, box: int, operation: ComputeBlock) -> Process:
        kind = SpanKind.COPY_ACTIVATIONS_IN
        yield from self.gpu.copy_in(self._nbytes, kind, operation.step, operation.block)
        self._inboxes[box].give_back()

    def _offer(self, box: int, operation: ComputeBlock, crossing: Crossing) -> Process:
        assert self.world.network is not None, "the job has several boxes"
        kind = SpanKind.COPY_ACTIVATIONS_OUT
        yield from self.gpu.copy_out(self._nbytes, kind, operation.step, operation.block)
        yield self.world.network.offer(self._box, box, crossing, self._nbytes)
        self._outboxes[box].give_back()


class SharedParams:
    """The params of an embedding that the head of another box uses, and the head's gradient of them.

    Without such params it does nothing. As in a real job, each version crosses once, in chunks.
    """

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu, self.world = gpu, gpu.world
        context, clock = gpu.world.context, gpu.world.clock
        layout, plan = context.layout, context.plan
        self._box, self._head = context.spec.box, BlockIndex(len(layout.blocks) - 1)
        self._last_group = plan.num_groups - 1
        self._lends, self._borrows = (_EMBEDDING in blocks for blocks in (layout.lent, layout.borrowed))
        self._other = len(context.spec.stages) - 1 if self._lends else 0
        is_first, is_last = gpu.rank == 0, gpu.name == context.grads_worker
        self._sends, self._pulls = self._lends and is_first, (self._lends and is_last) or (self._borrows and is_first)
        if not self._lends and not self._borrows:
            return
        self._numels = [stop - start for start, stop in layout.chunk_ranges(_EMBEDDING)]
        outgoing, incoming = plan.shared_sums, plan.shared_params
        self._itemsize_in, self._itemsize_out = context.formats.precision.itemsize, PARTIAL_GRAD_ITEMSIZE
        if self._lends:
            outgoing, incoming = incoming, outgoing
            self._itemsize_in, self._itemsize_out = self._itemsize_out, self._itemsize_in
        if is_first:
            gpu.world.allocate(MemoryTier.HOST, _SHARED, outgoing.nbytes + incoming.nbytes)
        self._outbox, self._inbox = (Slots(clock, pool.num_slots) for pool in (outgoing, incoming))
        if self._borrows or self._pulls:
            gpu.allocate(GRADIENTS if self._lends else PARAMS, sum(self._numels) * self._itemsize_in)
        # The other GPU workers of the head's box, to which the first one offers the params.
        self._others = [name for name in context.gpu_workers if self._borrows and name != gpu.name]
        self._num_copying: dict[Crossing, int] = {}  # GPU workers that have not copied what is there
        self._expected_version: int | None = None
        self._sent_version: int | None = None
        self._num_copied = 0  # chunks of the version that comes
        self._arrived: dict[int, Future] = {}  # by version: all its chunks are on the device

    def takes(self, operation: ComputeBlock) -> bool:
        """Returns whether an operation uses params of another box, or completes a gradient with that box's sum."""
        if self._borrows:
            return operation.block == self._head
        is_last = operation.phase is Phase.BACKWARD and operation.group == self._last_group
        return self._lends and is_last and operation.block == _EMBEDDING

    def expect(self, operation: ComputeBlock) -> None:
        """Queues the pulls of what comes, at the first operation of a version."""
        version = params_version(operation.phase, operation.step)
        if not self._pulls or version == self._expected_version:
            return
        self._expected_version = version
        self.world.clock.process(self._pull(operation.step))

    def wait_for(self, operation: ComputeBlock) -> Process:
        """Waits until what an operation takes is on the device."""
        if self.takes(operation):
            yield self._arrival_of(params_version(operation.phase, operation.step))

    def send_params(self, operation: ComputeBlock) -> Process:
        """Copies the embedding's params to slots after its first operation of a version, as compute."""
        version = params_version(operation.phase, operation.step)
        if not self._sends or operation.block != _EMBEDDING or version == self._sent_version:
            return
        self._sent_version = version
        yield from self._copy_out(operation, self._crossing(operation.step, is_params=True), SpanKind.COPY_STATES_OUT)

    def send_sum(self, operation: ComputeBlock) -> None:
        """Copies the head's sum of a step out, beside what is computed next."""
        if self._borrows and operation.block == self._head:
            crossing = self._crossing(operation.step, is_params=False)
            self.world.clock.process(self._copy_out(operation, crossing, SpanKind.COPY_GRAD_OUT))

    def take(self, message: OfferSpan | OfferTaken) -> None:
        """Processes a message of another GPU worker of the box."""
        if isinstance(message, OfferSpan):
            self.world.clock.process(self._copy_in(message.crossing, message))
        else:
            self._was_copied(message.crossing)

    def _crossing(self, step: Step, *, is_params: bool) -> Crossing:
        phase, block = (Phase.HEAD, self._head) if is_params else (Phase.BACKWARD, _EMBEDDING)
        return Crossing(step, phase, block, group=0, part=0, is_shared=True)

    def _copy_out(self, operation: ComputeBlock, crossing: Crossing, kind: SpanKind) -> Process:
        assert self.world.network is not None, "the job has several boxes"
        yield from self._outbox.take(len(self._numels))
        for part, numel in enumerate(self._numels):
            nbytes = numel * self._itemsize_out
            yield from self.gpu.copy_out(nbytes, kind, operation.step, _EMBEDDING, part)
            offered = self.world.network.offer(self._box, self._other, crossing._replace(part=part), nbytes)
            offered.then(self._outbox.give_back)

    def _pull(self, step: Step) -> Process:
        """Pulls all chunks of a version."""
        crossing = self._crossing(step, is_params=self._borrows)
        assert self.world.network is not None, "the job has several boxes"
        for part in range(len(self._numels)):
            yield from self._inbox.take()
            named = crossing._replace(part=part)
            pulled = self.world.network.pull(self._other, self._box, named)
            pulled.then(functools.partial(self._offer_to_others, named))

    def _offer_to_others(self, crossing: Crossing) -> None:
        """Copies a chunk to the device, and offers it to all GPU workers that use it, too."""
        self._num_copying[crossing] = 1 + len(self._others)
        job, name = self.world.context.spec.job, self.gpu.name
        for other in self._others:
            offer = OfferSpan(
                job=job, step=crossing.step, reply_to=name, box=self._box, crossing=crossing, span=Span(0, 0)
            )
            self.world.send(other, offer)
        self.world.clock.process(self._copy_in(crossing, None))

    def _copy_in(self, crossing: Crossing, offer: OfferSpan | None) -> Process:
        """Copies a chunk to the device. `offer`: that of another GPU worker, if this one has not pulled it."""
        nbytes, step = self._numels[crossing.part] * self._itemsize_in, crossing.step
        yield from self.gpu.copy_in(nbytes, SpanKind.COPY_PARAMS_IN, step, _EMBEDDING, crossing.part)
        self._num_copied += 1
        if self._num_copied == len(self._numels):
            self._num_copied = 0
            assert crossing.phase is not None, "exports are not for GPU workers"
            self._arrival_of(params_version(crossing.phase, step)).set_done()
        if offer is None:
            self._was_copied(crossing)
        else:
            self.world.send(offer.reply_to, OfferTaken(job=offer.job, step=step, crossing=crossing))

    def _was_copied(self, crossing: Crossing) -> None:
        """Frees the slot of a chunk when all GPU workers have copied it."""
        self._num_copying[crossing] -= 1
        if not self._num_copying[crossing]:
            del self._num_copying[crossing]
            self._inbox.give_back()

    def _arrival_of(self, version: int) -> Future:
        """Returns the arrival of all chunks of a version."""
        if version not in self._arrived:
            self._arrived[version] = self.world.clock.future()
        return self._arrived[version]


def _crossings(operation: ComputeBlock, phase: Phase, block: int, num_microbatches: int) -> list[Crossing]:
    """Names the results of all micro-batches of an operation's group, by the operation that takes them."""
    make = functools.partial(Crossing, operation.step, phase, BlockIndex(block), operation.group)
    return [make(microbatch) for microbatch in range(num_microbatches)]
