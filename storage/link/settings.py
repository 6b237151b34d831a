"""The settings of a link, and the identity that its box proves to others."""

import errno
import hashlib
import ssl
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from windlass.storage.ids import Attempt, BoxName, JobId
from windlass.storage.integrity import GRANULE_NBYTES

SECRET_NBYTES = 32
_MAX_PIECE_NBYTES = 4 * GRANULE_NBYTES
_MAX_STREAMS = 16


class Protection(StrEnum):
    """The protection of data frames on the wire. Control connections always use mutual TLS 1.3."""

    AES_GCM = "aes_gcm"  # AES-128-GCM with keys that were agreed over the control connection
    PLAIN = "plain"  # checksums only: others on the network can read and change the bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """The settings of a link. All boxes of a job have the same."""

    num_streams: int = 4  # data connections to each peer
    piece_nbytes: int = GRANULE_NBYTES  # of a data frame
    window_nbytes: int = 16 * GRANULE_NBYTES  # asked of a peer and not there yet
    protection: Protection = Protection.AES_GCM
    heartbeat_s: float = 1.0
    stall_s: float = 5.0  # without a byte of the control connection, after which it is made anew
    silence_s: float = 30.0  # without an answer, after which the peer is lost
    connect_s: float = 120.0  # the same, until the first connection: boxes start at different times
    max_messages: int = 1024  # to a peer that has not confirmed them

    def __post_init__(self) -> None:
        """Checks the values. Raises ValueError."""
        if not 1 <= self.num_streams <= _MAX_STREAMS:
            raise ValueError(f"num_streams must be 1 to {_MAX_STREAMS}, not {self.num_streams}")
        if not 0 < self.piece_nbytes <= _MAX_PIECE_NBYTES:
            raise ValueError(f"piece_nbytes must be 1 to {_MAX_PIECE_NBYTES}, not {self.piece_nbytes}")
        if self.window_nbytes < self.piece_nbytes:
            raise ValueError(f"window_nbytes is {self.window_nbytes}, less than a piece of {self.piece_nbytes}")
        if not 0 < self.heartbeat_s < self.stall_s <= self.silence_s <= self.connect_s:
            raise ValueError("must be 0 < heartbeat_s < stall_s <= silence_s <= connect_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The work that a link belongs to, and the secret of its attempt."""

    job: JobId
    attempt: Attempt
    epoch: int  # of the layout of chunks over boxes
    box: BoxName
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        """Checks the secret's length. Raises ValueError."""
        if len(self.secret) != SECRET_NBYTES:
            raise ValueError(f"the secret of an attempt must have {SECRET_NBYTES} bytes, not {len(self.secret)}")


def server_name(box: BoxName) -> str:
    """Returns the name of a box in its link's certificate, as a DNS name.

    It is not the name of a head, so a box with this certificate cannot take the head's place. It is made of a hash,
    because a box's name may have characters that DNS names must not have.
    """
    return f"{hashlib.sha256(box.encode()).hexdigest()[:32]}.link.windlass.internal"


class _TlsSocket(ssl.SSLSocket):
    """A TLS socket that closes itself if its peer resets the connection before the handshake begins.

    `wrap_socket` of Python 3.11 fails then and loses the new socket, so that no caller can close it.
    """

    def getpeername(self) -> Any:
        """Returns the peer's address. `wrap_socket` asks for it first."""
        try:
            return super().getpeername()
        except OSError:
            if self.version() is not None:
                raise
            self.close()
            raise ConnectionResetError(errno.ECONNRESET, "the peer ended the connection before TLS began") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """A box's certificate for links, and the authority that signed those of all boxes. PEM files.

    The certificate must allow the use as a client and as a server, for `server_name` of the box.
    """

    certificate: Path  # with its private key
    authority: Path

    def context(self, *, is_server: bool) -> ssl.SSLContext:
        """Returns a context that accepts TLS 1.3 only, and only peers that the authority has signed."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.sslsocket_class = _TlsSocket
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.authority)
        context.load_cert_chain(self.certificate)
        if is_server:
            context.num_tickets = 0
        return context
