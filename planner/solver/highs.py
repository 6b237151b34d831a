"""Linear programs, with or without whole numbers, solved by HiGHS.

It is called through its own bindings. Through SciPy the same programs take several times as long, because it cannot be
told that a solution is of no use. SciPy's import takes half a second.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

# In one thread, because programs are small.
_ALWAYS = {"threads": 1, "parallel": "off"}
# Presolving takes longer than it saves.
_LINEAR = {"presolve": "off", "solver": "simplex"}
# The first two look for a first assignment. Here the search of the tree finds one soon.
_WHOLE = {"mip_heuristic_run_feasibility_jump": False, "mip_heuristic_run_rens": False, "mip_detect_symmetry": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearProgram:
    """Minimize `costs @ x`, where `rows @ x` and `x` are within their limits."""

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
    duals: "np.ndarray"  # by how much the value grows with each row's limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """A solution with whole numbers."""

    columns: "np.ndarray"
    gap: float  # relative distance to the best possible value, at most
    is_cut_short: bool  # at the largest number of nodes


class _QuietHighs(highspy.Highs):
    """HiGHS without output. Its first instance in a process would print its version when it is made."""

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]


class InaccurateError(ArithmeticError):
    """HiGHS came to no result, because of limited precision."""


def minimize(program: LinearProgram) -> Optimum | None:
    """Returns the optimum. None: there is no solution. Raises InaccurateError."""
    highs = _run(program, None, _LINEAR)
    status = highs.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return None
    if status != highspy.HighsModelStatus.kOptimal:
        raise InaccurateError(f"HiGHS ended with {highs.modelStatusToString(status)}")
    return Optimum(
        value=highs.getInfo().objective_function_value,
        duals=np.array(highs.getSolution().row_dual),
    )


def minimize_whole(
    program: LinearProgram,
    whole: "np.ndarray",
    *,
    gap: float,
    max_nodes: int | None = None,
) -> Assigned | None:
    """Returns a solution in which the columns `whole` have whole numbers. None: none was found.

    `gap`: relative distance to the best possible value that is near enough. `max_nodes`: of the tree that is searched.
    """
    nodes = {} if max_nodes is None else {"mip_max_nodes": max_nodes}
    highs = _run(program, whole, {**_WHOLE, "mip_rel_gap": gap, **nodes})
    info, is_cut_short = highs.getInfo(), max_nodes is not None and highs.getInfo().mip_node_count >= max_nodes
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        if is_cut_short:
            return Assigned(columns=np.zeros(0), gap=np.inf, is_cut_short=True)
        return None
    columns = np.array(highs.getSolution().col_value)
    return Assigned(columns=columns, gap=info.mip_gap, is_cut_short=is_cut_short)


def _run(program: LinearProgram, whole: "np.ndarray | None", options: Mapping[str, Any]) -> highspy.Highs:
    highs = _QuietHighs()  # type: ignore[no-untyped-call]
    for name, value in {**_ALWAYS, **options}.items():
        highs.setOptionValue(name, value)
    highs.passModel(_model(program, whole))
    highs.run()
    return highs


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
