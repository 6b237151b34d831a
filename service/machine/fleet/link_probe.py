"""A measurement of the network between two boxes, with the link that jobs use: its streams, its frames, its TLS.

The box that connects leads: it measures the round trip, pulls, and then lets the other one pull. The other one serves.
"""

import queue
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from windlass.service.installation import Settings, link_host_of
from windlass.service.machine.fleet.link_endpoint import link_files, reserve_link_port
from windlass.service.machine.fleet.messages import ProbeAnswer, ProbeAsk, ProbeResult
from windlass.service.validation import ReportedError
from windlass.storage.ids import Attempt, BlockIndex, BoxName, JobId, Step
from windlass.storage.io_scheduler import IoResult
from windlass.storage.link import Codec, Identity, KeyKind, Link, LinkError, LinkKey, LinkSettings, listen

_Kind = TypeVar("_Kind")

_SETTINGS = LinkSettings(silence_s=10.0, connect_s=15.0)
_CONNECT_S = 5.0
_FLUSH_S = 0.5  # for the last messages, on which nothing depends
_POLL_S = 0.2  # seconds after which a wait looks whether it was cancelled
_NUM_ROUND_TRIPS = 20
# A round of pulls is long enough if it takes so many seconds. Else the next one has more bytes.
_ENOUGH_S, _ROUND_S = 0.75, 1.5
_FIRST_NBYTES, _MOST_NBYTES = 256 * 1024, 2 * 1024**3  # of a round
_MOST_GROWTH = 16.0
_PULL_NBYTES, _NUM_SLOTS = 4 * 1024**2, 16  # of one pull, and pulls at once
_MOST_KEYS = _MOST_NBYTES // _PULL_NBYTES  # of a round


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePing:
    """Asks for a ProbePong."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePong:
    """Answers a ProbePing."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOffer:
    """Asks the other box to offer keys."""

    first: int
    number: int
    nbytes: int  # of each


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePull:
    """Asks the other box to pull."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePulled:
    """Tells how fast the sender has pulled."""

    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeEnd:
    """Tells that the measurement is over."""


_MESSAGES = (ProbePing, ProbePong, ProbeOffer, ProbePull, ProbePulled, ProbeEnd)


class _Unreachable(ReportedError):
    """The other box's address and port cannot be reached."""


class LinkProbe:
    """One box's side of a measurement, in a thread of its own. It ends by itself, within the seconds of the request."""

    def __init__(self, settings: Settings, ask: ProbeAsk) -> None:
        """Begins."""
        self.ask = ask
        self._settings = settings
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._answer = ProbeAnswer(id=ask.id)
        self._thread = threading.Thread(target=self._run, name="network probe", daemon=True)
        self._thread.start()

    def answer(self) -> ProbeAnswer:
        """Returns how far the measurement is."""
        with self._lock:
            return self._answer

    def cancel(self) -> None:
        """Makes the measurement end soon."""
        self._cancelled.set()

    def join(self, timeout_s: float) -> bool:
        """Waits for the end of the measurement. Returns whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _tell(self, **news: Any) -> None:
        with self._lock:
            self._answer = self._answer.model_copy(update=news)

    def _run(self) -> None:
        until_s = time.monotonic() + self.ask.seconds
        inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        try:
            with self._open_link(inbox) as link:
                side = _Side(link, BoxName(self.ask.peer), inbox, self._cancelled, until_s)
                if self.ask.peer_host is None:
                    side.serve_until(ProbeEnd)
                else:
                    self._tell(result=side.lead())
        except _Unreachable as error:
            self._tell(error=str(error), is_unreachable=True)
        except (ReportedError, LinkError, OSError, ValueError) as error:
            self._tell(error=str(error) or type(error).__name__)

    @contextmanager
    def _open_link(self, inbox: "queue.SimpleQueue[object]") -> Iterator[Link]:
        ask, files = self.ask, link_files(self._settings.home)
        if files is None:
            raise ReportedError("it has no certificate for links yet; it gets one within a minute after its start")
        with ExitStack() as ending:
            settings = _SETTINGS
            if ask.peer_host is None or ask.peer_port is None:
                # It waits as long as it may, so that the box that connects says first why it fails.
                settings = replace(settings, connect_s=max(ask.seconds, settings.silence_s))
                listener = self._listen(ending)
                address = listener.getsockname()[:2]  # it is not used, because the other box connects
            else:
                address = (ask.peer_host, ask.peer_port)
                _reach(address)
                listener = listen("127.0.0.1")  # nothing connects to it
            identity = Identity(
                job=JobId(f"probe-{ask.id}"),
                attempt=Attempt(1),
                epoch=0,
                box=BoxName(ask.name),
                secret=bytes.fromhex(ask.secret),
            )
            link = Link.start(
                identity,
                listener,
                {BoxName(ask.peer): address},
                files,
                settings=settings,
                codec=Codec(_MESSAGES),
                on_message=lambda _box, message: inbox.put(message),
                on_lost=lambda _box, error: inbox.put(error),
            )
            ending.callback(link.close, _FLUSH_S)
            if ask.peer_host is None:
                self._tell(port=listener.getsockname()[1])
            yield link

    def _listen(self, ending: ExitStack) -> socket.socket:
        """Listens as an attempt of a job does."""
        host = link_host_of(self._settings)
        if host is None:
            raise ReportedError("its address is not known yet; set link_host")
        reserved = ending.enter_context(reserve_link_port(host, self._settings.link_port_range))
        return listen(host, reserved.getsockname()[1])


class _Side:
    """One box's part once there is a link. All waits end at `until_s`, by TimeoutError, or with the other box."""

    def __init__(
        self,
        link: Link,
        peer: BoxName,
        inbox: "queue.SimpleQueue[object]",
        cancelled: threading.Event,
        until_s: float,
    ) -> None:
        """`inbox`: messages of the other box, and the error of its loss."""
        self._link = link
        self._peer = peer
        self._inbox = inbox
        self._cancelled = cancelled
        self._until_s = until_s
        self._buffer = memoryview(bytearray(_PULL_NBYTES * _NUM_SLOTS))

    def lead(self) -> ProbeResult:
        """Measures all, and then ends the other side."""
        round_trip_s = self._round_trip_s()
        received = self._pull()
        self._link.send(self._peer, ProbePull())
        sent = self.serve_until(ProbePulled).bytes_per_s
        self._link.send(self._peer, ProbeEnd())
        return ProbeResult(received_bytes_per_s=received, sent_bytes_per_s=sent, round_trip_s=round_trip_s)

    def serve_until(self, kind: type[_Kind]) -> _Kind:
        """Does what the other box asks for, until it sends a message of a kind. Returns that."""
        while True:
            match message := self._receive():
                case ProbePing():
                    self._link.send(self._peer, ProbePong(number=message.number))
                case ProbeOffer():
                    # The bytes do not count, so all keys have the same.
                    offered = self._buffer[: max(1, min(message.nbytes, _PULL_NBYTES))]
                    for number in range(message.first, message.first + min(message.number, _MOST_KEYS)):
                        self._link.offer(_key(number), offered, {self._peer})
                case ProbePull():
                    self._link.send(self._peer, ProbePulled(bytes_per_s=self._pull()))
            if isinstance(message, kind):
                return message

    def _round_trip_s(self) -> float:
        """Returns the median time of a message and its answer."""
        times = []
        for number in range(_NUM_ROUND_TRIPS + 1):
            start_s = time.monotonic()
            self._link.send(self._peer, ProbePing(number=number))
            self.serve_until(ProbePong)
            times.append(time.monotonic() - start_s)
        return statistics.median(times[1:])  # the first one waited for the connections

    def _pull(self) -> float:
        """Pulls more and more bytes until it takes long enough. Returns the bytes per second of the last round."""
        nbytes, first = _FIRST_NBYTES, 0
        while True:
            each = min(nbytes, _PULL_NBYTES)
            number = -(-nbytes // each)
            self._link.send(self._peer, ProbeOffer(first=first, number=number, nbytes=each))
            start_s = time.monotonic()
            pulls: deque[Future[IoResult]] = deque()
            for key in range(first, first + number):
                if len(pulls) == _NUM_SLOTS:
                    self._await(pulls.popleft())
                slot = self._buffer[key % _NUM_SLOTS * _PULL_NBYTES :][:each]
                pulls.append(self._link.pull(_key(key), slot, source=self._peer))
            for pull in pulls:
                self._await(pull)
            elapsed_s = max(time.monotonic() - start_s, 1e-6)
            if elapsed_s >= _ENOUGH_S or nbytes >= _MOST_NBYTES:
                return number * each / elapsed_s
            first += number
            nbytes = min(_MOST_NBYTES, int(nbytes * min(_MOST_GROWTH, max(2.0, _ROUND_S / elapsed_s))))

    def _receive(self) -> object:
        while True:
            try:
                message = self._inbox.get(timeout=self._pause_s())
            except queue.Empty:
                continue
            if isinstance(message, Exception):
                raise message
            return message

    def _await(self, pull: "Future[IoResult]") -> None:
        while True:
            pause_s = self._pause_s()
            with suppress(FutureTimeout):
                pull.result(pause_s)
                return

    def _pause_s(self) -> float:
        """Returns how long a wait may last before it looks here again. Raises TimeoutError or InterruptedError."""
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the measurement took too long, and was given up")
        if self._cancelled.is_set():
            raise InterruptedError("the measurement was given up")
        return min(_POLL_S, left_s)


def _reach(address: tuple[str, int]) -> None:
    """Connects once, so that an address that is not reached has an error of its own. Raises _Unreachable."""
    try:
        socket.create_connection(address, timeout=_CONNECT_S).close()
    except TimeoutError:
        raise _Unreachable(f"no answer within {_CONNECT_S:g} s") from None
    except OSError as error:
        raise _Unreachable((error.strerror or str(error)).lower()) from None


def _key(number: int) -> LinkKey:
    return LinkKey(kind=KeyKind.PARAM, step=Step(0), block=BlockIndex(0), part=number)
