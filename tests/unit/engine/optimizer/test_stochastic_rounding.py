"""Stochastic rounding is right on average, repeats, and depends only on position."""

import math

import pytest
import torch

from windlass.engine.optimizer.stochastic_rounding import (
    NUMEL_PER_KEY,
    plain_nan,
    random_halves,
    random_words,
    rounded,
    rounded_pairs,
    rounding_keys,
)

NUM_DRAWS = 2**20
CPU = torch.device("cpu")
# Six standard deviations: the seeds are fixed, so a test that passes once passes always.
SIGMAS = 6


def unsigned(halves: torch.Tensor) -> torch.Tensor:
    return (halves.to(torch.int64) & 0xFFFF).double()


@pytest.mark.parametrize("state", [0, 1, 2])
@pytest.mark.parametrize("fraction", [1 / 65536, 0.01, 0.25, 0.5, 0.9, 1.0 - 1 / 65536])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_it_rounds_away_as_often_as_the_value_lies_there(state: int, fraction: float, sign: float) -> None:
    above = round(fraction * 65536)
    value = torch.tensor([0x3F800000 + above], dtype=torch.int32).view(torch.float32) * sign
    halves = random_halves(12345, NUM_DRAWS, 7, 3, CPU)[state]
    results = rounded(value.expand(NUM_DRAWS), halves)
    neighbours = {sign, sign * (1 + 2**-7)}
    assert set(results.unique().tolist()) <= neighbours
    share = (results.float().abs() > 1).double().mean().item()
    assert share == pytest.approx(fraction, abs=SIGMAS * math.sqrt(fraction * (1 - fraction) / NUM_DRAWS))


@pytest.mark.short("1")
@pytest.mark.parametrize("state", [0, 1, 2])
def test_one_element_is_right_on_average_over_steps(state: int) -> None:
    num_steps = 8192
    draws = torch.cat([random_halves(99, 2, 1, step, CPU)[state] for step in range(num_steps)])
    for parity in (0, 1):
        mean = unsigned(draws[parity::2]).mean().item() / 65536
        assert mean == pytest.approx(0.5, abs=SIGMAS / math.sqrt(12 * num_steps))


def test_bits_are_even_and_independent() -> None:
    halves = torch.stack([unsigned(half) for half in random_halves(0, NUM_DRAWS, 5, 1, CPU)])
    for half in halves:
        for shift in (0, 8):
            counts = torch.bincount((half.long() >> shift) & 0xFF, minlength=256).double()
            chi_squared = ((counts - NUM_DRAWS / 256) ** 2 / (NUM_DRAWS / 256)).sum().item()
            assert abs(chi_squared - 255) < SIGMAS * math.sqrt(2 * 255)
    later = torch.stack([unsigned(half) for half in random_halves(0, NUM_DRAWS, 5, 2, CPU)])
    seeded = torch.stack([unsigned(half) for half in random_halves(0, NUM_DRAWS, 6, 1, CPU)])
    neighbours = torch.cat([halves[:, :-1], halves[:, 1:]])
    apart = torch.cat([halves[:, :-256], halves[:, 256:]])
    for group in (torch.cat([halves, later, seeded]), neighbours, apart):
        correlations = torch.corrcoef(group) - torch.eye(len(group), dtype=torch.float64)
        assert correlations.abs().max().item() < SIGMAS / math.sqrt(NUM_DRAWS)


@pytest.mark.parametrize("start", [0, 1, 2**33 - 1000, 2**35 + 2**32 - 501])
def test_bits_depend_on_the_position_alone(start: int) -> None:
    whole = random_halves(start, 1000, 1, 1, CPU)
    for first, last in ((0, 1), (1, 500), (500, 1000)):
        part = random_halves(start + first, last - first, 1, 1, CPU)
        assert all(torch.equal(one, all_[first:last]) for one, all_ in zip(part, whole, strict=True))


def test_positions_further_apart_than_a_hash_counts_have_their_own_bits() -> None:
    near, far = (random_halves(position, 64, 1, 1, CPU)[0] for position in (0, NUMEL_PER_KEY))
    assert not torch.equal(near, far)


def test_pairs_are_rounded_as_single_elements_are() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32).view(torch.float32)
    values = plain_nan(values)
    words = random_words(torch.arange(100_000, dtype=torch.int32), torch.tensor(rounding_keys(1, 2, 0)).int())
    for word in words:
        pairs = rounded_pairs(values[::2].clone(), values[1::2].clone(), word)
        assert torch.equal(pairs.view(torch.int16), rounded(values, word.view(torch.int16)).view(torch.int16))


def test_values_exact_in_bf16_or_not_finite_are_unchanged() -> None:
    all_bf16 = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    all_ones = torch.full((2**16,), -1, dtype=torch.int16)
    for halves in (all_ones, torch.zeros_like(all_ones)):
        results = rounded(all_bf16.float(), halves)
        numbers = ~all_bf16.isnan()
        assert torch.equal(results[numbers], all_bf16[numbers])
        assert results[~numbers].isnan().all()
    worst = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert rounded(worst, all_ones[:2]).isnan().all()
