"""The network between the boxes of a simulated job, and the link that moves bytes over it.

Each box has a network card, which sends and receives at one rate each. Two boxes exchange bytes over a *way* in each
direction. Ways that are in use at once share the cards fairly, as TCP connections do. On a way the link moves one
transfer at a time, the most urgent one first.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from windlass.actors.messages import Crossing
from windlass.planner.simulation.clock import Clock, Future
from windlass.storage.link import LinkSettings
from windlass.storage.priority_queue import PriorityQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRates:
    """The network cards of boxes, in their order, and the time that bytes are under way."""

    card_bytes: tuple[float, ...]  # per second, each way
    round_trip_s: float = 0.0  # between any two boxes
    window_nbytes: int = field(default_factory=lambda: LinkSettings().window_nbytes)
    cpu_s_per_byte: float = 0.0  # time of shared cores on each of both boxes, for each byte moved

    @property
    def way_bytes(self) -> float:
        """The rate that the window allows between two boxes, in bytes per second."""
        return self.window_nbytes / self.round_trip_s if self.round_trip_s else math.inf


# A direction between two boxes: the sender and the receiver.
_Route = tuple[int, int]
# A direction of a box's network card: the box, and whether it sends.
_Card = tuple[int, bool]


@dataclass(slots=True, eq=False)
class _Transfer:
    nbytes: float
    left_nbytes: float
    arrived: Future
    taken: Future


@dataclass(slots=True, eq=False)
class _Pull:
    rank: tuple[int, ...]  # its priority and its order
    arrived: Future


@dataclass(slots=True, eq=False)
class _Offer:
    nbytes: float
    taken: Future


@dataclass(slots=True, eq=False)
class _Way:
    """The direction from one box to another, with all that passes there."""

    offers: dict[Crossing, _Offer] = field(default_factory=dict)  # that the receiver knows
    pulls: dict[Crossing, _Pull] = field(default_factory=dict)  # whose offer the receiver does not know
    transfers: PriorityQueue[_Transfer] = field(default_factory=PriorityQueue)  # the first one moves
    rate: float = 0.0  # bytes per second
    num_cuts: int = 0  # of this direction that last now
    held: list[Callable[[], None]] = field(default_factory=list)  # messages that wait for the end of a cut


class SimulatedNetwork:
    """Moves bytes and messages between boxes."""

    def __init__(self, clock: Clock, rates: NetworkRates, use_cores: Callable[[int, float], None]) -> None:
        """`use_cores(box, seconds)` occupies the shared cores of a box, if it has such."""
        self._clock, self._rates, self._use_cores = clock, rates, use_cores
        boxes = range(len(rates.card_bytes))
        self._ways = {route: _Way() for route in itertools.permutations(boxes, 2)}
        self._num_pulls = 0
        self._since_s = clock.now  # time up to which transfers are accounted for
        self._num_changes = 0

    # --- calls of actors --------------------------------------------------------------------------------------------

    def send(self, source: int, target: int, call: Callable[[], None]) -> None:
        """Sends a message: calls a function on the other box. Messages wait while the way is cut."""
        if source == target:
            call()
        elif (way := self._ways[source, target]).num_cuts:
            way.held.append(call)
        else:
            self._clock.after(self._rates.round_trip_s / 2, call)

    def offer(self, source: int, target: int, crossing: Crossing, nbytes: float) -> Future:
        """Offers bytes to another box. Returns the event at which it has them."""
        offer = _Offer(nbytes, self._clock.future())
        self.send(source, target, functools.partial(self._offered, (source, target), crossing, offer))
        return offer.taken

    def pull(self, source: int, target: int, crossing: Crossing) -> Future:
        """Asks for bytes that another box offers, or will offer. Returns the event of their arrival."""
        self._num_pulls += 1
        pull = _Pull((*crossing.priority, self._num_pulls), self._clock.future())
        way = self._ways[source, target]
        if (offer := way.offers.pop(crossing, None)) is not None:
            self._ask((source, target), offer, pull)
        else:
            way.pulls[crossing] = pull
        return pull.arrived

    # --- faults -----------------------------------------------------------------------------------------------------

    def cut(self, one: int, other: int) -> None:
        """Cuts the connection of two boxes. Transfers stop where they are, and messages wait."""
        self._settle()
        for route in ((one, other), (other, one)):
            self._ways[route].num_cuts += 1
        self._share()

    def restore(self, one: int, other: int) -> None:
        """Ends a cut. Transfers go on."""
        self._settle()
        for route in ((one, other), (other, one)):
            way = self._ways[route]
            way.num_cuts -= 1
            if not way.num_cuts:
                held, way.held = way.held, []
                for call in held:
                    self.send(*route, call)
        self._share()

    # --- what goes on -----------------------------------------------------------------------------------------------

    @property
    def nums_waiting(self) -> tuple[int, ...]:
        """For each way, the number of transfers, offers and pulls."""
        return tuple(len(way.transfers) + len(way.offers) + len(way.pulls) for way in self._ways.values())

    def _offered(self, route: _Route, crossing: Crossing, offer: _Offer) -> None:
        way = self._ways[route]
        if (pull := way.pulls.pop(crossing, None)) is not None:
            self._ask(route, offer, pull)
        else:
            way.offers[crossing] = offer

    def _ask(self, route: _Route, offer: _Offer, pull: _Pull) -> None:
        """Asks the sender for offered bytes."""
        source, target = route
        transfer = _Transfer(offer.nbytes, offer.nbytes, pull.arrived, offer.taken)
        self.send(target, source, functools.partial(self._begin, route, pull.rank, transfer))

    def _begin(self, route: _Route, rank: tuple[int, ...], transfer: _Transfer) -> None:
        self._settle()
        self._ways[route].transfers.push(rank, transfer)
        if cpu_s := self._rates.cpu_s_per_byte * transfer.nbytes:
            for box in route:
                self._use_cores(box, cpu_s)
        self._share()

    def _settle(self) -> None:
        """Accounts for the bytes that have moved since the last change."""
        passed_s, self._since_s = self._clock.now - self._since_s, self._clock.now
        for way in self._ways.values():
            if way.transfers:
                way.transfers.first.left_nbytes -= way.rate * passed_s

    def _share(self) -> None:
        """Shares the network cards among the ways in use, and sets the next end of a transfer."""
        active = {route: way for route, way in self._ways.items() if way.transfers and not way.num_cuts}
        for way in self._ways.values():
            way.rate = 0.0
        for route, rate in fair_rates(active, self._rates.card_bytes, most=self._rates.way_bytes).items():
            active[route].rate = rate
        self._num_changes += 1
        ends_s = [(max(0.0, way.transfers.first.left_nbytes) / way.rate, route) for route, way in active.items()]
        if ends_s:
            end_s, route = min(ends_s)
            self._clock.after(end_s, functools.partial(self._end, route, self._num_changes))

    def _end(self, route: _Route, change: int) -> None:
        if change != self._num_changes:
            return  # another transfer began in the meantime
        self._settle()
        transfer, (source, target) = self._ways[route].transfers.pop(), route
        self._share()

        def arrive() -> None:
            transfer.arrived.set_done()
            self.send(target, source, transfer.taken.set_done)

        self.send(source, target, arrive)


def fair_rates(routes: Iterable[_Route], card_bytes: Sequence[float], *, most: float) -> Mapping[_Route, float]:
    """Returns the rates of ways that are in use at once, by max-min fairness. None has more than `most`.

    The card with the smallest share for each of its ways limits these; what they leave of other cards is shared by the
    others.
    Source: Bertsekas and Gallager, Data Networks, section 6.5.2.
    """
    left: dict[_Card, float] = {}
    open_ways: dict[_Route, tuple[_Card, _Card]] = {}
    for source, target in routes:
        open_ways[source, target] = cards = ((source, True), (target, False))
        left |= {card: card_bytes[card[0]] for card in cards}
    rates: dict[_Route, float] = {}
    while open_ways:
        counts: dict[_Card, int] = dict.fromkeys(left, 0)
        for card in itertools.chain.from_iterable(open_ways.values()):
            counts[card] += 1
        share, tightest = min((left[card] / count, card) for card, count in counts.items() if count)
        limited = [route for route, cards in open_ways.items() if most <= share or tightest in cards]
        for route in limited:
            rates[route] = min(share, most)
            for card in open_ways.pop(route):
                left[card] -= rates[route]
    return rates
