"""Running a contender in separate processes, and collecting its reports."""

from pathlib import Path

import pytest

from benchmarks.peers.contenders import Contender, ContenderFailedError, rounds, run_contender, without_paths
from benchmarks.peers.workload import ModelShape, Workload

MIB = 1 << 20
WORKLOAD = Workload(
    shape=ModelShape(hidden=64, num_layers=2, vocab=64, intermediate=128, num_heads=2),
    batch_size=1,
    sequence_length=8,
    num_warmup_steps=1,
    num_timed_steps=1,
    num_threads=1,
    seed=1,
)


def stand_in(mode: str) -> Contender:
    return Contender(
        name=mode, title="stand-in", module="tests.unit.benchmarks.peers.contender_stand_in", arguments=(mode,)
    )


def test_steps_losses_and_peaks_are_gathered(tmp_path: Path) -> None:
    run = run_contender(stand_in("run"), WORKLOAD, tmp_path)
    assert run.missing is None
    assert run.step_s == (2.0,)  # without the warm-up
    assert run.losses == (9.0, 8.0)
    assert 80 * MIB < run.steps_peak_nbytes <= run.run_peak_nbytes < 200 * MIB
    assert run.ssd_nbytes == (30, 20)
    assert (run.control_s, run.moving_s) == (0.5, 0.25)


def test_a_peer_that_is_not_installed_is_missing(tmp_path: Path) -> None:
    assert run_contender(stand_in("missing"), WORKLOAD, tmp_path).missing == "not installed"


def test_a_failure_tells_its_cause_without_paths(tmp_path: Path) -> None:
    with pytest.raises(ContenderFailedError, match=r"exit code 1: ValueError: cannot open file\.bin"):
        run_contender(stand_in("fail"), WORKLOAD, tmp_path)


def test_an_end_before_the_last_step_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ContenderFailedError, match="stand-in ended with exit code 0"):
        run_contender(stand_in("stop"), WORKLOAD, tmp_path)


def test_every_other_round_is_reversed() -> None:
    one, two = stand_in("one"), stand_in("two")
    assert [contender.name for contender in rounds([one, two], 3)] == ["one", "two", "two", "one", "one", "two"]


def test_only_the_folders_of_absolute_paths_are_removed() -> None:
    assert without_paths("File /a/b-c/d.py, 3 GB/s and a/b, at /x/y") == "File d.py, 3 GB/s and a/b, at y"
