"""Moves hidden states and their gradients between a GPU worker and those of other boxes, through slots in host memory.

The unit is a micro-batch. What comes is pulled into free slots as soon as its operation is granted, in the order of
operations. What goes is offered until the other box has pulled it. So a box that is ahead waits for slots.
"""

import functools
import threading
from collections.abc import Callable, Sequence

import torch

from windlass.actors.gpu_worker.edges.inbox import Inbox
from windlass.actors.job import JobContext, link_name
from windlass.actors.lifecycle import working_at
from windlass.actors.messages import ComputeBlock, Crossing, Message, OfferSpan, OfferTaken, SpanPulled
from windlass.amounts import bytes_text
from windlass.engine.device import TORCH_DTYPE, Device, TensorArena, copy
from windlass.engine.memory_plan import Pool
from windlass.engine.model import UnsupportedArchitectureError
from windlass.storage.ids import ActorName, BlockIndex, Span
from windlass.storage.memory import SlotPool

# Examples and tokens of each of an operation's micro-batches.
Shapes = Sequence[tuple[int, int]]


class StageEdges:
    """The hidden states and gradients on their way from and to the boxes with the blocks before and after."""

    def __init__(
        self,
        context: JobContext,
        device: Device,
        arena: TensorArena,
        send: Callable[[ActorName, Message], None],
        *,
        rank: int,
    ) -> None:
        """`send` tells the box's link. `rank` is that of the GPU worker. The device's token ends all waits."""
        self._job, self._name_of_box = context.spec.job, context.spec.name_of_box
        self._name = context.gpu_worker(rank)
        self._stage, self._num_blocks = context.stage, len(context.layout.blocks)
        self._hidden_size = context.layout.hidden_size
        self._dtype = TORCH_DTYPE[context.formats.precision]
        self._device, self._arena, self._send = device, arena, send
        self._link = link_name(context.spec.box)
        self._changed = threading.Condition()
        self._arrived: dict[Crossing, int] = {}  # and the bytes
        self._offered: dict[Crossing, tuple[SlotPool, Span]] = {}
        self._box, pools = context.spec.box, context.crossing_pools(rank)
        neighbours = [box for box in (self._box - 1, self._box + 1) if 0 <= box < len(context.spec.stages)]
        self._outboxes: dict[int, SlotPool] = {}
        self._inboxes: dict[int, Inbox] = {}
        for neighbour, outgoing, incoming in zip(neighbours, pools[::2], pools[1::2], strict=True):
            self._outboxes[neighbour] = self._slots(outgoing, neighbour)
            self._inboxes[neighbour] = Inbox(neighbour, incoming.spans)

    def _slots(self, pool: Pool, box: int) -> SlotPool:
        name = f"slots of hidden states that {self._name_of_box(box)} has not taken"
        return SlotPool(pool.offset, pool.slot_nbytes, pool.num_slots, name=name, token=self._device.token)

    # --- what comes -------------------------------------------------------------------------------------------------

    def source_of(self, operation: ComputeBlock) -> int | None:
        """Returns the box whose results an operation takes; None if it takes none."""
        if self._stage.takes_hidden(operation.phase, operation.block):
            return self._box - 1
        return self._box + 1 if self._stage.takes_grads(operation.phase, operation.block) else None

    def expect(self, operation: ComputeBlock, num_microbatches: int) -> None:
        """Queues the pulls for an operation, after those of operations that were queued earlier."""
        if (box := self.source_of(operation)) is None:
            return
        with self._changed:
            inbox = self._inboxes[box]
            inbox.expected.extend(_crossing(operation, index) for index in range(num_microbatches))
            self._pull(inbox)

    def receive(self, operation: ComputeBlock, shapes: Shapes) -> list[torch.Tensor]:
        """Returns what an operation takes, for work that is queued on the compute stream from now on.

        Each tensor has the shape (B, T, H). It waits until the bytes are in host memory, not until they are copied.

        Raises the errors of `CancelToken.wait_for`.
        """
        box = self.source_of(operation)
        assert box is not None, "only an operation that takes another box's results receives them"
        return [
            self._receive(operation, self._inboxes[box], _crossing(operation, index), shape)
            for index, shape in enumerate(shapes)
        ]

    def _receive(
        self, operation: ComputeBlock, inbox: Inbox, crossing: Crossing, shape: tuple[int, int]
    ) -> torch.Tensor:
        what = (
            f"the results of {self._name_of_box(inbox.box)} for the {crossing.phase} of block {crossing.block} in step "
            f"{crossing.step}, group {crossing.group}"
        )
        stuck = f"{what}; that box or the link to it is stuck"
        with self._changed:
            self._device.token.wait_for(self._changed, lambda: crossing in self._arrived, stuck)
            nbytes, slot = self._arrived.pop(crossing), inbox.pulled.pop(crossing)
        full = (*shape, self._hidden_size)
        numel = torch.Size(full).numel()
        if nbytes != numel * self._dtype.itemsize:
            raise ValueError(
                f"{what} are {bytes_text(nbytes)} and not {bytes_text(numel * self._dtype.itemsize)}: the boxes have "
                "other data or settings"
            )
        compute, h2d = self._device.compute, self._device.h2d
        hidden = self._device.empty(numel * self._dtype.itemsize).view(self._dtype)
        h2d.wait(compute.record())  # queued work may still read what the memory held before
        h2d.run(functools.partial(copy, hidden, self._arena.view(slot.offset, numel, self._dtype)))
        compute.wait(h2d.record())
        h2d.then(working_at(operation, functools.partial(self._release, inbox, slot)))
        return hidden.view(full)

    def _release(self, inbox: Inbox, slot: Span) -> None:
        with self._changed:
            inbox.free.append(slot)
            self._pull(inbox)

    def _pull(self, inbox: Inbox) -> None:
        """Requests as many of the next results as there are slots. The caller holds the lock."""
        for message in inbox.pulls(self._job, self._name):
            self._send(self._link, message)

    # --- what goes --------------------------------------------------------------------------------------------------

    def send(self, operation: ComputeBlock, results: Sequence[torch.Tensor], shapes: Shapes) -> int | None:
        """Queues copies of an operation's results to slots, and their offers to the box that takes them.

        It is called after the operation is queued on the compute stream. `results` must be contiguous, and not change.
        Returns the other box if it had to wait until that one took earlier results, so that there were slots.

        Raises:
            UnsupportedArchitectureError: a result has another shape or type than the other box expects.
        """
        taker = self._stage.taker_of(operation.phase, operation.block, self._num_blocks)
        assert taker is not None, "only an operation whose results another box takes sends them"
        phase, block = taker
        box = self._box + (1 if block >= self._stage.stop else -1)
        outbox, has_waited = self._outboxes[box], False
        self._device.d2h.wait(self._device.compute.record())
        for index, (result, shape) in enumerate(zip(results, shapes, strict=True)):
            if result.shape != (*shape, self._hidden_size) or result.dtype is not self._dtype:
                raise UnsupportedArchitectureError(
                    f"block {operation.block} passes {result.dtype} of shape {tuple(result.shape)} to block {block} on "
                    f"another box, which expects {self._dtype} of shape {(*shape, self._hidden_size)}: such a model "
                    "is trained on one box only"
                )
            crossing = Crossing(operation.step, phase, BlockIndex(block), operation.group, index)
            if not (slots := outbox.try_acquire(1)):
                slots, has_waited = outbox.acquire(1), True
            (slot,) = slots
            target = self._arena.view(slot.offset, result.numel(), self._dtype)
            self._device.d2h.run(functools.partial(copy, target, result.detach().view(-1)))
            self._device.d2h.then(functools.partial(self._offer, box, crossing, outbox, slot, result))
        return box if has_waited else None

    def _offer(self, box: int, crossing: Crossing, pool: SlotPool, slot: Span, result: torch.Tensor) -> None:
        """Offers a result that was copied. Until now the callback has held its memory on the device."""
        with self._changed:
            self._offered[crossing] = pool, slot
        span = Span(slot.offset, result.nbytes)
        message = OfferSpan(
            job=self._job, step=crossing.step, reply_to=self._name, box=box, crossing=crossing, span=span
        )
        self._send(self._link, message)

    def take(self, message: SpanPulled | OfferTaken) -> None:
        """Processes an answer of the link."""
        if isinstance(message, OfferTaken):
            with self._changed:
                pool, slot = self._offered.pop(message.crossing)
            pool.release([slot])
            return
        with self._changed:
            self._arrived[message.crossing] = message.nbytes
            self._changed.notify_all()


def _crossing(operation: ComputeBlock, microbatch: int) -> Crossing:
    return Crossing(operation.step, operation.phase, operation.block, operation.group, microbatch)
