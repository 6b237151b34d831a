"""Boxes whose transfers are decided by the link's own code, and whose network is a set of queues that the test serves.

Each box has a program: the keys that it produces and consumes, in its order. A key that it produces takes a slot until
its reader has pulled it. A key that it consumes takes a slot from its pull on.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.storage.ids import BlockIndex, Step
from windlass.storage.link import IncomingTransfers, KeyKind, LinkKey, OutgoingTransfers
from windlass.storage.link.transfers import Offer, Pull
from windlass.storage.link.wire import Offered, Pulled, Want

PIECE_NBYTES = 4


@dataclass(frozen=True)
class Transfer:
    """A key with the box that produces it and the one that consumes it."""

    number: int
    source: int
    reader: int
    nbytes: int

    @property
    def key(self) -> LinkKey:
        """The key; numbers follow the total order."""
        return LinkKey(kind=KeyKind.ACTIVATION, step=Step(1), block=BlockIndex(self.number))

    @property
    def content(self) -> bytes:
        """The bytes, different for each key."""
        return bytes((self.number + at) % 251 for at in range(self.nbytes))


@dataclass
class _Way:
    """One direction between two boxes: what has an ordinal is never lost, the rest is lost with the connections."""

    incoming: IncomingTransfers
    outgoing: OutgoingTransfers  # of the other end
    messages: deque[Any] = field(default_factory=deque)  # Offered, from source to reader
    answers: deque[Any] = field(default_factory=deque)  # Want and Pulled, from reader to source
    frames: list[tuple[int, bytes]] = field(default_factory=list)


class LinkWorld:
    """The boxes of a job and the connections between them."""

    def __init__(self, transfers: Sequence[Transfer], *, in_slots: int, out_slots: int, window_nbytes: int) -> None:
        """`in_slots`: of each box for each sender. `out_slots`: of each box."""
        self._in_slots, self._out_slots = in_slots, out_slots
        self._transfers = {transfer.key: transfer for transfer in transfers}
        boxes = sorted({box for each in transfers for box in (each.source, each.reader)})
        self.programs: dict[int, deque[Transfer]] = {
            box: deque(each for each in transfers if box in (each.source, each.reader)) for box in boxes
        }
        pairs = {(each.source, each.reader) for each in transfers}
        self.ways = {
            pair: _Way(
                IncomingTransfers(window_nbytes=window_nbytes, piece_nbytes=PIECE_NBYTES),
                OutgoingTransfers(piece_nbytes=PIECE_NBYTES),
            )
            for pair in sorted(pairs)
        }
        # The pulls of each pair, in the order in which the reader makes them.
        self.to_pull = {
            pair: deque(each for each in transfers if (each.source, each.reader) == pair) for pair in self.ways
        }
        self.offered: dict[int, list[Offer]] = {box: [] for box in boxes}
        self.pulled: dict[LinkKey, Pull] = {}

    @property
    def is_done(self) -> bool:
        """Returns whether all programs have ended and all slots are free."""
        return not any(self.programs.values()) and not any(self.offered.values())

    def actions(self) -> list[Callable[[], None]]:
        """Returns everything that can happen next, in a fixed order."""
        found: list[Callable[[], None]] = []
        for box, program in self.programs.items():
            if program and self._can_run(box, program[0]):
                found.append(lambda box=box: self._run(box))  # type: ignore[misc]
        for pair, way in self.ways.items():
            if self.to_pull[pair] and self._num_in(pair) < self._in_slots:
                found.append(lambda pair=pair: self._pull(pair))  # type: ignore[misc]
            if way.messages:
                found.append(lambda way=way: self._take_message(way))  # type: ignore[misc]
            if way.answers:
                found.append(lambda pair=pair: self._take_answer(pair))  # type: ignore[misc]
            for index in range(len(way.frames)):
                found.append(lambda pair=pair, index=index: self._take_frame(pair, index))  # type: ignore[misc]
        return found

    def cut(self, pair: tuple[int, int]) -> None:
        """Ends the connections of a pair and makes them anew."""
        way = self.ways[pair]
        way.frames.clear()
        way.answers = deque(each for each in way.answers if isinstance(each, Pulled))
        way.outgoing.forget_wants()
        way.incoming.ask_again()
        way.answers.extend(way.incoming.take_wants())

    def _can_run(self, box: int, transfer: Transfer) -> bool:
        if transfer.source == box:
            return len(self.offered[box]) < self._out_slots
        pull = self.pulled.get(transfer.key)
        return pull is not None and pull.future.done()

    def _run(self, box: int) -> None:
        transfer = self.programs[box].popleft()
        way = self.ways[transfer.source, transfer.reader]
        if transfer.source == box:
            offer = Offer(key=transfer.key, buffer=memoryview(transfer.content), readers={str(transfer.reader)})
            way.outgoing.add(offer)
            self.offered[box].append(offer)
            way.messages.append(Offered(key=offer.key, nbytes=offer.buffer.nbytes))
        else:
            assert bytes(self.pulled.pop(transfer.key).into) == transfer.content

    def _num_in(self, pair: tuple[int, int]) -> int:
        return sum((each.source, each.reader) == pair for each in map(self._transfers.__getitem__, self.pulled))

    def _pull(self, pair: tuple[int, int]) -> None:
        transfer = self.to_pull[pair].popleft()
        slot = memoryview(bytearray(transfer.nbytes))
        pull = Pull(key=transfer.key, into=slot, priority=(0, 0), since_s=0.0, until_s=None)
        self.pulled[transfer.key] = pull
        way = self.ways[pair]
        way.incoming.add(pull)
        way.answers.extend(way.incoming.take_wants())

    def _take_message(self, way: _Way) -> None:
        offered = way.messages.popleft()
        way.incoming.offered(offered.key, offered.nbytes)
        way.answers.extend(way.incoming.take_wants())

    def _take_answer(self, pair: tuple[int, int]) -> None:
        way = self.ways[pair]
        answer = way.answers.popleft()
        if isinstance(answer, Want):
            way.outgoing.wanted(answer)
            while (taken := way.outgoing.take()) is not None:
                want, _, piece = taken
                way.frames.append((want.number, bytes(piece)))
        else:
            self.offered[pair[0]].remove(way.outgoing.pulled(answer.key))

    def _take_frame(self, pair: tuple[int, int], index: int) -> None:
        way = self.ways[pair]
        number, content = way.frames.pop(index)
        way.incoming.expected(number, len(content)).into[:] = content
        pull = way.incoming.arrived(number)
        if pull is not None:
            pull.future.set_result(None)  # type: ignore[arg-type]  nothing reads it
            way.answers.append(Pulled(key=pull.key))
        way.answers.extend(way.incoming.take_wants())
