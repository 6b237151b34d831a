"""Small model folders made by the tests."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

VOCABULARY = 384

PLAIN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
)


def make_tokenizer(template: str | None = PLAIN_TEMPLATE, *, bos: bool = False, eos: bool = True) -> Any:
    """A byte-level BPE tokenizer with a few merges. With `bos`, it begins texts with <|bos|>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|end|>", "<|bos|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the user asks and the assistant answers the user's questions"] * 4, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 3)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>" if eos else None)
    fast.chat_template = template
    return fast


def make_tokenizer_folder(directory: Path, tokenizer: Any, vocabulary: int = VOCABULARY) -> Path:
    """Makes a folder with a tokenizer and the parts of a config that tokenizing needs."""
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": vocabulary}))
    return directory


def make_config(name: str) -> Any:
    """The config of a tiny model."""
    common = {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    match name:
        case "qwen2-tied":
            return Qwen2Config(**common, tie_word_embeddings=True)
        case "qwen2":
            return Qwen2Config(**common, tie_word_embeddings=False)
        case "llama":
            return LlamaConfig(**common)
        case "mixtral":
            return MixtralConfig(**common, num_local_experts=3, num_experts_per_tok=2)
        case "gpt2":
            return GPT2Config(vocab_size=96, n_embd=16, n_layer=2, n_head=4, n_positions=32)
    raise ValueError(name)


def make_model_folder(directory: Path, name: str, **options: Any) -> Any:
    """Saves a tiny random model and returns it."""
    model = AutoModelForCausalLM.from_config(make_config(name))
    model.save_pretrained(directory, **options)
    return model
