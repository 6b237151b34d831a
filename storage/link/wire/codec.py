"""The closed codec of control messages: a fixed header, and the fields of a type that both boxes have registered."""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from windlass.amounts import bytes_text, least_text
from windlass.storage.link import LinkKey, ProtocolError

MAX_MESSAGE_NBYTES = 1 << 20
HEADER = struct.Struct("!IHQ")  # bytes of the fields, number of the type, ordinal


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """The sender has the bytes of a key, and keeps them until they were pulled. Has an ordinal."""

    key: LinkKey
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """The sender has all bytes of a key. Has an ordinal."""

    key: LinkKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """The sender's link ends. Has an ordinal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """The sender asks for one data frame. It is asked again on the next control connection."""

    number: int
    key: LinkKey
    offset: int
    nbytes: int
    priority: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The sender lives, and has received all messages up to an ordinal."""

    received: int


_OWN = (Offered, Pulled, Closing, Want, Heartbeat)


class Codec:
    """Encodes and decodes the link's own messages, and those of the registered types of its users."""

    def __init__(self, types: Sequence[type] = ()) -> None:
        """`types`: dataclasses or structs, the same ones on all boxes, each with a name of its own."""
        kinds = (*_OWN, *sorted(types, key=lambda kind: kind.__name__))
        names = [kind.__name__ for kind in kinds]
        if len(set(names)) < len(names):
            raise ValueError(f"two message types have the same name: {', '.join(names)}")
        self._numbers = {kind: number for number, kind in enumerate(kinds)}
        self._decoders: list[msgspec.msgpack.Decoder[Any]] = [msgspec.msgpack.Decoder(kind) for kind in kinds]
        self._encoder = msgspec.msgpack.Encoder()
        self.digest = hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]

    def encode(self, message: Any, ordinal: int = 0) -> bytes:
        """Returns the bytes of a message.

        Raises:
            ValueError: its type is not registered, or it is too large.
        """
        number = self._numbers.get(type(message))
        if number is None:
            raise ValueError(f"{type(message).__name__} is no registered type of message")
        fields = self._encoder.encode(message)
        if len(fields) > MAX_MESSAGE_NBYTES:
            raise ValueError(
                f"a {type(message).__name__} of {least_text(len(fields))}; at most {bytes_text(MAX_MESSAGE_NBYTES)} "
                "can be sent"
            )
        return HEADER.pack(len(fields), number, ordinal) + fields

    def take(self, received: bytearray) -> Iterator[tuple[int, Any]]:
        """Removes the whole messages at the beginning of `received`, and yields each with its ordinal.

        Raises:
            ProtocolError: it is not a message of a registered type, or one that is too large.
        """
        at = 0
        try:
            while len(received) - at >= HEADER.size:
                nbytes, number, ordinal = HEADER.unpack_from(received, at)
                if nbytes > MAX_MESSAGE_NBYTES or number >= len(self._decoders):
                    raise ProtocolError(f"a message of type {number} with {nbytes} bytes")
                end = at + HEADER.size + nbytes
                if len(received) < end:
                    break
                try:
                    message = self._decoders[number].decode(bytes(received[at + HEADER.size : end]))
                except msgspec.DecodeError as error:
                    raise ProtocolError(f"a message of type {number} that cannot be decoded: {error}") from None
                at = end
                yield ordinal, message
        finally:
            del received[:at]
