"""Formulas of sizes, compared with real operators and modules."""

import pytest

from benchmarks.papers.decoder_sizes import block_numels, gpt_profile, kv_size, layer_matrices, mlp_size
from windlass.planner.hardware.model_shape import ModelShape
from windlass.planner.profiling.model_profiler import config_of_shape, profile_config
from windlass.storage.ids import Precision

GPT = ModelShape(num_layers=2, hidden_size=64, num_heads=4, vocab_size=96)
LLAMA = ModelShape(num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=2, intermediate_size=160, vocab_size=96)


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_blocks_are_as_large_as_the_engine_cuts_them(shape: ModelShape) -> None:
    config = config_of_shape(shape, num_tokens=32)
    own = profile_config(config, Precision.BF16, num_examples=2, num_tokens=32)
    assert block_numels(shape, num_tokens=32) == tuple(block.numel for block in own.blocks)


def test_tying_changes_only_the_head() -> None:
    table = 96 * 64
    for shape in (GPT, LLAMA):
        tied, apart = (block_numels(shape, num_tokens=32, is_tied=is_tied) for is_tied in (True, False))
        assert apart == (*tied[:-1], tied[-1] + table)


def test_matrices_are_all_of_a_layer_but_its_norms_and_biases() -> None:
    assert layer_matrices(GPT) == (3 * 64 * 64, 64 * 64, 4 * 64 * 64, 4 * 64 * 64)
    assert layer_matrices(LLAMA) == (64 * 64, 32 * 64, 32 * 64, 64 * 64, 160 * 64, 160 * 64, 160 * 64)
    assert (kv_size(LLAMA), mlp_size(LLAMA), kv_size(GPT), mlp_size(GPT)) == (32, 160, 64, 256)
    assert sum(layer_matrices(LLAMA)) == block_numels(LLAMA, num_tokens=0)[1] - 2 * 64


def test_operations_are_those_of_the_real_operators() -> None:
    config = config_of_shape(GPT, num_tokens=32)
    config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.0
    own = profile_config(config, Precision.BF16, num_examples=2, num_tokens=32)
    found = gpt_profile(GPT, num_examples=2, num_tokens=32, chunk_numel=own.chunk_numel)
    assert [block.num_flops for block in found.blocks] == [block.num_flops for block in own.blocks]
    assert found.interblock_nbytes == own.interblock_nbytes
    # 34 bytes for each element of a hidden state.
    assert found.activation_nbytes == 34 * 2 * 2 * 32 * 64


def test_other_shapes_have_no_such_profile() -> None:
    with pytest.raises(ValueError, match="leave both out"):
        gpt_profile(LLAMA, num_examples=1, num_tokens=1, chunk_numel=1)
