"""Reports of a long task are due at once and then every few seconds."""

from windlass.actors.lifecycle.report_timer import PROGRESS_EVERY_S, ReportTimer, StartReport


def due_times(timer: ReportTimer, *times_s: float) -> list[float]:
    return [now_s for now_s in times_s if timer.restart_if_due(now_s)]


def test_timer_of_a_task_that_has_not_reported_is_due_at_once_and_then_after_each_interval() -> None:
    halves = [100.0 + half * PROGRESS_EVERY_S / 2 for half in range(5)]
    assert due_times(ReportTimer(), *halves) == halves[::2]


def test_timer_with_the_time_of_a_report_is_due_an_interval_later() -> None:
    assert due_times(ReportTimer(100.0), 100.0, 99.9 + PROGRESS_EVERY_S, 100.0 + PROGRESS_EVERY_S) == [
        100.0 + PROGRESS_EVERY_S
    ]


def test_late_report_starts_the_interval_anew() -> None:
    late_s = 100.0 + 3 * PROGRESS_EVERY_S
    times_s = (100.0, late_s, late_s + 0.9 * PROGRESS_EVERY_S, late_s + PROGRESS_EVERY_S)
    assert due_times(ReportTimer(), *times_s) == [100.0, late_s, late_s + PROGRESS_EVERY_S]


def test_what_a_start_waits_for_is_told_once_it_was_silent_for_seconds_and_then_now_and_then() -> None:
    texts: list[str] = []
    now_s = 100.0
    report = StartReport(texts.append, clock=lambda: now_s)
    waits = {102.0: "A", 104.9: "A", 105.0: "B", 109.9: "C", 110.0: "C", 139.9: "C", 140.0: "C", 144.0: "D", 145.0: "D"}
    told = {}
    for now_s, what in waits.items():
        report.note(what)
        if texts:
            told[now_s] = texts.pop()
    assert told == {105.0: "B", 110.0: "C", 140.0: "C (for 30 s)", 145.0: "D"}
