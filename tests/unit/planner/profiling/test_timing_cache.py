"""Measured times of a model's blocks are reused by later jobs with the same question."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.architectures import ARCHITECTURES
from windlass.planner.cost.model_profile import AgainTimes, TimesFacts
from windlass.planner.profiling import MachinePace
from windlass.planner.profiling import timing_cache as kept_times
from windlass.planner.profiling.block_times import BlockTimes, MeasuredBlocks
from windlass.planner.profiling.machine_pace import Pace
from windlass.planner.profiling.timing_cache import TimingCache

CONFIG = ARCHITECTURES["Qwen2"].config(tied=True, dropout=0.0)
ASKED = {"shape": (2, 16), "precision": "bf16"}
AGAIN = AgainTimes(all_s=0.3, one_held_s=0.2, most_held_s=0.1)
MACHINE = {"host": {"memory_gib": 8}}


class Measuring:
    """Measures new times at every measurement."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "kept"
        self._number = 0
        self.standard_error, self.others = 0.01, 0.0

    def measure(self) -> MeasuredBlocks:
        self._number += 1
        times = {
            block: BlockTimes(forward_s=float(self._number), backward_s=0.5, again=AGAIN if block == 1 else None)
            for block in range(3)
        }
        return MeasuredBlocks(times=times, standard_error=self.standard_error, others=self.others)

    def number(self, config: Any = CONFIG, asked: Any = None, machine: Any = None, *, is_alone: bool = True) -> float:
        """The number of the measurement that the answer comes from."""
        kept = TimingCache(folder=self.folder, machine=machine or MACHINE, is_alone=lambda: is_alone)
        found = kept.of(config, asked or ASKED, self.measure)
        assert found.keys() == {0, 1, 2}
        assert {each.backward_s for each in found.values()} == {0.5}
        assert [found[block].again for block in range(3)] == [None, AGAIN, None]
        return found[2].forward_s

    def facts(self) -> TimesFacts | None:
        """The facts that are stored about the times of the usual question."""
        stored = TimingCache(folder=self.folder, machine=MACHINE, is_alone=lambda: True).known(CONFIG, ASKED)
        assert stored is not None
        (facts,) = {times.facts for times in stored.values()}
        return facts

    def files(self) -> list[Path]:
        return sorted(self.folder.iterdir())


class Clock:
    """Stands in for the time of day."""

    def __init__(self) -> None:
        self.now_s = 1e9

    def time(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(kept_times, "time", made)
    return made


@pytest.fixture
def measuring(tmp_path: Path) -> Measuring:
    return Measuring(tmp_path)


def test_the_same_question_is_measured_once(measuring: Measuring) -> None:
    assert [measuring.number() for _ in range(3)] == [1, 1, 1]


def test_the_marker_is_there_while_blocks_are_measured_only(measuring: Measuring, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    kept = TimingCache(folder=tmp_path / "kept", machine=MACHINE, is_alone=lambda: True, marker=marker)

    def measure() -> MeasuredBlocks:
        assert marker.exists()
        return measuring.measure()

    kept.of(CONFIG, ASKED, measure)
    assert not marker.exists()
    kept.of(CONFIG, ASKED, measure)

    def fail() -> MeasuredBlocks:
        raise RuntimeError("too large")

    with pytest.raises(RuntimeError):
        kept.of(CONFIG, {**ASKED, "shape": (9, 9)}, fail)
    assert not marker.exists()


def test_another_question_is_another_measurement(measuring: Measuring, monkeypatch: pytest.MonkeyPatch) -> None:
    other = ARCHITECTURES["Qwen2"].config(tied=False, dropout=0.0)
    assert measuring.number() == 1
    assert measuring.number(config=other) == 2
    assert measuring.number(asked={**ASKED, "shape": (1, 16)}) == 3
    assert measuring.number(machine={"host": {"memory_gib": 16}}) == 4
    monkeypatch.setattr(kept_times, "code_fingerprint", lambda *_: ["another torch"])
    assert measuring.number() == 5
    monkeypatch.undo()
    assert [measuring.number(), measuring.number(config=other)] == [1, 2]


def test_model_in_another_folder_uses_the_same_measurement(measuring: Measuring) -> None:
    moved = ARCHITECTURES["Qwen2"].config(tied=True, dropout=0.0)
    moved._name_or_path = "elsewhere"
    assert [measuring.number(), measuring.number(config=moved)] == [1, 1]


def test_times_measured_beside_a_job_hold_for_minutes_and_for_plans_beside_a_job(
    clock: Clock, measuring: Measuring
) -> None:
    assert [measuring.number(is_alone=False), measuring.number(is_alone=False)] == [1, 1]
    clock.now_s += kept_times._DISTURBED_HOLD_S
    assert measuring.number(is_alone=False) == 2
    assert [measuring.number(), measuring.number(is_alone=False)] == [3, 3]
    clock.now_s += 1e6
    assert measuring.number() == 3


def test_times_that_no_longer_hold_are_used_where_none_are_measured(clock: Clock, measuring: Measuring) -> None:
    measuring.number(is_alone=False)
    clock.now_s += kept_times._DISTURBED_HOLD_S
    kept = TimingCache(folder=measuring.folder, machine=MACHINE, is_alone=lambda: False)
    assert kept.known(CONFIG, ASKED) is None
    assert replace(kept, takes_lapsed=True).known(CONFIG, ASKED) is not None


def test_times_during_whose_measurement_a_job_began_hold_for_minutes(clock: Clock, measuring: Measuring) -> None:
    answers = iter([True, False])
    kept = TimingCache(folder=measuring.folder, machine=MACHINE, is_alone=lambda: next(answers))
    kept.of(CONFIG, ASKED, measuring.measure)
    assert measuring.number(is_alone=False) == 1
    clock.now_s += kept_times._DISTURBED_HOLD_S
    assert measuring.number(is_alone=False) == 2


def test_imprecise_times_hold_for_minutes(clock: Clock, measuring: Measuring) -> None:
    """The same question asked again would else be measured again, and would have another answer."""
    measuring.standard_error = 0.2
    assert [measuring.number(), measuring.number()] == [1, 1]
    clock.now_s -= 1e6  # the clock was set back
    assert measuring.number() == 2
    clock.now_s += kept_times._DISTURBED_HOLD_S
    measuring.standard_error = 0.05
    assert measuring.number() == 3
    clock.now_s += 1e6
    assert measuring.number() == 3


def test_times_of_a_busy_machine_hold_until_it_is_less_busy(
    clock: Clock, measuring: Measuring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They agreed with each other, were stored for good, and all later plans of that shape were too slow."""
    now = {"others": 0.6}
    pace = MachinePace(lambda: Pace(seconds=0.25, others=now["others"]), kept_s=0.0)
    monkeypatch.setattr(kept_times, "this_machine", lambda: pace)
    measuring.others = 0.6
    assert measuring.number() == 1
    assert measuring.facts() == TimesFacts(standard_error=0.01, others=0.6)
    now["others"] = 0.0
    assert measuring.number() == 1, "the same answer for minutes"
    clock.now_s += kept_times._DISTURBED_HOLD_S
    now["others"] = 0.35
    assert measuring.number() == 1
    measuring.others = now["others"] = 0.25
    assert measuring.number() == 2, "half as much runs"
    clock.now_s += kept_times._DISTURBED_HOLD_S
    measuring.others = now["others"] = 0.09
    assert measuring.number() == 3
    assert measuring.facts() == TimesFacts(standard_error=0.01, pace_s=0.25)
    clock.now_s += 1e6
    assert measuring.number() == 3


@pytest.mark.parametrize("damaged", ["", "[]", "{}", '{"0": {"forward_s": 1}}', '{"x": 3}', '{"disturbed": 3}'])
def test_a_damaged_file_is_measured_again(measuring: Measuring, damaged: str) -> None:
    assert measuring.number() == 1
    (file,) = measuring.files()
    file.write_text(damaged)
    assert [measuring.number(), measuring.number()] == [2, 2]


def test_full_disk_measures_each_time(measuring: Measuring, tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    assert [measuring.number(), measuring.number()] == [1, 2]


def test_the_newest_are_kept(measuring: Measuring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_times, "_MOST_KEPT", 2)
    for length in range(3):
        measuring.number(asked={**ASKED, "shape": (1, length)})
        for each in measuring.files():  # the clock of the file system may be coarse
            os.utime(each, ns=(0, each.stat().st_mtime_ns - 10**9))
    assert len(measuring.files()) == 2
    assert measuring.number(asked={**ASKED, "shape": (1, 2)}) == 3


def test_times_are_stored_with_their_error_and_the_machines_pace(
    measuring: Measuring, monkeypatch: pytest.MonkeyPatch
) -> None:
    pace = MachinePace(lambda: Pace(seconds=0.25))
    monkeypatch.setattr(kept_times, "this_machine", lambda: pace)
    measuring.number()
    assert measuring.facts() == TimesFacts(standard_error=0.01, pace_s=0.25)
