"""The planner's integer program. It decides how many of a group of equal blocks use which option, for the shortest
step.

A step has *parts* that take time (computing forward, reading from SSDs, ...). Each option (`Option`) of a block adds
seconds to each part and bytes to each tier. The step time is the largest of some *bounds*. A bound is a weighted sum of
parts: all work of one resource, or work that cannot overlap. Every tier has a limit. Most bytes on a tier add up. Some
are in a buffer of limited size, which then counts at most that size.

AutoHete's program (section 3.2) counts the blocks that recompute, offload their params, or offload their optimizer
states. Here the caller defines the options. The solver is HiGHS.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from windlass.planner.solver.program.highs import (
    Assigned,
    InaccurateError,
    LinearProgram,
    SolverError,
    minimize,
    minimize_whole,
)

# Weight of all parts' seconds in the cost. If two assignments have the same step time, the one with less work is
# better.
SPARE_WEIGHT = 1e-4
# Relative gap to the best possible value at which HiGHS stops: an optimum.
OPTIMUM_GAP = 1e-6
# Limits for programs with many nearly equal assignments. A proof would take thousands of nodes, and would change only
# the fourth digit of the step time. After `_MAX_NODES` nodes the wider gap is enough, and after `_MOST_NODES` any gap.
_MAX_NODES = 150
_MOST_NODES = 3000
_WIDE_GAP = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option for one block: the seconds and bytes that it adds to a step."""

    seconds: tuple[float, ...]  # added to each part
    nbytes: tuple[float, ...]  # added to each tier
    movable_nbytes: float = 0.0  # part of these that the overflow may move
    buffered_nbytes: tuple[float, ...] = ()  # added to each buffer, beside `nbytes`; (): nothing


# Groups and bounds are compared as objects, because many programs share them, and their numbers take long to hash.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockGroup:
    """A number of equal blocks, each of which uses one of the options."""

    count: int
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bound:
    """A lower bound of the step time: `constant_s` and the weighted sum of the parts."""

    weights: tuple[float, ...]
    constant_s: float = 0.0
    # It rarely binds. The program is solved without it first, so that programs in which it does not bind keep their
    # solution among equal ones.
    is_rare: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflow:
    """A transfer of bytes from one tier to another, which takes time."""

    source: int  # a tier, as `target`
    target: int
    seconds: tuple[float, ...]  # of each part, per byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A buffer on a tier. It takes the bytes that the options add to it, but at most `most_nbytes`."""

    tier: int
    most_nbytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A complete integer program."""

    blocks: tuple[BlockGroup, ...]
    seconds: tuple[float, ...]  # of each part, independent of the options
    nbytes: tuple[float, ...]  # on each tier, independent of the options
    limits: tuple[float, ...]  # bytes of each tier
    bounds: tuple[Bound, ...]
    overflow: Overflow | None = None
    buffers: tuple[Buffer, ...] = ()
    # The parts whose seconds count only in bounds. They are the same work as other parts, on another resource.
    uncounted_parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A result. `counts`: for each group of blocks, how many use each option."""

    counts: tuple[tuple[int, ...], ...]
    moved_nbytes: float  # by the overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The step time, and the seconds and bytes of an assignment."""

    step_s: float
    seconds: tuple[float, ...]
    nbytes: tuple[float, ...]
    cost: float  # the value that the program minimizes


def outcome_of(program: Program, assignment: Assignment) -> Outcome:
    """Computes an assignment's outcome exactly, even if it exceeds the limits."""
    seconds, nbytes, buffered = list(program.seconds), list(program.nbytes), [0.0] * len(program.buffers)
    for group, counts in zip(program.blocks, assignment.counts, strict=True):
        for option, count in zip(group.options, counts, strict=True):
            for part, each in enumerate(option.seconds):
                seconds[part] += count * each
            for tier, each in enumerate(option.nbytes):
                nbytes[tier] += count * each
            for i, each in enumerate(option.buffered_nbytes):
                buffered[i] += count * each
    for buffer, each in zip(program.buffers, buffered, strict=True):
        nbytes[buffer.tier] += min(each, buffer.most_nbytes)
    if program.overflow is not None:
        nbytes[program.overflow.source] -= assignment.moved_nbytes
        nbytes[program.overflow.target] += assignment.moved_nbytes
        for part, each in enumerate(program.overflow.seconds):
            seconds[part] += assignment.moved_nbytes * each
    step_s = max(
        bound.constant_s + math.fsum(weight * each for weight, each in zip(bound.weights, seconds, strict=True))
        for bound in program.bounds
    )
    counted_s = sum(each for part, each in enumerate(seconds) if part not in program.uncounted_parts)
    cost = step_s + SPARE_WEIGHT * counted_s
    return Outcome(step_s=step_s, seconds=tuple(seconds), nbytes=tuple(nbytes), cost=cost)


def solve(program: Program, *, gap: float = OPTIMUM_GAP, below: float = math.inf) -> Assignment | None:
    """Returns the best assignment that fits. None: none fits, or none costs less than `below`.

    `gap`: relative distance to the optimum that is near enough.

    Raises:
        SolverError: HiGHS came to no result.
    """
    usual = replace(program, bounds=tuple(bound for bound in program.bounds if not bound.is_rare))
    result = _Variables(usual).minimize(gap=gap, below=below)
    if result is not None and outcome_of(program, result[0]).step_s > outcome_of(usual, result[0]).step_s:
        result = _Variables(program).minimize(gap=gap, below=below)
    return None if result is None or outcome_of(program, result[0]).cost >= below else result[0]


def shortfall(program: Program) -> tuple[float, ...]:
    """Returns the bytes missing on each tier if nothing fits, as small a share of the limits as possible."""
    result = _Variables(program).minimize(elastic=range(len(program.limits)))
    assert result is not None, "without limits everything fits"
    return result[1]


def least_assignment(program: Program, tier: int, *, elastic: Collection[int]) -> Assignment | None:
    """Returns the assignment that takes least of a tier, or None. The limits of tiers in `elastic` do not count."""
    result = _Variables(program).minimize(elastic=elastic, only=tier)
    return None if result is None else result[0]


class _Variables:
    """The program as matrices.

    Columns: a count for each option, moved bytes, the step time, each tier's missing bytes, each buffer's bytes, and
    whether each buffer is full. Bytes are in units of their tier's limit, or of its largest amount, because HiGHS
    compares numbers with limited precision.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        options = [option for group in program.blocks for option in group.options]
        largest = np.array([option.nbytes for option in options]).max(axis=0)
        self._units = np.maximum(np.maximum(program.limits, program.nbytes), np.maximum(largest, 1.0))
        overflow, num_parts, num_tiers = program.overflow, len(program.seconds), len(program.limits)
        self._num_options = len(options)
        columns = [option.seconds for option in options] + [overflow.seconds if overflow else (0.0,) * num_parts]
        self._seconds = np.array(columns).T.reshape(num_parts, len(columns))
        self._nbytes = np.zeros((num_tiers, len(options) + 1))
        self._nbytes[:, : len(options)] = np.array([option.nbytes for option in options]).T.reshape(
            num_tiers, len(options)
        )
        # The unit of moved bytes is the source tier's.
        self._moved_unit = self._units[overflow.source] if overflow else 1.0
        self._seconds[:, -1] *= self._moved_unit
        if overflow:
            self._nbytes[overflow.source, -1], self._nbytes[overflow.target, -1] = -self._moved_unit, self._moved_unit
        self._movable = np.array([option.movable_nbytes for option in options]) / self._moved_unit
        nothing = (0.0,) * len(program.buffers)
        buffered = np.array([option.buffered_nbytes or nothing for option in options]).T.reshape(
            len(nothing), len(options)
        )
        for buffer, of_options in zip(program.buffers, buffered, strict=True):
            taken = min(buffer.most_nbytes, of_options.max(initial=0.0))
            self._units[buffer.tier] = max(self._units[buffer.tier], taken)
        units = self._units[[buffer.tier for buffer in program.buffers]]
        self._buffered = buffered / units[:, None]
        self._most_buffered = np.array([buffer.most_nbytes for buffer in program.buffers]) / units

    def minimize(
        self,
        *,
        elastic: Collection[int] = (),
        only: int | None = None,
        gap: float = OPTIMUM_GAP,
        below: float = math.inf,
    ) -> tuple[Assignment, tuple[float, ...]] | None:
        """Minimizes the step time. If tiers are `elastic`, minimizes their missing bytes, of all or of `only` one.

        Returns None if nothing fits, or if the cost is not `below` a limit even with fractions of blocks. `gap`:
        relative distance to the optimum that is near enough. Raises SolverError.
        """
        program, num_options = self._program, self._num_options
        num_tiers, num_buffers = len(program.limits), len(program.buffers)
        step = num_options + 1
        width = step + 1 + num_tiers + 2 * num_buffers
        movable = np.zeros((1, width))
        movable[0, :num_options], movable[0, num_options] = -self._movable, 1.0
        sums, numbers = self._one_option_per_block(width)
        at_most = (self._bounds(width), self._tiers(width), *self._buffers(width), (movable, np.zeros(1)))
        upper_sums = np.concatenate([numbers, *(limits for _, limits in at_most)])
        lower_sums = np.full(len(upper_sums), -np.inf)
        lower_sums[: len(numbers)] = numbers
        rows = np.vstack([sums, *(each for each, _ in at_most)])
        costs = np.zeros(width)
        counted = np.delete(self._seconds, program.uncounted_parts, axis=0)
        costs[: num_options + 1] = SPARE_WEIGHT * counted.sum(axis=0)
        costs[step] = 1.0
        if elastic:
            costs[:] = 0.0
            costs[[step + 1 + tier for tier in (elastic if only is None else (only,))]] = 1.0
        integrality = np.zeros(width)
        integrality[:num_options] = 1
        integrality[width - num_buffers :] = 1
        upper = np.full(width, np.inf)
        upper[:num_options] = [group.count for group in program.blocks for _ in group.options]
        upper[num_options] = np.inf if program.overflow else 0.0
        upper[step + 1 : step + 1 + num_tiers] = 0.0
        upper[width - num_buffers :] = 1.0
        upper[[step + 1 + tier for tier in elastic]] = np.inf
        linear = LinearProgram(
            costs=costs,
            rows=rows,
            least_sums=lower_sums,
            most_sums=upper_sums,
            least=np.zeros(width),
            most=upper,
        )
        # The program's costs do not have those of its constant seconds.
        below -= SPARE_WEIGHT * np.delete(program.seconds, program.uncounted_parts).sum()
        if below < math.inf and _costs_at_least(linear, below):
            return None
        result = _assigned(linear, integrality, gap)
        if result is None:
            return None
        columns = result.columns
        counts = np.rint(columns[:num_options]).astype(int).tolist()
        lengths = [len(group.options) for group in program.blocks]
        starts = np.cumsum([0, *lengths]).tolist()
        by_kind = tuple(tuple(counts[start : start + n]) for start, n in zip(starts, lengths, strict=False))
        lacking = columns[step + 1 : step + 1 + num_tiers] * self._units
        moved = float(columns[num_options] * self._moved_unit)
        return Assignment(counts=by_kind, moved_nbytes=moved), tuple(lacking.tolist())

    # Each of the following returns rows, and the largest sum of each.

    def _one_option_per_block(self, width: int) -> "tuple[np.ndarray, np.ndarray]":
        rows = np.zeros((len(self._program.blocks), width))
        start = 0
        for row, group in enumerate(self._program.blocks):
            rows[row, start : start + len(group.options)] = 1.0
            start += len(group.options)
        return rows, np.array([group.count for group in self._program.blocks], dtype=float)

    def _bounds(self, width: int) -> "tuple[np.ndarray, np.ndarray]":
        program, num_columns = self._program, self._num_options + 1
        weights = np.array([bound.weights for bound in program.bounds])
        rows = np.zeros((len(program.bounds), width))
        rows[:, :num_columns] = weights @ self._seconds
        rows[:, num_columns] = -1.0
        constants = [bound.constant_s for bound in program.bounds]
        return rows, -(weights @ np.array(program.seconds) + constants)

    def _tiers(self, width: int) -> "tuple[np.ndarray, np.ndarray]":
        program, num_columns = self._program, self._num_options + 1
        num_tiers, num_buffers = len(program.limits), len(program.buffers)
        first_buffer = num_columns + 1 + num_tiers
        rows = np.zeros((num_tiers, width))
        rows[:, :num_columns] = self._nbytes / self._units[:, None]
        rows[:, num_columns + 1 : first_buffer] = -np.eye(num_tiers)
        for buffer in range(num_buffers):
            rows[program.buffers[buffer].tier, first_buffer + buffer] = 1.0
        free = (np.array(program.limits) - np.array(program.nbytes)) / self._units
        return rows, free

    def _buffers(self, width: int) -> "list[tuple[np.ndarray, np.ndarray]]":
        """The constraints of buffers: each holds all bytes added to it, or it is full and holds its maximum."""
        num = len(self._program.buffers)
        if not num:
            return []
        blocks = self._program.blocks
        starts = np.cumsum([0, *(len(group.options) for group in blocks[:-1])])
        most_there = np.maximum.reduceat(self._buffered, starts, axis=1) @ [group.count for group in blocks]
        all_there = np.zeros((num, width))
        all_there[:, : self._num_options] = self._buffered
        all_there[:, width - 2 * num : width - num] = -np.eye(num)
        all_there[:, width - num :] = -np.diag(most_there)
        full = np.zeros((num, width))
        full[:, width - 2 * num : width - num] = -np.eye(num)
        full[:, width - num :] = np.diag(self._most_buffered)
        rows = np.vstack([all_there, full])
        # The "full" columns are 0 or 1 to limited precision only. Scale the rows so that this error stays small.
        rows /= np.maximum(np.abs(rows).max(axis=1, keepdims=True), 1.0)
        return [(rows, np.zeros(2 * num))]


def _assigned(linear: LinearProgram, whole: "np.ndarray", gap: float) -> Assigned | None:
    """Returns the best assignment, as far as it is found in so many nodes. None: none fits."""
    first = minimize_whole(linear, whole, gap=gap, max_nodes=_MAX_NODES)
    if first is None or not first.is_cut_short or first.gap <= _WIDE_GAP:
        return first
    second = minimize_whole(linear, whole, gap=_WIDE_GAP, max_nodes=_MOST_NODES)
    if second is not None and second.value < first.value:
        return second
    if first.value < math.inf:
        return first
    if second is None:
        return None
    raise SolverError(f"HiGHS found no assignment in {_MOST_NODES} nodes, and no proof that there is none")


def _costs_at_least(linear: LinearProgram, below: float) -> bool:
    """Returns whether no solution costs less than `below`, not even one with fractions of blocks."""
    try:
        optimum = minimize(linear)
    except InaccurateError:
        return False
    return optimum is None or optimum.value >= below
