"""Profiles of models: bytes and FLOPs by shapes, equal to what formulas and real runs give."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from windlass.engine.model_profile import config_of_shape, profile_config
from windlass.planner.shapes import ModelShape
from windlass.storage.ids import Precision

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


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_what_a_layer_leaves_is_what_autograd_saves(shape: ModelShape) -> None:
    config = config_of_shape(shape, num_tokens=32)
    profile = profile_config(config, Precision.BF16, num_examples=2, num_tokens=32)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    params = {param.untyped_storage().data_ptr() for param in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in params:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor  # what is saved stays alive, so that no address is used twice

    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    begun = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: begun.append(dict(saved)))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(input_ids=torch.zeros(2, 32, dtype=torch.long), use_cache=False)
    of_second = sum(begun[2].values()) - sum(begun[1].values())
    expected = profile.layers[1].input_nbytes + profile.layers[1].saved_nbytes
    # A hidden state is what one layer saves and the next one as well.
    assert abs(of_second - expected) <= profile.layers[1].input_nbytes
    assert output.logits.shape == (2, 32, 128)


def test_fewer_or_more_layers_are_like_the_first() -> None:
    profile = profile_config(config_of_shape(LLAMA, num_tokens=16), Precision.FP32, num_examples=1, num_tokens=16)
    larger = profile.with_num_layers(7)
    assert larger.numel == profile.numel + 4 * profile.layers[0].numel
    assert profile.interblock_nbytes == 3 * 16 * 64 * 4
    assert larger.activation_nbytes == 7 * (16 * 64 * 4 + profile.layers[0].saved_nbytes)
