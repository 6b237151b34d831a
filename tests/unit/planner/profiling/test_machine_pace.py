"""The machine's pace is measured now and again, and a small change of it is none."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from windlass.planner.profiling import MachinePace, machine_pace
from windlass.planner.profiling.machine_pace import OtherWork, Pace, measure_pace


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_pace_is_measured_again_once_it_is_old() -> None:
    clock, measured = Clock(), iter([2.0, 3.0])
    pace = MachinePace(lambda: Pace(seconds=next(measured)), clock)
    assert [pace.now_s(), pace.now_s()] == [2.0, 2.0]
    clock.now_s = 61.0
    assert pace.now_s() == 3.0


@pytest.mark.parametrize(
    ("now_s", "earlier_s", "slowdown"),
    [(2.5, 2.0, 1.25), (1.6, 2.0, 0.8), (2.08, 2.0, 1.0), (1.92, 2.0, 1.0), (2.5, None, 1.0)],
)
def test_slowdown_is_that_of_the_fixed_work(now_s: float, earlier_s: float | None, slowdown: float) -> None:
    assert MachinePace(lambda: Pace(seconds=now_s)).slowdown(earlier_s) == pytest.approx(slowdown)


def test_busy_machine_has_no_pace() -> None:
    busy = MachinePace(lambda: Pace(seconds=2.5, others=0.3))
    assert (busy.now_s(), busy.slowdown(2.0), busy.now().others) == (None, 1.0, 0.3)


def test_this_machine_has_a_pace() -> None:
    pace = measure_pace()
    assert pace.seconds > 0.0
    assert 0.0 <= pace.others <= 1.0


class Cores:
    """Stands in for the time of three cores, of which this process has two."""

    def __init__(self, stat: Path) -> None:
        self.now_s = self.own_s = 0.0
        self._stat = stat
        self.take(0.0, 0.0)

    def take(self, own_s: float, others_s: float) -> None:
        """Lets four seconds pass, in which this process and others take so much of the time of each core."""
        self.now_s, self.own_s = self.now_s + 4.0, self.own_s + 2 * own_s
        each = round(100 * (own_s + others_s))
        lines = [f"cpu{core} {each} 0 0 {400 - each} 0 0 0 0 0 0" for core in (0, 1)]
        self._stat.write_text("\n".join(["cpu  7 7 7 7 7 7 7 0 0 0", *lines, "cpu2 400 0 0 0 0 0 0 0 0 0", "ctxt 5"]))


@pytest.mark.parametrize(("own_s", "others_s", "share"), [(1.0, 0.0, 0.0), (1.0, 2.0, 0.5), (0.0, 4.0, 1.0)])
def test_other_work_is_what_this_process_does_not_take_of_its_cores(
    own_s: float, others_s: float, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = Cores(tmp_path / "stat")
    monkeypatch.setattr(machine_pace, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(machine_pace, "time", SimpleNamespace(perf_counter=lambda: cores.now_s))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    monkeypatch.setattr(os, "times", lambda: SimpleNamespace(user=cores.own_s / 2, system=cores.own_s / 2))
    work = OtherWork()
    cores.take(own_s, others_s)
    assert work.share() == pytest.approx(share)


def test_system_that_does_not_tell_has_no_other_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_pace, "_STAT", tmp_path / "nothing")
    assert OtherWork().share() == 0.0
