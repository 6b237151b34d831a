"""Moves the params of an embedding that the head of another box uses, and the head's gradient of them.

Both cross once a step, in chunks, through slots in host memory. The sender has slots for the whole block, so none of
its operations waits for the other box.

Each chunk goes into a buffer on the device as soon as it arrives. Then the buffer's last contents have been used: new
params follow from an update with the gradient, and a new gradient follows from the new params.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch

from windlass.actors.job import JobContext, link_name
from windlass.actors.messages import (
    ComputeBlock,
    Crossing,
    Message,
    OfferSpan,
    OfferTaken,
    Phase,
    PullSpan,
    SpanPulled,
)
from windlass.actors.worker_policy import params_version
from windlass.amounts import bytes_text
from windlass.engine.device import TORCH_DTYPE, Device, DeviceBuffers, Event, Stream, TensorArena, copy
from windlass.engine.model import GradBuffer, StreamedParams, UnsupportedArchitectureError
from windlass.storage.ids import ActorName, BlockIndex, Span
from windlass.storage.memory import SlotPool

_EMBEDDING = BlockIndex(0)


@dataclass(slots=True, kw_only=True)
class _Exchange:
    """The chunks that go to the other box that uses the params, and those that come from it."""

    box: int  # index of the other one
    chunks: list[tuple[int, int]]  # the first and past-last element of each
    outbox: SlotPool  # with a slot for each chunk
    offered: dict[Crossing, Span] = field(default_factory=dict)
    sent_version: int | None = None  # of the params that were sent last
    inbox: list[Span]  # free slots for what comes
    expected: deque[Crossing] = field(default_factory=deque)  # not requested yet, in order
    expected_version: int | None = None  # the version of the last ones that were expected
    pulled: dict[Crossing, Span] = field(default_factory=dict)  # requested, and not copied to the device yet
    flat: torch.Tensor  # on the device, for what comes
    num_missing: int  # of its chunks
    version: int | None = None  # of its contents; None: it has none yet
    copied: Event | None = None  # the end of their copies


class SharedParams:
    """The end of one GPU worker. If no params are shared with another box, it does nothing.

    A *version* is the step whose updated params an operation reads (`params_version`).
    """

    def __init__(
        self,
        context: JobContext,
        device: Device,
        arena: TensorArena,
        send: Callable[[ActorName, Message], None],
        *,
        names: Collection[str],
    ) -> None:
        """`send` tells the box's link. `names`: the embedding's params that the head uses.

        The device's token ends all waits. The box has one GPU worker.
        """
        self._job, self._name, self._link = context.spec.job, context.gpu_worker(0), link_name(context.spec.box)
        self._device, self._arena, self._send = device, arena, send
        self._names, self._name_of_box = names, context.spec.name_of_box
        self._head, self._last_group = BlockIndex(len(context.layout.blocks) - 1), context.plan.num_groups - 1
        self._lends, self._borrows = (_EMBEDDING in blocks for blocks in (context.layout.lent, context.layout.borrowed))
        self._changed = threading.Condition()
        self._exchange: _Exchange | None = None
        if self._lends or self._borrows:
            self._exchange = self._open(context)

    def _open(self, context: JobContext) -> _Exchange:
        layout, plan, device = context.layout, context.plan, self._device
        box, outgoing, incoming = 0, plan.shared_sums, plan.shared_params
        what, dtype = "params", TORCH_DTYPE[context.formats.precision]
        if self._lends:
            box, outgoing, incoming = len(context.spec.stages) - 1, incoming, outgoing
            what, dtype = "gradients", torch.float32
        name = f"slots of shared params or gradients that {self._name_of_box(box)} has not taken"
        numel, chunks = layout.blocks[_EMBEDDING].numel, layout.chunk_ranges(_EMBEDDING)
        return _Exchange(
            box=box,
            chunks=chunks,
            outbox=SlotPool(outgoing.offset, outgoing.slot_nbytes, outgoing.num_slots, name=name, token=device.token),
            inbox=incoming.spans,
            flat=DeviceBuffers(device, {(numel, dtype): 1}, name=what).take(numel, dtype, device.h2d),
            num_missing=len(chunks),
        )

    # --- calls of the GPU worker ------------------------------------------------------------------------------------

    def params(self, block: BlockIndex) -> torch.Tensor | None:
        """Returns the buffer for the params of another box's block; None if the box has the block's own."""
        return self._exchange.flat if self._exchange is not None and self._borrows and block == _EMBEDDING else None

    def takes(self, operation: ComputeBlock) -> bool:
        """Returns whether an operation uses params of another box, or completes a gradient with that box's sum."""
        if self._borrows:
            return operation.block == self._head
        is_last = operation.phase is Phase.BACKWARD and operation.group == self._last_group
        return self._lends and is_last and operation.block == _EMBEDDING

    def source_of(self, operation: ComputeBlock) -> int | None:
        """Returns the box whose params or sum an operation takes; None if it takes none."""
        return self._exchange.box if self._exchange is not None and self.takes(operation) else None

    def expect(self, operation: ComputeBlock) -> None:
        """Queues the pulls of what comes, at the first operation of a version.

        That is long before it is needed, so that transfers run beside the operations in between.
        """
        version = params_version(operation.phase, operation.step)
        if (exchange := self._exchange) is None or version == exchange.expected_version:
            return
        if self._lends and operation.phase is not Phase.FORWARD:
            return  # no gradient comes from an evaluation
        crossing = self._params_crossing(operation) if self._borrows else self._sum_crossing(operation)
        with self._changed:
            exchange.expected_version = version
            exchange.expected.extend(crossing._replace(part=chunk) for chunk in range(len(exchange.chunks)))
            self._pull(exchange)

    def wait_for(self, operation: ComputeBlock) -> None:
        """Waits until what an operation takes is in host memory, and lets compute wait for the copies to the device.

        Raises the errors of `CancelToken.wait_for`.
        """
        version = params_version(operation.phase, operation.step)
        if (exchange := self._exchange) is None or not self.takes(operation):
            return
        what = "the embedding's params" if self._borrows else "the head's gradient of the embedding"
        source = self._name_of_box(exchange.box)
        stuck = f"{what} from {source} in step {operation.step}; that box or the link to it is stuck"
        with self._changed:
            self._device.token.wait_for(self._changed, lambda: exchange.version == version, stuck)
            copied = exchange.copied
        assert copied is not None, "it is set with the version"
        self._device.compute.wait(copied)

    def send_params(self, operation: ComputeBlock, params: torch.Tensor | StreamedParams) -> None:
        """Sends the embedding's params to the box with the head, unless it has them.

        It is called when the operation is queued on the compute stream, which makes the copies: after them the buffer
        of `params` may be used again. It waits for slots only until the other box has pulled what was sent last.
        """
        version = params_version(operation.phase, operation.step)
        if (exchange := self._exchange) is None or not self._lends or version == exchange.sent_version:
            return
        if operation.block == _EMBEDDING and operation.phase in (Phase.FORWARD, Phase.EVALUATE):
            assert isinstance(params, torch.Tensor), "an embedding is not streamed"
            exchange.sent_version = version
            self._send_chunks(exchange, self._device.compute, self._params_crossing(operation), params)

    def send_sum(self, operation: ComputeBlock, grad: GradBuffer) -> None:
        """Sends the head's sum for the embedding to its box. Queues the copies on the device-to-host stream.

        It is called in a step's last group, when the operation is queued on the compute stream.
        """
        assert self._exchange is not None, "a sum for another box comes from its params"
        d2h = self._device.d2h
        d2h.wait(self._device.compute.record())
        d2h.run(functools.partial(self._check_sum, grad))  # the tensors in it are known when it was computed
        self._send_chunks(self._exchange, d2h, self._sum_crossing(operation), grad.flat)

    def received_sums(self, operation: ComputeBlock) -> list[GradBuffer]:
        """Returns another box's sum for the gradient that an operation completes. `wait_for` comes first."""
        if self._exchange is None or not self._lends or not self.takes(operation):
            return []
        return [GradBuffer(self._exchange.flat, self._names)]

    def take(self, message: SpanPulled | OfferTaken) -> None:
        """Processes an answer of the link."""
        exchange = self._exchange
        assert exchange is not None, "the link answers a box that shares params"
        if isinstance(message, SpanPulled):
            self._copy_in(exchange, message)
            return
        with self._changed:
            slot = exchange.offered.pop(message.crossing)
        exchange.outbox.release([slot])

    # --- inside -----------------------------------------------------------------------------------------------------

    def _params_crossing(self, operation: ComputeBlock) -> Crossing:
        """Names the params by the head's operation in the same pass as `operation`, which is the first of its version.

        The part is that of the first chunk.
        """
        evaluates = operation.phase in (Phase.EVALUATE, Phase.EVALUATE_HEAD)
        phase = Phase.EVALUATE_HEAD if evaluates else Phase.HEAD
        return Crossing(operation.step, phase, self._head, operation.group, part=0, is_shared=True)

    def _sum_crossing(self, operation: ComputeBlock) -> Crossing:
        """Names the head's sum of a step by the operation that completes the embedding's gradient."""
        return Crossing(operation.step, Phase.BACKWARD, _EMBEDDING, self._last_group, part=0, is_shared=True)

    def _pull(self, exchange: _Exchange) -> None:
        """Requests as many of the next chunks as there are slots. The caller holds the lock."""
        while exchange.inbox and exchange.expected:
            crossing, slot = exchange.expected.popleft(), exchange.inbox.pop()
            exchange.pulled[crossing] = slot
            message = PullSpan(
                job=self._job, step=crossing.step, reply_to=self._name, box=exchange.box, crossing=crossing, span=slot
            )
            self._send(self._link, message)

    def _copy_in(self, exchange: _Exchange, message: SpanPulled) -> None:
        """Queues the copy of a chunk to its place on the device."""
        crossing, h2d = message.crossing, self._device.h2d
        start, stop = exchange.chunks[crossing.part]
        part = exchange.flat[start:stop]
        if message.nbytes != part.nbytes:
            source = self._name_of_box(exchange.box)
            raise ValueError(
                f"chunk {crossing.part} of the embedding from {source} is {bytes_text(message.nbytes)} and not "
                f"{bytes_text(part.nbytes)}: the boxes have other models or settings"
            )
        with self._changed:
            slot = exchange.pulled.pop(crossing)
        h2d.run(functools.partial(copy, part, self._arena.view(slot.offset, stop - start, part.dtype)))
        with self._changed:
            exchange.num_missing -= 1
            if not exchange.num_missing:  # the copies of all chunks are queued
                assert crossing.phase is not None, "exports are not for GPU workers"
                exchange.version = params_version(crossing.phase, crossing.step)
                exchange.num_missing, exchange.copied = len(exchange.chunks), h2d.record()
                self._changed.notify_all()
        h2d.then(functools.partial(self._release, exchange, slot))

    def _release(self, exchange: _Exchange, slot: Span) -> None:
        with self._changed:
            exchange.inbox.append(slot)
            self._pull(exchange)

    def _send_chunks(self, exchange: _Exchange, stream: Stream, crossing: Crossing, flat: torch.Tensor) -> None:
        """Queues the copies of a block to slots, and their offers."""
        slots = exchange.outbox.acquire(len(exchange.chunks))
        for part, ((start, stop), slot) in enumerate(zip(exchange.chunks, slots, strict=True)):
            chunk, named = flat[start:stop], crossing._replace(part=part)
            stream.run(functools.partial(copy, self._arena.view(slot.offset, stop - start, flat.dtype), chunk))
            stream.then(functools.partial(self._offer, exchange, named, slot, chunk.nbytes))

    def _offer(self, exchange: _Exchange, crossing: Crossing, slot: Span, nbytes: int) -> None:
        """Offers a chunk that was copied."""
        with self._changed:
            exchange.offered[crossing] = slot
        message = OfferSpan(
            job=self._job,
            step=crossing.step,
            reply_to=self._name,
            box=exchange.box,
            crossing=crossing,
            span=Span(slot.offset, nbytes),
        )
        self._send(self._link, message)

    def _check_sum(self, grad: GradBuffer) -> None:
        """Raises UnsupportedArchitectureError unless the head has a gradient of each shared param."""
        if missing := sorted(set(self._names) - grad.touched):
            raise UnsupportedArchitectureError(
                f"the head has no gradient of {missing[0]}, which it shares with the embedding on another box: such a "
                "model is trained on one box only"
            )
