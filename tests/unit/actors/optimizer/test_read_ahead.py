"""How far ahead of the updates chunks begin."""

import threading

import pytest

from windlass.actors.optimizer.read_ahead import ReadAhead


def may_begin(ahead: ReadAhead) -> bool:
    try:
        ahead.begin(0.0)
    except TimeoutError:
        return False
    return True


def test_while_nothing_is_at_hand_all_may_begin() -> None:
    ahead = ReadAhead()
    assert all(may_begin(ahead) for _ in range(5))


def test_while_something_is_at_hand_one_more_may() -> None:
    ahead = ReadAhead()
    for _ in range(2):
        ahead.begin(0.0)
    ahead.arrived()
    assert not may_begin(ahead)
    ahead.updating()  # one is updated, the other still comes
    assert not may_begin(ahead)
    ahead.arrived()
    ahead.updated()
    assert not may_begin(ahead)  # the other is at hand
    ahead.updating()
    assert may_begin(ahead)
    assert not may_begin(ahead)


def test_once_all_are_updated_the_next_may_begin_together() -> None:
    ahead = ReadAhead()
    ahead.begin(0.0)
    ahead.arrived()
    ahead.updating()
    ahead.updated()
    assert all(may_begin(ahead) for _ in range(3))


def test_who_waits_is_told_of_a_turn_and_of_the_end() -> None:
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
