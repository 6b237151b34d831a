"""The upkeep of connections when this box has a defect or lacks resources."""

import errno
import socket
import threading
from concurrent.futures import Future
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.storage.cutting_relay import CuttingRelay
from tests.support.storage.links import WAIT_S, Note, key, linked
from tests.support.storage.open_sockets import no_socket_is_dropped
from windlass.storage.ids import BoxName
from windlass.storage.link import PeerLost
from windlass.storage.link.peer import Peer
from windlass.storage.link.session import Session

LEFT, RIGHT = BoxName("left"), BoxName("right")


def test_peer_is_lost_and_its_connections_are_forgotten_if_serving_them_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve, forget, forgotten = Session.serve, Peer.disconnected, []

    def serve_and_fail(session: Session) -> None:
        session.end(None)
        serve(session)
        raise KeyError("a defect")

    def disconnected(peer: Peer, error: Exception | None) -> None:
        forgotten.append(peer.name)
        forget(peer, error)

    monkeypatch.setattr(Session, "serve", serve_and_fail)
    monkeypatch.setattr(Peer, "disconnected", disconnected)
    with no_socket_is_dropped(), linked(tmp_path) as ends:
        with pytest.raises(PeerLost, match=r"box 'left' cannot be served: KeyError\('a defect'\)"):
            ends["right"].pull(key(0), memoryview(bytearray(8)), source=LEFT).result(WAIT_S)
        ends.wait(lambda: ends.losses["left"] and ends.losses["right"])
    assert sorted(forgotten) == [LEFT, RIGHT]


def test_defect_while_connecting_ends_the_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connected(*_: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(Peer, "connected", connected)
    with no_socket_is_dropped(), linked(tmp_path) as ends:
        with pytest.raises(PeerLost, match=r"box 'left' cannot be served: KeyError\('a defect'\)"):
            ends["right"].pull(key(0), memoryview(bytearray(8)), source=LEFT).result(WAIT_S)
        ends.wait(lambda: ends.losses["left"] and ends.losses["right"])


def test_connections_are_made_anew_after_there_were_too_few_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, failures = socket.socketpair, [OSError(errno.EMFILE, "too many open files") for _ in range(4)]

    def socketpair(*arguments: Any) -> tuple[socket.socket, socket.socket]:
        if failures:
            raise failures.pop()
        return pair(*arguments)

    monkeypatch.setattr("windlass.storage.link.session.socket.socketpair", socketpair)
    with no_socket_is_dropped(), linked(tmp_path) as ends:
        ends["left"].send(RIGHT, Note("after all"))
        ends.wait(lambda: ends.messages["right"])
    assert failures == []


def test_hanging_callback_ends_the_peer_and_is_told_at_the_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windlass.storage.link.session._JOIN_S", 0.2)
    begun, ended = threading.Event(), threading.Event()

    def hang(_: "Future[Any]") -> None:
        begun.set()
        ended.wait(WAIT_S)

    with ExitStack() as stack:
        relays = []

        def via(_: str, port: int) -> int:
            relays.append(stack.enter_context(closing(CuttingRelay(port))))
            return relays[-1].port

        with linked(tmp_path, via=via) as ends:
            ends["right"].pull(key(0), memoryview(bytearray(8)), source=LEFT).add_done_callback(hang)
            ends["left"].offer(key(0), memoryview(bytes(8)), {RIGHT})
            assert begun.wait(WAIT_S)
            relays[1].cut()
            ends.wait(lambda: ends.losses["right"])
            assert "threads of job left did not end" in str(ends.losses["right"][0])
            with pytest.raises(TimeoutError, match="did not end"):
                ends["right"].close(0.0)
            ended.set()
            ends["right"].close(0.0)
