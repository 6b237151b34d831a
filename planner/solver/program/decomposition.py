"""The solution of a program in two parts: few counts are listed, and the others follow from linear programs.

A group of blocks has either few options, as for its states, or many, as for its activations. All counts of the groups
with few options can be listed. For each of them, a linear program tells the best fractions of the other blocks. Its
prices give a lower bound for all other counts as well (see `relaxation`), and for other programs with the same options.
So a few linear programs exclude nearly all counts, and rounding their solutions gives good assignments. HiGHS keeps
these programs, of which only limits change. They take a tenth of a millisecond, where a search of the tree takes ten.

Source: Benders, "Partitioning procedures for solving mixed-variables programming problems" (1962).
"""

import itertools
import math
from dataclasses import dataclass, field, replace

import numpy as np

from windlass.planner.solver.program.arrays import ProgramArrays
from windlass.planner.solver.program.highs import SolverError
from windlass.planner.solver.program.integer_program import (
    OPTIMUM_GAP,
    Assignment,
    BlockGroup,
    Program,
    outcome_of,
    solve,
)
from windlass.planner.solver.program.kept_results import kept
from windlass.planner.solver.program.relaxation import options_of, relaxed, with_buffers
from windlass.planner.solver.program.relaxed_program import PRECISION, binding_bounds, kept_program
from windlass.planner.solver.program.rounding import rounded

# Maximum number of options of a group whose counts are listed.
_FEW_OPTIONS = 6
# Limits of the work for one program, above which HiGHS searches its tree: a list's length, and linear programs.
_MOST_LISTED, _MOST_SOLVED = 10_000, 24
# The same of a list, if no assignment is known that fits. Then most linear programs may lack bytes.
_MOST_LISTED_BLINDLY = 2_000
# Number of bounds of counts that are computed at once.
_RAISED_AT_ONCE = 32_000
# Number of prices by which counts are excluded before they are listed.
_LISTED_BY = 4
# If no assignment is known, all are listed whose bound is larger than the smallest one by this share, then by more.
_FIRST_SLACK, _SLACK_FACTOR, _MOST_SLACK = 1.5e-3, 4.0, 0.5
# Prices, assignments and proofs that are kept for programs with the same options.
_MOST_PRICES, _MOST_ASSIGNMENTS, _MOST_PROOFS = 48, 16, 16
# Share by which the limits of ample tiers are larger in a proof than in its program.
_MORE_AMPLE = 1 / 16
# Share of the bound by which an assignment may cost more, if no limit is known.
_USUAL_COST = 0.02
# Share of the best cost. If a bound of counts whose rounding was no better is smaller by more, the tree is searched.
_ROUNDING_GAP = 5e-4


class _TooManyError(Exception):
    """The program cannot be solved in parts with little work."""


def solve_in_parts(program: Program, *, gap: float = OPTIMUM_GAP, below: float = math.inf) -> Assignment | None:
    """Returns the best assignment that fits. None: none fits, or none that costs less than `below` was found.

    `gap`: relative distance to the optimum that is near enough. Fractions of the groups with many options are rounded,
    which may add `_ROUNDING_GAP`. HiGHS searches the tree of a program that takes more work, or if rounding is worse.

    Raises:
        SolverError: HiGHS came to no result.
    """
    try:
        parts = _Decomposition(program)
    except _TooManyError:
        return solve(program, gap=gap, below=below)
    try:
        return parts.solved(gap, below)
    except (_TooManyError, SolverError):
        return parts.solved_by_tree(gap, below)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Proof:
    """A program of which no assignment costs less than `limit`, by all that programs with the same options differ in.

    Within its gap: a search with a smaller one may find some that do. Seconds are of each bound, and the counted work.
    """

    limit: float
    gap: float
    seconds: "np.ndarray"  # (options, seconds)
    always_s: "np.ndarray"
    moved_s: "np.ndarray"  # of a byte; infinite without an overflow
    buffers: "np.ndarray"  # the most bytes in each
    free: "np.ndarray"  # bytes of each tier

    def holds_for(self, other: "_Proof") -> bool:
        """Returns whether no assignment of another program costs less than the other's limit either."""
        return (
            other.limit <= self.limit
            and self.gap <= other.gap
            and bool((other.free <= self.free).all())
            and bool((other.buffers >= self.buffers).all())
            and bool((other.always_s >= self.always_s).all())
            and bool((other.moved_s >= self.moved_s).all())
            and bool((other.seconds >= self.seconds).all())
        )


@dataclass(frozen=True, slots=True)
class _Known:
    """Prices, assignments and proofs of programs with the same options."""

    prices: "list[np.ndarray]" = field(default_factory=list)  # of a second of each bound, then of a byte of each tier
    assignments: "list[np.ndarray]" = field(default_factory=list)
    proofs: list[_Proof] = field(default_factory=list)


@kept(128)
def _known_of(blocks: tuple[BlockGroup, ...], num_bounds: int) -> _Known:
    return _Known()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounds:
    """Lower bounds of all assignments by each of several prices: a sum over the listed counts, and a constant."""

    prices: "np.ndarray"  # (prices, bounds + tiers)
    of_listed: "np.ndarray"  # of each listed option (prices, options)
    constants: "np.ndarray"  # (prices, ways in which the buffer of the other groups may be filled)
    values: "np.ndarray"  # of the whole program

    def of_prices(self, indices: "np.ndarray") -> "_Bounds":
        """Returns the bounds by some of the prices."""
        return _Bounds(
            prices=self.prices[indices],
            of_listed=self.of_listed[indices],
            constants=self.constants[indices],
            values=self.values[indices],
        )


class _Decomposition:
    """The search for the best assignment of one program."""

    def __init__(self, program: Program) -> None:
        self._arrays = arrays = ProgramArrays(program)
        self._table = table = arrays.table
        numbers = [len(group.options) for group in program.blocks]
        # Linear programs move bytes of the other groups only.
        movable = table.amounts[:, table.movable] * (program.overflow is not None)
        is_movable = np.maximum.reduceat(movable, table.starts) > 0
        is_listed = [number <= _FEW_OPTIONS and not moves for number, moves in zip(numbers, is_movable, strict=True)]
        self._listed = tuple(group for group, is_few in enumerate(is_listed) if is_few)
        self._others = tuple(group for group, is_few in enumerate(is_listed) if not is_few)
        if not self._listed or not self._others:
            raise _TooManyError
        self._listed_options, self._other_options = map(table.options_in, (self._listed, self._others))
        of_others = table.amounts[self._other_options]
        buffers = [index for index in range(len(program.buffers)) if of_others[:, table.buffer(index)].any()]
        if len(buffers) > 1:
            raise _TooManyError
        # The buffer that the other groups use. It is full, or it has all bytes that options add to it.
        self._buffer = buffers[0] if buffers else None
        self._known = _known_of(program.blocks, table.num_bounds)
        self._best, self._best_cost = np.zeros(0), math.inf
        # Of the linear program of all groups: its value, and what a block costs more with each option.
        self._value, self._more_cost = -math.inf, np.zeros(len(table.groups))
        self._is_useful = np.ones(len(table.groups), dtype=bool)
        self._is_ample = np.zeros(table.num_tiers, dtype=bool)  # the tiers of which more bytes would save nothing
        self._num_solved = 0
        self._least_dropped = math.inf  # bound of counts that were dropped without a proof that they are no better

    def solved(self, gap: float, below: float) -> Assignment | None:
        """See `solve_in_parts`. Raises _TooManyError."""
        if self._known.prices and self._bounds().values.max() >= below:
            return None
        if below < math.inf and self._is_proven(self._proof(gap, below)):
            return None
        if self._known.assignments:
            costs = self._arrays.costs(self._arrays.sums(np.array(self._known.assignments)))
            if costs.min() < math.inf:
                self._best, self._best_cost = self._known.assignments[int(costs.argmin())], float(costs.min())
        try:
            if not self._relax_all(below):
                return None
            bounds = self._bounds()
            slack, limit = _FIRST_SLACK, -math.inf
            while limit < (most := self._limit(gap, below)):
                if slack > _MOST_SLACK:
                    raise _TooManyError
                limit = min(most, (1 + slack) * bounds.values.max())
                self._search(bounds, limit, gap)
                slack *= _SLACK_FACTOR
        finally:
            del self._known.prices[:-_MOST_PRICES]
        if self._least_dropped < self._limit(gap, below):
            raise _TooManyError
        return self._assignment() if self._best_cost < below else None

    def solved_by_tree(self, gap: float, below: float) -> Assignment | None:
        """Returns the same by a search of the tree, among the options that may be part of a better assignment.

        Raises SolverError.
        """
        limit = self._limit(gap, below)
        if not self._is_proven(self._proof(gap, limit)):
            program = self._arrays.program
            # With more bytes of the tiers that are ample, so that a proof holds for programs with smaller buffers, too.
            limits = np.where(self._is_ample, (1 + _MORE_AMPLE) * self._arrays.limits, self._arrays.limits)
            ample = replace(program, limits=tuple(limits.tolist()))
            found = self._by_tree(ample, gap, limit)
            if found is None:
                self._prove(self._proof(gap, limit, limits))
            elif self._is_ample.any():
                # With the program's own limits it may not fit, or only if more bytes are moved.
                own_cost, ample_cost = (
                    float(arrays.costs(arrays.sums(found)[None])[0]) for arrays in (self._arrays, ProgramArrays(ample))
                )
                if own_cost >= limit or own_cost > (1 + gap) * ample_cost:
                    found = self._by_tree(program, gap, limit)
            if found is not None:
                self._best = found
                self._best_cost = outcome_of(program, self._assignment()).cost
        return self._assignment() if self._best_cost < below else None

    def _by_tree(self, program: Program, gap: float, limit: float) -> "np.ndarray | None":
        """Returns the counts of the best assignment that costs less than a limit. Raises SolverError."""
        is_useful = self._more_cost < limit - self._value
        by_group = np.split(is_useful, self._table.starts[1:])
        blocks = tuple(
            replace(group, options=tuple(itertools.compress(group.options, is_kept)))
            for group, is_kept in zip(program.blocks, by_group, strict=True)
        )
        if not all(group.options for group in blocks):
            return None
        found = solve(replace(program, blocks=blocks), gap=gap, below=limit)
        if found is None:
            return None
        counts = np.zeros(len(is_useful))
        counts[is_useful] = np.concatenate(found.counts)
        return counts

    def _proof(self, gap: float, limit: float, limits: "np.ndarray | None" = None) -> _Proof:
        """Returns what there would be to prove: no assignment costs less. `limits`: other ones of bytes."""
        table, arrays = self._table, self._arrays
        limits = arrays.limits if limits is None else limits
        has_overflow = arrays.program.overflow is not None
        moved_s = np.append(arrays.moved_s, arrays.moved_work) if has_overflow else np.array([math.inf])
        return _Proof(
            limit=limit,
            gap=gap,
            seconds=table.amounts[:, : table.work + 1],
            always_s=arrays.always[: table.work + 1],
            moved_s=moved_s,
            buffers=np.array([buffer.most_nbytes for buffer in arrays.program.buffers]),
            free=limits - arrays.always[table.nbytes],
        )

    def _is_proven(self, proof: _Proof) -> bool:
        return any(known.holds_for(proof) for known in self._known.proofs)

    def _prove(self, proof: _Proof) -> None:
        self._known.proofs.append(proof)
        del self._known.proofs[:-_MOST_PROOFS]

    def _limit(self, gap: float, below: float) -> float:
        return min(below, (1 - gap) * self._best_cost)

    def _try(self, counts: "np.ndarray") -> None:
        cost = float(self._arrays.costs(self._arrays.sums(counts)[None])[0])
        if cost < self._best_cost:
            self._best, self._best_cost = counts, cost

    def _assignment(self) -> Assignment:
        known, counts = self._known.assignments, self._best
        if not any(counts is each for each in known):
            known.append(counts)
            del known[:-_MOST_ASSIGNMENTS]
        by_group = np.split(counts.astype(int), self._table.starts[1:])
        return Assignment(
            counts=tuple(tuple(each.tolist()) for each in by_group), moved_nbytes=self._arrays.moved_nbytes(counts)
        )

    # --- bounds -----------------------------------------------------------------------------------------------------

    def _bounds(self, prices: "np.ndarray | None" = None) -> _Bounds:
        """Returns the bounds by some prices; None: by all known ones."""
        table = self._table
        every = np.array(self._known.prices) if prices is None else prices
        costs, constants = self._priced(every)
        of_others, other_groups = costs[:, self._other_options], table.groups[self._other_options]
        starts, counts = np.searchsorted(other_groups, self._others), table.counts[list(self._others)]
        ways = [of_others]
        if self._buffer is not None:
            tier = self._arrays.program.buffers[self._buffer].tier
            buffered = table.amounts[self._other_options, table.buffer(self._buffer)]
            ways = [of_others + every[:, table.num_bounds + tier, None] * buffered, of_others]
        of_ways = np.stack([np.minimum.reduceat(way, starts, axis=1) @ counts + constants for way in ways], axis=1)
        of_listed = costs[:, self._listed_options]
        listed_starts = np.searchsorted(table.groups[self._listed_options], self._listed)
        least = np.minimum.reduceat(of_listed, listed_starts, axis=1) @ table.counts[list(self._listed)]
        return _Bounds(prices=every, of_listed=of_listed, constants=of_ways, values=least + of_ways.min(axis=1))

    def _priced(self, prices: "np.ndarray") -> "tuple[np.ndarray, np.ndarray]":
        """Returns the cost of each option by each price, without buffers, and that of what is always there."""
        table, arrays, overflow = self._table, self._arrays, self._arrays.program.overflow
        of_seconds, of_bytes = prices[:, : table.num_bounds], prices[:, table.num_bounds :]
        amounts, always = table.amounts, arrays.always
        costs = of_seconds @ amounts[:, : table.num_bounds].T + amounts[:, table.work]
        costs += of_bytes @ amounts[:, table.nbytes].T
        if overflow is not None:
            # Bytes move where that is cheaper than their place.
            move = of_seconds @ arrays.moved_s + arrays.moved_work + of_bytes[:, overflow.target]
            costs += np.minimum(0.0, move - of_bytes[:, overflow.source])[:, None] * amounts[:, table.movable]
        constants = of_seconds @ always[: table.num_bounds] + always[table.work]
        return costs, constants - of_bytes @ (arrays.limits - always[table.nbytes])

    def _buffered(self, listed: "np.ndarray") -> "np.ndarray":
        """Returns the bytes in buffers of each listed assignment, without those of the other groups.

        They are by way in which the buffer of these is filled, and by tier.
        """
        table = self._table
        nbytes = np.zeros((len(listed), 1 if self._buffer is None else 2, table.num_tiers))
        for index, buffer in enumerate(self._arrays.program.buffers):
            of_listed = listed @ table.amounts[self._listed_options, table.buffer(index)]
            if index == self._buffer:
                nbytes[:, 0, buffer.tier] += of_listed
                nbytes[:, 1, buffer.tier] += buffer.most_nbytes
            else:
                nbytes[:, :, buffer.tier] += np.minimum(of_listed, buffer.most_nbytes)[:, None]
        return nbytes

    # --- linear programs --------------------------------------------------------------------------------------------

    def _relax_all(self, below: float) -> bool:
        """Solves for fractions of all blocks. Returns whether any assignment fits and costs less than `below`.

        Raises _TooManyError: only the tree tells.
        """
        table, arrays = self._table, self._arrays
        none, nothing = np.zeros(len(table.groups)), np.zeros(table.num_tiers)
        value, fractions, fits, prices = self._relaxed(None, none, nothing)
        if value >= below:
            return False
        if not fits:
            # Missing bytes have a price, at which they may be cheaper than the options that need none.
            if relaxed(arrays.program) is None:
                return False
            raise _TooManyError
        # An option is of no use if a block with it costs more than all that is left to the limit.
        costs = self._priced(prices[None])[0][0]
        options = options_of(arrays.program.blocks, len(arrays.program.buffers))
        costs = costs + (with_buffers(arrays.program.buffers, options) - options.nbytes) @ prices[table.num_bounds :]
        self._is_ample = prices[table.num_bounds :] <= 0
        self._more_cost, self._value = costs - np.minimum.reduceat(costs, table.starts)[table.groups], value
        self._is_useful = self._more_cost <= min(below, self._best_cost, (1 + _USUAL_COST) * value) - value
        self._try(rounded(arrays, fractions, range(len(table.counts)), self._is_useful))
        return True

    def _relaxed(
        self, way: int | None, counts: "np.ndarray", buffered: "np.ndarray"
    ) -> "tuple[float, np.ndarray, bool, np.ndarray]":
        """Solves for the best fractions of the other groups beside `counts`, and keeps the prices.

        `way`: in which their buffer is filled; None: for the fractions of all groups. Returns the program's value, the
        counts of all options, whether they fit, and the prices.
        """
        table, arrays = self._table, self._arrays
        if way is None:
            kept, rows, options = kept_program(arrays)
        else:
            kept, rows, options = kept_program(arrays, self._others, None if way else self._buffer)
        sums = arrays.sums(counts)
        seconds = sums[: table.num_bounds]
        binding = binding_bounds(seconds, rows)
        free = arrays.limits - sums[table.nbytes] - buffered
        value, fractions, fits, duals = kept.solved(seconds[binding], free)
        prices = np.zeros(table.num_bounds + table.num_tiers)
        prices[binding], prices[table.num_bounds :] = duals[: len(binding)], duals[len(binding) :]
        self._known.prices.append(prices)
        all_counts = counts.copy()
        all_counts[options] = fractions
        return value + float(sums[table.work]), all_counts, fits, prices

    def _search(self, bounds: _Bounds, limit: float, gap: float) -> None:
        """Tries all listed counts whose bound is below the limit, the smallest first."""
        order = np.argsort(-bounds.values)
        listed = self._listed_below(bounds.of_prices(order[:_LISTED_BY]), limit)
        buffered = self._buffered(listed)
        least: np.ndarray = np.full(buffered.shape[:2], -np.inf)
        # Few prices at once for long lists, because the first ones exclude most of the counts.
        start = 0
        while len(listed) and start < len(order):
            number = max(1, _RAISED_AT_ONCE // least.size)
            least = self._raised(least, listed, buffered, bounds.of_prices(order[start : start + number]))
            listed, buffered, least = _below(limit, listed, buffered, least)
            start += number
        while len(listed):
            at, way = divmod(int(least.argmin()), least.shape[1])
            self._num_solved += 1
            if self._num_solved > _MOST_SOLVED:
                raise _TooManyError
            counts = np.zeros(len(self._table.groups))
            counts[self._listed_options] = listed[at]
            value, fractions, fits, prices = self._relaxed(way, counts, buffered[at, way])
            least = self._raised(least, listed, buffered, self._bounds(prices[None]))
            if fits and value < limit:
                self._try(rounded(self._arrays, fractions, self._others, self._is_useful))
                limit = min(limit, (1 - gap) * self._best_cost)
            # Rounding may miss better assignments with these counts. If bytes are missing, some may fit all the same.
            self._least_dropped = min(self._least_dropped, value / (1 - _ROUNDING_GAP) if fits else value)
            least[at, way] = np.inf
            listed, buffered, least = _below(limit, listed, buffered, least)

    @staticmethod
    def _raised(least: "np.ndarray", listed: "np.ndarray", buffered: "np.ndarray", bounds: _Bounds) -> "np.ndarray":
        """Returns the bounds of listed counts, raised to those by some prices."""
        num_ways, num_tiers = buffered.shape[1:]
        of_listed = listed @ bounds.of_listed.T
        raised = least
        for way in range(num_ways):
            by_price = of_listed + buffered[:, way] @ bounds.prices[:, -num_tiers:].T + bounds.constants[:, way]
            raised[:, way] = np.maximum(least[:, way], by_price.max(axis=1))
        return raised

    def _listed_below(self, bounds: _Bounds, limit: float) -> "np.ndarray":
        """Returns all counts of the listed groups whose bounds are below the limit, and whose bytes fit.

        `bounds`: by few prices, because each of them takes time. Raises _TooManyError.
        """
        if limit <= 0:  # a step without work, of which no share can be left
            raise _TooManyError
        table, arrays = self._table, self._arrays
        most_listed = _MOST_LISTED if self._best_cost < math.inf else _MOST_LISTED_BLINDLY
        groups = table.groups[self._listed_options]
        starts = np.searchsorted(groups, self._listed)
        least = np.minimum.reduceat(bounds.of_listed, starts, axis=1)
        # Each block takes a share of what is left to the limit by each price, and of the free bytes of each tier.
        more = (bounds.of_listed - least[:, np.searchsorted(self._listed, groups)]) / limit
        nbytes = table.amounts[self._listed_options][:, table.nbytes].T / arrays.units[:, None]
        shares = np.concatenate([more, nbytes])
        free = (arrays.limits - arrays.always[table.nbytes]) / arrays.units
        left = np.concatenate([1 - bounds.values / limit, free])[:, None]
        listed = np.zeros((len(groups), int((left >= 0).all())))
        for group in sorted(self._listed, key=lambda group: -table.counts[group]):
            # The last one takes the other blocks. It is the cheapest, so that few are too expensive then.
            *firsts, last = np.flatnonzero(groups == group)[np.argsort(-more[0, groups == group])]
            num_blocks = np.full(listed.shape[1], table.counts[group])
            for option in firsts:
                takes = shares[:, option] > 0
                most = np.floor((left[takes] / shares[takes, option, None]).min(axis=0, initial=np.inf) + PRECISION)
                most = np.maximum(0.0, most)  # what is left may be a little less than nothing, by rounding
                number = np.minimum(most, num_blocks).astype(np.int64) + 1
                if (total := int(number.sum())) > most_listed:
                    raise _TooManyError
                rows = np.repeat(np.arange(len(number)), number)
                values = np.arange(total) - (np.cumsum(number) - number)[rows]
                listed, num_blocks = listed[:, rows], num_blocks[rows] - values
                listed[option] = values
                left = left[:, rows] - shares[:, option, None] * values
            left = left - shares[:, last, None] * num_blocks
            listed[last] = num_blocks
            fits = (left >= -PRECISION).all(axis=0)
            listed, left = listed[:, fits], np.maximum(0.0, left[:, fits])
        result: np.ndarray = np.ascontiguousarray(listed.T)
        return result


def _below(
    limit: float, listed: "np.ndarray", buffered: "np.ndarray", least: "np.ndarray"
) -> "tuple[np.ndarray, np.ndarray, np.ndarray]":
    """Returns the listed counts with a bound below the limit, with their bytes in buffers and their bounds."""
    is_below = least[:, 0] < limit
    for way in range(1, least.shape[1]):
        is_below |= least[:, way] < limit
    return (listed, buffered, least) if is_below.all() else (listed[is_below], buffered[is_below], least[is_below])
