"""The number of chunks that may be read ahead of the updates."""

import threading

import pytest

from windlass.actors.optimizer.read_ahead import ReadAhead


def may_begin(ahead: ReadAhead) -> bool:
    try:
        ahead.begin(0.0)
    except TimeoutError:
        return False
    return True


def test_read_ahead_with_no_arrived_chunk_may_begin_all() -> None:
    ahead = ReadAhead()
    assert all(may_begin(ahead) for _ in range(5))


def test_read_ahead_with_arrived_chunk_may_begin_one_more() -> None:
    ahead = ReadAhead()
    for _ in range(2):
        ahead.begin(0.0)
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
    ahead = ReadAhead()
    ahead.begin(0.0)
    ahead.arrived()
    ahead.updating()
    ahead.updated()
    assert all(may_begin(ahead) for _ in range(3))


def test_read_ahead_waiter_continues_at_its_turn_and_at_close() -> None:
    ahead = ReadAhead()
    for _ in range(2):
        ahead.begin(0.0)
    ahead.arrived()
    timer = threading.Timer(0.05, lambda: (ahead.updating(), ahead.updated()))  # type: ignore[func-returns-value]
    timer.start()
    ahead.begin(30.0)
    timer.join()
    ahead.arrived()
    timer = threading.Timer(0.05, ahead.close)
    timer.start()
    with pytest.raises(InterruptedError, match="the job was stopped"):
        ahead.begin(30.0)
    timer.join()


def test_an_optimizer_that_hangs_is_an_error() -> None:
    ahead = ReadAhead()
    ahead.begin(0.0)
    ahead.arrived()
    with pytest.raises(TimeoutError, match=r"no chunk was updated for .* s: the optimizer is stuck"):
        ahead.begin(0.01)
