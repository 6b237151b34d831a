"""Lower bounds of an integer program's value, which cost far less than its solution.

- Without limits: for each bound of the step, every block takes the option that adds least to it.
- With prices: a second of each bound and a byte of each tier have a price, and every block takes the cheapest option.
  That is a lower bound whatever the prices are (Lagrange's relaxation). The best prices are those of the program
  without the condition that counts are whole numbers. They are good for all programs that differ little.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from windlass.planner.solver.program.highs import InaccurateError, LinearProgram, minimize
from windlass.planner.solver.program.integer_program import SPARE_WEIGHT, BlockGroup, Bound, Buffer, Program
from windlass.planner.solver.program.kept_results import kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The prices of a program's limits, in seconds of the step."""

    bounds: "np.ndarray"  # of a second of each bound; their sum is 1
    tiers: "np.ndarray"  # of a byte of each tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of all blocks as matrices, with a row for each option."""

    counts: "np.ndarray"  # of each group of blocks
    starts: "np.ndarray"  # the first option of each group
    seconds: "np.ndarray"
    nbytes: "np.ndarray"
    movable: "np.ndarray"
    buffered: "np.ndarray"
    most_buffered: tuple[float, ...]  # the bytes in each buffer, if as many as possible are there


@kept(256)
def options_of(blocks: tuple[BlockGroup, ...], num_buffers: int) -> Options:
    """Returns the options of some groups, as matrices."""
    options = [option for group in blocks for option in group.options]
    nothing = (0.0,) * num_buffers
    counts = np.array([group.count for group in blocks], dtype=float)
    starts = np.cumsum([0, *(len(group.options) for group in blocks[:-1])])
    buffered = np.array([option.buffered_nbytes or nothing for option in options]).reshape(len(options), num_buffers)
    return Options(
        counts=counts,
        starts=starts,
        seconds=np.array([option.seconds for option in options]),
        nbytes=np.array([option.nbytes for option in options]),
        movable=np.array([option.movable_nbytes for option in options]),
        buffered=buffered,
        most_buffered=tuple((counts @ np.maximum.reduceat(buffered, starts, axis=0)).tolist()),
    )


def least_cost(program: Program) -> float:
    """Returns a lower bound of a program's value that ignores its limits."""
    options = options_of(program.blocks, len(program.buffers))
    weights, constants = bounds_of(program.bounds)
    spare = spare_weights(len(program.seconds), program.uncounted_parts)
    by_bound = np.minimum.reduceat(options.seconds @ weights.T, options.starts, axis=0)  # (groups, bounds)
    work_s = np.minimum.reduceat(options.seconds @ spare, options.starts)
    seconds = np.array(program.seconds)
    step_s = (options.counts @ by_bound + weights @ seconds + constants).max()
    return float(step_s + options.counts @ work_s + spare @ seconds)


def priced_cost(program: Program, prices: Prices) -> float:
    """Returns a lower bound of a program's value from prices of another program with the same kinds of bounds."""
    options = options_of(program.blocks, len(program.buffers))
    weights, constants = bounds_of(program.bounds)
    per_second = prices.bounds @ weights + spare_weights(len(program.seconds), program.uncounted_parts)  # of each part
    costs = options.seconds @ per_second + with_buffers(program.buffers, options) @ prices.tiers
    if (overflow := program.overflow) is not None:
        move = float(np.array(overflow.seconds) @ per_second) + prices.tiers[overflow.target]
        # Bytes move where that is cheaper than their place.
        costs += min(0.0, move - prices.tiers[overflow.source]) * options.movable
    least = options.counts @ np.minimum.reduceat(costs, options.starts)
    free = np.array(program.limits) - np.array(program.nbytes)
    always = per_second @ np.array(program.seconds) + prices.bounds @ constants
    return float(least + always - prices.tiers @ free)


def relaxed(program: Program) -> tuple[float, Prices] | None:
    """Returns a lower bound of the program's value, with its prices. Returns None if nothing fits."""
    options = options_of(program.blocks, len(program.buffers))
    weights, constants = bounds_of(program.bounds)
    seconds, free = np.array(program.seconds), np.array(program.limits) - np.array(program.nbytes)
    if _is_short(program, options, free):
        return None
    num_options, num_bounds, num_tiers = len(options.seconds), len(weights), len(program.limits)
    units = np.maximum(np.maximum(program.limits, program.nbytes), 1.0)  # HiGHS compares with limited precision
    nbytes = with_buffers(program.buffers, options)
    overflow, spare = program.overflow, spare_weights(len(program.seconds), program.uncounted_parts)
    unit = units[overflow.source] if overflow is not None else 1.0
    moved = np.zeros(len(seconds)) if overflow is None else unit * np.array(overflow.seconds)
    # Columns: a count of each option, moved bytes, the step.
    rows = np.zeros((num_bounds + num_tiers + 1, num_options + 2))
    rows[:num_bounds, :num_options] = weights @ options.seconds.T
    rows[:num_bounds, num_options] = weights @ moved
    rows[:num_bounds, num_options + 1] = -1.0
    rows[num_bounds:-1, :num_options] = nbytes.T / units[:, None]
    if overflow is not None:
        rows[num_bounds + overflow.source, num_options] = -1.0
        rows[num_bounds + overflow.target, num_options] = unit / units[overflow.target]
    rows[-1, :num_options], rows[-1, num_options] = -options.movable / unit, 1.0
    limits = np.concatenate([-(weights @ seconds + constants), free / units, [0.0]])
    equal = np.zeros((len(options.counts), num_options + 2))
    for group, (start, stop) in enumerate(zip(options.starts, [*options.starts[1:], num_options], strict=True)):
        equal[group, start:stop] = 1.0
    linear = LinearProgram(
        costs=np.concatenate([options.seconds @ spare, [moved @ spare, 1.0]]),
        rows=np.vstack([rows, equal]),
        least_sums=np.concatenate([np.full(len(limits), -np.inf), options.counts]),
        most_sums=np.concatenate([limits, options.counts]),
        least=np.concatenate([np.zeros(num_options + 1), [-np.inf]]),
        most=np.concatenate([np.full(num_options, np.inf), [np.inf if overflow is not None else 0.0, np.inf]]),
    )
    try:
        optimum = minimize(linear)
    except InaccurateError:  # the bound without limits holds in any case
        of_bounds = np.zeros(num_bounds)
        of_bounds[0] = 1.0
        return least_cost(program), Prices(bounds=of_bounds, tiers=np.zeros(num_tiers))
    if optimum is None:
        return None
    duals = np.maximum(0.0, -optimum.duals)
    of_bounds = duals[:num_bounds] / duals[:num_bounds].sum()
    prices = Prices(bounds=of_bounds, tiers=duals[num_bounds : num_bounds + num_tiers] / units)
    return max(priced_cost(program, prices), least_cost(program)), prices


def _is_short(program: Program, options: Options, free: "np.ndarray") -> bool:
    """Returns whether a tier is too small even for the options that take least of it."""
    nbytes = options.nbytes
    if program.overflow is not None:
        nbytes = nbytes.copy()
        nbytes[:, program.overflow.source] -= options.movable
    least = options.counts @ np.minimum.reduceat(nbytes, options.starts, axis=0)
    return bool((least > free).any())


@kept(256)
def bounds_of(bounds: tuple[Bound, ...]) -> "tuple[np.ndarray, np.ndarray]":
    """Returns the weights of parts in each bound (bounds, parts), and each bound's constant seconds."""
    return np.array([bound.weights for bound in bounds]), np.array([bound.constant_s for bound in bounds])


def spare_weights(num_parts: int, uncounted_parts: Iterable[int]) -> "np.ndarray":
    """Returns the weight of each part in the counted work."""
    weights = np.full(num_parts, SPARE_WEIGHT)
    weights[list(uncounted_parts)] = 0.0
    return weights


def with_buffers(buffers: Sequence[Buffer], options: Options) -> "np.ndarray":
    """Returns the bytes of options, with the least share of their bytes in buffers that these take in any case."""
    nbytes = options.nbytes
    for index, buffer in enumerate(buffers):
        share = _least_share(options.most_buffered[index], buffer)
        if share:
            nbytes = nbytes.copy()
            nbytes[:, buffer.tier] += share * options.buffered[:, index]
    return nbytes


def _least_share(most: float, buffer: Buffer) -> float:
    """Returns the share of all buffered bytes that a buffer takes, if as many as possible (`most`) are there."""
    return min(1.0, buffer.most_nbytes / most) if most else 0.0
