"""Linear programs, with or without whole numbers, solved by HiGHS.

It is called through its own bindings, because SciPy passes few of its options on. SciPy's import takes half a second.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

# In one thread, because programs are small. Presolving takes as long as it saves, and in HiGHS 1.16 it does not end for
# some programs with whole numbers, whatever the limits of nodes and time.
_ALWAYS = {"threads": 1, "parallel": "off", "presolve": "off"}
_LINEAR = {"solver": "simplex"}
# The first two look for a first assignment. Here the search of the tree finds one soon. After a restart HiGHS 1.16 does
# not always end.
_WHOLE = {
    "mip_heuristic_run_feasibility_jump": False,
    "mip_heuristic_run_rens": False,
    "mip_detect_symmetry": False,
    "mip_allow_restart": False,
}


# No program is unbounded (`LinearProgram`), so the second one says the same.
_INFEASIBLE = (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearProgram:
    """Minimize `costs @ x`, where `rows @ x` and `x` are within their limits. There is a lower bound of the value."""

    costs: "np.ndarray"  # of each column
    rows: "np.ndarray"  # (rows, columns)
    least_sums: "np.ndarray"  # of each row; infinite if there is no limit, as below
    most_sums: "np.ndarray"
    least: "np.ndarray"  # of each column
    most: "np.ndarray"


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """A solution without whole numbers."""

    value: float
    columns: "np.ndarray"
    duals: "np.ndarray"  # by how much the value grows with each row's limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """The best solution with whole numbers that was found."""

    columns: "np.ndarray"  # empty if the search was cut short before it found any
    value: float  # infinite without a solution, as the gap
    gap: float  # relative distance to the best possible value, at most
    is_cut_short: bool  # at the largest number of nodes


class _QuietHighs(highspy.Highs):
    """HiGHS without output. Its first instance in a process would print its version when it is made."""

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]


class SolverError(RuntimeError):
    """HiGHS refused a program or an option, or ended without a result."""


class InaccurateError(SolverError):
    """HiGHS came to no result, because of limited precision."""


def minimize(program: LinearProgram) -> Optimum | None:
    """Returns the optimum. None: there is no solution.

    Raises:
        SolverError: HiGHS refused the program.
        InaccurateError: it ended without a result.
    """
    highs = _run(program, None, _LINEAR)
    return None if highs.getModelStatus() in _INFEASIBLE else _optimum(highs)


class KeptProgram:
    """A program without whole numbers that HiGHS keeps. For other limits it is solved in a fraction of the time."""

    def __init__(self, program: LinearProgram) -> None:
        """Passes the program to HiGHS. Raises SolverError if that refuses it."""
        self._least_sums = program.least_sums
        self._indices = np.arange(len(program.least_sums), dtype=np.int32)
        self._highs = _passed(program, None, _LINEAR)

    def minimize(self, most_sums: "np.ndarray") -> Optimum:
        """Returns the optimum for other largest sums. There must be one.

        Raises:
            InaccurateError: HiGHS ended without a result.
        """
        self._highs.changeRowsBounds(  # type: ignore[attr-defined]
            len(self._indices), self._indices, self._least_sums, most_sums
        )
        _solve(self._highs)
        return _optimum(self._highs)


def minimize_whole(program: LinearProgram, whole: "np.ndarray", *, gap: float, max_nodes: int) -> Assigned | None:
    """Returns a solution in which the columns `whole` have whole numbers. None: there is none.

    `gap`: relative distance to the best possible value that is near enough. `max_nodes`: of the tree that is searched.

    Raises:
        SolverError: HiGHS refused the program.
        InaccurateError: it ended without a result.
    """
    highs = _run(program, whole, {**_WHOLE, "mip_rel_gap": gap, "mip_max_nodes": max_nodes})
    status, info = highs.getModelStatus(), highs.getInfo()
    if status in _INFEASIBLE:
        return None
    _require(highs, highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kSolutionLimit)
    is_cut_short = status == highspy.HighsModelStatus.kSolutionLimit
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        if not is_cut_short:
            raise InaccurateError("HiGHS ended with an optimum that is not within the limits")
        return Assigned(columns=np.zeros(0), value=math.inf, gap=math.inf, is_cut_short=True)
    return Assigned(
        columns=np.array(highs.getSolution().col_value),
        value=info.objective_function_value,
        gap=info.mip_gap,
        is_cut_short=is_cut_short,
    )


def _run(program: LinearProgram, whole: "np.ndarray | None", options: Mapping[str, Any]) -> highspy.Highs:
    highs = _passed(program, whole, options)
    _solve(highs)
    return highs


def _passed(program: LinearProgram, whole: "np.ndarray | None", options: Mapping[str, Any]) -> highspy.Highs:
    highs = _QuietHighs()  # type: ignore[no-untyped-call]
    for name, value in {**_ALWAYS, **options}.items():
        if highs.setOptionValue(name, value) == highspy.HighsStatus.kError:
            raise SolverError(f"HiGHS refused the option {name} = {value!r}; use a version that pyproject.toml allows")
    # A warning says that tiny numbers count as zero.
    if highs.passModel(_model(program, whole)) == highspy.HighsStatus.kError:
        raise SolverError(f"HiGHS refused a program with {program.rows.shape[0]} rows; is a number of it not finite?")
    return highs


def _solve(highs: highspy.Highs) -> None:
    if highs.run() == highspy.HighsStatus.kError:
        raise InaccurateError(f"HiGHS failed with {highs.modelStatusToString(highs.getModelStatus())}")


def _optimum(highs: highspy.Highs) -> Optimum:
    _require(highs, highspy.HighsModelStatus.kOptimal)
    solution = highs.getSolution()
    return Optimum(
        value=highs.getInfo().objective_function_value,
        columns=np.array(solution.col_value),
        duals=np.array(solution.row_dual),
    )


def _require(highs: highspy.Highs, *expected: highspy.HighsModelStatus) -> None:
    """Raises InaccurateError if HiGHS ended with another status."""
    status = highs.getModelStatus()
    if status not in expected:
        raise InaccurateError(f"HiGHS ended with {highs.modelStatusToString(status)}")


def _model(program: LinearProgram, whole: "np.ndarray | None") -> highspy.HighsLp:
    model = highspy.HighsLp()
    model.num_row_, model.num_col_ = program.rows.shape
    model.col_cost_, model.col_lower_, model.col_upper_ = program.costs, program.least, program.most
    model.row_lower_, model.row_upper_ = program.least_sums, program.most_sums
    columns, rows = np.nonzero(program.rows.T)
    matrix = model.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kColwise
    matrix.start_ = np.searchsorted(columns, np.arange(len(program.costs) + 1)).astype(np.int32)
    matrix.index_ = rows.astype(np.int32)
    matrix.value_ = program.rows[rows, columns]
    if whole is not None:
        kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
        model.integrality_ = [kinds[bool(is_whole)] for is_whole in whole]
    return model
