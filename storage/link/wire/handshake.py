"""The handshakes of control and data connections: who is at the other end, and do both work on the same attempt."""

import hmac
import secrets
import socket
import ssl
import struct
import time
from dataclasses import dataclass
from typing import Any

import msgspec
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from windlass.storage.ids import BoxName
from windlass.storage.link import Identity, LinkError, LinkSettings, ProtocolError, Refused, server_name
from windlass.storage.link.wire.codec import Codec
from windlass.storage.link.wire.frames import send_all

VERSION = 1
MAX_OPEN_NBYTES = 4096  # that are read from a connection before its box is known
HANDSHAKE_S = 5.0  # in which a box must make itself known
_LENGTH = struct.Struct("!H")
_DATA_MAGIC = b"WLD1"
_DATA_HELLO = struct.Struct("!4s16sB32s")  # magic, session, stream, proof
_PROOF_NBYTES = 32
_TLS_RECORD = 0x16  # the first byte of each TLS handshake
_DATA_KEY_NBYTES = 16


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    """Base of the messages of the handshake."""


class Hello(_Text, tag=True):
    """The first message, from the box that connects."""

    version: int
    job: str
    attempt: int
    epoch: int
    box: str
    to: str
    secret: bytes
    instance: bytes  # random, of the link object
    nonce: bytes
    received: int  # the ordinal of the last message that the sender has from the other
    codec: str
    shape: tuple[int, int, str]  # streams, bytes of a piece, protection


class Welcome(_Text, tag=True):
    """The answer: both work on the same."""

    instance: bytes
    session: bytes
    data_secret: bytes
    received: int


class Refusal(_Text, tag=True):
    """The answer: the box does not connect, and why."""

    reason: str
    received: int = 0  # as that of a welcome, so that a box that closes its link need not wait for a lost confirmation


_DECODER: "msgspec.msgpack.Decoder[Hello | Welcome | Refusal]" = msgspec.msgpack.Decoder(Hello | Welcome | Refusal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of a session's data connections."""

    session: bytes
    master: bytes

    @classmethod
    def agreed(cls, identity: Identity, hello: Hello, welcome: Welcome) -> "Keys":
        """Returns the keys that follow from what both sides said over TLS, and from the secret of the attempt."""
        material = welcome.data_secret + hello.nonce
        return cls(session=welcome.session, master=_derived(material, identity.secret, b"windlass link"))

    def proof(self, stream: int, *, from_dialer: bool) -> bytes:
        """Returns what shows that a side knows the keys."""
        text = struct.pack("!16sB?", self.session, stream, from_dialer)
        return hmac.digest(self.of(b"proof"), text, "sha256")

    def of_stream(self, stream: int, *, from_dialer: bool) -> bytes:
        """Returns the key of one direction of one data connection."""
        return self.of(struct.pack("!4sB?", b"data", stream, from_dialer))[:_DATA_KEY_NBYTES]

    def of(self, purpose: bytes) -> bytes:
        """Returns the key of a purpose."""
        return _derived(self.master, self.session, purpose)


def make_hello(
    identity: Identity, settings: LinkSettings, codec: Codec, *, to: BoxName, instance: bytes, received: int
) -> Hello:
    """Returns the first message to a box."""
    return Hello(
        version=VERSION,
        job=identity.job,
        attempt=identity.attempt,
        epoch=identity.epoch,
        box=identity.box,
        to=to,
        secret=identity.secret,
        instance=instance,
        nonce=secrets.token_bytes(32),
        received=received,
        codec=codec.digest,
        shape=_shape(settings),
    )


def reason_to_refuse(hello: Hello, identity: Identity, settings: LinkSettings, codec: Codec) -> str:
    """Returns why a hello is refused; "" if it is not."""
    # The secret first, and nothing about this box's work to one that does not know it.
    if not hmac.compare_digest(hello.secret, identity.secret):
        return "its secret is not that of this attempt"
    ours: dict[str, Any] = {
        "version": VERSION,
        "job": identity.job,
        "attempt": identity.attempt,
        "epoch": identity.epoch,
        "to": identity.box,
        "codec": codec.digest,
        "shape": _shape(settings),
    }
    for name, value in ours.items():
        if (theirs := getattr(hello, name)) != value:
            return f"its {name} is {theirs!r}, here it is {value!r}"
    return ""


def require_certificate_of(connection: ssl.SSLSocket, box: str) -> None:
    """Raises Refused unless the peer's certificate is that of a box."""
    certificate = connection.getpeercert() or {}
    names = {pair[1] for pair in certificate.get("subjectAltName", ()) if pair[0] == "DNS"}
    if server_name(BoxName(box)) not in names:
        raise Refused(f"box {box!r} has the certificate of {', '.join(sorted(map(str, names))) or 'no box'}")


def connect_control(address: tuple[str, int], to: BoxName, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Connects to a box's link with TLS. `context`: of this box's `Certificates`. Raises OSError."""
    raw = socket.create_connection(address, timeout=HANDSHAKE_S)
    try:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return context.wrap_socket(raw, server_hostname=server_name(to))
    except BaseException:
        raw.close()
        raise


def connect_data(address: tuple[str, int], keys: Keys, stream: int) -> socket.socket:
    """Makes a data connection of a session. Raises OSError, or LinkError if the other end does not know the keys.

    That is no ProtocolError: nothing protects the answer on its way, so it may not be the peer's.
    """
    connection = socket.create_connection(address, timeout=HANDSHAKE_S)
    try:
        hello = _DATA_HELLO.pack(_DATA_MAGIC, keys.session, stream, keys.proof(stream, from_dialer=True))
        send_all(connection, [memoryview(hello)])
        proof = receive_by(connection, _PROOF_NBYTES, time.monotonic() + HANDSHAKE_S)
        if not hmac.compare_digest(proof, keys.proof(stream, from_dialer=False)):
            raise LinkError("the other end of a data connection does not know its keys")
    except BaseException:
        connection.close()
        raise
    return connection


def is_control(connection: socket.socket) -> bool:
    """Waits for the first byte of an accepted connection, and returns whether it begins with TLS. Raises OSError."""
    first = connection.recv(1, socket.MSG_PEEK)
    if not first:
        raise EOFError("the peer ended the connection")
    return first[0] == _TLS_RECORD


def receive_data_hello(connection: socket.socket, until_s: float) -> tuple[bytes, int, bytes]:
    """Returns the session, the stream and the proof of an accepted data connection. Raises OSError or ProtocolError."""
    received = receive_by(connection, _DATA_HELLO.size, until_s)
    magic, session, stream, proof = _DATA_HELLO.unpack(received)
    if magic != _DATA_MAGIC:
        raise ProtocolError("a connection that is none of a link")
    return session, stream, proof


def send_handshake(connection: socket.socket, message: Hello | Welcome | Refusal) -> None:
    """Sends a message of the handshake. Raises OSError."""
    fields = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(fields)) + fields)


def receive_handshake(connection: socket.socket, until_s: float) -> Hello | Welcome | Refusal:
    """Receives a message of the handshake. Raises OSError, or ProtocolError if it is none or too large."""
    (nbytes,) = _LENGTH.unpack(receive_by(connection, _LENGTH.size, until_s))
    if nbytes > MAX_OPEN_NBYTES:
        raise ProtocolError(f"a first message of {nbytes} bytes; at most {MAX_OPEN_NBYTES} are read")
    try:
        return _DECODER.decode(receive_by(connection, nbytes, until_s))
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a first message that cannot be decoded: {error}") from None


def receive_by(connection: socket.socket, nbytes: int, until_s: float) -> bytes:
    """Receives some bytes before a moment of time.monotonic. Raises OSError, or EOFError."""
    received = bytearray()
    while len(received) < nbytes:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the box did not make itself known in time")
        connection.settimeout(left_s)
        part = connection.recv(nbytes - len(received))
        if not part:
            raise EOFError("the peer ended the connection")
        received += part
    return bytes(received)


def expect_welcome(answer: Hello | Welcome | Refusal) -> Welcome:
    """Returns the answer if it is a welcome. Raises Refused, or ProtocolError."""
    if isinstance(answer, Refusal):
        raise Refused(f"it refuses: {answer.reason[:500]}")
    if not isinstance(answer, Welcome):
        raise ProtocolError("a hello in answer to a hello")
    return answer


def _shape(settings: LinkSettings) -> tuple[int, int, str]:
    return (settings.num_streams, settings.piece_nbytes, settings.protection.value)


def _derived(material: bytes, salt: bytes, purpose: bytes) -> bytes:
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=salt, info=purpose).derive(material)
