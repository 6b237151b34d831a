"""The demo's small model and tokenizer, and measurements of the model before and after training."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config
from transformers.utils import logging

from windlass.engine.data import ChatExample, DataFile
from windlass.engine.data.chat import ChatRenderer

_END, _TURN, _END_OF_TURN = "<|end|>", "<|turn|>", "<|end_of_turn|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end_of_turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def make_demo_model(folder: Path, text_file: Path, *, vocab_size: int = 8192, seed: int = 0) -> int:
    """Writes a Qwen2-shaped model of about 20 M random weights and a byte-level BPE tokenizer trained on a chat file.

    Returns the number of parameters.
    """
    tokenizer = _train_tokenizer(text_file, vocab_size)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=10,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.convert_tokens_to_ids(_END),
        eos_token_id=tokenizer.convert_tokens_to_ids(_END_OF_TURN),
        pad_token_id=tokenizer.convert_tokens_to_ids(_END),
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())


def _train_tokenizer(text_file: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END, _TURN, _END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_contents(text_file), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=_END, eos_token=_END_OF_TURN, pad_token=_END, model_max_length=512
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def _contents(text_file: Path) -> Iterator[str]:
    with text_file.open(encoding="utf-8") as file:
        for line in file:
            yield from (f"{message['role']}\n{message['content']}" for message in json.loads(line)["messages"])


def measure_loss(model_dir: Path, file: Path) -> float:
    """Returns a model's mean loss over the answers of a chat file.

    Only transformers computes it, no part of windlass.
    """
    model, tokenizer = _load(model_dir)
    renderer = ChatRenderer(tokenizer)
    loss_sum, num_targets = 0.0, 0
    with torch.inference_mode():
        for _, _, example in DataFile(path=file, param="validation_file").examples():
            assert isinstance(example, ChatExample), "the demo writes chats"
            (rendered,) = renderer.render(example)
            encoded = tokenizer(rendered.text, return_offsets_mapping=True, add_special_tokens=False)
            is_target = [
                any(start < last and first < end for first, last in rendered.targets)
                for start, end in encoded["offset_mapping"]
            ]
            ids = torch.tensor([encoded["input_ids"]])
            targets = torch.where(torch.tensor([is_target]), ids, -100)[:, 1:]
            logits = model(input_ids=ids).logits[:, :-1].float()
            loss_sum += float(F.cross_entropy(logits[0], targets[0], ignore_index=-100, reduction="sum"))
            num_targets += int((targets != -100).sum())
    return loss_sum / num_targets


def answer(model_dir: Path, question: str, *, max_new_tokens: int = 48) -> str:
    """Generates a model's answer with greedy decoding."""
    model, tokenizer = _load(model_dir)
    messages = [{"role": "user", "content": question}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        ids = model.generate(**encoded, max_new_tokens=max_new_tokens, do_sample=False, repetition_penalty=1.2)
    text: str = tokenizer.decode(ids[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    return " ".join(text.split())


def _load(model_dir: Path) -> tuple[Any, Any]:
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True).eval()
    return model, AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
