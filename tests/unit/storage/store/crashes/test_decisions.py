"""The log of decided commits."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.storage.stores import flip, make_record
from windlass.storage.ids import LayoutEpoch
from windlass.storage.store.decisions import Decision, DecisionLog, last_decision


def decision(step: int, attempt: int = 1) -> Decision:
    return Decision.of(make_record(step, step, attempt, f'{{"step": {step}}}'))


def write(path: Path, *decisions: Decision) -> None:
    log = DecisionLog(path)
    for each in decisions:
        log.append(each)
    log.close()
    log.close()


def test_last_decision_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "job" / "decisions"
    assert last_decision(path) is None
    write(path)
    assert last_decision(path) is None
    for step in range(3):
        write(path, decision(step))
        assert last_decision(path) == decision(step)
    assert path.stat().st_size == 3 * 64
    assert decision(1).digest != decision(2).digest


def test_late_decision_of_an_older_attempt_does_not_lead_back(tmp_path: Path) -> None:
    path = tmp_path / "decisions"
    write(path, decision(5, attempt=1), decision(6, attempt=2), decision(5, attempt=1))
    assert last_decision(path) == decision(6, attempt=2)


def test_decision_of_a_later_layout_epoch_counts_before_all_of_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "decisions"
    moved = replace(decision(5), epoch=LayoutEpoch(1))
    write(path, decision(5), moved, decision(6))
    assert last_decision(path) == moved


@pytest.mark.parametrize("num_bytes", [1, 63, 64, 65, 127])
def test_torn_record_does_not_count_and_later_ones_do(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "decisions"
    write(path, decision(0), decision(1))
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert last_decision(path) == (decision(0) if num_bytes >= 64 else None)
    write(path, decision(2))
    assert last_decision(path) == decision(2)


@pytest.mark.parametrize("at", [0, 8, 31, 40, 63])
def test_flipped_bit_loses_one_record(tmp_path: Path, at: int) -> None:
    path = tmp_path / "decisions"
    write(path, decision(0), decision(1))
    flip(path, 64 + at)
    assert last_decision(path) == decision(0)
