"""The measurement of the network between the boxes of a head, one pair after the other.

The head's own side runs in the caller's process. Boxes are asked by the head's answers to their calls.
"""

import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from windlass.service.installation import Settings, node_of
from windlass.service.machine.fleet import LinkProbe, ProbeAnswer, ProbeAsk, ProbeResult, link_name, link_name_of_head
from windlass.service.validation import ReportedError
from windlass.storage.ids import BoxName
from windlass.storage.sql import Box, Database
from windlass.storage.sql.repositories import HEAD_ID, BoxRepository

_Found = TypeVar("_Found")

# Seconds in which a box answers: it calls every second, and may be busy with a call.
_ANSWER_S = 15.0
_MEASURE_S = 60.0
_POLL_S = 0.1


class ProbeError(ReportedError):
    """The network between two boxes could not be measured. The message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkEnd:
    """A box whose network is measured. `host`: see `link_host_of`; None: not known."""

    id: str  # HEAD_ID: the head itself
    name: str
    host: str | None

    @property
    def link_name(self) -> BoxName:
        """The box's name on links."""
        return link_name_of_head() if self.id == HEAD_ID else link_name(self.name, self.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRates:
    """The network between two boxes. The rates are bytes per second."""

    there_bytes_per_s: float  # from the first box to the second one
    back_bytes_per_s: float
    round_trip_s: float


def probe_of(box: Box) -> ProbeAsk | None:
    """Returns the measurement that a box is to take part in now."""
    if box.probe is None or time.time() > box.probe["expires_at"]:
        return None
    return ProbeAsk.model_validate(box.probe)


def pairs_of(ends: Sequence[NetworkEnd]) -> Sequence[tuple[NetworkEnd, NetworkEnd]]:
    """Returns all pairs in the order in which they are measured."""
    return list(itertools.combinations(ends, 2))


class NetworkCheck:
    """Measures pairs of boxes, and stores the rates in the head's database."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings = settings
        self._database = database
        self._head = node_of(settings.home)

    def measure(self, one: NetworkEnd, other: NetworkEnd) -> PairRates:
        """Measures a pair both ways, and stores the rates. Takes some seconds. Raises ProbeError."""
        # The same one of the two connects as in a job.
        connecting, listening = sorted((one, other), key=lambda end: end.link_name)
        result = self._probe(connecting, listening)
        rates = {
            (listening.id, connecting.id): result.received_bytes_per_s,
            (connecting.id, listening.id): result.sent_bytes_per_s,
        }
        with self._database.write() as session:
            boxes = BoxRepository(session)
            for (source, target), rate in rates.items():
                boxes.keep_rate(self._head, source, target, bytes_per_s=rate, round_trip_s=result.round_trip_s)
        return PairRates(
            there_bytes_per_s=rates[one.id, other.id],
            back_bytes_per_s=rates[other.id, one.id],
            round_trip_s=result.round_trip_s,
        )

    def _probe(self, connecting: NetworkEnd, listening: NetworkEnd) -> ProbeResult:
        if listening.host is None:
            raise ProbeError(
                f"the address of box {listening.name} is not known: it has an older windlass, or has not called yet; "
                "update it, or set link_host there"
            )
        probe_id, secret = secrets.token_hex(8), secrets.token_hex(32)
        with ExitStack() as ending:

            def begin(end: NetworkEnd, peer: NetworkEnd, *, host: str | None = None, port: int | None = None) -> _Part:
                ask = ProbeAsk(
                    id=probe_id,
                    name=end.link_name,
                    peer=peer.link_name,
                    secret=secret,
                    peer_host=host,
                    peer_port=port,
                    seconds=_MEASURE_S + 2 * _ANSWER_S,
                )
                if end.id == HEAD_ID:
                    return ending.enter_context(_part_of_head(self._settings, ask))
                return ending.enter_context(_part_of_box(self._database, end.id, ask))

            listens = begin(listening, connecting)
            port = _await(
                lambda: _checked(listening, listens.answer()).port, _ANSWER_S, _silence_of(listening, _ANSWER_S)
            )
            connects = begin(connecting, listening, host=listening.host, port=port)
            _await(connects.answer, _ANSWER_S, _silence_of(connecting, _ANSWER_S))

            def result() -> ProbeResult | None:
                answer = connects.answer()
                if answer is not None and answer.is_unreachable:
                    raise ProbeError(
                        f"box {connecting.name} does not reach box {listening.name} at {listening.host} port {port} "
                        f"({answer.error}): open link_ports of {listening.name} to {connecting.name} in the firewall, "
                        f"or set link_host of {listening.name} to an address that {connecting.name} reaches"
                    )
                _checked(listening, listens.answer())
                return _checked(connecting, answer).result

            return _await(result, _MEASURE_S, _silence_of(connecting, _MEASURE_S))


class _Part(Protocol):
    """One box's part in a measurement."""

    def answer(self) -> ProbeAnswer | None:
        """Returns how far it is; None: it has not answered yet."""


@contextmanager
def _part_of_head(settings: Settings, ask: ProbeAsk) -> Iterator[_Part]:
    probe = LinkProbe(settings, ask)
    try:
        yield probe
    finally:
        probe.cancel()
        probe.join(_ANSWER_S)


@dataclass(frozen=True, slots=True)
class _PartOfBox:
    database: Database
    box_id: str

    def answer(self) -> ProbeAnswer | None:
        with self.database.read() as session:
            told = BoxRepository(session).get(self.box_id).probe_answer
        return None if told is None else ProbeAnswer.model_validate(told)


@contextmanager
def _part_of_box(database: Database, box_id: str, ask: ProbeAsk) -> Iterator[_Part]:
    probe = {**ask.model_dump(mode="json"), "expires_at": time.time() + ask.seconds}
    with database.write() as session:
        boxes = BoxRepository(session)
        if probe_of(boxes.get(box_id)) is not None:
            raise ProbeError("the network is being measured already; wait a minute, and try again")
        boxes.ask_probe(box_id, probe)
    try:
        yield _PartOfBox(database, box_id)
    finally:
        with database.write() as session:
            BoxRepository(session).ask_probe(box_id, None)


def _silence_of(end: NetworkEnd, seconds: float) -> str:
    return (
        f"box {end.name} did not answer within {seconds:g} s; look whether it is up, and has the head's version of "
        "windlass"
    )


def _checked(end: NetworkEnd, answer: ProbeAnswer | None) -> ProbeAnswer:
    """Returns an answer, or one that tells nothing. Raises ProbeError if the box has failed."""
    if answer is None:
        return ProbeAnswer(id="")
    if answer.error is not None:
        raise ProbeError(f"box {end.name}: {answer.error}")
    return answer


def _await(look: Callable[[], _Found | None], timeout_s: float, told: str) -> _Found:
    until_s = time.monotonic() + timeout_s
    while (found := look()) is None:
        if time.monotonic() > until_s:
            raise ProbeError(told)
        time.sleep(_POLL_S)
    return found
