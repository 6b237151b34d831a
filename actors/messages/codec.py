"""Encodes messages for a socket, and decodes them.

Decoding checks the types of all fields and runs no code of the sender, unlike unpickling. It is also several times
faster (`docs/decisions/0006-messages-over-sockets.md`).
"""

import functools
from collections.abc import Sequence

import msgspec

from windlass.actors.messages import base, compute, crossings, failures, model, optimizer, params, ssd, telemetry
from windlass.actors.messages.base import Event, Message

_MODULES = (base, compute, crossings, failures, model, optimizer, params, ssd, telemetry)
_BASES = {Message, Event, ssd.SsdRequest}

_ENCODER = msgspec.msgpack.Encoder()
_BATCH_DECODER = msgspec.msgpack.Decoder(list[tuple[str, msgspec.Raw]])


def encode(messages: Sequence[Message]) -> bytes:
    """Encodes messages as one batch: a list of pairs of the type's name and the fields."""
    return _ENCODER.encode([(type(message).__name__, message) for message in messages])


def decode(raw: bytes) -> list[Message]:
    """Decodes a batch of messages.

    Raises:
        msgspec.DecodeError: it is no batch, or a field has a wrong type.
        KeyError: there is no message type of that name.
    """
    decoders = _decoders()
    return [decoders[name].decode(fields) for name, fields in _BATCH_DECODER.decode(raw)]


@functools.cache
def message_types() -> dict[str, type[Message]]:
    """Returns all message types by name, without their base classes."""
    values = [value for module in _MODULES for value in vars(module).values()]
    types = {value for value in values if isinstance(value, type) and issubclass(value, Message)}
    return {kind.__name__: kind for kind in sorted(types - _BASES, key=lambda kind: kind.__name__)}


@functools.cache
def _decoders() -> dict[str, msgspec.msgpack.Decoder[Message]]:
    return {name: msgspec.msgpack.Decoder(kind) for name, kind in message_types().items()}
