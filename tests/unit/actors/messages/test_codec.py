"""The encoding of messages on sockets."""

from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.examples import examples
from windlass.actors.messages.base import Message
from windlass.actors.messages.codec import decode, encode, message_types


@pytest.fixture(autouse=True, scope="module")
def numbers() -> Any:
    """Numbers that messages can hold: 64 bits, and floats that equal themselves."""
    st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))
    st.register_type_strategy(float, st.floats(allow_nan=False))


@pytest.mark.parametrize("kind", message_types().values(), ids=list(message_types()))
def test_every_message_is_decoded_as_it_was_encoded(kind: type[Message]) -> None:
    @settings(max_examples=examples(30), suppress_health_check=list(HealthCheck))
    @given(st.lists(st.builds(kind), max_size=3))
    def check(messages: list[Message]) -> None:
        decoded = decode(encode(messages))
        assert decoded == messages
        assert [type(message) for message in decoded] == [kind] * len(messages)

    check()


def test_types_are_those_of_the_package() -> None:
    assert {"ReadChunks", "UpdateStep", "ActorFailed", "SpansReported"} <= message_types().keys()
    assert not {"Message", "Event", "SsdRequest"} & message_types().keys()


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", msgspec.DecodeError),
        (msgspec.msgpack.encode([("GradSlotsReleased", {"job": "ftjob-1", "step": "three"})]), msgspec.ValidationError),
        (msgspec.msgpack.encode([("GradSlotsReleased", {"job": "ftjob-1"})]), msgspec.ValidationError),
        (msgspec.msgpack.encode([("System", {"command": "true"})]), KeyError),
    ],
    ids=["pickle", "wrong type", "missing field", "unknown message"],
)
def test_what_is_no_batch_of_messages_is_an_error(raw: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode(raw)
