"""The order of what happens in simulated time."""

import pytest

from windlass.planner.simulation.clock import Clock, Future, Process


def test_calls_at_one_time_come_in_the_order_of_request_and_before_what_they_cause() -> None:
    clock, called = Clock(), list[tuple[str, float]]()

    def note(name: str) -> None:
        called.append((name, clock.now))

    def first() -> None:
        note("first")
        clock.after(0.0, lambda: note("caused"))

    clock.after(2.0, lambda: note("late"))
    clock.after(1.0, first)
    clock.after(1.0, lambda: note("second"))
    assert not clock.run()
    assert called == [("first", 1.0), ("second", 1.0), ("caused", 1.0), ("late", 2.0)]


def test_a_process_waits_for_seconds_and_for_futures() -> None:
    clock, seen = Clock(), list[tuple[str, float]]()
    ready = Future(clock)

    def wait(name: str, delay_s: float) -> Process:
        yield delay_s
        yield ready
        seen.append((name, clock.now))
        yield ready  # is done: takes no time
        seen.append((name, clock.now))

    def run() -> Process:
        yield 3.0
        ready.set_done()

    over = [clock.process(wait("early", 1.0)), clock.process(wait("late", 5.0)), clock.process(run())]
    assert not clock.run()
    assert seen == [("early", 3.0), ("early", 3.0), ("late", 5.0), ("late", 5.0)]
    assert all(future.is_done for future in over)


def test_an_error_in_a_process_ends_the_run() -> None:
    clock = Clock()

    def fail() -> Process:
        yield 1.0
        raise ValueError("of the process")

    clock.process(fail())
    with pytest.raises(ValueError, match="of the process"):
        clock.run()


def test_a_run_pauses_and_goes_on() -> None:
    clock, called = Clock(), list[float]()
    for delay_s in (1.0, 2.0, 3.0):
        clock.after(delay_s, lambda: called.append(clock.now))
    clock.after(2.0, clock.pause)
    assert clock.run(max_calls=1)
    assert called == [1.0]
    assert (called, clock.pending_s) == ([1.0], [1.0, 1.0, 2.0])
    assert clock.run()
    assert (called, clock.now) == ([1.0, 2.0], 2.0)
    assert not clock.run()
    assert called == [1.0, 2.0, 3.0]
