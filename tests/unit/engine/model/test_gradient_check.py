from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.support.engine import odd_models
from tests.support.engine.architectures import ARCHITECTURES
from tests.support.engine.odd_models import odd_config
from windlass.engine.memory_plan.activation_policy import RECOMPUTE_ALL, ActivationChoice, BlockActivations
from windlass.engine.model import gradient_check as self_check
from windlass.engine.model.gradient_check import check_architecture, tiny_config
from windlass.engine.model.layout import UnsupportedArchitectureError


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_supported_architectures_pass_as_their_class_comes(architecture: Any) -> None:
    check_architecture(type(architecture.make())())


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(
            num_hidden_layers=28,
            layer_types=["full_attention"] * 14 + ["sliding_attention"] * 14,
            use_sliding_window=True,
        ),
        Qwen3Config(tie_word_embeddings=True, head_dim=128, hidden_size=1024, num_attention_heads=16),
        LlamaConfig(
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            max_position_embeddings=131072,
        ),
        MixtralConfig(attention_dropout=0.1),
        Qwen3MoeConfig(num_experts=128, num_experts_per_tok=8),
        GPTJConfig(),
        GPT2Config(n_embd=1600, n_head=25, n_layer=48),
    ],
    ids=["Qwen2-two-kinds", "Qwen3-0.6B", "Llama-3.1", "Mixtral-dropout", "Qwen3-30B-A3B", "GPT-J", "GPT-2-XL"],
)
def test_common_variants_of_supported_architectures_pass(config: Any) -> None:
    check_architecture(config)


def test_a_tiny_config_keeps_one_layer_of_each_kind_and_the_original() -> None:
    config = Gemma3TextConfig()
    tiny = tiny_config(config)
    assert tiny.layer_types == ["sliding_attention", "full_attention", "full_attention"]
    assert tiny.num_hidden_layers == 3
    assert (tiny.hidden_size, tiny.vocab_size) == (64, 96)
    assert max(tiny.bos_token_id, tiny.eos_token_id, tiny.pad_token_id) < 96
    assert (config.hidden_size, config.num_hidden_layers) == (2304, 26)


def test_tiny_config_of_small_model_is_unchanged() -> None:
    tiny = tiny_config(odd_config(odd_models.PlainModel))
    assert (tiny.hidden_size, tiny.intermediate_size, tiny.num_attention_heads) == (32, 48, 4)


def test_the_plain_loop_passes() -> None:
    check_architecture(odd_config(odd_models.PlainModel))
    check_architecture(odd_config(odd_models.HeadDropoutModel))


@pytest.mark.parametrize(
    "body", [odd_models.TokenMixingModel, odd_models.CountingModel, odd_models.NotingModel], ids=lambda b: b.__name__
)
def test_error_invisible_to_trace_is_caught(body: Any) -> None:
    config = odd_config(body)
    config.architectures = ["TheirModel"]
    with pytest.raises(
        UnsupportedArchitectureError, match=r"TheirModel is not supported: block by block it computes other gradients"
    ):
        check_architecture(config)


def test_a_model_that_writes_to_its_params_is_refused() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="block 1 changes the parameters of block 1 in place"):
        check_architecture(odd_config(odd_models.ClampingModel))


@pytest.mark.short("swap")
@pytest.mark.parametrize("choice", ActivationChoice)
def test_every_choice_of_activations_passes(choice: ActivationChoice) -> None:
    for body in (odd_models.SavingModel, odd_models.KernelModel, odd_models.HeadDropoutModel):
        check_architecture(odd_config(body), choice.of_layers(1))
    check_architecture(BloomConfig(), choice.of_layers(1))


def test_functions_that_keep_params_by_themselves_are_refused_where_they_are_wrong() -> None:
    config = odd_config(odd_models.HoardingModel)
    right = (ActivationChoice.RECOMPUTE, ActivationChoice.RECOMPUTE_SWAP_INPUT)
    for choice in ActivationChoice:
        if choice in right:
            check_architecture(config, choice.of_layers(1))
            continue
        with pytest.raises(
            UnsupportedArchitectureError,
            match=rf"HoardingConfig is not supported with activations {choice}: .* other gradients than as a whole",
        ):
            check_architecture(config, choice.of_layers(1))
    products = BlockActivations(swapped=frozenset({"aten.mm.default"}))
    check_architecture(config, [products])  # a second forward pass saves only new tensors


def test_other_operators_the_second_time_are_refused_where_they_are_wrong() -> None:
    config = odd_config(odd_models.SwitchingModel)
    check_architecture(config, [RECOMPUTE_ALL, *ActivationChoice.KEEP.of_layers(1)])
    with pytest.raises(
        UnsupportedArchitectureError,
        match=r"cannot be checked with activations BlockActivations\(.*'aten.mm.default'.* operator 2 of",
    ):
        check_architecture(config, [BlockActivations(kept=frozenset({"aten.mm.default"}))])


@pytest.mark.parametrize("body", [odd_models.SharingModel, odd_models.SharingBackwardsModel], ids=lambda b: b.__name__)
def test_a_matrix_of_two_blocks_passes_in_any_order_of_registration(body: Any) -> None:
    check_architecture(odd_config(body))


def test_refusal_by_trace_keeps_its_reason() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="has code between layer 0 and layer 1"):
        check_architecture(odd_config(odd_models.CodeBetweenLayersModel))


def test_a_model_that_cannot_be_built_is_refused_and_threads_are_put_back() -> None:
    config = odd_config(odd_models.PlainModel, hidden_act="no such thing")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads + 1)
    try:
        with pytest.raises(UnsupportedArchitectureError, match=r"PlainConfig cannot be checked: .* KeyError"):
            check_architecture(config)
        assert torch.get_num_threads() == num_threads + 1
    finally:
        torch.set_num_threads(num_threads)


def test_a_gradient_that_is_nan_on_one_side_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = self_check.block_gradients

    def spoiled(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        found = gradients(*args, **kwargs)
        found["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
        return found

    monkeypatch.setattr(self_check, "block_gradients", spoiled)
    with pytest.raises(UnsupportedArchitectureError, match=r"first at model\.layers\.1\.mlp\.up_proj\.weight"):
        check_architecture(LlamaConfig())


@pytest.mark.short("swap")
@pytest.mark.parametrize("choice", ActivationChoice)
def test_every_choice_passes_with_params_in_pieces(choice: ActivationChoice) -> None:
    for config in (LlamaConfig(), odd_config(odd_models.SavingModel), odd_config(odd_models.KernelModel)):
        check_architecture(config, choice.of_layers(1), True)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        # A graph that backward traverses as a whole finds whole params unchanged.
        (odd_models.HoardingModel, "HoardingConfig is not supported with streamed_blocks: .* other gradients"),
        (odd_models.TakingModel, "TakingConfig is not supported with streamed_blocks: .* other gradients"),
        (odd_models.BorrowingModel, "BorrowingConfig cannot be checked with streamed_blocks: .*meta"),
        (odd_models.NestedModel, "cannot be checked with streamed_blocks: .* needs more than 2 pieces at once"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_layers_that_need_params_at_other_times_are_refused(body: Any, reason: str) -> None:
    config = odd_config(body)
    check_architecture(config)
    with pytest.raises(UnsupportedArchitectureError, match=reason):
        check_architecture(config, is_streamed=True)


@pytest.mark.short("recompute")
@pytest.mark.parametrize("choice", ActivationChoice)
def test_every_choice_passes_with_cut_matrices(choice: ActivationChoice) -> None:
    for config in (LlamaConfig(), GPT2Config(), odd_config(odd_models.SavingModel), odd_config(odd_models.KernelModel)):
        check_architecture(config, choice.of_layers(1), False, True)
        check_architecture(config, choice.of_layers(1), True, True)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["OPT", "Gemma-2"])
def test_tied_and_untied_ends_pass_in_parts_and_in_pieces(name: str, tied: bool) -> None:
    """OPT's biases of keys have gradients of rounding only."""
    check_architecture(ARCHITECTURES[name].config(tied=tied, dropout=0.0), (RECOMPUTE_ALL,), True, True, True)


def test_a_layer_that_reads_the_matrix_of_a_cut_module_is_refused() -> None:
    config = odd_config(odd_models.BorrowingModel)
    with pytest.raises(
        UnsupportedArchitectureError, match=r"BorrowingConfig cannot be checked with cut_matrices: .*meta"
    ):
        check_architecture(config, is_cut=True)
    # A subclass of a linear layer is never cut, so this one finds its own weight.
    check_architecture(odd_config(odd_models.TakingModel), is_cut=True)
