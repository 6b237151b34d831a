"""Bare shapes of models: accepted and refused ones."""

from pathlib import Path

import pytest

from windlass.planner.hardware.model_shape import ModelShape
from windlass.planner.hardware.yaml_files import YamlFileError, load, parse

GPT = {"num_layers": 40, "hidden_size": 5120, "num_heads": 40, "vocab_size": 50257}


def test_two_optional_numbers_make_it_a_llama(tmp_path: Path) -> None:
    path = tmp_path / "shape.yaml"
    path.write_text("{num_layers: 2, hidden_size: 64, num_heads: 4, num_kv_heads: 2, vocab_size: 100}")
    assert not load(ModelShape, path).is_gpt
    assert not parse(ModelShape, GPT | {"intermediate_size": 1000}, "here").is_gpt
    assert parse(ModelShape, GPT, "here").is_gpt


def test_heads_and_ties_are_as_usual_unless_given() -> None:
    gpt, llama = parse(ModelShape, GPT, "here"), parse(ModelShape, GPT | {"num_kv_heads": 8}, "here")
    assert (gpt.is_tied, llama.is_tied) == (True, False)
    assert parse(ModelShape, GPT | {"num_kv_heads": 8, "tied_embeddings": True}, "here").is_tied
    assert (llama.head_size, parse(ModelShape, GPT | {"num_kv_heads": 8, "head_dim": 64}, "here").head_size) == (
        128,
        64,
    )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"num_heads": 39}, "shape.yaml: hidden_size: 5120 is no multiple of num_heads, 39"),
        ({"num_kv_heads": 3}, "shape.yaml: num_heads: 40 is no multiple of num_kv_heads, 3"),
        (
            {"hidden_size": 120, "intermediate_size": 8},
            "shape.yaml: hidden_size: heads of 3 elements cannot be rotated in pairs; hidden_size over num_heads must "
            "be even",
        ),
        (
            {"head_dim": 64},
            "shape.yaml: head_dim: GPT's shape has no such field; give num_kv_heads or intermediate_size, too",
        ),
        (
            {"num_kv_heads": 8, "head_dim": 63},
            "shape.yaml: head_dim: heads of 63 elements cannot be rotated in pairs; it must be even",
        ),
        (
            {"num_kv_heads": 8, "qkv_bias": True, "qk_norm": True},
            "shape.yaml: qk_norm: no model that windlass knows has both qkv_bias and qk_norm",
        ),
        ({"num_layers": 0}, "shape.yaml: num_layers: 0: input should be greater than or equal to 1"),
        ({"vocab_size": -5}, "shape.yaml: vocab_size: -5: input should be greater than or equal to 1"),
        ({"layers": 4}, "shape.yaml: layers: is not a key here; did you mean num_layers?"),
        ({"n_embd": 4}, "shape.yaml: n_embd: is not a key here; there are " + ", ".join(ModelShape.model_fields)),
        ({"num_layers": 10**6}, "shape.yaml: num_layers: 1000000: input should be less than or equal to 10000"),
        ({"hidden_size": 10**9}, "shape.yaml: hidden_size: 1000000000: input should be less than or equal to 16777216"),
    ],
)
def test_impossible_shape_is_refused_by_key(change: dict[str, int], line: str) -> None:
    with pytest.raises(YamlFileError) as caught:
        parse(ModelShape, GPT | change, "shape.yaml")
    assert str(caught.value) == line
