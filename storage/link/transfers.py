"""The order of transfers with one peer: which piece is asked for next, and which is sent next. No I/O, no threads."""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from windlass.storage.io_scheduler import IoResult
from windlass.storage.link.errors import LinkError, ProtocolError
from windlass.storage.link.keys import LinkKey
from windlass.storage.link.wire import Want
from windlass.storage.priority_queue import PriorityQueue

# Offers of a peer, and pieces that it has asked for. Slots limit both; these limits stop peers with a defect.
_MAX_OFFERS = 65536
_MAX_WANTS = 65536


@dataclass(slots=True, eq=False, kw_only=True)
class Pull:
    """A key that the caller waits for, and the memory that it reserved for it."""

    key: LinkKey
    into: memoryview  # may be larger than what is offered
    priority: tuple[int, int]
    since_s: float
    until_s: float | None  # the deadline
    future: "Future[IoResult]" = field(default_factory=Future)
    start_s: float | None = None  # the arrival of the first byte
    nbytes: int = 0  # that the peer offers, once it does
    num_missing: int = 0  # pieces
    is_failed: bool = False
    rank: tuple[int, ...] = ()
    pieces: "deque[Piece]" = field(default_factory=deque)  # not asked for


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A part of a pull that one data frame brings."""

    pull: Pull
    offset: int
    nbytes: int

    @property
    def into(self) -> memoryview:
        """The memory for its bytes."""
        return self.pull.into[self.offset : self.offset + self.nbytes]


class IncomingTransfers:
    """The pulls from one peer. Pieces of what the peer has offered are asked for, in order of priority.

    At most `window_nbytes` are asked for at once. What is not offered takes no part of them. So a pull that waits for
    its offer never delays another.
    """

    def __init__(self, *, window_nbytes: int, piece_nbytes: int) -> None:
        self._window_nbytes = window_nbytes
        self._piece_nbytes = piece_nbytes
        self.pulls: dict[LinkKey, Pull] = {}  # not finished
        self._offers: dict[LinkKey, int] = {}
        self._ready: PriorityQueue[Pull] = PriorityQueue()  # pulls of offered keys, with pieces to ask for
        self._asked: dict[int, Piece] = {}
        self._asked_nbytes = 0
        self._num_pulls = 0
        self._num_asked = 0

    def add(self, pull: Pull) -> None:
        """Adds a pull. Raises ValueError if its key is being pulled, or LinkError if the peer offered more bytes."""
        if pull.key in self.pulls:
            raise ValueError(f"{pull.key} is being pulled already")
        pull.rank = (*pull.priority, self._num_pulls)  # all different, so that a pull returns to its place
        self._num_pulls += 1
        if pull.key in self._offers:
            self._match(pull)
        self.pulls[pull.key] = pull

    def offered(self, key: LinkKey, nbytes: int) -> None:
        """Records an offer of the peer. Raises ProtocolError, or LinkError if the pull has too little room."""
        if nbytes <= 0 or key in self._offers or len(self._offers) >= _MAX_OFFERS:
            raise ProtocolError(f"an offer of {nbytes} bytes of {key}, beside {len(self._offers)} others")
        self._offers[key] = nbytes
        if (pull := self.pulls.get(key)) is not None:
            self._match(pull)

    def is_offered(self, key: LinkKey) -> bool:
        """Returns whether the peer has offered a key that is not finished."""
        return key in self._offers

    @property
    def has_wants(self) -> bool:
        """Returns whether pieces should be asked for now. A quarter of the window is asked for at once.

        Single pieces would cost the control connection a message each, and several threads a wake-up.
        """
        return bool(self._ready) and self._asked_nbytes <= self._window_nbytes * 3 // 4

    def take_wants(self) -> list[Want]:
        """Returns the pieces to ask the peer for now."""
        wants: list[Want] = []
        if not self.has_wants:
            return wants
        while self._ready:
            pull = self._ready.first
            piece = pull.pieces[0]
            if self._asked and self._asked_nbytes + piece.nbytes > self._window_nbytes:
                break
            pull.pieces.popleft()
            if not pull.pieces:
                self._ready.pop()
            self._num_asked += 1
            self._asked[self._num_asked] = piece
            self._asked_nbytes += piece.nbytes
            wants.append(
                Want(
                    number=self._num_asked,
                    key=pull.key,
                    offset=piece.offset,
                    nbytes=piece.nbytes,
                    priority=pull.priority,
                )
            )
        return wants

    def expected(self, number: int, nbytes: int) -> Piece:
        """Returns the piece that a data frame brings. Raises ProtocolError if it was not asked for."""
        piece = self._asked.get(number)
        if piece is None or piece.nbytes != nbytes:
            raise ProtocolError(f"a data frame with number {number} and {nbytes} bytes, which nothing asked for")
        return piece

    def arrived(self, number: int) -> Pull | None:
        """Records that all bytes of a piece are there. Returns its pull if that is complete now and has not failed."""
        piece = self._asked.pop(number)
        self._asked_nbytes -= piece.nbytes
        pull = piece.pull
        pull.num_missing -= 1
        if pull.num_missing or pull.is_failed:
            return None
        del self.pulls[pull.key]
        del self._offers[pull.key]
        return pull

    def ask_again(self) -> None:
        """Forgets what was asked for and has not arrived, after the loss of the connections, to ask for it again."""
        ready = {id(piece.pull): piece.pull for piece in self._asked.values()}
        while self._ready:
            pull = self._ready.pop()
            ready[id(pull)] = pull
        for piece in reversed(self._asked.values()):
            piece.pull.pieces.appendleft(piece)
        self._asked.clear()
        self._asked_nbytes = 0
        for pull in ready.values():
            if not pull.is_failed:
                self._ready.push(pull.rank, pull)

    def take_overdue(self, now_s: float) -> list[Pull]:
        """Removes and returns the pulls whose deadline has passed. Pieces that were asked for may still arrive."""
        overdue = [pull for pull in self.pulls.values() if pull.until_s is not None and pull.until_s <= now_s]
        for pull in overdue:
            self._fail(pull)
        return overdue

    def next_deadline_s(self) -> float | None:
        """Returns the earliest deadline of a pull."""
        return min((pull.until_s for pull in self.pulls.values() if pull.until_s is not None), default=None)

    def take_all(self) -> list[Pull]:
        """Removes and returns all pulls: the peer is lost."""
        pulls = list(self.pulls.values())
        for pull in pulls:
            self._fail(pull)
        return pulls

    def _match(self, pull: Pull) -> None:
        if (nbytes := self._offers[pull.key]) > pull.into.nbytes:
            raise LinkError(f"{pull.key} has {nbytes} bytes, but {pull.into.nbytes} were reserved for it")
        pull.nbytes = nbytes
        starts = range(0, nbytes, self._piece_nbytes)
        pull.pieces.extend(Piece(pull, at, min(self._piece_nbytes, nbytes - at)) for at in starts)
        pull.num_missing = len(pull.pieces)
        self._ready.push(pull.rank, pull)

    def _fail(self, pull: Pull) -> None:
        pull.is_failed = True
        del self.pulls[pull.key]
        if pull.pieces and pull.key in self._offers:
            waiting = []
            while self._ready:
                if (other := self._ready.pop()) is not pull:
                    waiting.append(other)
            for other in waiting:
                self._ready.push(other.rank, other)
            pull.pieces.clear()


@dataclass(slots=True, eq=False, kw_only=True)
class Offer:
    """Bytes that this box keeps for its peers."""

    key: LinkKey
    buffer: memoryview
    readers: set[str]  # that have not pulled all of it
    future: "Future[IoResult]" = field(default_factory=Future)
    start_s: float | None = None  # of the first piece


class OutgoingTransfers:
    """The offers to one peer, and the pieces that it has asked for. Nothing else is ever sent."""

    def __init__(self, *, piece_nbytes: int) -> None:
        self._piece_nbytes = piece_nbytes
        self.offers: dict[LinkKey, Offer] = {}
        self._wants: PriorityQueue[Want] = PriorityQueue()

    def add(self, offer: Offer) -> None:
        """Adds an offer. Raises ValueError if its key is offered already."""
        if offer.key in self.offers:
            raise ValueError(f"{offer.key} is offered already")
        self.offers[offer.key] = offer

    def wanted(self, want: Want) -> None:
        """Records that the peer asks for a piece. Raises ProtocolError if there is no such piece."""
        offer = self.offers.get(want.key)
        if offer is None:
            raise ProtocolError(f"a pull of {want.key}, which is not offered")
        is_inside = want.offset >= 0 and 0 < want.nbytes <= min(self._piece_nbytes, offer.buffer.nbytes - want.offset)
        if not is_inside or len(self._wants) >= _MAX_WANTS:
            raise ProtocolError(f"a pull of {want.nbytes} bytes from {want.offset} of {want.key}")
        self._wants.push(want.priority, want)

    def take(self) -> tuple[Want, Offer, memoryview] | None:
        """Removes and returns the most urgent piece, its offer and its bytes; None if the peer asks for nothing."""
        while self._wants:
            want = self._wants.pop()
            # A peer that confirms a key before its last piece has come gets no more of it.
            if (offer := self.offers.get(want.key)) is not None:
                return want, offer, offer.buffer[want.offset : want.offset + want.nbytes]
        return None

    def pulled(self, key: LinkKey) -> Offer:
        """Removes and returns an offer whose bytes the peer has. Raises ProtocolError if there is none."""
        offer = self.offers.pop(key, None)
        if offer is None:
            raise ProtocolError(f"a confirmation of {key}, which is not offered")
        return offer

    def forget_wants(self) -> None:
        """Forgets what the peer has asked for, after the loss of the connections. It asks again."""
        while self._wants:
            self._wants.pop()

    def take_all(self) -> list[Offer]:
        """Removes and returns all offers: the peer is lost."""
        self.forget_wants()
        offers = list(self.offers.values())
        self.offers.clear()
        return offers
