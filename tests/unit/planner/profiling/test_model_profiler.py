"""Profiles of models: bytes and FLOPs from shapes equal those of formulas and real runs."""

import itertools
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, T5Config

from tests.support.engine.activation_runs import MemoryStore, Run
from tests.support.engine.architectures import ARCHITECTURES, make_batch, make_model
from windlass.engine.memory_estimate.activation_memory import activation_need
from windlass.engine.memory_plan.activation_policy import BlockActivations
from windlass.engine.model.block_runner import BlockRunner
from windlass.engine.model.partition import Partition, build_meta_model
from windlass.planner.cost.activation_options import ActivationOption, by_benefit, ways_of_layer
from windlass.planner.hardware.model_shape import ModelShape
from windlass.planner.profiling.model_config import UnusableConfigError
from windlass.planner.profiling.model_profiler import config_of_shape, profile_config
from windlass.storage.ids import BlockIndex, Precision

GPT = ModelShape(num_layers=3, hidden_size=64, num_heads=4, vocab_size=128)
LLAMA = ModelShape(num_layers=3, hidden_size=64, num_heads=4, vocab_size=128, num_kv_heads=2, intermediate_size=96)


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_parameters_are_those_of_the_model(shape: ModelShape) -> None:
    config = config_of_shape(shape, num_tokens=32)
    profile = profile_config(config, Precision.BF16, num_examples=2, num_tokens=32)
    model = AutoModelForCausalLM.from_config(config)
    assert profile.numel == sum(param.numel() for param in model.parameters())
    assert len(profile.blocks) == 5


def test_flops_are_those_of_the_formula() -> None:
    batch, tokens, hidden = 2, 32, 64
    profile = profile_config(
        config_of_shape(GPT, num_tokens=tokens), Precision.BF16, num_examples=batch, num_tokens=tokens
    )
    # A GPT layer: 12 hidden^2 weights in products with every token, and attention's two products.
    products = 2 * 12 * hidden**2 * batch * tokens
    attention = 2 * 2 * batch * tokens**2 * hidden
    assert [layer.num_flops for layer in profile.layers] == [products + attention] * 3
    assert profile.head.num_flops == 2 * hidden * 128 * batch * tokens
    assert profile.num_flops == 3 * (products + attention) + profile.head.num_flops
    assert profile.layers[0].work.num_attention_flops == attention


def test_bytes_beside_operators_are_those_of_gradients_and_of_the_loss() -> None:
    profile = profile_config(config_of_shape(GPT, num_tokens=32), Precision.BF16, num_examples=2, num_tokens=32)
    assert [block.moved_nbytes for block in profile.blocks[:-1]] == [16 * block.numel for block in profile.blocks[:-1]]
    # Three times written and read: a logit in bf16, and in fp32 itself and its log-probability. The matrix is tied.
    assert profile.head.moved_nbytes == 16 * 128 * 64 + 6 * (2 + 4 + 4) * 128 * 2 * 32


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_saved_bytes_of_layer_equal_those_of_autograd(shape: ModelShape) -> None:
    config = config_of_shape(shape, num_tokens=32)
    profile = profile_config(config, Precision.BF16, num_examples=2, num_tokens=32)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    params = {param.untyped_storage().data_ptr() for param in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in params:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor  # saved tensors stay alive, so that no address is used twice

    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    begun = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: begun.append(dict(saved)))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(input_ids=torch.zeros(2, 32, dtype=torch.long), use_cache=False)
    of_second = sum(begun[2].values()) - sum(begun[1].values())
    expected = profile.layers[1].input_nbytes + profile.layers[1].saved_nbytes
    # A hidden state is saved by one layer and by the next one as well.
    assert abs(of_second - expected) <= profile.layers[1].input_nbytes
    assert output.logits.shape == (2, 32, 128)


def test_fewer_or_more_layers_are_like_the_first() -> None:
    profile = profile_config(config_of_shape(LLAMA, num_tokens=16), Precision.FP32, num_examples=1, num_tokens=16)
    larger = profile.with_num_layers(7)
    assert larger.numel == profile.numel + 4 * profile.layers[0].numel
    assert profile.interblock_nbytes == 3 * 16 * 64 * 4
    assert larger.activation_nbytes == 7 * (16 * 64 * 4 + profile.layers[0].saved_nbytes)


def _flash_flops(query: torch.Tensor, key: torch.Tensor, *_args: Any, **_kwargs: Any) -> int:
    """Two products for each head of the queries. Torch 2.11's formula refuses fewer heads of keys."""
    batch, num_heads, num_queries, width = query.shape
    return 2 * (2 * batch * num_heads * num_queries * key.shape[2] * width)


_flash_flops._get_raw = True  # type: ignore[attr-defined]
# Torch's counter does not know this operator.
FLASH = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash_flops}


def backward_flops(model: Any, choice: BlockActivations) -> tuple[int, int]:
    """The FLOPs of the second layer's backward pass, and the bytes that it swapped."""
    store, block = MemoryStore(), BlockIndex(2)
    run = Run(model, activations={block: choice}, store=store)
    batch, targets = make_batch((2, 16))
    for each in run.layout.blocks[:-1]:
        run.forward(each.index, batch)
    run.head(targets)
    for each in reversed(run.layout.blocks[3:-1]):
        run.backward(each.index, batch)
    out_nbytes = store.out_nbytes
    with FlopCounterMode(display=False, custom_mapping=FLASH) as counter:
        run.backward(block, batch)
    return counter.get_total_flops(), out_nbytes


@pytest.mark.long
@pytest.mark.parametrize("name", ["Qwen2", "GPT-2", "Mistral", "Phi"])
def test_activation_options_recompute_and_swap_as_described(name: str) -> None:
    model = make_model(ARCHITECTURES[name].config(tied=False, dropout=0.0))
    profile = profile_config(model.config, Precision.FP32, num_examples=2, num_tokens=16)
    layer = profile.layers[1]
    without, _ = backward_flops(model, BlockActivations(recompute=False))
    ways = list(ways_of_layer(layer))
    assert len({way.choice for way in ways}) == len(ways) >= 8
    for way in ways:
        num_flops, swapped_nbytes = backward_flops(model, way.choice)
        assert num_flops - without == way.again.num_flops, way
        assert swapped_nbytes == way.swapped_nbytes, way


def test_operators_that_save_most_per_byte_are_held_first() -> None:
    profile = profile_config(config_of_shape(LLAMA, num_tokens=32), Precision.BF16, num_examples=2, num_tokens=32)
    layer = profile.layers[0]
    names = [operator.name for operator in by_benefit(layer)]
    again = [layer.work_again(set(names[:number])).num_flops for number in range(len(names) + 1)]
    assert again[0] == layer.num_flops
    assert again[-1] == 0
    assert all(after < before for before, after in itertools.pairwise(again))
    # In bf16 the first norm reads a copy in fp32: no operator reads the layer's input a second time.
    assert not layer.saves_input
    assert max(ways_of_layer(layer), key=_swapped).choice == BlockActivations(recompute=False, swapped=frozenset({"*"}))


def _swapped(way: ActivationOption) -> int:
    return way.swapped_nbytes


@pytest.mark.parametrize(
    "name", ["Qwen2", "GPT-2", *(pytest.param(name, marks=pytest.mark.long) for name in ("Mistral", "Phi"))]
)
def test_activation_options_use_the_computed_memory(name: str) -> None:
    """A store holds the swapped activations of two micro-batches, each output in its own slots."""
    config = ARCHITECTURES[name].config(tied=False, dropout=0.0)
    layer = profile_config(config, Precision.BF16, num_examples=2, num_tokens=32).layers[0]
    runner = BlockRunner(Partition(build_meta_model(config, Precision.BF16)), torch.device("cpu"), seed=0)
    for way in ways_of_layer(layer, slot_nbytes=512):
        need = activation_need(runner, [way.choice], [(2, 32), (2, 32)], 512)
        assert need.num_slots == 2 * way.num_slots, way
        assert need.nbytes == 2 * way.swapped_nbytes, way


def test_model_that_is_no_causal_language_model_is_refused_in_a_sentence() -> None:
    with pytest.raises(UnusableConfigError, match="has no causal language model of type 't5'") as refused:
        profile_config(T5Config(), Precision.BF16, num_examples=1, num_tokens=8)
    assert len(str(refused.value)) < 200
