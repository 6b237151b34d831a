"""The link over a network that fails: what was on its way arrives, once, and a peer that stays away is lost."""

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.storage.cutting_relay import CuttingRelay
from tests.support.storage.link_counts import count_links
from tests.support.storage.links import WAIT_S, Note, key, linked, quick
from windlass.storage.ids import BoxName
from windlass.storage.link import PeerClosed, PeerLost, Protection, PullOverdue

LEFT, RIGHT = BoxName("left"), BoxName("right")


class Relays:
    """The relays before the boxes of a test."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.all: list[CuttingRelay] = []

    def via(self, _: str, port: int) -> int:
        """Puts a relay before a port."""
        relay = CuttingRelay(port)
        self._stack.callback(relay.close)
        self.all.append(relay)
        return relay.port

    @property
    def used(self) -> CuttingRelay:
        """The relay of "right", to which "left" connects."""
        return self.all[1]


@pytest.fixture
def relays() -> Iterator[Relays]:
    with ExitStack() as stack:
        yield Relays(stack)


@pytest.mark.parametrize("protection", list(Protection))
@pytest.mark.parametrize("nbytes", [1, 5_000, 77_777])
def test_transfer_that_is_cut_in_mid_frame_goes_on(
    tmp_path: Path, relays: Relays, protection: Protection, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = count_links(monkeypatch)
    content, answer = os.urandom(300_000), os.urandom(300_000)
    slot, answer_slot = bytearray(300_000), bytearray(300_000)
    with linked(tmp_path, settings=quick(protection=protection), via=relays.via) as ends:
        ends["left"].send(RIGHT, Note("connected"))
        ends.wait(lambda: ends.messages["right"])
        relays.used.cut_after(nbytes)
        pulls = [
            ends["right"].pull(key(0), memoryview(slot), source=LEFT),
            ends["left"].pull(key(0), memoryview(answer_slot), source=RIGHT),
        ]
        offers = [
            ends["left"].offer(key(0), memoryview(content), {RIGHT}),
            ends["right"].offer(key(0), memoryview(answer), {LEFT}),
        ]
        for future in (*pulls, *offers):
            future.result(WAIT_S)
        assert relays.used.num_cuts == 1
        assert counts.num_connections[RIGHT] == 2
    assert slot == content
    assert answer_slot == answer


def test_closed_link_has_no_views_of_buffers_after_cuts(
    tmp_path: Path, relays: Relays, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windlass.storage.link.keeper._RETRY_S", 0.01)
    content, slot = bytearray(300_000), bytearray(300_000)
    gc.disable()  # callers unmap their memory, and cannot wait for the collector
    try:
        with linked(tmp_path, via=relays.via) as ends:
            ends["left"].send(RIGHT, Note("connected"))
            ends.wait(lambda: ends.messages["right"])
            pull = ends["right"].pull(key(0), memoryview(slot), source=LEFT)
            for nbytes in range(20_000, 30_000, 1_000):
                relays.used.cut_after(nbytes)
                if nbytes == 20_000:
                    offer = ends["left"].offer(key(0), memoryview(content), {RIGHT})
                relays.used.await_cut()
            pull.result(WAIT_S)
            offer.result(WAIT_S)
            del pull, offer
        slot.append(0)  # BufferError if a view is left
        content.append(0)
    finally:
        gc.enable()


def test_messages_arrive_once_and_in_order_over_cuts(tmp_path: Path, relays: Relays) -> None:
    with linked(tmp_path, via=relays.via) as ends:
        for round_number in range(4):
            for number in range(50):
                ends["left"].send(RIGHT, Note("n", 50 * round_number + number))
                ends["right"].send(LEFT, Note("m", 50 * round_number + number))
            ends.wait(lambda: len(ends.messages["right"]) > 50 * round_number)  # noqa: B023  called at once
            relays.used.cut()
        ends.wait(lambda: len(ends.messages["right"]) == len(ends.messages["left"]) == 200)
    assert [message.number for _, message in ends.messages["right"]] == list(range(200))
    assert [message.number for _, message in ends.messages["left"]] == list(range(200))


def test_end_of_a_link_is_told_over_new_connections(tmp_path: Path, relays: Relays) -> None:
    with linked(tmp_path, via=relays.via) as ends:
        pull = ends["right"].pull(key(0), memoryview(bytearray(8)), source=LEFT)
        ends["left"].send(RIGHT, Note("connected"))
        ends.wait(lambda: ends.messages["right"])
        relays.used.cut()
        ends["left"].close()
        with pytest.raises(PeerClosed):
            pull.result(WAIT_S)
    assert ends.losses == {"left": [], "right": []}


def test_end_of_a_link_is_told_to_all_although_one_is_silent(tmp_path: Path, relays: Relays) -> None:
    with linked(tmp_path, ("a", "b", "c"), via=relays.via) as ends:
        for box in ("b", "c"):
            ends["a"].send(BoxName(box), Note("connected"))
            ends.wait(lambda: ends.messages[box])  # noqa: B023  called at once
        pull = ends["c"].pull(key(0), memoryview(bytearray(8)), source=BoxName("a"))
        relays.all[1].cut(stay_down=True)
        ends["a"].send(BoxName("b"), Note("never confirmed"))
        ends["a"].close(0.2)
        with pytest.raises(PeerClosed):
            pull.result(WAIT_S)
    assert ends.losses["c"] == []


@pytest.mark.parametrize("protection", list(Protection))
def test_transfer_over_a_network_that_damages_bytes_arrives(
    tmp_path: Path, relays: Relays, protection: Protection
) -> None:
    content = os.urandom(300_000)
    slot = bytearray(300_000)
    with linked(tmp_path, settings=quick(protection=protection), via=relays.via) as ends:
        ends["left"].send(RIGHT, Note("connected"))
        ends.wait(lambda: ends.messages["right"])
        relays.used.damage_every(45_000)
        pull = ends["right"].pull(key(0), memoryview(slot), source=LEFT)
        ends["left"].offer(key(0), memoryview(content), {RIGHT})
        pull.result(WAIT_S)
        assert relays.used.num_damaged > 3
    assert slot == content
    assert ends.losses == {"left": [], "right": []}


def test_peer_that_stays_away_is_lost_on_both_sides(tmp_path: Path, relays: Relays) -> None:
    settings = quick(silence_s=0.8, stall_s=0.5)
    with linked(tmp_path, settings=settings, via=relays.via) as ends:
        pull = ends["right"].pull(key(3), memoryview(bytearray(8)), source=LEFT)
        offer = ends["left"].offer(key(4), memoryview(bytes(8)), {RIGHT})
        ends["left"].send(RIGHT, Note("connected"))
        ends.wait(lambda: ends.messages["right"])
        relays.used.cut(stay_down=True)
        with pytest.raises(PeerLost, match=r"box 'left' was silent for .* s .*block 3, part 0 did not come"):
            pull.result(WAIT_S)
        with pytest.raises(PeerLost, match=r"box 'right' was silent for .* has not pulled activation of step 1"):
            offer.result(WAIT_S)
        ends.wait(lambda: ends.losses["left"] and ends.losses["right"])
        with pytest.raises(PeerLost):
            ends["left"].send(RIGHT, Note("too late"))
    assert len(ends.losses["left"]) == len(ends.losses["right"]) == 1


def test_deadline_holds_while_there_is_no_connection(tmp_path: Path, relays: Relays) -> None:
    with linked(tmp_path, via=relays.via) as ends:
        ends["left"].send(RIGHT, Note("connected"))
        ends.wait(lambda: ends.messages["right"])
        relays.used.cut(stay_down=True)
        pull = ends["right"].pull(key(3), memoryview(bytearray(8)), source=LEFT, deadline_s=0.3)
        with pytest.raises(PullOverdue, match=r"block 3, part 0 has not come from box 'left' after .*no connection"):
            pull.result(WAIT_S)
