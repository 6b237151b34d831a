"""The memory that PyTorch's allocator takes beside a job's tensors."""

import pytest

from windlass.amounts import GIB
from windlass.engine.memory_plan.allocator_reserve import allocatable_nbytes, reserved_nbytes

MIB = 2**20


def test_the_reserve_has_two_workspaces_two_segments_and_four_percent() -> None:
    assert reserved_nbytes(0) == 2 * (32 + 1) * MIB + (20 + 2) * MIB
    assert reserved_nbytes(100 * GIB) - reserved_nbytes(0) == 104 * GIB


@pytest.mark.parametrize(("counted_mib", "taken_mib"), [(6200.3, 6446), (6645.5, 6886), (15042.2, 15586)])
def test_it_is_what_the_allocator_took_on_an_h100_and_at_most_two_percent_more(
    counted_mib: float, taken_mib: float
) -> None:
    """1.5B twice and 7B, batch 16 of 1024 tokens, all layers recomputed (reports of `gpu_check`)."""
    assert taken_mib <= reserved_nbytes(int(counted_mib * MIB)) / MIB <= 1.02 * taken_mib


@pytest.mark.parametrize("limit_nbytes", [88 * MIB, 89 * MIB + 1, GIB - 1, 45 * GIB / 2, 80 * GIB + 7])
def test_tensors_may_take_all_but_the_reserve(limit_nbytes: float) -> None:
    most_nbytes = allocatable_nbytes(limit_nbytes)
    assert most_nbytes >= 0
    assert reserved_nbytes(most_nbytes) <= limit_nbytes < reserved_nbytes(most_nbytes + 26)


def test_a_limit_below_the_reserve_lacks_memory_without_any_tensors() -> None:
    assert allocatable_nbytes(MIB) < 0
