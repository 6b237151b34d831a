"""Qwen2 models with one oddity each: block-by-block training must refuse them, or treat them with care."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen2Model
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


class PlainModel(Qwen2Model):
    """Qwen2 with its loop over layers written out, so that subclasses can change a part of it."""

    def forward(self, input_ids: torch.Tensor, **_: Any) -> BaseModelOutputWithPast:
        hidden = self.enter(self.embed_tokens(input_ids))
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        embeddings = self.rotary_emb(hidden, positions)
        hidden = self.run_layers(hidden, {"attention_mask": None, "position_embeddings": embeddings})
        return BaseModelOutputWithPast(last_hidden_state=self.leave(hidden))

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def run_layers(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden, **kwargs)
        return hidden

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden)


class CodeBetweenLayersModel(PlainModel):
    def run_layers(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden, **kwargs) * 0.5
        return hidden


class BackwardsModel(PlainModel):
    def run_layers(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        for layer in reversed(self.layers):
            hidden = layer(hidden, **kwargs)
        return hidden


class LayersTwiceModel(PlainModel):
    def run_layers(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(layer(hidden, **kwargs), **kwargs)
        return hidden


class SkippedLayerModel(PlainModel):
    def run_layers(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        for layer in list(self.layers)[:-1]:
            hidden = layer(hidden, **kwargs)
        return hidden


class ConditioningModel(PlainModel):
    """Passes the embedded tokens to every layer as well."""

    def run_layers(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        embedded = hidden
        for layer in self.layers:
            hidden = layer(hidden, conditioning=embedded, **kwargs)
        return hidden


class StringFirstModel(PlainModel):
    def run_layers(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer("hidden", x=hidden, **kwargs)
        return hidden


class SequentialModel(PlainModel):
    """Keeps its layers in a Sequential instead of a ModuleList."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.Sequential(*self.layers)


class PersistentBufferModel(PlainModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("running_mean", torch.zeros(4))


class MixedTypesModel(PlainModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norm.weight = nn.Parameter(torch.ones(32, dtype=torch.float64))


class BorrowedWeightModel(PlainModel):
    """Uses a module's parameter without calling the module."""

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.norm.weight


class TokenMixingModel(PlainModel):
    """Makes the logits of a token depend on earlier tokens after the last layer."""

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden.cumsum(1))


class HeadDropoutModel(PlainModel):
    """Applies dropout after the embedding and before the head too, so every block is random."""

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(hidden, 0.2, self.training)

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.norm(hidden), 0.2, self.training)


class _CountingLayer(Qwen2DecoderLayer):
    """Computes a different result at each call."""

    num_calls = 0

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.num_calls += 1
        return super().forward(hidden_states, **kwargs) * (1 + 0.1 * self.num_calls)


class CountingModel(PlainModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(_CountingLayer(config, i) for i in range(config.num_hidden_layers))


class _SwitchingLayer(Qwen2DecoderLayer):
    """Computes the same result with other operators at each call."""

    num_calls = 0

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.num_calls += 1
        for _ in range(self.num_calls):
            hidden_states = hidden_states.neg().neg()
        return super().forward(hidden_states, **kwargs)


class SwitchingModel(PlainModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(_SwitchingLayer(config, i) for i in range(config.num_hidden_layers))


class _ClampingLayer(Qwen2DecoderLayer):
    """Writes to its own weights."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        with torch.no_grad():
            self.mlp.down_proj.weight.clamp_(-1, 1)
        output: torch.Tensor = super().forward(hidden_states, **kwargs)
        return output


class ClampingModel(PlainModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(_ClampingLayer(config, i) for i in range(config.num_hidden_layers))


class _NotingLayer(Qwen2DecoderLayer):
    """Adds a tensor that the previous layer left in a list, which a trace does not see."""

    def __init__(self, config: Any, layer_idx: int, note: list[torch.Tensor]) -> None:
        super().__init__(config, layer_idx)
        self.note = note

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = super().forward(hidden_states, **kwargs)
        if self.note:
            output = output + self.note.pop()
        self.note.append(hidden_states)
        return output


class NotingModel(PlainModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        note: list[torch.Tensor] = []
        self.layers = nn.ModuleList(_NotingLayer(config, i, note) for i in range(config.num_hidden_layers))

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        if len(self.layers):
            self.layers[0].note.clear()
        return hidden


class _HoardedLinear(torch.autograd.Function):
    """Stores its weight as an attribute, outside of autograd's saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad @ ctx.weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class _SavedLinear(torch.autograd.Function):
    """Saves its weight through autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class _KernelLinear(_SavedLinear):
    """Reads addresses of tensors, as code that launches its own kernels does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert x.is_meta or x.data_ptr() != 0
        return _SavedLinear.forward(ctx, x, weight)


class _OwnLinear(nn.Linear):
    def __init__(self, size: int, function: Any) -> None:
        super().__init__(size, size, bias=False)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.function.apply(x, self.weight)
        return output


class HoardingModel(PlainModel):
    """Has layers that keep params outside of autograd from the forward to the backward pass."""

    function: Any = _HoardedLinear

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.self_attn.o_proj = _OwnLinear(config.hidden_size, self.function)


class SavingModel(HoardingModel):
    """Has layers that save their params through autograd, as they should."""

    function = _SavedLinear


class KernelModel(HoardingModel):
    """Has layers that launch their own kernel."""

    function = _KernelLinear


class _BorrowingLayer(Qwen2DecoderLayer):
    """Reads a param of a module that does not run."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = super().forward(hidden_states, **kwargs)
        return output @ self.self_attn.o_proj.weight


class _Handing(nn.Linear):
    """Returns its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight


class _TakingLayer(Qwen2DecoderLayer):
    """Computes with the weight that its submodule returns."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.handing = _Handing(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = super().forward(hidden_states, **kwargs)
        return output @ self.handing(output)


class _Nested(nn.Module):
    """Computes with its weight before and after its inner module."""

    def __init__(self, config: Any, depth: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(config.intermediate_size, config.hidden_size) * 0.1)
        self.inside = _Nested(config, depth - 1) if depth > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside(x @ self.weight.t() @ self.weight)


class _NestedLayer(Qwen2DecoderLayer):
    """Needs the params of three modules at the same time."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.mlp = _Nested(config, 3)


class _TwiceLayer(Qwen2DecoderLayer):
    """Calls its modules twice."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return super().forward(super().forward(hidden_states, **kwargs), **kwargs)


class SharingModel(PlainModel):
    """Has a layer that uses a matrix of the code before the layers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        layers = self._modules.pop("layers")
        self.entry = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.layers = layers  # registered behind `entry`, so that a shared matrix has the name of its first use
        self.layers[1].self_attn.o_proj.weight = self.entry.weight

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.entry(hidden)


class SharingBackwardsModel(SharingModel):
    """Has the same, but registers the layers first, so that PyTorch names the matrix as that of the layer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.entry = self._modules.pop("entry")


class OwnLayersModel(PlainModel):
    """Has layers of another class."""

    layer: type[Qwen2DecoderLayer]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(self.layer(config, i) for i in range(config.num_hidden_layers))


class BorrowingModel(OwnLayersModel):
    layer = _BorrowingLayer


class TakingModel(OwnLayersModel):
    layer = _TakingLayer


class TwiceModel(OwnLayersModel):
    layer = _TwiceLayer


class NestedModel(OwnLayersModel):
    layer = _NestedLayer


def odd_config(body: type[PlainModel], **options: Any) -> Any:
    """A config from which AutoModelForCausalLM builds a causal LM around `body`."""
    name = body.__name__.removesuffix("Model")
    config_class = type(f"{name}Config", (Qwen2Config,), {"model_type": f"odd-{name.lower()}"})

    def build(self: Any, config: Any) -> None:
        Qwen2ForCausalLM.__init__(self, config)
        self.model = body(config)
        self.post_init()

    lm_class = type(f"{name}ForCausalLM", (Qwen2ForCausalLM,), {"__init__": build, "config_class": config_class})
    AutoModelForCausalLM.register(config_class, lm_class)
    return config_class(**(SIZES | options))
