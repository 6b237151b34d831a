"""The number of requests a minute that are accepted, and the time until the next one."""

import threading

import pytest

from windlass.service.api.middleware.rate_limit import BusyError, SlidingCounts, Turnstile


class Clock:
    def __init__(self) -> None:
        self.now_s = 600.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.short("*-1", "*-2", "*-3", "*-10", "*-60", "0.5-1200")
@pytest.mark.parametrize("limit", [1, 2, 3, 10, 60, 1200])
@pytest.mark.parametrize("begin_s", [0.0, 0.5, 30.0, 59.9])
def test_request_after_given_wait_is_accepted_and_limit_holds(limit: int, begin_s: float) -> None:
    clock = Clock()
    clock.now_s += begin_s
    counts, let_in = SlidingCounts(limit, clock), []
    for _ in range(4 * limit):
        if (wait_s := counts.hit("a")) is not None:
            assert 1 <= wait_s <= 120
            clock.now_s += wait_s
            assert counts.hit("a") is None
        let_in.append(clock.now_s)
    # A sliding counter is exact if the previous minute was even, and otherwise wrong by less than its count.
    for index, since_s in enumerate(let_in):
        assert sum(since_s <= at_s < since_s + 60 for at_s in let_in[index:]) <= 2 * limit


def test_request_before_given_wait_is_refused_without_penalty() -> None:
    clock = Clock()
    counts = SlidingCounts(10, clock)
    assert [counts.hit("a") for _ in range(10)] == [None] * 10
    assert [counts.hit("a") for _ in range(5)] == [66] * 5  # the next minute, and a tenth of it
    clock.now_s += 65
    assert counts.hit("a") == 1
    clock.now_s += 1
    assert [counts.hit("a"), counts.hit("a")] == [None, 6]


def test_names_have_counts_of_their_own() -> None:
    counts = SlidingCounts(1, Clock())
    assert counts.hit("a") is None
    assert counts.hit("a") is not None
    assert counts.hit("b") is None


def test_counts_of_idle_names_are_deleted() -> None:
    clock = Clock()
    counts = SlidingCounts(5, clock)
    for number in range(1000):
        counts.hit(str(number))
    for _ in range(2):
        clock.now_s += 60
        counts.hit("a")
    assert len(counts._now) + len(counts._before) == 2


def test_no_thread_is_started() -> None:
    counts, before = SlidingCounts(5, Clock()), threading.active_count()
    for _ in range(5):
        counts.hit("a")
    assert threading.active_count() == before


def test_turnstile_admits_one_operation_of_each_user_and_a_total() -> None:
    stile = Turnstile(2)
    with stile.entered("ann"):
        with pytest.raises(BusyError, match="one of your requests is not done yet"), stile.entered("ann"):
            pass
        with (
            stile.entered("bob"),
            pytest.raises(BusyError, match="too many are running for other users"),
            stile.entered("cat"),
        ):
            pass
        with stile.entered("cat"):
            pass
    with stile.entered("ann"):
        pass


def test_turnstile_tells_a_caller_without_a_key_nothing_of_requests_of_their_own() -> None:
    stile = Turnstile(1)
    with stile.entered(None):
        with pytest.raises(BusyError, match="another one is not done yet"), stile.entered(None):
            pass
        with pytest.raises(BusyError, match="other users"), stile.entered("ann"):
            pass
    with stile.entered(None):
        pass
