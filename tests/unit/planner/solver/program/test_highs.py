"""HiGHS's results, and how it says that there is none."""

import math
from dataclasses import replace

import numpy as np
import pytest

from windlass.planner.solver.program import highs
from windlass.planner.solver.program.highs import (
    InaccurateError,
    KeptProgram,
    LinearProgram,
    SolverError,
    minimize,
    minimize_whole,
)

WHOLE = np.ones(2)


def program(*, least_sum: float = 3.0, most: float = 10.0) -> LinearProgram:
    """Minimizes x + 2y, where 2x + 2y is at least a sum."""
    return LinearProgram(
        costs=np.array([1.0, 2.0]),
        rows=np.array([[2.0, 2.0]]),
        least_sums=np.array([least_sum]),
        most_sums=np.array([np.inf]),
        least=np.zeros(2),
        most=np.full(2, most),
    )


def hard_program() -> LinearProgram:
    """Chooses numbers whose sum of products is as near as possible to a limit."""
    weights = np.random.default_rng(1).integers(10_000, 99_999, 30).astype(float)
    return LinearProgram(
        costs=weights,
        rows=weights[None, :],
        least_sums=np.array([weights.sum() / 2 + 0.5]),
        most_sums=np.array([np.inf]),
        least=np.zeros(30),
        most=np.ones(30),
    )


def test_minimize_with_and_without_fractions_finds_the_optimum() -> None:
    optimum = minimize(program())
    assert optimum is not None
    assert (optimum.value, optimum.duals.tolist()) == (1.5, [0.5])
    assigned = minimize_whole(program(), WHOLE, gap=0.0, max_nodes=10)
    assert assigned is not None
    assert (assigned.columns.tolist(), assigned.value, assigned.is_cut_short) == ([2.0, 0.0], 2.0, False)


@pytest.mark.parametrize("impossible", [program(most=0.5), program(least_sum=50.0)])
def test_minimize_of_an_impossible_program_returns_none(impossible: LinearProgram) -> None:
    assert minimize(impossible) is None
    assert minimize_whole(impossible, WHOLE, gap=0.0, max_nodes=10) is None


def test_minimize_of_numbers_that_are_not_finite_is_refused() -> None:
    broken = replace(program(), rows=np.array([[2.0, math.inf]]))
    with pytest.raises(SolverError, match="refused a program"):
        minimize(broken)
    with pytest.raises(SolverError, match="refused a program"):
        minimize_whole(broken, WHOLE, gap=0.0, max_nodes=10)


def test_minimize_that_ends_without_a_result_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here time is up before it begins."""
    monkeypatch.setattr(highs, "_ALWAYS", {"time_limit": 0.0})
    with pytest.raises(InaccurateError, match="Time limit"):
        minimize(program())
    with pytest.raises(InaccurateError, match="Time limit"):
        minimize_whole(hard_program(), np.ones(30), gap=0.0, max_nodes=10)


def test_minimize_with_an_unknown_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(highs, "_ALWAYS", {"no_such_option": 1})
    with pytest.raises(SolverError, match="no_such_option"):
        minimize(program())


def test_minimize_whole_stops_at_the_largest_number_of_nodes() -> None:
    assigned = minimize_whole(hard_program(), np.ones(30), gap=0.0, max_nodes=1)
    assert assigned is not None
    assert assigned.is_cut_short
    assert assigned.gap > 0.0
    assert assigned.value == pytest.approx(hard_program().costs @ assigned.columns)


def test_solving_writes_nothing_to_the_process_output(capfd: pytest.CaptureFixture[str]) -> None:
    """Not even below Python, where HiGHS would print its version. `windlass plan --json` prints one object only."""
    minimize(program())
    minimize_whole(hard_program(), np.ones(30), gap=0.0, max_nodes=1)
    minimize_whole(program(most=0.5), WHOLE, gap=0.0, max_nodes=10)
    assert capfd.readouterr() == ("", "")


def test_kept_program_with_other_limits_equals_a_new_one() -> None:
    kept = KeptProgram(at_most(10.0))
    for most in (10.0, 4.0, 7.0):
        new = minimize(at_most(most))
        assert new is not None
        optimum = kept.minimize(np.array([most]))
        assert (optimum.value, optimum.columns.tolist(), optimum.duals.tolist()) == (
            new.value,
            new.columns.tolist(),
            new.duals.tolist(),
        )


def at_most(most_sum: float) -> LinearProgram:
    """Maximizes x + 2y, where x + y is at most a sum and y is at most 5."""
    return LinearProgram(
        costs=np.array([-1.0, -2.0]),
        rows=np.array([[1.0, 1.0]]),
        least_sums=np.array([-np.inf]),
        most_sums=np.array([most_sum]),
        least=np.zeros(2),
        most=np.array([10.0, 5.0]),
    )
