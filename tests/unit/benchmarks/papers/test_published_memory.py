"""The host memory figures printed in MemAscend's paper."""

import pytest

from benchmarks.papers.published.memory import (
    PUBLISHED_GROWTHS,
    PUBLISHED_PEAKS,
    PUBLISHED_SAVINGS,
    PublishedGrowth,
    PublishedPeak,
    checkpoint_nbytes,
    growths,
    memascend_memory,
    savings,
    zero_infinity_memory,
)
from windlass.amounts import GIB


@pytest.mark.parametrize("peak", PUBLISHED_PEAKS, ids=lambda peak: peak.model)
def test_peaks_come_within_a_percent(peak: PublishedPeak) -> None:
    assert zero_infinity_memory(peak.shape).total / GIB == pytest.approx(peak.zero_infinity_gib, rel=0.01)
    assert memascend_memory(peak.shape).total / GIB == pytest.approx(peak.memascend_gib, rel=0.01)


def test_the_parts_that_are_printed_for_one_model() -> None:
    """Section V-A, Qwen2.5-7B."""
    (shape,) = (peak.shape for peak in PUBLISHED_PEAKS if peak.model == "Qwen2.5-7B")
    theirs, ours = zero_infinity_memory(shape), memascend_memory(shape)
    gib = [part / GIB for part in (theirs.flat_grads, theirs.overflow_check, theirs.param_pool, theirs.pinned_overhead)]
    assert gib == pytest.approx([28.37, 35.46, 9.14, 24.90], abs=0.06)
    assert (ours.param_pool / GIB, ours.pinned_overhead / GIB) == pytest.approx((2.46, 1.63), abs=0.005)
    assert ours.optimizer_buffers == theirs.optimizer_buffers
    assert ours.optimizer_buffers / GIB == pytest.approx(11.17, abs=0.005)


@pytest.mark.parametrize("growth", PUBLISHED_GROWTHS, ids=lambda growth: f"{growth.model} {growth.num_tokens[1]}")
def test_activations_add_what_was_measured(growth: PublishedGrowth) -> None:
    found = [nbytes / GIB for nbytes in growths(growth)]
    assert found == pytest.approx([growth.zero_infinity_gib, growth.memascend_gib], abs=0.05)


def test_savings_are_those_printed() -> None:
    assert savings() == pytest.approx(PUBLISHED_SAVINGS, abs=0.001)


def test_pinned_buffers_are_rounded_up_by_one_and_not_by_the_other() -> None:
    shape = PUBLISHED_PEAKS[-1].shape
    nbytes = checkpoint_nbytes(shape, num_tokens=3 * 4096)
    assert nbytes == 3 * 4096 * 64 * 5120 * 2
    for memory, expected in ((zero_infinity_memory, 8 * GIB), (memascend_memory, nbytes)):
        assert memory(shape, activations=[nbytes]).total - memory(shape).total == expected
