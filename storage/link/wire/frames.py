"""Data frames: a header with the number of the piece and its checksum, and the bytes, encrypted or plain.

The header has a checksum of its own, because it decides where the bytes go, before they are there to be checked.
"""

import socket
import struct
from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from windlass.storage.integrity import buffer_digest
from windlass.storage.link import LinkError

_FIELDS = struct.Struct("!QIQ")  # number of the piece, its bytes, their XXH3
_CHECK = struct.Struct("!Q")  # XXH3 of the fields
_TAG_NBYTES = 16
_NONCE_NBYTES = 12


class DamagedFrame(LinkError):
    """A data frame's bytes are not those that the peer had."""


class FrameWriter:
    """Sends data frames over a connection. Not thread-safe."""

    def __init__(self, connection: socket.socket, key: bytes | None, piece_nbytes: int) -> None:
        """`key`: of AES-128-GCM, for this connection and direction alone. None: frames are sent plain."""
        self._connection = connection
        self._cipher = None if key is None else AESGCM(key)
        self._sealed = memoryview(bytearray(piece_nbytes + _TAG_NBYTES if key is not None else 0))
        self._num_frames = 0

    def send(self, number: int, piece: memoryview) -> None:
        """Sends a piece. Raises OSError."""
        header = header_of(number, piece.nbytes, buffer_digest(piece))
        body = piece
        if self._cipher is not None:
            body = self._sealed[: piece.nbytes + _TAG_NBYTES]
            self._cipher.encrypt_into(_nonce(self._num_frames), piece, header, body)
        self._num_frames += 1
        send_all(self._connection, [memoryview(header), body])


class FrameReader:
    """Receives data frames from a connection. Not thread-safe."""

    def __init__(self, connection: socket.socket, key: bytes | None, piece_nbytes: int) -> None:
        """`key`: as that of the writer."""
        self._connection = connection
        self._cipher = None if key is None else AESGCM(key)
        self._sealed = memoryview(bytearray(piece_nbytes + _TAG_NBYTES if key is not None else 0))
        self._header = memoryview(bytearray(_FIELDS.size + _CHECK.size))
        self._num_frames = 0

    def receive(self, place: Callable[[int, int], memoryview]) -> int:
        """Waits for a frame, and puts its piece where `place` says, by its number and its bytes. Returns the number.

        Raises:
            OSError, EOFError: the connection has ended.
            DamagedFrame: the bytes are not those that were sent.
        """
        receive_exactly(self._connection, self._header)
        number, nbytes, digest = _FIELDS.unpack_from(self._header)
        if self._header != header_of(number, nbytes, digest):
            raise DamagedFrame("the checksum of a data frame's header is wrong")
        into = place(number, nbytes)
        if self._cipher is None:
            receive_exactly(self._connection, into)
        else:
            sealed = self._sealed[: nbytes + _TAG_NBYTES]
            receive_exactly(self._connection, sealed)
            try:
                self._cipher.decrypt_into(_nonce(self._num_frames), sealed, self._header, into)
            except InvalidTag:
                raise DamagedFrame("a data frame that was not encrypted by the peer, or was changed") from None
        self._num_frames += 1
        if buffer_digest(into) != digest:
            raise DamagedFrame("the checksum of a data frame is wrong")
        return int(number)


def header_of(number: int, nbytes: int, digest: int) -> bytes:
    """Returns the header of a piece with that XXH3."""
    fields = _FIELDS.pack(number, nbytes, digest)
    return fields + _CHECK.pack(buffer_digest(memoryview(fields)))


def send_all(connection: socket.socket, parts: list[memoryview]) -> None:
    """Sends all bytes of the parts, in order and without a copy. Raises OSError."""
    while parts:
        sent = connection.sendmsg(parts)
        while parts and sent >= parts[0].nbytes:
            sent -= parts.pop(0).nbytes
        if parts:
            parts[0] = parts[0][sent:]


def receive_exactly(connection: socket.socket, into: memoryview) -> None:
    """Fills `into`. Raises OSError, or EOFError if the peer ended the connection first."""
    while into.nbytes:
        received = connection.recv_into(into, 0, socket.MSG_WAITALL)
        if not received:
            raise EOFError("the peer ended the connection")
        into = into[received:]


def _nonce(number: int) -> bytes:
    # A key serves one connection and one direction, so a counter never repeats a nonce.
    return number.to_bytes(_NONCE_NBYTES, "big")
