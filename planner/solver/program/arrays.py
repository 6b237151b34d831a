"""A program as arrays, in which many assignments are evaluated at once."""

from dataclasses import dataclass

import numpy as np

from windlass.planner.solver.program.integer_program import BlockGroup, Bound, Overflow, Program
from windlass.planner.solver.program.kept_results import kept
from windlass.planner.solver.program.relaxation import bounds_of, options_of, spare_weights

# Share of a limit that an assignment may exceed, because sums of floats are not exact.
_ROUNDING = 1e-9
# What a byte beyond a limit costs, where it is only to be avoided: all of a limit as so many times the longest step.
_EXCESS_COST = 32


# Compared as an object, as groups and bounds are.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptionTable:
    """The options of all blocks. Each has a row of amounts, and an assignment the sum of its blocks' rows.

    The amounts are, in this order: the seconds of each bound, the counted work, the bytes on each tier, the movable
    bytes, and the bytes in each buffer.
    """

    blocks: tuple[BlockGroup, ...]
    num_bounds: int
    num_tiers: int
    counts: "np.ndarray"  # of each group
    groups: "np.ndarray"  # of each option: its group
    starts: "np.ndarray"  # of each group: its first option
    amounts: "np.ndarray"  # (options, amounts)
    weights: "np.ndarray"  # (bounds, parts)
    constants: "np.ndarray"  # of each bound
    spare: "np.ndarray"  # weights of parts in the counted work
    longest_s: float  # the step, if each block takes the option that adds most to it

    @property
    def work(self) -> int:
        """The index of the counted work among the amounts."""
        return self.num_bounds

    @property
    def nbytes(self) -> slice:
        """The indices of the tiers' bytes."""
        return slice(self.num_bounds + 1, self.num_bounds + 1 + self.num_tiers)

    @property
    def movable(self) -> int:
        """The index of the movable bytes."""
        return self.num_bounds + 1 + self.num_tiers

    def buffer(self, index: int) -> int:
        """Returns the index of a buffer's bytes."""
        return self.num_bounds + 2 + self.num_tiers + index

    def options_in(self, groups: "tuple[int, ...]") -> "np.ndarray":
        """Returns the options of some groups."""
        return np.flatnonzero(np.isin(self.groups, groups))


def table_of(program: Program) -> OptionTable:
    """Returns the table of a program, which is made once for all that have the same options and bounds."""
    return _table(program.blocks, program.bounds, len(program.buffers), program.uncounted_parts)


@kept(256)
def _table(
    blocks: tuple[BlockGroup, ...], bounds: tuple[Bound, ...], num_buffers: int, uncounted_parts: tuple[int, ...]
) -> OptionTable:
    options, (weights, constants) = options_of(blocks, num_buffers), bounds_of(bounds)
    spare = spare_weights(weights.shape[1], uncounted_parts)
    seconds = options.seconds @ weights.T
    lengths = [len(group.options) for group in blocks]
    amounts = (seconds, (options.seconds @ spare)[:, None], options.nbytes, options.movable[:, None], options.buffered)
    return OptionTable(
        blocks=blocks,
        num_bounds=len(bounds),
        num_tiers=options.nbytes.shape[1],
        counts=options.counts,
        groups=np.repeat(np.arange(len(lengths)), lengths),
        starts=options.starts,
        amounts=np.concatenate(amounts, axis=1),
        weights=weights,
        constants=constants,
        spare=spare,
        longest_s=float((options.counts @ np.maximum.reduceat(seconds, options.starts, axis=0)).max()),
    )


class ProgramArrays:
    """A program as arrays. An assignment is a count for each option."""

    def __init__(self, program: Program) -> None:
        self.program, self.table = program, table_of(program)
        table, seconds = self.table, np.array(program.seconds)
        always_s = table.weights @ seconds + table.constants
        self.always = np.concatenate(
            [always_s, [table.spare @ seconds], program.nbytes, [0.0], np.zeros(len(program.buffers))]
        )
        self.limits = np.array(program.limits)
        # Powers of two, so that programs with nearly the same limits have the same units. Where the limit is small, the
        # largest bytes count, because HiGHS compares numbers with limited precision.
        largest = np.maximum(program.nbytes, table.amounts[:, table.nbytes].max(axis=0))
        self.units = 2.0 ** np.ceil(np.log2(np.maximum(np.maximum(self.limits, largest), 1.0)))
        self.excess_cost = _EXCESS_COST * 2.0 ** np.ceil(np.log2(max(table.longest_s + always_s.max(), 1e-9)))
        self.moved_s, self.moved_work = moved_costs(table, program.overflow)

    def sums(self, counts: "np.ndarray") -> "np.ndarray":
        """Returns the amounts of assignments."""
        result: np.ndarray = self.always + counts @ self.table.amounts
        return result

    def costs(self, sums: "np.ndarray", *, is_strict: bool = True) -> "np.ndarray":
        """Returns the cost of each row of sums: infinite beyond a limit or, if not `is_strict`, larger.

        The fewest bytes move with which the others fit, because moving takes time.
        """
        table, overflow = self.table, self.program.overflow
        nbytes = self._nbytes(sums)
        step_s, work = sums[:, : table.num_bounds], sums[:, table.work]
        if overflow is not None:
            above = np.maximum(0.0, nbytes[:, overflow.source] - self.limits[overflow.source])
            moved = np.minimum(above, sums[:, table.movable])
            nbytes[:, overflow.source] -= moved
            nbytes[:, overflow.target] += moved
            step_s, work = step_s + moved[:, None] * self.moved_s, work + moved * self.moved_work
        excess = (np.maximum(0.0, nbytes - (1 + _ROUNDING) * self.limits) / self.units).sum(axis=1)
        costs: np.ndarray = step_s.max(axis=1) + work
        return np.where(excess > 0, np.inf, costs) if is_strict else costs + self.excess_cost * excess

    def moved_nbytes(self, counts: "np.ndarray") -> float:
        """Returns the bytes that an assignment moves so that the others fit."""
        overflow, sums = self.program.overflow, self.sums(counts)
        if overflow is None:
            return 0.0
        above = max(0.0, self._nbytes(sums[None])[0, overflow.source] - self.limits[overflow.source])
        return float(min(above, sums[self.table.movable]))

    def _nbytes(self, sums: "np.ndarray") -> "np.ndarray":
        nbytes: np.ndarray = sums[:, self.table.nbytes].copy()
        for index, buffer in enumerate(self.program.buffers):
            nbytes[:, buffer.tier] += np.minimum(sums[:, self.table.buffer(index)], buffer.most_nbytes)
        return nbytes


def moved_costs(table: OptionTable, overflow: Overflow | None) -> "tuple[np.ndarray, float]":
    """Returns the seconds of each bound for a byte that moves, and its counted work."""
    if overflow is None:
        return np.zeros(table.num_bounds), 0.0
    seconds = np.array(overflow.seconds)
    return table.weights @ seconds, float(table.spare @ seconds)
