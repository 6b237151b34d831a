import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2LMHeadModel

from tests.support.engine.folders import make_config
from windlass.engine.checkpoint.initialization import BlockInitializer, InitializationError
from windlass.engine.model.layout import ModelLayout
from windlass.engine.model.partition import Partition, build_meta_model
from windlass.storage.ids import Precision

CHUNK_NUMEL = 700
NAMES = ("qwen2-tied", "qwen2", "llama", "gpt2", "mixtral")


def meta(name: str, **changes: Any) -> tuple[Any, ModelLayout]:
    config = make_config(name)
    for key, value in changes.items():
        setattr(config, key, value)
    model = build_meta_model(config, Precision.BF16)
    return model, Partition(model, CHUNK_NUMEL).layout


def initialize(name: str, seed: int, *, backwards: bool = False, **changes: Any) -> dict[str, torch.Tensor]:
    model, layout = meta(name, **changes)
    initializer = BlockInitializer(model, layout, seed)
    params = {}
    for block in reversed(layout.blocks) if backwards else layout.blocks:
        flat = torch.empty(layout.num_chunks(block.index) * CHUNK_NUMEL)
        for key in layout.chunk_keys(block.index):
            slot = torch.full((CHUNK_NUMEL,), torch.nan)
            initializer.fill_chunk(key, slot)
            flat[key.chunk * CHUNK_NUMEL :][:CHUNK_NUMEL] = slot
        assert (flat[block.numel :] == 0).all()
        params |= {p.name: flat[p.offset : p.offset + p.numel].view(p.shape) for p in block.params}
    initializer.close()
    return params


@pytest.mark.parametrize("name", NAMES)
def test_weights_have_the_architectures_own_distribution(name: str) -> None:
    params = initialize(name, 1)
    torch.manual_seed(0)
    model, _ = meta(name)
    reference = type(model)(make_config(name))
    assert params.keys() == dict(reference.named_parameters()).keys()
    for param_name, expected in reference.named_parameters():
        param = params[param_name]
        if expected.std() == 0:  # norms and biases
            assert torch.equal(param, expected), param_name
        else:
            assert param.std().item() == pytest.approx(expected.std().item(), rel=0.25), param_name
            assert abs(param.mean().item()) < 5 * expected.std().item() / math.sqrt(param.numel())


def test_a_parent_sets_its_childrens_weights() -> None:
    # GPT-2 shrinks the weights that write to the residual stream, in the initialization of its attention and MLP.
    params = initialize("gpt2", 1)
    torch.manual_seed(0)
    reference = dict(GPT2LMHeadModel(make_config("gpt2")).named_parameters())
    for part in ("c_proj", "c_fc"):
        name = f"transformer.h.1.mlp.{part}.weight"
        assert params[name].std().item() == pytest.approx(reference[name].std().item(), rel=0.1)


def test_a_padding_row_is_zero() -> None:
    assert (initialize("llama", 1, pad_token_id=5)["model.embed_tokens.weight"][5] == 0).all()


def test_the_seed_alone_decides() -> None:
    first, backwards, other = initialize("llama", 1), initialize("llama", 1, backwards=True), initialize("llama", 2)
    assert all(torch.equal(first[name], backwards[name]) for name in first)
    name = "model.layers.{}.mlp.up_proj.weight"
    assert not torch.equal(first[name.format(0)], other[name.format(0)])
    assert not torch.equal(first[name.format(0)], first[name.format(1)])


def test_the_model_and_the_random_state_are_left_as_they_were() -> None:
    model, layout = meta("llama")
    before = {name: id(param) for name, param in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    attributes = [set(vars(module)) for module in model.modules()]
    state = torch.get_rng_state()
    for block in layout.blocks:
        BlockInitializer(model, layout, 3).fill_chunk(layout.chunk_keys(block.index)[0], torch.empty(CHUNK_NUMEL))
    assert {name: id(param) for name, param in model.named_parameters()} == before
    assert all(param.is_meta for param in model.parameters())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert torch.equal(torch.get_rng_state(), state)


def test_a_parameter_that_the_architecture_forgets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, layout = meta("llama")
    own = type(model)._init_weights

    def forgets_linear(self: Any, module: nn.Module) -> None:
        if not isinstance(module, nn.Linear):
            own(self, module)

    monkeypatch.setattr("transformers.PreTrainedModel._init_weights", forgets_linear)
    layer = layout.blocks[1]
    with pytest.raises(InitializationError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight"):
        BlockInitializer(model, layout, 3).fill_chunk(layout.chunk_keys(layer.index)[0], torch.empty(CHUNK_NUMEL))
    assert all(param.is_meta for param in model.parameters())
