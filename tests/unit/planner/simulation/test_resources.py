"""Simulated resources: the order of requests, and the waits."""

import functools

import pytest

from windlass.actors.messages import SpanKind
from windlass.planner.simulation.clock import Clock, Process
from windlass.planner.simulation.cores import SharedCores
from windlass.planner.simulation.resources import Log, Resource, Ssd
from windlass.planner.simulation.waiting import Queue, Signal, Slots


class TestSsd:
    def moved(self, *requests: tuple[float, float, int, tuple[int, int]]) -> dict[int, tuple[float, float]]:
        """Start and end of each request (requested at, seconds, pieces, priority), by position."""
        log = Log()
        ssd = Ssd(log, "ssd-0")

        def ask(chunk: int, at_s: float, duration_s: float, num_pieces: int, priority: tuple[int, int]) -> Process:
            yield at_s
            yield ssd.move(duration_s, num_pieces, priority, SpanKind.READ_PARAMS, 1, 0, chunk, 100)

        for chunk, request in enumerate(requests):
            log.clock.process(ask(chunk, *request))
        log.clock.run()
        assert len(log.spans) == len(requests)
        return {span.chunk: (span.start_s, span.end_s) for span in log.spans}

    def test_one_after_the_other(self) -> None:
        found = self.moved((0.0, 4.0, 4, (1, 0)), (1.0, 2.0, 2, (1, 0)), (1.5, 1.0, 1, (1, 0)))
        assert found == {0: (0.0, 4.0), 1: (4.0, 6.0), 2: (6.0, 7.0)}

    def test_waiting_requests_are_served_by_priority(self) -> None:
        found = self.moved((0.0, 1.0, 1, (1, 0)), (0.1, 1.0, 1, (1, 2)), (0.2, 1.0, 1, (1, 1)))
        assert found == {0: (0.0, 1.0), 2: (1.0, 2.0), 1: (2.0, 3.0)}

    def test_more_urgent_request_goes_first_after_the_current_piece(self) -> None:
        found = self.moved((0.0, 4.0, 4, (1, 5)), (1.5, 1.0, 1, (1, 1)), (1.6, 0.5, 1, (1, 0)))
        assert found[2] == pytest.approx((2.0, 2.5))
        assert found[1] == pytest.approx((2.5, 3.5))
        assert found[0] == pytest.approx((0.0, 5.5))  # its other two pieces come last

    def test_request_of_one_piece_is_not_interrupted(self) -> None:
        found = self.moved((0.0, 4.0, 1, (1, 5)), (1.0, 1.0, 1, (1, 0)))
        assert found == {0: (0.0, 4.0), 1: (4.0, 5.0)}

    @pytest.mark.timeout(20)  # an error would make it run forever
    def test_request_shorter_than_clock_resolution_ends(self) -> None:
        found = self.moved(*[(at_s, 3.3e-9, 3, (1, 0)) for at_s in (101.1, 1e6 / 3, 1e6 / 3, 1e9)])
        assert sorted(end_s for _, end_s in found.values()) == pytest.approx([101.1, 1e6 / 3, 1e6 / 3, 1e9])


@pytest.mark.parametrize(("num_cores", "computed_s"), [(2, 12.0), (None, 10.0)])
def test_cpu_time_for_ssd_slows_compute_and_not_the_ssd(num_cores: int | None, computed_s: float) -> None:
    log = Log(num_cores)
    ssd, compute = Ssd(log, "ssd-0", cpu_s_per_byte=0.02), Resource(log, "compute")
    log.clock.process(compute.work(10.0, SpanKind.FORWARD, 1, 0))
    ssd.move(5.0, 5, (1, 0), SpanKind.READ_PARAMS, 1, 0, 0, 100)
    log.clock.run()
    ends = {span.kind: span.end_s for span in log.spans}
    assert ends == {SpanKind.FORWARD: pytest.approx(computed_s), SpanKind.READ_PARAMS: 5.0}


def test_a_resource_takes_turns() -> None:
    log = Log()
    link = Resource(log, "link")

    def ask(chunk: int, at_s: float) -> Process:
        yield at_s
        yield from link.work(2.0, SpanKind.COPY_PARAMS_IN, 1, 0, chunk, 10)

    for chunk, at_s in enumerate((0.0, 1.0, 0.5, 9.0)):
        log.clock.process(ask(chunk, at_s))
    log.clock.run()
    assert [(span.chunk, span.start_s) for span in log.spans] == [(0, 0.0), (2, 2.0), (1, 4.0), (3, 9.0)]


def test_two_ways_that_share_a_link_are_slow_only_while_both_are_busy() -> None:
    log = Log()
    both = SharedCores(log.clock, 2 * 0.75)
    there, back = (Resource(log, name, functools.partial(both.work, num_threads=1)) for name in ("there", "back"))
    for chunk in range(2):
        log.clock.process(there.work(3.0, SpanKind.COPY_PARAMS_IN, 1, 0, chunk))
    log.clock.process(back.work(3.0, SpanKind.COPY_GRAD_OUT, 1, 0, 2))
    log.clock.run()
    assert {span.chunk: span.end_s for span in log.spans} == pytest.approx({0: 4.0, 2: 4.0, 1: 7.0})


def test_first_request_for_slots_is_served_first() -> None:
    clock = Clock()
    slots, taken = Slots(clock, 3), []

    def ask(name: str, count: int, at_s: float) -> Process:
        yield at_s
        yield from slots.take(count)
        taken.append((name, clock.now))
        yield 4.0
        slots.give_back(count)

    for name, count, at_s in (("two", 2, 0.0), ("three", 3, 1.0), ("one", 1, 2.0)):
        clock.process(ask(name, count, at_s))
    clock.run()
    # One slot is free all the time, but the request for three came earlier.
    assert taken == [("two", 0.0), ("three", 4.0), ("one", 8.0)]


def test_a_queue_hands_out_in_order() -> None:
    clock = Clock()
    queue: Queue[str] = Queue(clock)
    got = []

    def take() -> Process:
        while True:
            item = yield from queue.get()
            got.append((item, clock.now))

    def put() -> Process:
        queue.put("a")
        queue.put("b")
        yield 1.0
        queue.put("c")

    clock.process(take())
    clock.process(put())
    clock.run()
    assert got == [("a", 0.0), ("b", 0.0), ("c", 1.0)]


def test_waiter_checks_its_condition_after_a_signal() -> None:
    clock = Clock()
    signal, number, over = Signal(clock), [0], []

    def wait(least: int) -> Process:
        yield from signal.until(lambda: number[0] >= least)
        over.append((least, clock.now))

    def count() -> Process:
        for _ in range(3):
            yield 1.0
            number[0] += 1
            signal.notify()

    for least in (2, 0, 3):
        clock.process(wait(least))
    clock.process(count())
    clock.run()
    assert over == [(0, 0.0), (2, 2.0), (3, 3.0)]
