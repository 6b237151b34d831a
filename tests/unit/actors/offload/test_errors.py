"""The token of an offloaded model: each of its waits ends with an error that says what to do."""

import pytest

from windlass.actors.offload.errors import OffloadClosedError, OffloadFailedError, OffloadToken
from windlass.storage.cancellation import Signal


def test_wait_that_takes_too_long_names_what_it_is_for_and_the_late_ssd() -> None:
    token = OffloadToken(0.01)
    with pytest.raises(
        OffloadFailedError, match=r"waited 0\.01 s for the params of layers\.1; .* no transfer is pending"
    ):
        Signal(token).wait("the params of layers.1")
    token.describe_pending = lambda: "SSD /ssd0: a read is not done after 0.1 s"
    with pytest.raises(OffloadFailedError, match=r"; a disk hangs or is too slow; SSD /ssd0: a read is not done"):
        Signal(token).wait("the params of layers.1")


def test_first_failure_of_a_thread_is_raised_by_all_waits() -> None:
    token, first = OffloadToken(30.0), ValueError("the disk is broken")
    token.fail(first)
    token.fail(ValueError("another"))
    for _ in range(2):
        with pytest.raises(OffloadFailedError, match="training cannot go on: the disk is broken") as raised:
            Signal(token).wait("the params of layers.1")
        assert raised.value.__cause__ is first


def test_wait_after_the_close_says_so() -> None:
    token = OffloadToken(30.0)
    token.cancel()
    with pytest.raises(OffloadClosedError, match="the model was closed"):
        Signal(token).wait("the params of layers.1")
