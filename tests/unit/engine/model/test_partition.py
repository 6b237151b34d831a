import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, Gemma3Config, Gemma3TextConfig, GPT2Config, Qwen2Config, T5Config

from tests.support.engine import odd_models
from tests.support.engine.architectures import (
    ARCHITECTURES,
    NUM_LAYERS,
    Architecture,
    make_batch,
    make_model,
    plain_step,
)
from tests.support.engine.folders import make_config, make_model_folder
from tests.support.engine.odd_models import odd_config
from windlass.engine.memory_plan.arena.layout import may_stream_tied
from windlass.engine.memory_plan.plan import ModelSize
from windlass.engine.model.gradient_check import block_gradients, check_architecture
from windlass.engine.model.layout import (
    CHUNK_GRANULE,
    MIN_CHUNK_NUMEL,
    ModelLayout,
    UnsupportedArchitectureError,
    choose_chunk_numel,
)
from windlass.engine.model.partition import (
    Partition,
    build_meta_model,
    dropouts_of,
    load_config,
    partition_folder,
    run_beside_cache,
)
from windlass.storage.ids import Precision

every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
both = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def partition_of(config: Any, chunk_numel: int | None = None) -> Partition:
    return Partition(build_meta_model(config, Precision.FP32), chunk_numel)


# --- the meta model ------------------------------------------------------------------------------------------------


@every_architecture
def test_a_meta_model_holds_no_weights_and_the_very_buffers_of_a_real_one(architecture: Architecture) -> None:
    config = architecture.config(tied=True, dropout=0.0)
    meta, real = build_meta_model(config, Precision.BF16), make_model(config)
    assert {p.device.type for p in meta.parameters()} == {"meta"}
    assert {p.dtype for p in meta.parameters()} == {torch.bfloat16}
    assert all(p.requires_grad for p in meta.parameters())
    assert all(module.training for module in meta.modules())
    found, expected = dict(meta.named_buffers()), dict(real.named_buffers())
    assert found.keys() == expected.keys()
    for name, buffer in found.items():
        torch.testing.assert_close(buffer.float(), expected[name].float(), rtol=1e-2, atol=1e-6)


def test_building_a_meta_model_leaves_the_library_as_it_was() -> None:
    before = torch.nn.Module.register_parameter
    with pytest.raises(ValueError, match="T5Config"):
        build_meta_model(T5Config(), Precision.FP32)
    assert torch.nn.Module.register_parameter is before
    assert not torch.nn.Linear(2, 2).weight.is_meta


class CacheModel(torch.nn.Module):
    """Uses the library's parameter names since 5.24."""

    def forward(self, input_ids: torch.Tensor, cache: Any = None, use_cache: bool = True) -> tuple[Any, bool]:
        return cache, use_cache


class PastKeyValuesModel(torch.nn.Module):
    """Uses the library's parameter names before 5.24, as models with their own code do."""

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = True) -> tuple[Any, bool]:
        return past_key_values, use_cache


@pytest.mark.parametrize("model", [CacheModel(), PastKeyValuesModel()], ids=["cache", "past_key_values"])
def test_a_cache_goes_in_under_the_name_that_the_model_gives_it(model: torch.nn.Module) -> None:
    cache = DynamicCache()
    taken, use_cache = run_beside_cache(model, torch.zeros((1, 2), dtype=torch.long), cache)
    assert taken is cache
    assert not use_cache


# --- blocks ---------------------------------------------------------------------------------------------------------


@every_architecture
@both
def test_every_parameter_is_in_one_block_once(architecture: Architecture, tied: bool) -> None:
    config = architecture.config(tied=tied, dropout=0.0)
    partition, model = partition_of(config), make_model(config)
    layout = partition.layout
    expected = {name: tuple(param.shape) for name, param in model.named_parameters()}
    assert {p.name: p.shape for block in layout.blocks for p in block.params} == expected
    assert sum(len(block.params) for block in layout.blocks) == len(expected)
    assert layout.numel == model.num_parameters()
    names = [f"{architecture.layers}.{i}" for i in range(NUM_LAYERS)]
    assert [block.name for block in layout.blocks] == ["embedding", *names, "head"]
    for block, name in zip(layout.blocks[1:-1], names, strict=True):
        assert all(param.name.startswith(f"{name}.") for param in block.params)
    for block in layout.blocks:
        offset = 0
        for param in block.params:
            assert param.offset == offset
            assert param.numel == torch.Size(param.shape).numel()
            offset += param.numel
        assert [param.decay for param in block.params] == sorted((p.decay for p in block.params), reverse=True)


@every_architecture
def test_tied_weights_are_one_state_used_twice(architecture: Architecture) -> None:
    model = make_model(architecture.config(tied=True, dropout=0.0))
    (input_name,) = [n for n, p in model.named_parameters() if p is model.get_input_embeddings().weight]
    (output_name,) = [n for n, m in model.named_modules() if m is model.get_output_embeddings()]
    layout = partition_of(model.config).layout
    assert layout.tied == {f"{output_name}.weight": input_name}
    head = NUM_LAYERS + 1
    assert layout.shared == (*((b,) for b in range(head)), (head, 0))
    untied = partition_of(architecture.config(tied=False, dropout=0.0)).layout
    assert untied.tied == {}
    assert untied.shared == tuple((b,) for b in range(head + 1))


def test_names_that_the_head_uses_of_the_embedding_are_those_of_tied_params() -> None:
    for tied in (False, True):
        partition = partition_of(ARCHITECTURES["GPT-2"].config(tied=tied, dropout=0.0))
        names = partition.grads_used(partition.head, 0, None)
        assert names == ({"transformer.wte.weight"} if tied else set())  # and not those of positions
        parts = {f"transformer.wte.weight[{start}:{start + 32}]" for start in range(0, 96, 32)}
        assert partition.grads_used(partition.head, 0, 32 * partition.layout.hidden_size) == (parts if tied else set())


def test_a_layer_that_uses_a_matrix_of_the_embeddings_block_is_no_tied_head() -> None:
    config = odd_config(odd_models.SharingModel)
    check_architecture(config)
    layouts = [partition_of(each).layout for each in (config, ARCHITECTURES["Qwen2"].config(tied=True, dropout=0.0))]
    assert [layout.shared[2:] for layout in layouts] == [((2, 0), (3,), (4,)), ((2,), (3,), (4, 0))]
    sizes = [
        ModelSize(
            block_numels=tuple(block.numel for block in layout.blocks),
            chunk_numel=layout.chunk_numel,
            param_itemsize=4,
            state_itemsize=12,
            shared=layout.shared,
        )
        for layout in layouts
    ]
    assert [may_stream_tied(size, num_lanes=1, num_ranks=1) for size in sizes] == [False, True]


def test_norms_and_biases_do_not_decay() -> None:
    layout = partition_of(GPT2Config(vocab_size=96, n_embd=16, n_layer=1, n_head=2, n_positions=8)).layout
    decaying = {p.name for block in layout.blocks for p in block.params if p.decay}
    assert decaying == {
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.h.0.attn.c_attn.weight",
        "transformer.h.0.attn.c_proj.weight",
        "transformer.h.0.mlp.c_fc.weight",
        "transformer.h.0.mlp.c_proj.weight",
    }
    assert layout.blocks[1].decay_numel == 16 * 16 * (3 + 1 + 4 + 4)


def test_a_layout_does_not_depend_on_the_run() -> None:
    config = make_config("qwen2-tied")
    assert partition_of(config).layout == partition_of(config).layout
    assert ModelLayout.from_json(partition_of(config).layout.to_json()) == partition_of(config).layout


# --- chunks ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 200 * 2**20), min_size=1, max_size=20))
def test_chunks_are_aligned_small_enough_and_waste_little_of_the_largest_share(numels: list[int]) -> None:
    chunk = choose_chunk_numel(numels)
    assert chunk % CHUNK_GRANULE == 0
    assert 0 < chunk < 2 * MIN_CHUNK_NUMEL + CHUNK_GRANULE
    common = max(set(numels), key=lambda n: (numels.count(n) * n, n))
    num_chunks = -(-common // chunk)
    assert num_chunks * chunk - common < num_chunks * CHUNK_GRANULE


def test_a_layer_of_a_7b_model_is_cut_evenly() -> None:
    layer, embedding = 233_057_792, 544_997_376  # Qwen2-7B
    chunk = choose_chunk_numel([embedding, *[layer] * 28, embedding + 3584])
    assert chunk == -(-layer // 27 // 2048) * 2048
    assert MIN_CHUNK_NUMEL <= chunk < 2 * MIN_CHUNK_NUMEL


# --- refusals -----------------------------------------------------------------------------------------------------

REFUSALS: list[tuple[Any, str]] = [
    (odd_models.CodeBetweenLayersModel, r"has code between layer 0 and layer 1"),
    (odd_models.BackwardsModel, r"calls layer 2 where layer 0 was expected"),
    (odd_models.LayersTwiceModel, r"calls layer 0 where layer 1 was expected"),
    (odd_models.SkippedLayerModel, r"calls 2 of its 3 layers once each"),
    (odd_models.ConditioningModel, r"passes layer 1 further tensors that need gradients \(shapes \[\(1, 8, 32\)\]\)"),
    (odd_models.SequentialModel, r"has no nn\.ModuleList of layers to stream"),
    (odd_models.PersistentBufferModel, r"keeps state in buffers, not parameters: \['model\.running_mean'\]"),
    (odd_models.MixedTypesModel, r"mixes parameter types: \['torch\.float32', 'torch\.float64'\]"),
    (odd_models.BorrowedWeightModel, r"parameters of model\.norm are used outside its own forward"),
]


@pytest.mark.parametrize(("body", "reason"), REFUSALS, ids=[body.__name__ for body, _ in REFUSALS])
def test_model_that_cannot_be_exact_is_refused_by_name(body: Any, reason: str) -> None:
    name = body.__name__.removesuffix("Model") + "ForCausalLM"
    with pytest.raises(UnsupportedArchitectureError, match=reason) as caught:
        partition_of(odd_config(body))
    assert str(caught.value).startswith(name)


def test_a_layer_without_a_hidden_state_is_refused() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="layer 0 is not called with a hidden state"):
        partition_of(odd_config(odd_models.StringFirstModel))


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"is_encoder_decoder": True}, "is an encoder-decoder; only causal LMs are supported"),
        ({"output_router_logits": True}, "auxiliary router loss is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "is quantized; full fine-tuning needs plain weights"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_would_change_the_result_are_refused(setting: dict[str, Any], reason: str) -> None:
    config = ARCHITECTURES["Mixtral"].config(tied=False, dropout=0.0)
    model = build_meta_model(config, Precision.BF16)
    for name, value in setting.items():
        setattr(model.config, name, value)
    with pytest.raises(UnsupportedArchitectureError, match=f"MixtralForCausalLM .*{reason}"):
        Partition(model)


def test_the_same_loop_without_an_oddity_is_taken() -> None:
    """Shows that the refusals above are for the oddities only."""
    partition = partition_of(odd_config(odd_models.PlainModel))
    assert partition.num_blocks == NUM_LAYERS + 2
    assert partition.num_returned is None


def test_dropout_is_found_in_the_config_and_in_modules() -> None:
    model = build_meta_model(ARCHITECTURES["Qwen2"].config(tied=False, dropout=0.0), Precision.FP32)
    assert dropouts_of(model) == []
    model.config.attention_dropout = 0.1
    model.model.layers[0].mlp.act_fn = torch.nn.Dropout(0.1)
    model.model.layers[1].mlp.act_fn = torch.nn.Dropout(0.0)
    assert dropouts_of(model) == ["attention_dropout", "model.layers.0.mlp.act_fn"]


def test_a_failed_trace_leaves_the_model_whole() -> None:
    model = build_meta_model(odd_config(odd_models.CodeBetweenLayersModel), Precision.FP32)
    layers, buffers = list(model.model.layers), dict(model.named_buffers())
    with pytest.raises(UnsupportedArchitectureError):
        Partition(model)
    assert list(model.model.layers) == layers
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.usefixtures("one_thread")
def test_randomness_of_embedding_and_head_is_keyed_too() -> None:
    config = odd_config(odd_models.HeadDropoutModel)
    model = make_model(config)
    batch, targets = make_batch((2, 16), (1, 9))
    expected = plain_step(model, "model.layers", batch, targets, seed=1, step=2).grads
    found = block_gradients(partition_of(config), dict(model.named_parameters()), batch, targets, seed=1, step=2)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    other = block_gradients(partition_of(config), dict(model.named_parameters()), batch, targets, seed=1, step=3)
    assert not any(torch.equal(found[name], other[name]) for name in expected)


# --- folders --------------------------------------------------------------------------------------------------------


def test_a_folder_is_partitioned_without_its_weights(tmp_path: Path) -> None:
    make_model_folder(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    assert partition_folder(tmp_path, Precision.BF16).layout == partition_of(make_config("llama")).layout


def test_a_composite_config_gives_its_text_model(tmp_path: Path) -> None:
    text = ARCHITECTURES["Gemma-3"].config(tied=True, dropout=0.0)
    Gemma3Config(text_config=text.to_dict(), vision_config={"hidden_size": 16}).save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert isinstance(config, Gemma3TextConfig)
    assert config.hidden_size == text.hidden_size


def test_code_of_a_folder_is_never_run(tmp_path: Path) -> None:
    Qwen2Config().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MyConfig"}}
    path.write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ValueError, match=r"custom code|trust_remote_code|mine"):
        load_config(tmp_path)
    assert not (tmp_path / "ran").exists()
