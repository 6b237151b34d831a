"""The order of transfers, and the absence of deadlock for boxes that keep the total order, with the fewest slots."""

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.storage.link_world import PIECE_NBYTES, LinkWorld, Transfer
from tests.support.storage.links import key
from windlass.storage.link import IncomingTransfers, OutgoingTransfers, ProtocolError
from windlass.storage.link.transfers import Offer, Pull
from windlass.storage.link.wire import Want


class Deadlock(AssertionError):
    """Nothing can happen, and the programs have not ended."""


def run(world: LinkWorld, choices: random.Random, *, num_cuts: int = 0) -> None:
    """Lets things happen in an order that `choices` decides, until all is done."""
    while not world.is_done:
        if num_cuts and choices.random() < 0.05:
            world.cut(choices.choice(list(world.ways)))
            num_cuts -= 1
        actions = world.actions()
        if not actions:
            raise Deadlock({box: [each.number for each in program] for box, program in world.programs.items()})
        choices.choice(actions)()


@st.composite
def in_total_order(draw: st.DrawFn) -> list[Transfer]:
    """Returns transfers between up to four boxes, whose numbers are the order of all of them."""
    num_boxes = draw(st.integers(2, 4))
    pairs = st.permutations(range(num_boxes)).map(lambda order: (order[0], order[1]))
    sizes = st.integers(1, 3 * PIECE_NBYTES)
    ends = draw(st.lists(st.tuples(pairs, sizes), min_size=1, max_size=12))
    return [Transfer(number, *pair, nbytes) for number, (pair, nbytes) in enumerate(ends)]


@settings(max_examples=150, deadline=None)
@given(transfers=in_total_order(), seed=st.integers(0, 2**32), num_cuts=st.integers(0, 3))
def test_no_deadlock_in_total_order_with_one_slot_each(transfers: list[Transfer], seed: int, num_cuts: int) -> None:
    world = LinkWorld(transfers, in_slots=1, out_slots=1, window_nbytes=PIECE_NBYTES)
    run(world, random.Random(seed), num_cuts=num_cuts)


@settings(max_examples=60, deadline=None)
@given(num_boxes=st.integers(2, 4), num_groups=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_no_deadlock_in_stages(num_boxes: int, num_groups: int, seed: int) -> None:
    forward = [(box, box + 1) for _ in range(num_groups) for box in range(num_boxes - 1)]
    backward = [(box + 1, box) for _ in range(num_groups) for box in reversed(range(num_boxes - 1))]
    transfers = [Transfer(number, *pair, 2 * PIECE_NBYTES) for number, pair in enumerate(forward + backward)]
    run(LinkWorld(transfers, in_slots=1, out_slots=1, window_nbytes=PIECE_NBYTES), random.Random(seed), num_cuts=2)


def test_a_box_that_pulls_in_another_order_is_found_to_deadlock() -> None:
    transfers = [Transfer(number, 0, 1, 4) for number in range(2)]
    world = LinkWorld(transfers, in_slots=1, out_slots=1, window_nbytes=PIECE_NBYTES)
    world.to_pull[0, 1] = deque(reversed(transfers))
    with pytest.raises(Deadlock):
        run(world, random.Random(0))


# --- the parts ---


def a_pull(block: int, nbytes: int, priority: tuple[int, int] = (0, 0), until_s: float | None = None) -> Pull:
    return Pull(key=key(block), into=memoryview(bytearray(nbytes)), priority=priority, since_s=0.0, until_s=until_s)


def test_window_limits_what_is_asked_for() -> None:
    incoming = IncomingTransfers(window_nbytes=8, piece_nbytes=4)
    incoming.add(a_pull(0, 14))
    assert incoming.take_wants() == []
    incoming.offered(key(0), 14)
    wants = incoming.take_wants()
    assert [(want.offset, want.nbytes) for want in wants] == [(0, 4), (4, 4)]
    incoming.arrived(wants[1].number)
    assert [(want.offset, want.nbytes) for want in incoming.take_wants()] == [(8, 4)]
    incoming.arrived(wants[0].number)
    assert [(want.offset, want.nbytes) for want in incoming.take_wants()] == [(12, 2)]


def test_most_urgent_is_asked_for_first_and_ties_in_order_of_arrival() -> None:
    incoming = IncomingTransfers(window_nbytes=100, piece_nbytes=4)
    for block, priority in ((0, (1, 0)), (1, (1, 0)), (2, (0, 5)), (3, (0, 1))):
        incoming.add(a_pull(block, 4, priority))
        incoming.offered(key(block), 4)
    assert [want.key.block for want in incoming.take_wants()] == [3, 2, 0, 1]


def test_pieces_are_asked_for_again_after_a_loss() -> None:
    incoming = IncomingTransfers(window_nbytes=8, piece_nbytes=4)
    pull = a_pull(0, 12)
    incoming.add(pull)
    incoming.offered(key(0), 12)
    first, second = incoming.take_wants()
    incoming.arrived(second.number)
    incoming.ask_again()
    again = incoming.take_wants()
    assert [want.offset for want in again] == [0, 8]
    with pytest.raises(ProtocolError, match="nothing asked for"):
        incoming.expected(first.number, 4)
    assert incoming.arrived(again[0].number) is None
    assert incoming.arrived(again[1].number) is pull


def test_overdue_pull_is_not_asked_for_and_others_go_on() -> None:
    incoming = IncomingTransfers(window_nbytes=4, piece_nbytes=4)
    for block, until_s in ((0, 5.0), (1, None)):
        incoming.add(a_pull(block, 8, until_s=until_s))
        incoming.offered(key(block), 8)
    (asked,) = incoming.take_wants()
    assert incoming.next_deadline_s() == 5.0
    assert incoming.take_overdue(4.9) == []
    assert [pull.key.block for pull in incoming.take_overdue(5.0)] == [0]
    assert incoming.arrived(asked.number) is None  # it was on its way
    assert [want.key.block for want in incoming.take_wants()] == [1]


def test_most_urgent_want_is_sent_first() -> None:
    outgoing = OutgoingTransfers(piece_nbytes=4)
    outgoing.add(Offer(key=key(0), buffer=memoryview(b"12345678"), readers={"there"}))
    for number, (offset, priority) in enumerate([(0, (1, 0)), (4, (0, 0))]):
        outgoing.wanted(Want(number=number, key=key(0), offset=offset, nbytes=4, priority=priority))
    sent = [bytes(taken[2]) for _ in range(2) if (taken := outgoing.take()) is not None]
    assert sent == [b"5678", b"1234"]
    assert outgoing.take() is None


def test_nothing_of_a_confirmed_key_is_sent() -> None:
    outgoing = OutgoingTransfers(piece_nbytes=4)
    outgoing.add(Offer(key=key(0), buffer=memoryview(b"1234"), readers={"there"}))
    outgoing.wanted(Want(number=1, key=key(0), offset=0, nbytes=4, priority=(0, 0)))
    outgoing.pulled(key(0))
    assert outgoing.take() is None
