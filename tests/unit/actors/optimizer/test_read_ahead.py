"""The number of chunks that may be read ahead of the updates."""

import threading

import pytest

from windlass.actors.optimizer.read_ahead import ReadAhead
from windlass.storage.cancellation import CancelToken


def may_begin(ahead: ReadAhead) -> bool:
    try:
        ahead.begin()
    except TimeoutError:
        return False
    return True


def test_read_ahead_with_no_arrived_chunk_may_begin_all() -> None:
    ahead = ReadAhead(CancelToken(0.0))
    assert all(may_begin(ahead) for _ in range(5))


def test_read_ahead_with_arrived_chunk_may_begin_one_more() -> None:
    ahead = ReadAhead(CancelToken(0.0))
    for _ in range(2):
        ahead.begin()
    ahead.arrived()
    assert not may_begin(ahead)
    ahead.updating()  # one is being updated, the other still arrives
    assert not may_begin(ahead)
    ahead.arrived()
    ahead.updated()
    assert not may_begin(ahead)  # the other has arrived and waits
    ahead.updating()
    assert may_begin(ahead)
    assert not may_begin(ahead)


def test_read_ahead_with_all_chunks_updated_may_begin_all() -> None:
    ahead = ReadAhead(CancelToken(0.0))
    ahead.begin()
    ahead.arrived()
    ahead.updating()
    ahead.updated()
    assert all(may_begin(ahead) for _ in range(3))


def test_read_ahead_waiter_continues_at_its_turn_and_at_a_cancel() -> None:
    token = CancelToken(30.0)
    ahead = ReadAhead(token)
    for _ in range(2):
        ahead.begin()
    ahead.arrived()
    timer = threading.Timer(0.05, lambda: (ahead.updating(), ahead.updated()))  # type: ignore[func-returns-value]
    timer.start()
    ahead.begin()
    timer.join()
    ahead.arrived()
    timer = threading.Timer(0.05, token.cancel)
    timer.start()
    with pytest.raises(InterruptedError, match="the job was stopped"):
        ahead.begin()
    timer.join()


def test_an_optimizer_that_hangs_is_an_error() -> None:
    ahead = ReadAhead(CancelToken(0.01))
    ahead.begin()
    ahead.arrived()
    with pytest.raises(TimeoutError, match=r"waited 0\.01 s for the update of a chunk: the optimizer is stuck"):
        ahead.begin()
