"""The link actor of a box: pulls bytes from other boxes into its arena, and passes on messages to their actors."""

import contextlib
import queue
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from windlass.actors.job import SCHEDULER, JobSpec, box_of, link_name
from windlass.actors.messages import (
    ActorFailed,
    Crossing,
    DescribeStatus,
    Message,
    OfferSpan,
    OfferTaken,
    Phase,
    PullSpan,
    SpanPulled,
    SpansReported,
    StatusDescribed,
    decode,
    encode,
)
from windlass.actors.runtime.boxes.peer_clock import PeerClock
from windlass.storage.ids import ActorName, BoxName, Span, Step
from windlass.storage.io_scheduler import IoResult
from windlass.storage.link import (
    Certificates,
    Codec,
    Identity,
    KeyKind,
    Link,
    LinkClosed,
    LinkError,
    LinkKey,
    LinkSettings,
    PeerLost,
    listen,
)
from windlass.storage.memory import Arena

_KINDS = {
    None: KeyKind.EXPORT,
    Phase.FORWARD: KeyKind.ACTIVATION,
    Phase.HEAD: KeyKind.ACTIVATION,
    Phase.BACKWARD: KeyKind.ACTIVATION_GRAD,
    Phase.EVALUATE: KeyKind.EVALUATION,
    Phase.EVALUATE_HEAD: KeyKind.EVALUATION,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnd:
    """The addresses, certificates and secret with which a box reaches the other boxes of its job."""

    names: tuple[BoxName, ...]  # of the job's boxes, in their order
    listener: socket.socket  # see `listen`; it belongs to the link
    addresses: Mapping[BoxName, tuple[str, int]]  # host and port of the other boxes
    certificates: Certificates
    secret: bytes = field(repr=False)  # of the attempt
    settings: LinkSettings = field(default_factory=LinkSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """A LinkEnd that does not listen yet, as the runner of a box is given it."""

    names: tuple[BoxName, ...]
    address: tuple[str, int]  # host and port at which this box listens
    addresses: Mapping[BoxName, tuple[str, int]]
    certificates: Certificates
    secret: bytes = field(repr=False)
    settings: LinkSettings = field(default_factory=LinkSettings)

    def listen(self) -> LinkEnd:
        """Listens. Raises OSError if the address is not one of this box, or its port is in use."""
        return LinkEnd(
            names=self.names,
            listener=listen(*self.address),
            addresses=self.addresses,
            certificates=self.certificates,
            secret=self.secret,
            settings=self.settings,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mail:
    """Messages from an actor of one box to an actor of another one."""

    to: ActorName
    batch: bytes  # of `encode`
    sent_s: float  # by the sender's monotonic clock


class BoxLink:
    """The link actor of a box. All methods but `stop` may be called by any thread.

    Only `send` and `request` may wait for another box.
    """

    def __init__(
        self,
        spec: JobSpec,
        end: LinkEnd,
        requests: Sequence[type] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts to listen and to connect.

        `requests`: the types of messages that are for no actor. They come to `self.requests` with the index of the box
        that sent them, as does the error of a lost box. `clock`: that of the spans of this box.
        """
        self.requests: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._job = spec.job
        self._name, self._names = link_name(spec.box), end.names
        self._clock, self._clocks = clock, {name: PeerClock() for name in end.addresses}
        self._arena: Arena | None = None
        self._send: Callable[[ActorName, Message], None] = _lost
        self._deliver: Callable[[ActorName, Message], None] = _lost
        self._link = Link.start(
            Identity(
                job=spec.job,
                attempt=spec.attempt,
                epoch=spec.layout_epoch,
                box=end.names[spec.box],
                secret=end.secret,
            ),
            end.listener,
            end.addresses,
            end.certificates,
            settings=end.settings,
            codec=Codec([Mail, *requests]),
            on_message=self._take,
            on_lost=self._lose,
        )

    def open(
        self,
        arena: Arena,
        *,
        send: Callable[[ActorName, Message], None],
        deliver: Callable[[ActorName, Message], None],
    ) -> None:
        """Sets the arena of the box, before its actors start.

        `send` sends a message of the link, to any actor. `deliver` passes a message of another box to an actor of this
        one. Both must be quick.
        """
        self._arena, self._send, self._deliver = arena, send, deliver

    def post(self, message: Message) -> None:
        """Carries out a message. Raises LinkError if the other box is lost."""
        match message:
            case OfferSpan():
                taker = self._names[message.box]
                offered = self._link.offer(_key(message.crossing), self._buffer(message.span), {taker})
                taken = OfferTaken(job=self._job, step=message.step, crossing=message.crossing)
                self._when_done(offered, lambda result: self._send(message.reply_to, taken))
            case PullSpan():
                source, slot = self._names[message.box], self._buffer(message.span)
                crossing = message.crossing
                pulled = self._link.pull(_key(crossing), slot, source=source, priority=crossing.priority)
                self._when_done(pulled, lambda result: self._send(message.reply_to, self._pulled(message, result)))
            case DescribeStatus():
                text = self._link.describe()
                status = StatusDescribed(job=self._job, step=Step(0), actor=self._name, text=text)
                self._send(SCHEDULER, status)
            case _:
                raise ValueError(f"{self._name} has no handler for {type(message).__name__}")

    def send(self, to: ActorName, message: Message) -> None:
        """Sends a message to an actor of another box. It arrives once, and after those sent to that box before.

        Waits while the other box has too many to confirm. Raises LinkError if it is lost.
        """
        mail = Mail(to=to, batch=encode([message]), sent_s=self._clock())
        self._link.send(self._names[box_of(to)], mail)

    def post_all(self, messages: Sequence[Message]) -> None:
        """Carries out messages of actors that wait for no answer. An error is sent to the scheduler."""
        for message in messages:
            try:
                self.post(message)
            except Exception as error:  # noqa: BLE001 - the sender does not wait
                self._fail(error, message)

    def deliver(self, to: ActorName, messages: Sequence[Message]) -> None:
        """Sends messages to an actor of another box, for actors that wait for no answer.

        Waits as `send` does. Messages to a lost box are dropped: the scheduler hears of its loss by itself.
        """
        for message in messages:
            try:
                with contextlib.suppress(LinkError, InterruptedError):
                    self.send(to, message)
            except ValueError as error:  # it is too large
                self._fail(error, message)

    def request(self, box: int, request: object) -> None:
        """Sends a message that is for no actor to another box. Raises LinkError if it is lost."""
        self._link.send(self._names[box], request)

    def stop(self) -> None:
        """Ends the link. Raises TimeoutError if a thread hangs."""
        self._link.close()

    def _buffer(self, span: Span) -> memoryview:
        assert self._arena is not None, "actors offer and pull once there is an arena"
        return self._arena.buffer(span)

    # --- in threads of the link -------------------------------------------------------------------------------------

    def _pulled(self, message: PullSpan, result: IoResult) -> SpanPulled:
        return SpanPulled(
            job=self._job,
            step=message.step,
            crossing=message.crossing,
            box=message.box,
            nbytes=result.nbytes,
            start_s=result.start_s,
            end_s=result.end_s,
        )

    def _when_done(self, future: "Future[IoResult]", tell_result: Callable[[IoResult], None]) -> None:
        def tell(done: "Future[IoResult]") -> None:
            error = done.exception()
            if error is None:
                tell_result(done.result())
            # The loss of the other box is told by `on_lost`. After the end of this link nobody waits for an answer.
            elif isinstance(error, Exception) and not isinstance(error, PeerLost | LinkClosed):
                self._fail(error)

        future.add_done_callback(tell)

    def _take(self, sender: BoxName, message: Any) -> None:
        if isinstance(message, Mail):
            clock = self._clocks[sender]  # one thread takes the messages of a box
            clock.heard(message.sent_s, self._clock())
            for each in decode(message.batch):
                self._deliver(message.to, _by_this_clock(each, clock))
        else:
            self.requests.put((self._names.index(sender), message))

    def _lose(self, box: BoxName, error: PeerLost) -> None:
        self.requests.put((self._names.index(box), error))
        self._fail(error)

    def _fail(self, error: Exception, about: Message | None = None) -> None:
        idle = Message(job=self._job, step=Step(0))
        self._send(SCHEDULER, ActorFailed.of(error, actor=self._name, about=about or idle))


def _lost(to: ActorName, message: Message) -> None:
    """Stands for `send` before there are actors."""


def _by_this_clock(message: Message, clock: PeerClock) -> Message:
    """Returns a message of another box with times by the clock of this one."""
    if not isinstance(message, SpansReported):
        return message
    behind_s = clock.behind_s
    spans = (span._replace(start_s=span.start_s + behind_s, end_s=span.end_s + behind_s) for span in message.spans)
    return replace(message, spans=tuple(spans))


def _key(crossing: Crossing) -> LinkKey:
    kind = _KINDS[crossing.phase]
    if crossing.is_shared:
        kind = KeyKind.PARAM_GRAD if crossing.phase is Phase.BACKWARD else KeyKind.PARAM
    return LinkKey(
        kind=kind,
        step=crossing.step,
        group=crossing.group,
        block=crossing.block,
        part=crossing.part,
    )
