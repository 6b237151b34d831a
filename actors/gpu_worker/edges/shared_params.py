"""Moves the params of an embedding that the head of another box uses, and the head's gradient of them.

Both cross once a step, in chunks, through slots in host memory. The sender has slots for the whole block, so none of
its operations waits for the other box.

Each chunk goes into a buffer on the device as soon as it arrives. Then the buffer's last contents have been used: new
params follow from an update with the gradient, and a new gradient follows from the new params.

Of several GPU workers of a box, the first one sends the params. That of a step's last group sends the head's sum, which
all have added to, or adds it to the embedding's gradient. Params come to the first one, which offers each chunk to
the others, too. Its slot is free when all have copied it.
"""

import functools
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch

from windlass.actors.gpu_worker.edges.inbox import Inbox
from windlass.actors.job import JobContext, link_name
from windlass.actors.messages import ComputeBlock, Crossing, Message, OfferSpan, OfferTaken, Phase, SpanPulled
from windlass.actors.worker_policy import params_version
from windlass.amounts import bytes_text
from windlass.engine.device import TORCH_DTYPE, Device, DeviceBuffers, Event, Stream, TensorArena, copy
from windlass.engine.memory_plan import Pool
from windlass.engine.model import GradBuffer, StreamedParams, UnsupportedArchitectureError
from windlass.storage.ids import ActorName, BlockIndex, Span
from windlass.storage.memory import SlotPool

_EMBEDDING = BlockIndex(0)


@dataclass(slots=True, kw_only=True)
class _Outgoing:
    """The chunks that go to the other box that uses the params."""

    box: int  # index of the other one
    outbox: SlotPool  # with a slot for each chunk
    offered: dict[Crossing, Span] = field(default_factory=dict)
    sent_version: int | None = None  # of the params that were sent last


@dataclass(slots=True, kw_only=True)
class _Incoming:
    """The chunks that come from the other box that uses the params."""

    inbox: Inbox  # a chunk is in `pulled` until it is copied to all devices
    pulls: bool  # False: the box's first GPU worker pulls them, and offers them to this one
    expected_version: int | None = None  # the version of the last ones that were expected
    num_copying: dict[Crossing, int] = field(default_factory=dict)  # GPU workers that have not copied what is there
    flat: torch.Tensor  # on the device
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
        rank: int,
        names: Collection[str],
    ) -> None:
        """`send` tells the box's link, and its other GPU workers. `rank` is that of this one.

        `names`: the embedding's params that the head uses. The device's token ends all waits.
        """
        self._job, self._name, self._link = context.spec.job, context.gpu_worker(rank), link_name(context.spec.box)
        self._box, self._workers = context.spec.box, context.gpu_workers
        self._device, self._arena, self._send = device, arena, send
        self._names, self._name_of_box = names, context.spec.name_of_box
        self._chunks = context.layout.chunk_ranges(_EMBEDDING)  # the first and past-last element of each
        self._head, self._last_group = BlockIndex(len(context.layout.blocks) - 1), context.plan.num_groups - 1
        self._lends, self._borrows = (_EMBEDDING in blocks for blocks in (context.layout.lent, context.layout.borrowed))
        self._changed = threading.Condition()
        self._outgoing: _Outgoing | None = None
        self._incoming: _Incoming | None = None
        plan, is_first, is_last = context.plan, rank == 0, self._name == context.grads_worker
        if self._lends:
            box = len(context.spec.stages) - 1
            self._outgoing = self._open_outgoing(box, plan.shared_params) if is_first else None
            self._incoming = self._open_incoming(box, plan.shared_sums, torch.float32) if is_last else None
        elif self._borrows:
            dtype = TORCH_DTYPE[context.formats.precision]
            self._outgoing = self._open_outgoing(0, plan.shared_sums) if is_last else None
            self._incoming = self._open_incoming(0, plan.shared_params, dtype, pulls=is_first)

    def _open_outgoing(self, box: int, pool: Pool) -> _Outgoing:
        name = f"slots of shared params or gradients that {self._name_of_box(box)} has not taken"
        outbox = SlotPool(pool.offset, pool.slot_nbytes, pool.num_slots, name=name, token=self._device.token)
        return _Outgoing(box=box, outbox=outbox)

    def _open_incoming(self, box: int, pool: Pool, dtype: torch.dtype, *, pulls: bool = True) -> _Incoming:
        numel, what = self._chunks[-1][1], "gradients" if self._lends else "params"
        flats = DeviceBuffers(self._device, {(numel, dtype): 1}, name=what)
        return _Incoming(
            inbox=Inbox(box, pool.spans),
            pulls=pulls,
            flat=flats.take(numel, dtype, self._device.h2d),
            num_missing=len(self._chunks),
        )

    # --- calls of the GPU worker ------------------------------------------------------------------------------------

    def params(self, block: BlockIndex) -> torch.Tensor | None:
        """Returns the buffer for the params of another box's block; None if the box has the block's own."""
        return self._incoming.flat if self._incoming is not None and self._borrows and block == _EMBEDDING else None

    def takes(self, operation: ComputeBlock) -> bool:
        """Returns whether an operation uses params of another box, or completes a gradient with that box's sum."""
        if self._borrows:
            return operation.block == self._head
        is_last = operation.phase is Phase.BACKWARD and operation.group == self._last_group
        return self._lends and is_last and operation.block == _EMBEDDING

    def source_of(self, operation: ComputeBlock) -> int | None:
        """Returns the box whose params or sum an operation takes; None if it takes none."""
        return self._incoming.inbox.box if self._incoming is not None and self.takes(operation) else None

    def expect(self, operation: ComputeBlock) -> None:
        """Queues the pulls of what comes, at the first operation of a version.

        That is long before it is needed, so that transfers run beside the operations in between.
        """
        version = params_version(operation.phase, operation.step)
        incoming = self._incoming
        if incoming is None or not incoming.pulls or version == incoming.expected_version:
            return
        if self._lends and operation.phase is not Phase.FORWARD:
            return  # no gradient comes from an evaluation
        crossing = self._params_crossing(operation) if self._borrows else self._sum_crossing(operation)
        with self._changed:
            incoming.expected_version = version
            incoming.inbox.expected.extend(crossing._replace(part=chunk) for chunk in range(len(self._chunks)))
            self._pull(incoming)

    def wait_for(self, operation: ComputeBlock) -> None:
        """Waits until what an operation takes is in host memory, and lets compute wait for the copies to the device.

        Raises the errors of `CancelToken.wait_for`.
        """
        version = params_version(operation.phase, operation.step)
        if (incoming := self._incoming) is None or not self.takes(operation):
            return
        what = "the embedding's params" if self._borrows else "the head's gradient of the embedding"
        source = self._name_of_box(incoming.inbox.box)
        cause = "that box or the link to it" if incoming.pulls else f"that box, the link to it or {self._workers[0]}"
        stuck = f"{what} from {source} in step {operation.step}; {cause} is stuck"
        with self._changed:
            self._device.token.wait_for(self._changed, lambda: incoming.version == version, stuck)
            copied = incoming.copied
        assert copied is not None, "it is set with the version"
        self._device.compute.wait(copied)

    def send_params(self, operation: ComputeBlock, params: torch.Tensor | StreamedParams) -> None:
        """Sends the embedding's params to the box with the head, unless it has them.

        It is called when the operation is queued on the compute stream, which makes the copies: after them the buffer
        of `params` may be used again. It waits for slots only until the other box has pulled what was sent last.
        """
        version = params_version(operation.phase, operation.step)
        if (outgoing := self._outgoing) is None or not self._lends or version == outgoing.sent_version:
            return
        if operation.block == _EMBEDDING and operation.phase in (Phase.FORWARD, Phase.EVALUATE):
            assert isinstance(params, torch.Tensor), "an embedding is not streamed"
            outgoing.sent_version = version
            self._send_chunks(outgoing, self._device.compute, self._params_crossing(operation), params)

    def send_sum(self, operation: ComputeBlock, grad: GradBuffer) -> None:
        """Sends the head's sum for the embedding to its box. Queues the copies on the device-to-host stream.

        It is called in a step's last group, when the operation is queued on the compute stream.
        """
        assert self._outgoing is not None, "the GPU worker of the last group has slots for it"
        d2h = self._device.d2h
        d2h.wait(self._device.compute.record())
        d2h.run(functools.partial(self._check_sum, grad))  # the tensors in it are known when it was computed
        self._send_chunks(self._outgoing, d2h, self._sum_crossing(operation), grad.flat)

    def received_sums(self, operation: ComputeBlock) -> list[GradBuffer]:
        """Returns another box's sum for the gradient that an operation completes. `wait_for` comes first."""
        if self._incoming is None or not self._lends or not self.takes(operation):
            return []
        return [GradBuffer(self._incoming.flat, self._names)]

    def take(self, message: SpanPulled | OfferSpan | OfferTaken) -> None:
        """Processes an answer of the link, or a message of another GPU worker of the box."""
        incoming, outgoing = self._incoming, self._outgoing
        match message:
            case SpanPulled():
                assert incoming is not None, "what comes was requested"
                self._arrived(incoming, message)
            case OfferSpan():
                assert incoming is not None, "all GPU workers of the head's box use the params"
                taken = OfferTaken(job=self._job, step=message.step, crossing=message.crossing)
                self._copy_in(incoming, message.crossing, message.span, lambda: self._send(message.reply_to, taken))
            case OfferTaken() if incoming is not None and message.crossing in incoming.num_copying:
                self._was_copied(incoming, message.crossing)
            case OfferTaken():
                assert outgoing is not None, "what is taken was offered"
                with self._changed:
                    slot = outgoing.offered.pop(message.crossing)
                outgoing.outbox.release([slot])

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

    def _pull(self, incoming: _Incoming) -> None:
        """Requests as many of the next chunks as there are slots. The caller holds the lock."""
        for message in incoming.inbox.pulls(self._job, self._name):
            self._send(self._link, message)

    def _arrived(self, incoming: _Incoming, message: SpanPulled) -> None:
        """Copies a chunk to the device, and offers it to all GPU workers that use it, too."""
        crossing, (start, stop) = message.crossing, self._chunks[message.crossing.part]
        nbytes = (stop - start) * incoming.flat.itemsize
        if message.nbytes != nbytes:
            source = self._name_of_box(incoming.inbox.box)
            raise ValueError(
                f"chunk {crossing.part} of the embedding from {source} is {bytes_text(message.nbytes)} and not "
                f"{bytes_text(nbytes)}: the boxes have other models or settings"
            )
        others = [worker for worker in self._workers if self._borrows and worker != self._name]
        with self._changed:
            span = Span(incoming.inbox.pulled[crossing].offset, nbytes)
            incoming.num_copying[crossing] = 1 + len(others)
        for worker in others:
            self._send(worker, self._offer_of(crossing, span, self._box))
        self._copy_in(incoming, crossing, span, functools.partial(self._was_copied, incoming, crossing))

    def _copy_in(self, incoming: _Incoming, crossing: Crossing, span: Span, then: Callable[[], None]) -> None:
        """Queues the copy of a chunk to its place on the device. `then` is called after it."""
        start, stop = self._chunks[crossing.part]
        part, h2d = incoming.flat[start:stop], self._device.h2d
        h2d.run(functools.partial(copy, part, self._arena.view(span.offset, stop - start, part.dtype)))
        with self._changed:
            incoming.num_missing -= 1
            if not incoming.num_missing:  # the copies of all chunks are queued
                assert crossing.phase is not None, "exports are not for GPU workers"
                incoming.version = params_version(crossing.phase, crossing.step)
                incoming.num_missing, incoming.copied = len(self._chunks), h2d.record()
                self._changed.notify_all()
        h2d.then(then)

    def _was_copied(self, incoming: _Incoming, crossing: Crossing) -> None:
        """Records that a GPU worker has copied a chunk. After the last one, the chunk's slot is free."""
        with self._changed:
            incoming.num_copying[crossing] -= 1
            if not incoming.num_copying[crossing]:
                del incoming.num_copying[crossing]
                incoming.inbox.free.append(incoming.inbox.pulled.pop(crossing))
                self._pull(incoming)

    def _send_chunks(self, outgoing: _Outgoing, stream: Stream, crossing: Crossing, flat: torch.Tensor) -> None:
        """Queues the copies of a block to slots, and their offers."""
        slots = outgoing.outbox.acquire(len(self._chunks))
        for part, ((start, stop), slot) in enumerate(zip(self._chunks, slots, strict=True)):
            chunk, named = flat[start:stop], crossing._replace(part=part)
            stream.run(functools.partial(copy, self._arena.view(slot.offset, stop - start, flat.dtype), chunk))
            stream.then(functools.partial(self._offer, outgoing, named, slot, chunk.nbytes))

    def _offer(self, outgoing: _Outgoing, crossing: Crossing, slot: Span, nbytes: int) -> None:
        """Offers a chunk that was copied."""
        with self._changed:
            outgoing.offered[crossing] = slot
        self._send(self._link, self._offer_of(crossing, Span(slot.offset, nbytes), outgoing.box))

    def _offer_of(self, crossing: Crossing, span: Span, box: int) -> OfferSpan:
        return OfferSpan(job=self._job, step=crossing.step, reply_to=self._name, box=box, crossing=crossing, span=span)

    def _check_sum(self, grad: GradBuffer) -> None:
        """Raises UnsupportedArchitectureError unless the head has a gradient of each shared param."""
        if missing := sorted(set(self._names) - grad.touched):
            raise UnsupportedArchitectureError(
                f"the head has no gradient of {missing[0]}, which it shares with the embedding on another box: such a "
                "model is trained on one box only"
            )
