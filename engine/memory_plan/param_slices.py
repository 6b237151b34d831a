"""Cuts a layer's matrices into pieces, for devices on which two whole layers do not fit.

A layer's flat vector begins with its matrices, in the order of its modules. These are copied to the device in pieces.
Norms and biases are at the vector's end; they are small and are copied as a whole.

With the job's setting `cut_matrices`, a large matrix is computed in parts: parts of rows, which are pieces of the flat
vector, and parts of columns. No part splits a sum of a matrix product.
"""

import functools
import itertools
from collections.abc import Sequence

# Buffers for pieces on the device: one piece is used while the next one is copied.
NUM_PIECE_BUFFERS = 2
# Least value of a job's `cut_matrices`. Smaller parts would make kernels and copies slow, and save no memory.
LEAST_CUT_NUMEL = 2**20
# Rows or columns of a part are multiples of the first of these that is small enough: of a matrix product's tile, or of
# the alignment of its operands.
_GRANULES = (128, 8, 1)
# Elements of a row of a gradient's norm. The buffer of a piece has so many more, because its rows must be aligned.
NORM_ROW_NUMEL = 2**10
# Buffers for pieces of gradients: one is filled while another is copied to the host. One more brings sums back.
_NUM_GRAD_PIECES = 2
# Buffers for the gradients of a layer's norms and biases: one is filled while another is copied to the host.
NUM_REST_BUFFERS = 2


def cut_layers(layers: Sequence[Sequence[Sequence[int]]]) -> list[tuple[int, ...]]:
    """Returns the bounds of each layer's pieces: the first element of each piece, and the end of the last one.

    `layers`: for each layer and each module with own matrices, the elements of each matrix in the order of the flat
    vector. A matrix that is cut counts as its parts; see `BlockLayout.part_numels_by_module`. The largest one sets the
    size of a piece. Smaller ones are joined up to that size, those of one module first. Layers that are one object have
    bounds that are one object.
    """
    different = {id(modules): modules for modules in layers}  # most are one object, and parts may be many
    limit = max((numel for modules in different.values() for module in modules for numel in module), default=0)
    bounds = {key: _cut(tuple(map(tuple, modules)), limit) for key, modules in different.items()}
    return [bounds[id(modules)] for modules in layers]


@functools.lru_cache(maxsize=256)  # most layers are alike
def _cut(modules: tuple[tuple[int, ...], ...], limit: int) -> tuple[int, ...]:
    bounds, stop = [0], 0
    for module in modules:
        for numel in [sum(module)] if sum(module) <= limit else module:
            if stop + numel - bounds[-1] > limit:
                bounds.append(stop)
            stop += numel
    return (*bounds, stop)


def row_bounds(shape: Sequence[int], cut_matrices: int | None) -> tuple[int, ...]:
    """Returns the first row of each part of a matrix that is computed in parts of rows, and the number of rows.

    `shape`: rows and columns as they lie in memory. `cut_matrices`: see `TrainingConfig`. A matrix with at most so many
    elements is one part. A part has at most so many, too, except where one row or one column of the matrix has more.
    """
    num_rows, width = shape
    if cut_matrices is None or num_rows * width <= cut_matrices:
        return (0, num_rows)
    # A part of columns must fit in the memory of a part of rows, so that has at least the elements of one column.
    least = -(-num_rows // width)
    return _even_bounds(num_rows, max(cut_matrices // width, least), least=least)


def column_bounds(shape: Sequence[int], cut_matrices: int | None) -> tuple[int, ...]:
    """Returns the first column of each part of a matrix that is computed in parts of columns, and their number.

    No part has more elements than the largest one of `row_bounds`.
    """
    num_rows, width = shape
    largest = max(stop - start for start, stop in itertools.pairwise(row_bounds(shape, cut_matrices)))
    return _even_bounds(width, largest * width // num_rows)


def _even_bounds(number: int, most: int, *, least: int = 1) -> tuple[int, ...]:
    """Divides a range into parts of nearly equal size, between `least` and `most`; only the last one may be smaller."""
    if number <= most:
        return (0, number)
    granule = next(granule for granule in _GRANULES if most - most % granule >= least)
    num_parts = -(-number // (most - most % granule))
    size = max(-(-number // num_parts), least)
    size += -size % granule
    return (*range(0, number, size), number)


def largest_piece(layers: Sequence[Sequence[int]]) -> int:
    """Returns the elements of the largest piece, which is the size of a buffer. `layers`: bounds of `cut_layers`."""
    different = {id(bounds): bounds for bounds in layers}.values()
    return max((stop - start for bounds in different for start, stop in itertools.pairwise(bounds)), default=0)


def grad_piece_numels(
    layers: Sequence[Sequence[int]], numels: Sequence[int], *, is_summed: bool
) -> tuple[list[int], list[int]]:
    """Returns the elements of each buffer for pieces of gradients, and for the rest of a layer after its pieces.

    `layers`: bounds of `cut_layers`. `numels`: all elements of each layer. `is_summed`: several micro-batches are
    summed, so pieces come back.
    """
    number = _NUM_GRAD_PIECES + is_summed
    rest = max((numel - bounds[-1] for bounds, numel in zip(layers, numels, strict=True)), default=0)
    return [largest_piece(layers) + NORM_ROW_NUMEL] * number, [rest + NORM_ROW_NUMEL] * NUM_REST_BUFFERS
