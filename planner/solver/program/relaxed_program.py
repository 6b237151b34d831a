"""Programs without whole numbers, in which some groups of blocks take fractions. HiGHS keeps them for other limits."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from windlass.planner.solver.program.arrays import OptionTable, ProgramArrays, moved_costs
from windlass.planner.solver.program.highs import KeptProgram, LinearProgram
from windlass.planner.solver.program.integer_program import BlockGroup, Buffer, Overflow
from windlass.planner.solver.program.kept_results import kept
from windlass.planner.solver.program.relaxation import options_of, with_buffers

# Programs that are kept for the same groups of blocks.
_MOST_KEPT = 32
# Share of a limit that may be missing in a linear program, because HiGHS computes with limited precision.
PRECISION = 1e-6


def binding_bounds(seconds: "np.ndarray", rows: "np.ndarray") -> "np.ndarray":
    """Returns for each row the bound that needs most without the groups of a program: it is the one that counts."""
    by_need = np.lexsort((seconds, rows))
    binding: np.ndarray = by_need[np.searchsorted(rows[by_need], np.arange(rows.max() + 1), side="right") - 1]
    return binding


@kept(64)
def _kept_of(blocks: tuple[BlockGroup, ...]) -> "OrderedDict[tuple[object, ...], RelaxedProgram]":
    """Returns the kept linear programs for some groups of blocks, by all else that they depend on."""
    return OrderedDict()


class RelaxedProgram:
    """The linear program of some groups, for any amounts of the others.

    Bounds in which the groups have the same seconds are one row. Bytes beyond a limit are allowed, but cost much.
    """

    def __init__(
        self, arrays: ProgramArrays, options: "np.ndarray", nbytes: "np.ndarray", rows_s: "np.ndarray"
    ) -> None:
        """`rows_s`: the seconds of options, and of a moved unit, in each different bound."""
        table, overflow, units = arrays.table, arrays.program.overflow, arrays.units
        num_rows, num_options = len(rows_s), len(options)
        num_tiers, unit = table.num_tiers, 1.0 if overflow is None else units[overflow.source]
        groups = np.unique(table.groups[options])
        # Columns: a count of each option, moved bytes, the step, each tier's missing bytes.
        rows = np.zeros((num_rows + num_tiers + 1 + len(groups), num_options + 2 + num_tiers))
        rows[:num_rows, : num_options + 1] = rows_s
        rows[:num_rows, num_options + 1] = -1.0
        of_tiers = rows[num_rows : num_rows + num_tiers]
        of_tiers[:, :num_options] = nbytes.T / units[:, None]
        of_tiers[:, num_options + 2 :] = -np.eye(num_tiers)
        if overflow is not None:
            of_tiers[overflow.source, num_options] = -1.0
            of_tiers[overflow.target, num_options] = unit / units[overflow.target]
        rows[num_rows + num_tiers, :num_options] = -table.amounts[options, table.movable] / unit
        rows[num_rows + num_tiers, num_options] = 1.0
        rows[num_rows + num_tiers + 1 :, :num_options] = table.groups[options] == groups[:, None]
        self._most_sums = np.concatenate([np.zeros(num_rows + num_tiers + 1), table.counts[groups]])
        work = [*table.amounts[options, table.work], arrays.moved_work * unit]
        costs = np.concatenate([work, [1.0], np.full(num_tiers, arrays.excess_cost)])
        least, most = np.zeros(len(costs)), np.full(len(costs), np.inf)
        least[num_options + 1] = -np.inf
        if overflow is None:
            most[num_options] = 0.0
        least_sums = np.where(np.arange(len(rows)) > num_rows + num_tiers, self._most_sums, -np.inf)
        self._units, self._num_options = units, num_options
        self._program = KeptProgram(
            LinearProgram(
                costs=costs, rows=rows, least_sums=least_sums, most_sums=self._most_sums, least=least, most=most
            )
        )

    def solved(self, needs_s: "np.ndarray", free_nbytes: "np.ndarray") -> "tuple[float, np.ndarray, bool, np.ndarray]":
        """Returns the value, the counts, whether they fit, and the prices of rows and of bytes.

        `needs_s`: the seconds of each row without these groups. `free_nbytes`: left for these groups on each tier.
        """
        num_rows, num_tiers = len(needs_s), len(free_nbytes)
        self._most_sums[:num_rows] = -needs_s
        self._most_sums[num_rows : num_rows + num_tiers] = free_nbytes / self._units
        optimum = self._program.minimize(self._most_sums)
        prices = np.maximum(0.0, -optimum.duals[: num_rows + num_tiers])
        prices[:num_rows] /= prices[:num_rows].sum()
        prices[num_rows:] /= self._units
        missing = optimum.columns[self._num_options + 2 :]
        return optimum.value, optimum.columns[: self._num_options], bool(missing.max() <= PRECISION), prices


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """All of a linear program but its limits."""

    options: "np.ndarray"
    nbytes: "np.ndarray"  # of each option on each tier
    rows: "np.ndarray"  # of each bound: its row in `rows_s`
    rows_s: "np.ndarray"  # (different rows, options and a moved unit)
    groups: tuple[BlockGroup, ...]
    key: tuple[object, ...]  # equal if the programs are


def kept_program(
    arrays: ProgramArrays, others: tuple[int, ...] = (), buffer: int | None = None
) -> "tuple[RelaxedProgram, np.ndarray, np.ndarray]":
    """Returns the linear program of some groups, the row of each bound, and the program's options.

    `others`: the groups; (): all. `buffer`: the one that has all bytes which these groups add to it. With all groups,
    each buffer has the least share of them.
    """
    program = arrays.program
    form = _form(arrays.table, others, program.buffers, buffer, program.overflow, tuple(arrays.units.tolist()))
    programs, key = _kept_of(form.groups), (*form.key, arrays.excess_cost)
    if key not in programs:
        programs[key] = RelaxedProgram(arrays, form.options, form.nbytes, form.rows_s)
        if len(programs) > _MOST_KEPT:
            programs.popitem(last=False)
    programs.move_to_end(key)
    return programs[key], form.rows, form.options


@kept(512)
def _form(
    table: OptionTable,
    others: tuple[int, ...],
    buffers: tuple[Buffer, ...],
    buffer: int | None,
    overflow: Overflow | None,
    units: tuple[float, ...],
) -> _Form:
    unit = 1.0 if overflow is None else units[overflow.source]
    options = table.options_in(others) if others else np.arange(len(table.groups))
    moved_s, moved_work = moved_costs(table, overflow)
    # Bounds in which the groups have the same seconds are one row.
    seconds = np.column_stack([table.amounts[options, : table.num_bounds].T, unit * moved_s])
    rows_s, rows = np.unique(seconds, axis=0, return_inverse=True)
    if not others:
        nbytes = with_buffers(buffers, options_of(table.blocks, len(buffers)))
    else:
        nbytes = table.amounts[options][:, table.nbytes]
        if buffer is not None:
            nbytes = nbytes.copy()
            nbytes[:, buffers[buffer].tier] += table.amounts[options, table.buffer(buffer)]
    return _Form(
        options=options,
        nbytes=nbytes,
        rows=rows.ravel(),
        rows_s=rows_s,
        groups=tuple(table.blocks[group] for group in np.unique(table.groups[options])),
        key=(rows_s.tobytes(), nbytes.tobytes(), units, moved_work, overflow is None),
    )
