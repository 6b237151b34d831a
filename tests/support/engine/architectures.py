"""Tiny configs of the architectures that must train exactly, and their steps in plain autograd."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from windlass.engine.model.block_runner import random_key

NUM_LAYERS = 3
VOCABULARY = 96

_NEW = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MHA = {name: value for name, value in _NEW.items() if name != "num_key_value_heads"}
_OLD = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": NUM_LAYERS,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DROPOUTS = (
    "attention_dropout",
    "hidden_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "dropout",
    "activation_dropout",
)


@dataclass(frozen=True)
class Architecture:
    """A factory of tiny models of one class, and the name of the module that holds their layers."""

    make: Callable[[], Any]
    layers: str  # name of the module that holds them

    def config(self, *, tied: bool, dropout: float) -> Any:
        config = self.make()
        config.tie_word_embeddings = tied
        for name in _DROPOUTS:
            if hasattr(config, name):
                setattr(config, name, dropout)
        return config


ARCHITECTURES = {
    "Qwen2": Architecture(lambda: Qwen2Config(**_NEW), "model.layers"),
    "Qwen3": Architecture(lambda: Qwen3Config(**_NEW, head_dim=16), "model.layers"),
    "Llama": Architecture(lambda: LlamaConfig(**_NEW), "model.layers"),
    "Mistral": Architecture(lambda: MistralConfig(**_NEW, sliding_window=8), "model.layers"),
    "Mixtral": Architecture(lambda: MixtralConfig(**_NEW, num_local_experts=4, num_experts_per_tok=2), "model.layers"),
    "GPT-2": Architecture(lambda: GPT2Config(**_OLD, n_positions=64), "transformer.h"),
    "GPT-NeoX": Architecture(lambda: GPTNeoXConfig(**_MHA), "gpt_neox.layers"),
    "OPT": Architecture(
        lambda: OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=4,
            word_embed_proj_dim=32,
            max_position_embeddings=64,
        ),
        "model.decoder.layers",
    ),
    "Phi": Architecture(lambda: PhiConfig(**_MHA), "model.layers"),
    "Phi-3": Architecture(lambda: Phi3Config(**_NEW), "model.layers"),
    # Gemma: one layer with a sliding window, one with full attention, each with a mask of its own.
    "Gemma-2": Architecture(lambda: Gemma2Config(**_NEW, head_dim=16, sliding_window=8), "model.layers"),
    "Gemma-3": Architecture(
        lambda: Gemma3TextConfig(
            **_NEW,
            head_dim=16,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "model.layers",
    ),
    "OLMo": Architecture(lambda: OlmoConfig(**_NEW), "model.layers"),  # its norms have no params
    "OLMo-2": Architecture(lambda: Olmo2Config(**_NEW), "model.layers"),
    "Granite": Architecture(lambda: GraniteConfig(**_NEW, logits_scaling=4.0), "model.layers"),
    "SmolLM3": Architecture(lambda: SmolLM3Config(**_NEW), "model.layers"),
    "Bloom": Architecture(
        lambda: BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=NUM_LAYERS, n_head=4), "transformer.h"
    ),
    "Falcon": Architecture(
        lambda: FalconConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=NUM_LAYERS, num_attention_heads=4, alibi=True
        ),
        "transformer.h",
    ),
}


def make_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A whole model in training mode, with the same weights each time.

    Norms and biases are changed from 1 and 0, because those values would hide errors.
    """
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.02)
    return model


def make_batch(*shapes: tuple[int, int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Micro-batches of token ids and targets, of the shapes (examples, tokens). Many targets are ignored."""
    generator = torch.Generator().manual_seed(5)
    batch = [torch.randint(3, VOCABULARY, shape, generator=generator) for shape in shapes]
    targets = []
    for ids in batch:
        ignored = torch.rand(ids.shape, generator=generator) < 0.4
        ignored[:, -1] = True
        targets.append(ids.roll(-1, 1).masked_fill(ignored, -100))
    return batch, targets


@contextmanager
def keyed_randomness(model: Any, layers: str, seed: int, step: int, microbatch: int) -> Iterator[None]:
    """Seeds before the embedding, before each layer and after the last one, as block-by-block computation does."""
    modules = list(model.get_submodule(layers))

    def seed_block(block: int) -> None:
        torch.manual_seed(random_key(seed, step, microbatch, block))

    hooks = [
        layer.register_forward_pre_hook(lambda *_, block=i + 1: seed_block(block)) for i, layer in enumerate(modules)
    ]
    hooks.append(modules[-1].register_forward_hook(lambda *_: seed_block(len(modules) + 1)))
    seed_block(0)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class PlainStep:
    """The results of one step of plain autograd."""

    grads: dict[str, torch.Tensor]
    loss_sum: float
    num_targets: int
    num_correct: int


def plain_step(
    model: Any, layers: str, batch: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], *, seed: int, step: int
) -> PlainStep:
    """Gradients of the mean loss over all targets of the step, accumulated over the micro-batches in order."""
    num_targets = sum(int((t != -100).sum()) for t in targets)
    loss_sum, num_correct = 0.0, 0
    model.zero_grad()
    for m, (ids, target) in enumerate(zip(batch, targets, strict=True)):
        with keyed_randomness(model, layers, seed, step, m):
            logits = model(input_ids=ids, use_cache=False).logits.float().flatten(0, 1)
        loss = F.cross_entropy(logits, target.flatten(), ignore_index=-100, reduction="sum")
        (loss / num_targets).backward()
        loss_sum += float(loss.detach())
        num_correct += int((logits.argmax(-1) == target.flatten()).sum())
    grads = {
        name: torch.zeros_like(param) if param.grad is None else param.grad for name, param in model.named_parameters()
    }
    return PlainStep(grads, loss_sum, num_targets, num_correct)
