import itertools

import pytest

from windlass.engine.memory_plan.buffer_counts import param_buffers
from windlass.engine.memory_plan.param_slices import (
    NUM_PIECE_BUFFERS,
    column_bounds,
    cut_layers,
    largest_piece,
    row_bounds,
)

HIDDEN, INTERMEDIATE, KEY_VALUE = 8192, 28672, 1024
SQUARE, NARROW, WIDE = HIDDEN * HIDDEN, HIDDEN * KEY_VALUE, HIDDEN * INTERMEDIATE
# As in Llama 3.1 70B: q, k, v and o; gate, up and down; two norms.
LLAMA = ([SQUARE], [NARROW], [NARROW], [SQUARE], [WIDE], [WIDE], [WIDE])
LLAMA_NUMEL = sum(map(sum, LLAMA)) + 2 * HIDDEN


def test_matrices_are_joined_up_to_the_size_of_the_largest() -> None:
    (bounds,) = cut_layers([LLAMA])
    attention = 2 * SQUARE + 2 * NARROW
    assert bounds == (0, attention, attention + WIDE, attention + 2 * WIDE, attention + 3 * WIDE)
    assert largest_piece([bounds]) == WIDE


@pytest.mark.parametrize(
    ("modules", "bounds"),
    [
        ([[4], [1, 2], [4]], (0, 4, 7, 11)),
        ([[2], [1, 2], [4]], (0, 2, 5, 9)),  # params of one module stay together where possible
        ([[2], [6, 3], [3]], (0, 2, 8, 14)),  # an expert that is larger than all other matrices is a separate piece
        ([[6], [6, 3, 3]], (0, 6, 12, 18)),
        ([[7]], (0, 7)),
        ([], (0, 0)),
    ],
)
def test_no_matrix_is_cut(modules: list[list[int]], bounds: tuple[int, ...]) -> None:
    assert cut_layers([modules]) == [bounds]


def test_small_layers_are_cut_for_the_buffers_that_large_ones_need() -> None:
    assert cut_layers([[[2], [2], [2]], [[5], [1]]]) == [(0, 4, 6), (0, 5, 6)]
    assert largest_piece([(0, 4, 6), (0, 5, 6)]) == 5
    assert largest_piece([]) == 0


def test_buffers_for_pieces_are_a_fraction_of_those_for_whole_layers() -> None:
    """For bf16 layers as in Llama 3.1 70B: the params that the device holds."""
    layers = [LLAMA_NUMEL] * 80
    rest = [2 * HIDDEN] * 80

    def nbytes(numels: list[int]) -> int:
        blocks = [0, *numels, 0]
        buffers = param_buffers(blocks, [(b,) for b in range(len(blocks))], resident=(), num_ahead=2)
        return 2 * sum(numel * number for numel, number in buffers.items())

    whole = nbytes(layers)
    pieces = nbytes(rest) + 2 * NUM_PIECE_BUFFERS * largest_piece(cut_layers([LLAMA] * 80))
    assert (whole, pieces) == (3_422_617_600, 939_589_632)


@pytest.mark.parametrize(
    ("shape", "cut", "rows", "columns"),
    [
        ((512, 1024), None, (0, 512), (0, 1024)),
        ((512, 1024), 512 * 1024, (0, 512), (0, 1024)),
        ((512, 1024), 512 * 1024 - 1, (0, 256, 512), (0, 512, 1024)),
        ((28672, 8192), 2**24, tuple(range(0, 28673, 2048)), (*range(0, 8192, 512), 8192)),
        ((1000, 96), 30_000, (0, 256, 512, 768, 1000), (0, 24, 48, 72, 96)),
        ((10, 6), 20, (0, 3, 6, 9, 10), (0, 1, 2, 3, 4, 5, 6)),
        ((1000, 3), 4, (*range(0, 1000, 334), 1000), (0, 1, 2, 3)),  # a column has more elements than a part
        ((2, 50), 10, (0, 1, 2), (0, 24, 48, 50)),  # a row has
    ],
)
def test_matrix_is_cut_into_parts_of_rows_and_of_columns(
    shape: tuple[int, int], cut: int | None, rows: tuple[int, ...], columns: tuple[int, ...]
) -> None:
    assert (row_bounds(shape, cut), column_bounds(shape, cut)) == (rows, columns)


def test_parts_of_columns_fit_in_the_memory_of_parts_of_rows() -> None:
    for num_rows in range(1, 300, 13):
        for width in range(1, 300, 17):
            for cut in (1, 7, 100, 1000, 10_000):
                rows, columns = row_bounds((num_rows, width), cut), column_bounds((num_rows, width), cut)
                largest = max(stop - start for start, stop in itertools.pairwise(rows)) * width
                assert largest <= max(cut, num_rows + width, width)
                assert max(stop - start for start, stop in itertools.pairwise(columns)) * num_rows <= largest
                assert rows[-1] == num_rows
                assert columns[-1] == width
