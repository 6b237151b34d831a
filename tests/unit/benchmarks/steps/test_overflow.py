"""The overflow checks agree, and their time and memory are measured."""

import pytest
import torch

from benchmarks.overflow import CHECKS, MIB, extra_peak_nbytes, measure


@pytest.mark.parametrize("name", CHECKS)
def test_checks_find_one_bad_element(name: str) -> None:
    grad = torch.ones(5000)
    assert not CHECKS[name](grad)
    for bad in (float("inf"), float("nan")):
        grad[4321] = bad
        assert CHECKS[name](grad)


def test_every_check_is_timed_in_every_round() -> None:
    assert {name: len(times) for name, times in measure(1000, torch.float16, 3).items()} == dict.fromkeys(CHECKS, 3)


@pytest.mark.long
def test_temporaries_show_in_the_peak() -> None:
    """`isinf` of 16 Mi elements is 16 MiB of booleans, in addition to its operand."""
    ours, naive = (extra_peak_nbytes(name, 16 * MIB, "fp32") for name in CHECKS)
    assert naive >= 16 * MIB
    assert ours < 8 * MIB
