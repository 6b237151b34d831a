"""A folder's config of a known family is planned by its sizes, and any other config is traced."""

import json
from pathlib import Path
from typing import Any

import pytest

from windlass.engine.memory_estimate.model_facts import Passes
from windlass.planner.hardware.model_shape import ModelShape
from windlass.planner.profiling.facts_choice import KnownOrTraced, facts_of
from windlass.planner.profiling.known.known_configs import shape_of_config
from windlass.planner.profiling.model_config import FolderConfig
from windlass.planner.profiling.model_profiler import TracedModel, config_of_shape
from windlass.storage.ids import BlockIndex, Precision

GPT = ModelShape(num_layers=2, hidden_size=64, num_heads=4, vocab_size=500, max_tokens=48)
LLAMA = ModelShape(
    num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, intermediate_size=96, vocab_size=500, max_tokens=48
)
SHAPES = {
    "gpt2": GPT,
    "llama": LLAMA,
    "qwen2": LLAMA.model_copy(update={"qkv_bias": True, "tied_embeddings": True}),
    "qwen3": LLAMA.model_copy(update={"qk_norm": True, "head_dim": 32}),
}
# As in the published folder of Llama 3.1, beside the sizes.
LLAMA_3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
    "rope_type": "llama3",
}


def content_of_folder(shape: ModelShape, folder: Path, **changes: Any) -> dict[str, Any]:
    config_of_shape(shape, num_tokens=48).save_pretrained(folder)
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content | changes


@pytest.mark.parametrize("family", SHAPES)
def test_saved_config_of_a_known_family_has_its_shape(family: str, tmp_path: Path) -> None:
    shape = SHAPES[family]
    content = content_of_folder(shape, tmp_path, rms_norm_eps=1e-3, bos_token_id=1)
    found = shape_of_config(content)
    assert found is not None
    of_llama = {} if shape.is_gpt else {"head_dim": shape.head_size}
    assert found == shape.model_copy(update={"tied_embeddings": shape.is_tied, **of_llama})


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"attention_dropout": 0.1}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"a_new_field": 1}),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        ("llama", {"vocab_size": None}),
        ("llama", {"num_attention_heads": 2.0}),
        ("llama", {"hidden_size": 2**40}),
        ("llama", {"model_type": "mistral"}),
        ("qwen2", {"use_sliding_window": True}),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}}),
        ("gpt2", {"activation_function": "gelu_new"}),
        ("gpt2", {"attn_pdrop": 0.1}),
        ("gpt2", {"n_inner": 100}),
    ],
)
def test_config_with_another_field_or_value_has_no_known_shape(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    assert shape_of_config(content_of_folder(SHAPES[family], tmp_path, **changes)) is None


def test_config_of_gpt_without_its_dropout_has_no_known_shape(tmp_path: Path) -> None:
    """A missing field means dropout, and activations of that are not in the recorded formulas."""
    content = content_of_folder(GPT, tmp_path)
    del content["resid_pdrop"]
    assert shape_of_config(content) is None


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA_3_ROPE, "bos_token_id": 3}),
        pytest.param("gpt2", {}, marks=pytest.mark.long),
        pytest.param("qwen2", {"sliding_window": 16, "use_sliding_window": False}, marks=pytest.mark.long),
        pytest.param("qwen3", {"rms_norm_eps": 1e-4}, marks=pytest.mark.long),
    ],
)
def test_known_config_of_a_folder_has_the_facts_of_its_trace(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    content = content_of_folder(SHAPES[family], tmp_path, **changes)
    (tmp_path / "config.json").write_text(json.dumps(content))
    config, refused = FolderConfig.read(tmp_path), "a known model is not traced"
    facts = facts_of(config, Precision.BF16, on_trace=lambda: pytest.fail(refused))
    assert isinstance(facts, KnownOrTraced)
    traced = TracedModel(config.load(), Precision.BF16)
    assert facts.layout == traced.layout
    assert (facts.name, facts.buffers_nbytes) == (traced.name, traced.buffers_nbytes)
    assert facts.operators(BlockIndex(1), 3, 40) == traced.operators(BlockIndex(1), 3, 40)
    passes = Passes(num_examples=3, num_tokens=40, grad_precision=Precision.BF16, is_summed=False)
    assert facts.needs({}, passes) == traced.needs({}, passes)
