"""Norms of chunks of a gradient that comes in pieces: the bits of whole chunks, whatever comes first."""

import random
from itertools import pairwise

import pytest
import torch

from windlass.engine.optimizer.grad_norm import portable_squared_norms
from windlass.engine.pieces.chunk_norms import ChunkNorms

NUMEL = 5 * 700 + 300


@pytest.mark.parametrize("chunk_numel", [1, 700, 1000, NUMEL, 2 * NUMEL])
@pytest.mark.parametrize("seed", range(4))
def test_parts_in_any_order_give_the_bits_of_whole_chunks(chunk_numel: int, seed: int) -> None:
    order, flat = random.Random(seed), torch.randn(NUMEL)
    bounds = sorted({0, 700, NUMEL, *order.sample(range(NUMEL), order.randint(0, 6))})
    norms, parts = ChunkNorms(NUMEL, chunk_numel, torch.device("cpu")), list(pairwise(bounds))
    for start, stop in order.sample(parts, len(parts)):
        norms.put(flat[start:stop], start)
    assert torch.equal(torch.stack(norms.total()), torch.stack(portable_squared_norms(flat, chunk_numel)))


def test_an_empty_part_changes_nothing() -> None:
    flat, norms = torch.randn(100), ChunkNorms(100, 64, torch.device("cpu"))
    norms.put(flat, 0)
    norms.put(flat[100:], 100)
    assert torch.equal(torch.stack(norms.total()), torch.stack(portable_squared_norms(flat, 64)))


def test_an_infinity_shows_in_its_chunk_only() -> None:
    flat, norms = torch.zeros(90), ChunkNorms(90, 30, torch.device("cpu"))
    flat[45] = torch.inf
    for start in (60, 20, 0, 50):
        norms.put(flat[start : {60: 90, 20: 50, 0: 20, 50: 60}[start]], start)
    assert [float(norm) for norm in norms.total()] == [0.0, torch.inf, 0.0]
