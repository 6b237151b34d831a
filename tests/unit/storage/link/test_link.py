"""The link over real sockets: bytes, order, and messages between boxes that behave."""

import functools
import os
import random
import threading
from concurrent.futures import wait
from pathlib import Path

import pytest

from tests.support.storage.link_counts import count_links
from tests.support.storage.links import WAIT_S, Note, identity, key, linked, quick
from windlass.storage.ids import BoxName
from windlass.storage.link import (
    Certificates,
    KeyKind,
    Link,
    LinkClosed,
    LinkError,
    LinkKey,
    PeerClosed,
    Protection,
    PullOverdue,
    listen,
)

LEFT, RIGHT = BoxName("left"), BoxName("right")


@pytest.mark.parametrize("protection", list(Protection))
@pytest.mark.parametrize("num_streams", [1, 4])
def test_pull_gets_the_offered_bytes_both_ways(tmp_path: Path, protection: Protection, num_streams: int) -> None:
    sizes = [1, 4095, 4096, 4097, 123_456, 1 << 20]
    there, back = [os.urandom(size) for size in sizes], [os.urandom(size) for size in sizes]
    with linked(tmp_path, settings=quick(protection=protection, num_streams=num_streams)) as ends:
        slots = [bytearray(size) for size in sizes]
        back_slots = [bytearray(size) for size in sizes]
        # Some pulls come before their offers and some after.
        pulls = [ends["right"].pull(key(i), memoryview(slots[i]), source=LEFT) for i in range(3)]
        offers = [ends["left"].offer(key(i), memoryview(content), {RIGHT}) for i, content in enumerate(there)]
        offers += [ends["right"].offer(key(i), memoryview(content), {LEFT}) for i, content in enumerate(back)]
        pulls += [ends["right"].pull(key(i), memoryview(slots[i]), source=LEFT) for i in range(3, 6)]
        pulls += [ends["left"].pull(key(i), memoryview(back_slots[i]), source=RIGHT) for i in range(6)]
        for future in (*pulls, *offers):
            assert future.result(WAIT_S).nbytes in sizes
    assert [bytes(slot) for slot in slots] == there
    assert [bytes(slot) for slot in back_slots] == back


def test_offer_to_two_boxes_ends_when_both_have_pulled(tmp_path: Path) -> None:
    content = os.urandom(50_000)
    with linked(tmp_path, ("a", "b", "c")) as ends:
        offer = ends["b"].offer(key(0), memoryview(content), {BoxName("a"), BoxName("c")})
        slots = {box: bytearray(50_000) for box in ("a", "c")}
        ends["a"].pull(key(0), memoryview(slots["a"]), source=BoxName("b")).result(WAIT_S)
        # A message goes the same way as the confirmation, after it.
        ends["a"].send(BoxName("b"), Note("pulled"))
        ends.wait(lambda: ends.messages["b"])
        assert not offer.done()
        ends["c"].pull(key(0), memoryview(slots["c"]), source=BoxName("b")).result(WAIT_S)
        offer.result(WAIT_S)
    assert slots["a"] == slots["c"] == content


def test_nothing_is_sent_without_a_pull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_links(monkeypatch)
    content = memoryview(os.urandom(100_000))
    with linked(tmp_path) as ends:
        offers = [ends["left"].offer(key(i), content, {RIGHT}) for i in range(20)]
        ends["left"].send(RIGHT, Note("offered"))
        ends.wait(lambda: ends.messages["right"])
        ends["right"].send(LEFT, Note("seen"))
        ends.wait(lambda: ends.messages["left"])
        assert counts.nbytes_out[RIGHT] == 0
        ends["right"].pull(key(7), memoryview(bytearray(100_000)), source=LEFT).result(WAIT_S)
        offers[7].result(WAIT_S)
        assert counts.nbytes_out[RIGHT] == 100_000
        assert [i for i, offer in enumerate(offers) if offer.done()] == [7]


def test_urgent_pull_overtakes_those_that_wait(tmp_path: Path) -> None:
    nbytes, order = 40 * 4096, []
    priorities = {"first": 1, "later": 1, "urgent": 0}
    with linked(tmp_path, settings=quick(num_streams=1, window_nbytes=4096)) as ends:
        content = memoryview(bytes(nbytes))
        pulls = []
        for block, (name, priority) in enumerate(priorities.items()):
            slot = memoryview(bytearray(nbytes))
            pulls.append(ends["right"].pull(key(block), slot, source=LEFT, priority=(priority, 0)))
            pulls[-1].add_done_callback(functools.partial(lambda name, _: order.append(name), name))
        # The urgent one is offered last.
        for block in range(3):
            ends["left"].offer(key(block), content, {RIGHT})
        wait(pulls, WAIT_S)
    assert order.index("urgent") < order.index("later")


def test_pull_that_waits_for_its_offer_delays_no_other(tmp_path: Path) -> None:
    with linked(tmp_path, settings=quick(window_nbytes=4096)) as ends:
        waiting = [ends["right"].pull(key(i), memoryview(bytearray(8192)), source=LEFT) for i in range(8)]
        ends["left"].offer(key(99), memoryview(bytes(8192)), {RIGHT})
        ends["right"].pull(key(99), memoryview(bytearray(8192)), source=LEFT, priority=(9, 9)).result(WAIT_S)
        assert not any(future.done() for future in waiting)


def test_overdue_pull_fails_and_names_peer_step_and_block(tmp_path: Path) -> None:
    wanted = key(5, kind=KeyKind.ACTIVATION_GRAD, group=2)
    with linked(tmp_path) as ends:
        future = ends["right"].pull(wanted, memoryview(bytearray(10)), source=LEFT, deadline_s=0.05)
        with pytest.raises(PullOverdue, match=r"activation grad of step 1, group 2, block 5.*box 'left'.*not offered"):
            future.result(WAIT_S)


def test_messages_arrive_once_and_in_order(tmp_path: Path) -> None:
    with linked(tmp_path, settings=quick(max_messages=8)) as ends:
        for number in range(200):
            ends["left"].send(RIGHT, Note("n", number))
            ends["right"].send(LEFT, Note("m", number))
        ends.wait(lambda: len(ends.messages["right"]) == len(ends.messages["left"]) == 200)
    assert ends.messages["right"] == [("left", Note("n", number)) for number in range(200)]
    assert ends.messages["left"] == [("right", Note("m", number)) for number in range(200)]


def test_wrong_requests_are_refused_at_once(tmp_path: Path) -> None:
    with linked(tmp_path) as ends:
        slot = memoryview(bytearray(8))
        ends["left"].offer(key(0), slot, {RIGHT})
        with pytest.raises(ValueError, match="offered already"):
            ends["left"].offer(key(0), slot, {RIGHT})
        ends["left"].pull(key(1), slot, source=RIGHT)
        with pytest.raises(ValueError, match="being pulled already"):
            ends["left"].pull(key(1), slot, source=RIGHT)
        with pytest.raises(ValueError, match="read-only"):
            ends["left"].pull(key(2), memoryview(b"constant"), source=RIGHT)
        with pytest.raises(ValueError, match="no bytes"):
            ends["left"].offer(key(3), memoryview(b""), {RIGHT})
        with pytest.raises(ValueError, match="no peer"):
            ends["left"].pull(key(2), slot, source=BoxName("elsewhere"))
        with pytest.raises(ValueError, match="no registered type"):
            ends["left"].send(RIGHT, object())
        with pytest.raises(ValueError, match=r"a Note of 1\.01 MiB; at most 1\.00 MiB can be sent"):
            ends["left"].send(RIGHT, Note("x" * (1 << 20)))


def test_what_is_offered_goes_to_the_beginning_of_larger_memory(tmp_path: Path) -> None:
    content, into = bytes(range(100, 200)) * 100, bytearray(15_000)
    with linked(tmp_path) as ends:
        pulled = ends["right"].pull(key(0), memoryview(into), source=LEFT)
        ends["left"].offer(key(0), memoryview(content), {RIGHT})
        assert pulled.result(WAIT_S).nbytes == len(content)
    assert bytes(into) == content + bytes(5_000)


def test_pull_into_too_little_memory_fails(tmp_path: Path) -> None:
    with linked(tmp_path) as ends:
        early = ends["right"].pull(key(0), memoryview(bytearray(7)), source=LEFT)
        ends["left"].offer(key(0), memoryview(bytes(8)), {RIGHT})
        with pytest.raises(LinkError, match="has 8 bytes, but 7 were reserved"):
            early.result(WAIT_S)
        ends["left"].offer(key(1), memoryview(bytes(8)), {RIGHT})
        ends["left"].send(RIGHT, Note("offered"))
        ends.wait(lambda: ends.messages["right"])
        with pytest.raises(LinkError, match="has 8 bytes, but 7 were reserved"):
            ends["right"].pull(key(1), memoryview(bytearray(7)), source=LEFT)


def test_peer_that_closes_its_link_is_no_loss_and_what_is_open_with_it_fails(tmp_path: Path) -> None:
    with linked(tmp_path) as ends:
        pull = ends["right"].pull(key(0), memoryview(bytearray(8)), source=LEFT)
        offer = ends["right"].offer(key(0), memoryview(bytes(8)), {LEFT})
        ends["left"].send(RIGHT, Note("the last word"))
        ends["left"].close()
        with pytest.raises(PeerClosed, match="box 'left' closed its link: activation of step 1"):
            pull.result(WAIT_S)
        with pytest.raises(PeerClosed, match="has not pulled activation of step 1"):
            offer.result(WAIT_S)
        assert ends.messages["right"] == [("left", Note("the last word"))]
        with pytest.raises(PeerClosed):
            ends["right"].pull(key(1), memoryview(bytearray(8)), source=LEFT)
        with pytest.raises(PeerClosed):
            ends["right"].send(LEFT, Note("too late"))
    assert ends.losses == {"left": [], "right": []}


def test_links_that_are_closed_at_once_on_both_sides_lose_nothing(tmp_path: Path) -> None:
    with linked(tmp_path) as ends:
        ends["left"].send(RIGHT, Note("connected"))
        ends.wait(lambda: ends.messages["right"])
        closing = [threading.Thread(target=ends[box].close) for box in ("left", "right")]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
    assert ends.losses == {"left": [], "right": []}


def test_closed_link_fails_what_is_open(tmp_path: Path) -> None:
    with linked(tmp_path) as ends:
        pull = ends["right"].pull(key(0), memoryview(bytearray(8)), source=LEFT)
        ends["right"].close(0.0)
        with pytest.raises(LinkClosed):
            pull.result(WAIT_S)
        with pytest.raises(LinkClosed):
            ends["right"].pull(key(1), memoryview(bytearray(8)), source=LEFT)


def test_listener_is_closed_if_the_link_cannot_start(tmp_path: Path) -> None:
    missing = Certificates(certificate=tmp_path / "missing.pem", authority=tmp_path / "missing.pem")
    for box, error in (("left", ValueError), ("right", OSError)):
        listener = listen("127.0.0.1")
        with pytest.raises(error):
            Link.start(identity("left"), listener, {BoxName(box): ("127.0.0.1", 1)}, missing)
        assert listener.fileno() == -1


def test_listen_at_all_addresses_is_refused() -> None:
    for host in ("", "0.0.0.0", "::"):
        with pytest.raises(ValueError, match="one address"):
            listen(host)


def test_description_names_the_oldest_pull(tmp_path: Path) -> None:
    with linked(tmp_path) as ends:
        assert ends["right"].describe() == ""
        ends["right"].pull(key(3), memoryview(bytearray(8)), source=LEFT)
        ends["right"].pull(key(4), memoryview(bytearray(8)), source=LEFT)
        assert "block 3, part 0 has not come from box 'left'" in ends["right"].describe()
        assert "the first of 2 pulls" in ends["right"].describe()


def test_positions_order_keys_as_they_are_computed() -> None:
    ordered = [
        key(0, kind=KeyKind.PARAM),
        key(0),
        key(1),
        key(0, group=1),
        key(5, kind=KeyKind.ACTIVATION_GRAD),
        key(4, kind=KeyKind.ACTIVATION_GRAD),
        key(5, kind=KeyKind.ACTIVATION_GRAD, group=1),
        key(0, kind=KeyKind.PARAM_GRAD),
    ]
    assert sorted(random.Random(1).sample(ordered, len(ordered)), key=lambda each: each.position) == ordered
    assert isinstance(ordered[0], LinkKey)
