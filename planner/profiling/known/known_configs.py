"""Recognizes the config of a known family by its content, without transformers.

A model's folder has a config with any fields. Its facts are those of its sizes only if each field is one of three: a
size; a field that changes numbers and no operator or tensor; or a field with the value that the recorded models had.
Any other field or value makes the model unknown, and it is traced.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it needs pydantic, which the GPU check does without
    from windlass.planner.hardware import ModelShape

# Fields that change neither operators nor tensors.
_OF_NUMBERS = frozenset(
    [
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "layer_norm_epsilon",
        "model_type",
        "pad_token_id",
        "rms_norm_eps",
        "rope_theta",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    ]
)
# Values of `rope_type` with which all tensors and operators are the same.
_ROPE_TYPES = ("default", "llama3")
# Fields of `rope_parameters`. Other ones may be parameters for each type of layer, which have a type of their own.
_OF_ROPE = frozenset(
    [
        "factor",
        "high_freq_factor",
        "low_freq_factor",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
        "rope_type",
        "type",
    ]
)

# By family: the fields of `ModelShape`, and the field of the config for each. All of them must be there.
_SIZES_OF_GPT = {"num_layers": "n_layer", "hidden_size": "n_embd", "num_heads": "n_head", "vocab_size": "vocab_size"}
_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
}
# By field: the values that a config may have. The first one is that of a missing field; `...`: it must be there.
_VALUES_OF_GPT: dict[str, tuple[Any, ...]] = {
    "activation_function": (..., "gelu_pytorch_tanh"),
    "attn_pdrop": (..., 0),
    "embd_pdrop": (..., 0),
    "resid_pdrop": (..., 0),
    "n_inner": (None,),
    "add_cross_attention": (False,),
    "reorder_and_upcast_attn": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
}
_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "pretraining_tp": (1,),
    "use_sliding_window": (False,),
}
# Fields without an effect where the ones above have their values.
_IGNORED_OF_GPT = frozenset(
    ["summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"]
)
_IGNORED = frozenset(["max_window_layers", "sliding_window"])  # without `use_sliding_window`
_ADDITIONS: dict[str, dict[str, bool]] = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}


def shape_of_config(content: Mapping[str, Any]) -> "ModelShape | None":
    """Returns the sizes of a model of a known family, from the content of its config.json.

    Returns None if they do not say all about its operators and tensors.
    """
    family = content.get("model_type")
    if family == "gpt2":
        return _shape(
            content, _SIZES_OF_GPT, "n_positions", _VALUES_OF_GPT, _IGNORED_OF_GPT, {}, is_tied_by_default=True
        )
    if not isinstance(family, str) or family not in _ADDITIONS:
        return None
    sizes = dict(_SIZES)
    if "head_dim" in content or family == "qwen3":  # the others have one by division
        sizes["head_dim"] = "head_dim"
    if not _turns_as_recorded(content):
        return None
    ignored = _IGNORED | {"rope_parameters", "rope_scaling", "layer_types"}
    return _shape(
        content, sizes, "max_position_embeddings", _VALUES, ignored, _ADDITIONS[family], is_tied_by_default=False
    )


def _shape(
    content: Mapping[str, Any],
    sizes: Mapping[str, str],
    positions: str,
    values: Mapping[str, tuple[Any, ...]],
    ignored: frozenset[str],
    additions: Mapping[str, bool],
    *,
    is_tied_by_default: bool,
) -> "ModelShape | None":
    from windlass.planner.hardware import ModelShape

    known = {*sizes.values(), positions, "tie_word_embeddings", *values, *ignored, *_OF_NUMBERS}
    if not content.keys() <= known:
        return None
    for name, (missing, *_) in values.items():
        value = content.get(name, missing)
        if value is ... or value not in values[name]:
            return None
    fields = {field: content.get(name) for field, name in sizes.items()}
    fields["max_tokens"] = content.get(positions)
    if any(type(size) is not int for size in fields.values()):
        return None
    is_tied = content.get("tie_word_embeddings", is_tied_by_default)
    if not isinstance(is_tied, bool):
        return None
    try:
        return ModelShape.model_validate({**fields, **additions, "tied_embeddings": is_tied})
    except ValueError:  # sizes beyond any model's, or that do not go together
        return None


def _turns_as_recorded(content: Mapping[str, Any]) -> bool:
    """Returns whether all layers attend to all earlier tokens, and positions turn queries and keys as recorded."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = content.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict) or not rope.keys() <= _OF_ROPE:
            return False
        if rope.get("rope_type", rope.get("type", "default")) not in _ROPE_TYPES:
            return False
        if rope.get("partial_rotary_factor", 1) != 1:
            return False
    layer_types = content.get("layer_types")
    return layer_types is None or (isinstance(layer_types, list) and set(layer_types) <= {"full_attention"})
