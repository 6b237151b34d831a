"""Good assignments from solutions with fractions of blocks."""

from collections.abc import Sequence

import numpy as np

from windlass.planner.solver.program.arrays import ProgramArrays

# Maximum number of blocks that change their option one after the other.
_MOST_CHANGES = 40
# Fractions count as whole numbers if they are less below one.
_NEARLY = 1e-6
# A change must make an assignment cheaper by a larger share, so that the search ends.
_LEAST_GAIN = 1e-9


def rounded(
    arrays: ProgramArrays,
    fractions: "np.ndarray",
    groups: Sequence[int],
    is_useful: "np.ndarray",
) -> "np.ndarray":
    """Returns an assignment near a solution with fractions of blocks in some groups, which may exceed the limits.

    The whole part of each count stays at first, and the other blocks take the cheapest option one by one. Then blocks
    change their option as long as that makes the assignment cheaper. `is_useful`: the options that they may take.
    """
    table, counts = arrays.table, np.floor(fractions + _NEARLY)
    sums = arrays.sums(counts)
    for group in groups:
        options = np.flatnonzero(table.groups == group)
        for _ in range(round(table.counts[group] - counts[options].sum())):
            option = options[arrays.costs(sums + table.amounts[options], is_strict=False).argmin()]
            counts[option] += 1
            sums = sums + table.amounts[option]
    return _improved(arrays, counts, _changes(arrays, groups, is_useful))


def _changes(arrays: ProgramArrays, groups: Sequence[int], is_useful: "np.ndarray") -> "tuple[np.ndarray, np.ndarray]":
    """Returns the option before and after each change of a block."""
    before, after = [], []
    for group in groups:
        options = np.flatnonzero(arrays.table.groups == group)
        useful = options[is_useful[options]]
        before.append(np.repeat(options, len(useful)))
        after.append(np.tile(useful, len(options)))
    every = np.concatenate(before), np.concatenate(after)
    is_other = every[0] != every[1]
    return every[0][is_other], every[1][is_other]


def _improved(arrays: ProgramArrays, counts: "np.ndarray", changes: "tuple[np.ndarray, np.ndarray]") -> "np.ndarray":
    """Returns the assignment after the cheapest change, and the next one, until none makes it cheaper."""
    amounts = arrays.table.amounts
    sums = arrays.sums(counts)
    cost = float(arrays.costs(sums[None], is_strict=False)[0])
    for _ in range(_MOST_CHANGES):
        is_possible = counts[changes[0]] >= 1
        before, after = changes[0][is_possible], changes[1][is_possible]
        if not len(before):
            break
        costs = arrays.costs(sums + amounts[after] - amounts[before], is_strict=False)
        best = int(costs.argmin())
        if costs[best] >= cost * (1 - _LEAST_GAIN):
            break
        counts[before[best]] -= 1
        counts[after[best]] += 1
        sums, cost = arrays.sums(counts), float(costs[best])
    return counts
