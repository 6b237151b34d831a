"""The link against peers and clients that must not get in, and against peers that break the protocol."""

import contextlib
import os
import socket
import ssl
import struct
import threading
import time
from pathlib import Path

import pytest

from tests.support.storage.link_counts import count_links
from tests.support.storage.links import QUICK, WAIT_S, Authority, Note, identity, key, linked, quick
from tests.support.storage.open_sockets import no_socket_is_dropped
from windlass.storage.ids import BoxName
from windlass.storage.link import Codec, Link, LinkSettings, PeerClosed, PeerLost, listen, server_name
from windlass.storage.link.admission import MAX_HALF_OPEN
from windlass.storage.link.wire import (
    Closing,
    FrameWriter,
    Heartbeat,
    Hello,
    Keys,
    Offered,
    Pulled,
    Refusal,
    Want,
    Welcome,
    handshake,
)
from windlass.storage.link.wire.codec import HEADER
from windlass.storage.link.wire.frames import header_of

LEFT, RIGHT = BoxName("left"), BoxName("right")
PATIENCE = quick(stall_s=0.9, silence_s=1.0, connect_s=1.0)
ONE_STREAM = quick(num_streams=1)
PIECE_NBYTES = ONE_STREAM.piece_nbytes


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"secret": bytes(32)}, "its secret is not that of this attempt"),
        ({"attempt": 2}, "its attempt is 2, here it is 1"),
    ],
)
def test_box_of_another_attempt_is_refused(
    tmp_path: Path, changes: dict[str, int], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = count_links(monkeypatch)
    with linked(tmp_path, settings=PATIENCE, left=identity("left", **changes)) as ends:  # type: ignore[arg-type]
        pull = ends["left"].pull(key(0), memoryview(bytearray(8)), source=RIGHT)
        ends["right"].offer(key(0), memoryview(bytes(8)), {LEFT})
        with pytest.raises(PeerLost, match=f"was silent.*{text}.*: activation of step 1"):
            pull.result(WAIT_S)
        assert counts.num_connections[LEFT] == 0


class Intruder:
    """A peer "left" of the link under test, whose bytes the test writes itself."""

    def __init__(self, folder: Path, *, names: str = "left", settings: LinkSettings = ONE_STREAM) -> None:
        own = Authority(folder)
        self.lost: list[PeerLost] = []
        self._listener = listen("127.0.0.1")
        self.address = self._listener.getsockname()
        self.link = Link.start(
            identity("right"),
            self._listener,
            {LEFT: ("127.0.0.1", 1)},
            own.certificates("right"),
            settings=settings,
            codec=Codec([Note]),
            on_lost=lambda _, error: self.lost.append(error),
        )
        self.certificates = own.certificates("left", names=names)

    def hello(self) -> Hello:
        codec = Codec([Note])
        return handshake.make_hello(identity("left"), ONE_STREAM, codec, to=RIGHT, instance=b"i" * 16, received=0)

    def connect(self) -> ssl.SSLSocket:
        return handshake.connect_control(self.address, RIGHT, self.certificates.context(is_server=False))

    def session(self, *, received: int = 0) -> tuple[ssl.SSLSocket, socket.socket, Keys]:
        control, hello = self.connect(), self.hello()
        hello.received = received
        handshake.send_handshake(control, hello)
        welcome = handshake.receive_handshake(control, time.monotonic() + WAIT_S)
        assert isinstance(welcome, Welcome)
        keys = Keys.agreed(identity("left"), hello, welcome)
        data = handshake.connect_data(self.address, keys, 0)
        control.settimeout(WAIT_S)
        data.settimeout(WAIT_S)
        return control, data, keys

    def await_loss(self) -> str:
        try:
            failure = self.link.pull(key(0), memoryview(bytearray(8)), source=LEFT).exception(WAIT_S)
        except PeerLost as error:
            failure = error
        assert isinstance(failure, PeerLost)
        return str(failure)

    def __enter__(self) -> "Intruder":
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close(0.0)


def assert_closed(connection: socket.socket) -> None:
    connection.settimeout(WAIT_S)
    with pytest.raises((EOFError, OSError)):  # noqa: PT012  what arrives before the end does not matter
        while connection.recv(65536):
            pass
        raise EOFError
    connection.close()


def assert_no_answer(context: ssl.SSLContext, raw: socket.socket, intruder: Intruder) -> None:
    """With TLS 1.3, a client learns that its certificate is refused only when it reads."""
    with context.wrap_socket(raw, server_hostname=server_name(RIGHT)) as control:
        with contextlib.suppress(OSError):
            handshake.send_handshake(control, intruder.hello())
        with pytest.raises((OSError, EOFError)):
            handshake.receive_handshake(control, time.monotonic() + WAIT_S)


def test_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with Intruder(tmp_path) as intruder:
        foreign = Authority(other).certificates("left")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_cert_chain(foreign.certificate)
        context.load_verify_locations(intruder.certificates.authority)
        raw = socket.create_connection(intruder.address)
        assert_no_answer(context, raw, intruder)
        # The client side checks as well.
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake.connect_control(intruder.address, RIGHT, foreign.context(is_server=False))


def test_box_without_certificate_is_refused(tmp_path: Path) -> None:
    with Intruder(tmp_path) as intruder:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(intruder.certificates.authority)
        raw = socket.create_connection(intruder.address)
        assert_no_answer(context, raw, intruder)


def test_box_with_the_certificate_of_another_is_refused(tmp_path: Path) -> None:
    with Intruder(tmp_path, names="elsewhere") as intruder, intruder.connect() as control:
        handshake.send_handshake(control, intruder.hello())
        assert_closed(control)


def test_other_versions_are_refused_and_told(tmp_path: Path) -> None:
    with Intruder(tmp_path) as intruder, intruder.connect() as control:
        hello = intruder.hello()
        hello.version = 99
        handshake.send_handshake(control, hello)
        answer = handshake.receive_handshake(control, time.monotonic() + WAIT_S)
        assert answer == Refusal("its version is 99, here it is 1")


def test_large_first_message_is_not_read(tmp_path: Path) -> None:
    with Intruder(tmp_path) as intruder, intruder.connect() as control:
        control.sendall(struct.pack("!H", 4097) + bytes(4097))
        assert_closed(control)


def test_silent_client_is_cut_off_and_no_more_than_the_limit_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windlass.storage.link.admission.HANDSHAKE_S", 0.3)
    with Intruder(tmp_path) as intruder:
        silent = [socket.create_connection(intruder.address) for _ in range(MAX_HALF_OPEN + 4)]
        # The places of the first ones are free once they were cut off. Then a box that says who it is gets in.
        control, data, _ = intruder.session()
        for each in silent[:MAX_HALF_OPEN]:
            assert_closed(each)
        for each in (*silent[MAX_HALF_OPEN:], control, data):
            each.close()


def test_closed_link_ends_the_connections_that_are_not_admitted_yet(tmp_path: Path) -> None:
    with no_socket_is_dropped():
        with Intruder(tmp_path) as intruder:
            silent = [socket.create_connection(intruder.address) for _ in range(3)]
            silent[1].sendall(b"\x16")  # TLS begins
            silent[2].sendall(b"W")
            # It waits for its data connections.
            control = intruder.connect()
            handshake.send_handshake(control, intruder.hello())
            handshake.receive_handshake(control, time.monotonic() + WAIT_S)
        assert [thread for thread in threading.enumerate() if thread.name == "link admission"] == []
        for each in (*silent, control):
            assert_closed(each)


def test_link_with_too_many_unknown_connections_closes(tmp_path: Path) -> None:
    with Intruder(tmp_path) as intruder:
        silent = [socket.create_connection(intruder.address) for _ in range(MAX_HALF_OPEN + 1)]
        intruder.link.close(0.0)
        assert [thread for thread in threading.enumerate() if thread.name.startswith("link")] == []
        for each in silent:
            assert_closed(each)


def test_connection_is_closed_if_no_thread_can_be_started_and_later_ones_are_admitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    refused: list[threading.Thread] = []

    def start_but_once(thread: threading.Thread) -> None:
        if thread.name == "link admission" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_but_once)
    with no_socket_is_dropped(), Intruder(tmp_path) as intruder:
        assert_closed(socket.create_connection(intruder.address))
        control, data, _ = intruder.session()
        control.close()
        data.close()
    assert len(refused) == 1


def test_slow_client_gets_no_more_time_for_each_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.storage.link.admission.HANDSHAKE_S", 0.3)
    with Intruder(tmp_path) as intruder, socket.create_connection(intruder.address) as slow:
        slow.sendall(b"W")
        with pytest.raises(OSError):  # noqa: PT012  broken pipe or reset, whichever comes first
            while True:
                slow.sendall(b"L")
                time.sleep(0.02)


def test_data_connection_without_the_keys_is_closed(tmp_path: Path) -> None:
    with Intruder(tmp_path) as intruder:
        control, hello = intruder.connect(), intruder.hello()
        handshake.send_handshake(control, hello)
        welcome = handshake.receive_handshake(control, time.monotonic() + WAIT_S)
        assert isinstance(welcome, Welcome)
        for session in (welcome.session, b"s" * 16):
            keys = Keys(session=session, master=b"m" * 32)
            with pytest.raises((EOFError, OSError)):
                handshake.connect_data(intruder.address, keys, 0)
        control.close()


def test_unasked_data_frame_ends_the_peer(tmp_path: Path) -> None:
    with Intruder(tmp_path) as intruder:
        control, data, _ = intruder.session()
        data.sendall(header_of(1, 4096, 0) + bytes(4096))
        assert "broke the protocol: a data frame with number 1 and 4096 bytes, which nothing asked for" in (
            intruder.await_loss()
        )
        control.close()
        data.close()


CODEC = Codec([Note])


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (CODEC.encode(Want(number=1, key=key(0), offset=0, nbytes=8, priority=(0, 0))), "which is not offered"),
        (CODEC.encode(Want(number=1, key=key(1), offset=4, nbytes=8, priority=(0, 0))), "a pull of 8 bytes from 4"),
        (CODEC.encode(Want(number=1, key=key(1), offset=-4, nbytes=4, priority=(0, 0))), "a pull of 4 bytes from -4"),
        (CODEC.encode(Pulled(key=key(0)), 1), "a confirmation of activation"),
        (CODEC.encode(Note("late"), 2), "message 2 after message 0"),
        (CODEC.encode(Note("without")), "a Note with ordinal 0"),
        (CODEC.encode(Heartbeat(received=77)), "a confirmation of message 77"),
        (HEADER.pack((1 << 20) + 1, 4, 0), "with 1048577 bytes"),
        (HEADER.pack(4, 99, 0), "a message of type 99"),
        (HEADER.pack(4, 4, 0) + b"\xff" * 4, "cannot be decoded"),
    ],
)
def test_wrong_control_message_ends_the_peer(tmp_path: Path, sent: bytes, text: str) -> None:
    with Intruder(tmp_path) as intruder:
        intruder.link.offer(key(1), memoryview(bytes(8)), {LEFT})
        control, data, _ = intruder.session()
        control.sendall(sent)
        assert text in intruder.await_loss()
        control.close()
        data.close()


def test_peer_that_was_started_anew_is_refused(tmp_path: Path) -> None:
    with Intruder(tmp_path) as intruder:
        control, data, _ = intruder.session()
        hello = intruder.hello()
        hello.instance = b"j" * 16
        with intruder.connect() as second:
            handshake.send_handshake(second, hello)
            answer = handshake.receive_handshake(second, time.monotonic() + WAIT_S)
        assert answer == Refusal("it was started anew within the attempt, so its state is lost")
        control.close()
        data.close()


def test_confirmation_of_what_was_never_sent_ends_the_peer_and_its_connections(tmp_path: Path) -> None:
    with no_socket_is_dropped(), Intruder(tmp_path) as intruder:
        control, data, _ = intruder.session(received=77)
        assert "a confirmation of message 77, but 0 were sent" in intruder.await_loss()
        assert_closed(control)
        assert_closed(data)


def test_peer_that_says_that_it_closes_and_ends_its_connections_is_not_lost(tmp_path: Path) -> None:
    with Intruder(tmp_path) as intruder:
        pull = intruder.link.pull(key(0), memoryview(bytearray(8)), source=LEFT)
        control, data, _ = intruder.session()
        control.sendall(CODEC.encode(Closing(), 1))
        data.close()
        control.close()
        assert isinstance(pull.exception(WAIT_S), PeerClosed)
    assert intruder.lost == []


def test_peer_that_ends_its_connections_without_a_word_is_lost(tmp_path: Path) -> None:
    with Intruder(tmp_path, settings=quick(num_streams=1, stall_s=0.5, silence_s=0.6, connect_s=60.0)) as intruder:
        pull = intruder.link.pull(key(0), memoryview(bytearray(8)), source=LEFT)
        control, data, _ = intruder.session()
        data.close()
        control.close()
        assert isinstance(pull.exception(WAIT_S), PeerLost)
        assert len(intruder.lost) == 1


def test_damaged_frames_with_progress_between_do_not_end_the_peer(tmp_path: Path) -> None:
    content = os.urandom(6 * PIECE_NBYTES)
    slot = bytearray(len(content))
    with Intruder(tmp_path) as intruder:
        pull = intruder.link.pull(key(0), memoryview(slot), source=LEFT)
        for attempt in range(6):
            control, data, keys = intruder.session()
            with control, data:
                if attempt == 0:
                    control.sendall(CODEC.encode(Offered(key=key(0), nbytes=len(content)), 1))
                want = _next_want(control)
                writer = FrameWriter(data, keys.of_stream(0, from_dialer=True), PIECE_NBYTES)
                writer.send(want.number, memoryview(content)[want.offset : want.offset + want.nbytes])
                if attempt < 5:
                    data.sendall(header_of(want.number, 8, 0)[::-1] + bytes(100))
                    assert_closed(data)
        pull.result(WAIT_S)
    assert intruder.lost == []
    assert slot == content


def test_damaged_frames_without_progress_end_the_peer(tmp_path: Path) -> None:
    with Intruder(tmp_path) as intruder:
        pull = intruder.link.pull(key(0), memoryview(bytearray(8)), source=LEFT)
        for attempt in range(3):
            control, data, _ = intruder.session()
            with control, data:
                if attempt == 0:
                    control.sendall(CODEC.encode(Offered(key=key(0), nbytes=8), 1))
                want = _next_want(control)
                data.sendall(header_of(want.number, 8, 0) + os.urandom(8 + 16))
                assert_closed(data)
        error = pull.exception(WAIT_S)
        assert isinstance(error, PeerLost)
        assert "sent 3 damaged frames and nothing whole between them" in str(error)


def _next_want(control: ssl.SSLSocket) -> Want:
    received = bytearray()
    while True:
        for _, message in CODEC.take(received):
            if isinstance(message, Want):
                return message
        received += control.recv(65536)


def test_settings_differ_is_refused(tmp_path: Path) -> None:
    with Intruder(tmp_path) as intruder, intruder.connect() as control:
        hello = handshake.make_hello(identity("left"), QUICK, CODEC, to=RIGHT, instance=b"i" * 16, received=0)
        handshake.send_handshake(control, hello)
        answer = handshake.receive_handshake(control, time.monotonic() + WAIT_S)
        assert isinstance(answer, Refusal)
        assert "its shape is" in answer.reason
