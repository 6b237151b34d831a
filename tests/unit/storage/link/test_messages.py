"""Messages over connections that are lost: each arrives once and in order."""

import pytest

from tests.support.storage.links import Note
from windlass.storage.link import Codec, ProtocolError
from windlass.storage.link.messages import MessageStream

CODEC = Codec([Note])


def taken(stream: MessageStream) -> list[tuple[int, int]]:
    """Returns the ordinals of the messages to send, and the numbers in them."""
    return [(ordinal, note.number) for ordinal, note in CODEC.take(bytearray(b"".join(stream.take_unsent())))]


def stream_of(num_messages: int) -> MessageStream:
    stream = MessageStream(CODEC)
    for number in range(num_messages):
        stream.post(Note("n", number))
    return stream


def test_each_message_is_sent_once_over_the_same_connections() -> None:
    stream = stream_of(2)
    assert taken(stream) == [(1, 0), (2, 1)]
    stream.post(Note("n", 2))
    assert taken(stream) == [(3, 2)]
    assert taken(stream) == []


def test_unconfirmed_messages_are_sent_again_over_new_connections() -> None:
    stream = stream_of(3)
    taken(stream)
    stream.confirmed(1)
    stream.reconnected()
    assert taken(stream) == [(2, 1), (3, 2)]
    stream.confirmed(3)
    assert stream.num_unconfirmed == 0


def test_message_that_was_confirmed_before_it_was_sent_again_takes_no_others_turn() -> None:
    stream = stream_of(3)
    taken(stream)
    stream.reconnected()
    stream.confirmed(2)
    assert taken(stream) == [(3, 2)]


def test_message_that_arrives_again_is_not_new() -> None:
    stream = MessageStream(CODEC)
    assert [stream.arrived(ordinal) for ordinal in (1, 2, 1, 2, 3)] == [True, True, False, False, True]
    with pytest.raises(ProtocolError, match="message 5 after message 3"):
        stream.arrived(5)


def test_confirmation_is_owed_after_each_arrival() -> None:
    stream = MessageStream(CODEC)
    assert not stream.owes_confirmation
    stream.arrived(1)
    assert stream.owes_confirmation
    assert stream.take_confirmation() == 1
    assert not stream.owes_confirmation


def test_message_that_cannot_be_encoded_takes_no_ordinal() -> None:
    stream = stream_of(1)
    with pytest.raises(ValueError, match="no registered type"):
        stream.post(object())
    stream.post(Note("n", 1))
    assert taken(stream) == [(1, 0), (2, 1)]
