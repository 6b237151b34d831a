"""Params of chunks on their way between boxes. The first box exports the model, so it pulls those of all others."""

import threading
from collections.abc import Callable

from windlass.actors.job import JobContext, link_name, optimizer_name
from windlass.actors.messages import Crossing, Message, OfferParams, OfferSpan, OfferTaken, PullSpan, SpanPulled
from windlass.amounts import bytes_text
from windlass.storage.ids import ActorName, ChunkIndex, ChunkKey, Span, Step


class BoxParams:
    """One optimizer's side of the transfers, which go from slot to slot over the link. Thread-safe.

    The optimizer of the first box asks for each chunk that it has a slot for. So slots limit memory on both sides, and
    no box is asked for what the first one does not need.
    """

    def __init__(self, name: ActorName, context: JobContext, send: Callable[[ActorName, Message], None]) -> None:
        self._name = name
        self._context = context
        self._send = send
        self._link = link_name(context.spec.box)
        self._lock = threading.Lock()  # of `_pending`
        self._pending: dict[Crossing, Callable[[], None]] = {}

    def pull(self, key: ChunkKey, slot: Span, step: Step, on_done: Callable[[], None]) -> None:
        """Requests a chunk's params of `step` from its box. `on_done` is called when they are in the slot."""
        if not self._context.chunk_numel(key):
            on_done()  # a block without params has one empty chunk
            return
        job, box = self._context.spec.job, self._context.box_of_block(key.block)
        crossing, span = self._begin(key, slot, step, on_done)
        self._send(optimizer_name(0, box), OfferParams(job=job, step=step, key=key))
        pull = PullSpan(job=job, step=step, reply_to=self._name, box=box, crossing=crossing, span=span)
        self._send(self._link, pull)

    def offer(self, key: ChunkKey, slot: Span, step: Step, on_done: Callable[[], None]) -> None:
        """Offers a chunk's params to the first box. `on_done` is called when it has them, so that the slot is free."""
        crossing, span = self._begin(key, slot, step, on_done)
        offer = OfferSpan(
            job=self._context.spec.job, step=step, reply_to=self._name, box=0, crossing=crossing, span=span
        )
        self._send(self._link, offer)

    def take(self, message: SpanPulled | OfferTaken) -> None:
        """Processes an answer of the link. Raises ValueError if another number of bytes has come than was expected."""
        crossing = message.crossing
        if isinstance(message, SpanPulled):
            key = ChunkKey(crossing.block, ChunkIndex(crossing.part))
            if message.nbytes != (nbytes := self._nbytes(key)):
                raise ValueError(
                    f"the params of {key} are {bytes_text(message.nbytes)} on their box and {bytes_text(nbytes)} on "
                    "the first one: the boxes have different versions or settings"
                )
        with self._lock:
            on_done = self._pending.pop(crossing)
        on_done()

    def _begin(self, key: ChunkKey, slot: Span, step: Step, on_done: Callable[[], None]) -> tuple[Crossing, Span]:
        """Records a transfer. Returns its name, and the place of the params in the slot."""
        crossing = Crossing.of_params(step, key)
        with self._lock:
            self._pending[crossing] = on_done
        offset = self._context.state_offsets()[self._context.formats.param_kind]
        return crossing, Span(slot.offset + offset, self._nbytes(key))

    def _nbytes(self, key: ChunkKey) -> int:
        formats = self._context.formats
        return self._context.chunk_numel(key) * formats.itemsizes[formats.param_kind]
