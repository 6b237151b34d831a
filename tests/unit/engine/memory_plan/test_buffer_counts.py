from collections import Counter
from typing import Any

import pytest

from windlass.engine.lanes.lane_division import LaneDivision
from windlass.engine.memory_plan.buffer_counts import (
    grad_buffers,
    grad_buffers_of_job,
    grad_overlay_of_job,
    overlay_nbytes,
    param_buffers,
    rounded_numel,
    rounding_nbytes,
    streamed_grads_nbytes,
    summed_in_fp32,
)
from windlass.storage.ids import Formats, Precision, StatePrecision

# Elements of an embedding, four layers, a head.
NUMELS = (50, 10, 10, 10, 10, 60)
OWN = tuple((block,) for block in range(6))
TIED = (*OWN[:5], (5, 0))


@pytest.mark.parametrize(
    ("num_ahead", "wanted"),
    [
        (1, {50: 1, 10: 1, 60: 1}),
        (2, {50: 1, 10: 2, 60: 1}),
        (3, {50: 1, 10: 3, 60: 1}),
        (20, {50: 2, 10: 8, 60: 1}),
    ],
)
def test_there_are_buffers_for_operations_that_follow_each_other(num_ahead: int, wanted: dict[int, int]) -> None:
    assert param_buffers(NUMELS, OWN, resident=(), num_ahead=num_ahead) == wanted


def test_the_head_also_needs_the_params_it_shares() -> None:
    assert param_buffers(NUMELS, TIED, resident=(), num_ahead=1)[50] == 1
    # The last layer and the head, and the embedding with it: no second buffer of its size.
    assert param_buffers(NUMELS, TIED, resident=(), num_ahead=2) == {50: 1, 10: 2, 60: 1}
    same_sizes = (10, 10, 10, 10)
    assert param_buffers(same_sizes, ((0,), (1,), (2,), (3, 0)), resident=(), num_ahead=2) == {10: 3}


def test_params_that_rest_on_the_device_need_none() -> None:
    assert param_buffers(NUMELS, OWN, resident=(1, 3, 5), num_ahead=2) == {50: 1, 10: 1}
    assert param_buffers(NUMELS, OWN, resident=range(6), num_ahead=2) == {}


def test_layers_of_two_sizes_in_turn_need_one_buffer_of_each() -> None:
    numels = (5, 10, 20, 10, 20, 6)
    assert param_buffers(numels, OWN, resident=(), num_ahead=2) == Counter({5: 1, 10: 1, 20: 1, 6: 1})


def test_gradients_wait_in_few_buffers_but_for_those_that_stay() -> None:
    blocks = dict(enumerate(NUMELS))
    assert grad_buffers(blocks, resident=(), num_waiting=2) == {50: 1, 10: 2, 60: 1}
    assert grad_buffers(blocks, resident=(1, 2, 3), num_waiting=2) == {50: 1, 10: 4, 60: 1}
    assert grad_buffers(blocks, resident=range(6), num_waiting=2) == {50: 1, 10: 4, 60: 1}
    assert grad_buffers({0: 50}, resident=(), num_waiting=2) == {50: 1}
    assert grad_buffers({}, resident=(1,), num_waiting=2) == {}


def test_sums_over_tied_uses_or_slices_are_fp32() -> None:
    assert summed_in_fp32(OWN, is_sliced=False) == set()
    assert summed_in_fp32(OWN, is_sliced=True) == {5}
    assert summed_in_fp32(TIED, is_sliced=False) == {0}
    assert summed_in_fp32(TIED, is_sliced=True) == {0, 5}


def buffers(shared: tuple[tuple[int, ...], ...], **changes: Any) -> dict[tuple[int, int], int]:
    options = {"itemsize": 2, "summed_in_fp32": (), "resident": (), "num_groups": 1} | changes
    return dict(grad_buffers_of_job(NUMELS, shared, **options))


def test_sums_in_fp32_have_buffers_from_which_they_travel() -> None:
    assert buffers(OWN) == {(50, 2): 1, (10, 2): 2, (60, 2): 1}
    assert buffers(OWN, summed_in_fp32={5}) == {(50, 2): 1, (10, 2): 2, (60, 4): 1}
    # One for the sum of the head's use, one for that of the embedding's.
    assert buffers(TIED, summed_in_fp32={0}) == {(50, 4): 2, (10, 2): 2, (60, 2): 1}
    # Both use the same buffers if gradients are fp32 in transfer.
    assert buffers(TIED, itemsize=4, summed_in_fp32={0}) == {(50, 4): 2, (10, 4): 2, (60, 4): 1}


@pytest.mark.parametrize(("shared", "in_fp32"), [(OWN, set()), (OWN, {5}), (TIED, {0}), (TIED, {0, 5})])
def test_16_bit_sums_take_less_memory_than_fp32_sums(shared: tuple[tuple[int, ...], ...], in_fp32: set[int]) -> None:
    """Gradients that are summed in fp32 all the same are rounded in place when they leave the device."""
    numels = (500, 10, 10, 10, 10, 60)
    nbytes = {}
    for itemsize in (2, 4):
        numbers = grad_buffers_of_job(
            numels, shared, itemsize=itemsize, summed_in_fp32=in_fp32, resident=(), num_groups=1
        )
        nbytes[itemsize] = sum(numel * element_nbytes * number for (numel, element_nbytes), number in numbers.items())
    assert nbytes[2] < nbytes[4]


@pytest.mark.parametrize(
    ("in_fp32", "itemsize", "nbytes"),
    [((), 2, 0), ((5,), 2, 2 * 60), ((0, 5), 2, 2 * 60), ((0,), 2, 2 * 50), ((0, 5), 4, 0), ((6,), 2, 2**13)],
)
def test_rounding_in_place_takes_the_start_of_the_largest_fp32_sum(
    in_fp32: tuple[int, ...], itemsize: int, nbytes: int
) -> None:
    """The start has up to 8 KiB. The last block has more elements."""
    assert rounding_nbytes((*NUMELS, 2**24), in_fp32, itemsize=itemsize) == nbytes


def test_lanes_have_sums_beside_the_totals() -> None:
    """Only the running operation has them or, if groups end inside of lanes, every sum."""
    fp32: dict[str, Any] = {"itemsize": 4, "num_groups": 1}
    totals = {(50, 4): 1, (10, 4): 2, (60, 4): 1}
    assert buffers(OWN, **fp32, lanes=LaneDivision(1, 4), group_size=4) == totals
    assert buffers(OWN, **fp32, lanes=LaneDivision(2, 4), group_size=4) == {(50, 4): 2, (10, 4): 3, (60, 4): 2}
    tied = buffers(TIED, **fp32, lanes=LaneDivision(2, 4), group_size=4)
    assert tied == {(50, 4): 3, (10, 4): 3, (60, 4): 2}
    whole_lanes = buffers(OWN, **fp32 | {"num_groups": 2}, lanes=LaneDivision(2, 4), group_size=2)
    assert whole_lanes == {(50, 4): 2, (10, 4): 4, (60, 4): 2}
    cut_lanes = buffers(TIED, **fp32 | {"num_groups": 4}, lanes=LaneDivision(2, 4), group_size=1)
    assert cut_lanes == {(50, 4): 4, (10, 4): 6, (60, 4): 2}


def test_sums_in_the_memory_of_pieces_have_no_lane_beside_them() -> None:
    lanes = LaneDivision(2, 4)
    options: dict[str, Any] = {"itemsize": 4, "summed_in_fp32": (), "resident": (), "num_groups": 2}
    options |= {"num_grad_buffers": 1, "lanes": lanes, "group_size": 2, "elsewhere": range(6)}
    assert grad_buffers_of_job(NUMELS, OWN, **options) == {}
    # The head's sum for the embedding: a total and a lane.
    assert grad_buffers_of_job(NUMELS, TIED, **options) == {(50, 4): 2}
    pieces = dict.fromkeys(range(1, 5), (0, 6, 9))
    users = grad_overlay_of_job(NUMELS, pieces, (0, 5), itemsize=4, summed_in_fp32=(), is_summed=True, has_lanes=True)
    assert users[0] == [(50, 4)] * 3  # a sum, and two parts of a total, which are small
    assert users[None] == [(6 + 1024, 4)] * 3 + [(1 + 1024, 4)] * 2
    sizes = {"itemsize": 4, "summed_in_fp32": (), "is_summed": True, "has_lanes": True}
    nbytes = streamed_grads_nbytes(NUMELS, pieces, (0, 5), chunk_numel=3, **sizes)
    in_one_memory = overlay_nbytes([numel * size for numel, size in buffers] for buffers in users.values())
    assert nbytes == in_one_memory + 4 * 9  # three chunks, for their norms


def test_a_head_whose_slices_are_summed_in_fp32_has_buffers_of_its_own_in_the_memory_of_pieces() -> None:
    pieces = {1: (0, 6, 9), 5: (0, 8, 55)}
    sizes: dict[str, Any] = {"itemsize": 2, "summed_in_fp32": {5}, "is_summed": False}
    users = grad_overlay_of_job(NUMELS, pieces, (), fp32_in_pieces=(5,), **sizes)
    assert users == {
        None: [(47 + 1024, 2)] * 2 + [(5 + 1024, 2)] * 2,  # also for the head in steps of one slice
        5: [(47 + 1024, 4)] * 3 + [(5 + 1024, 4)] * 2,
    }


def test_the_sums_of_the_next_group_come_while_two_others_are_there() -> None:
    assert buffers(OWN, num_groups=2) == {(50, 2): 1, (10, 2): 3, (60, 2): 1}
    assert buffers(OWN, num_groups=2, resident=(1, 2, 3)) == {(50, 2): 1, (10, 2): 4, (60, 2): 1}


@pytest.mark.parametrize(
    ("formats", "expected"),
    [
        (Formats(Precision.BF16, StatePrecision.FP32), 8),
        (Formats(Precision.BF16, StatePrecision.SPLIT), 0),  # the params are stored
        (Formats(Precision.FP32, StatePrecision.FP32), 0),  # they are the master
    ],
)
def test_a_gpu_has_a_buffer_for_the_params_of_a_chunk_if_they_follow_from_a_master(
    formats: Formats, expected: int
) -> None:
    assert rounded_numel(formats, 8, resident=(1,), on_gpu=True) == expected
    assert rounded_numel(formats, 8, resident=(1,), on_gpu=False) == 0
    assert rounded_numel(formats, 8, resident=(), on_gpu=True) == 0
