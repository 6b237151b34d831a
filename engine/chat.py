"""Conversations as text: the model's own chat template, and which characters the assistant wrote."""

import re
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from windlass.engine.data import ChatExample

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplateError(Exception):
    """The chat template cannot render a conversation, or not so that the assistant's part of it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedText:
    """A text and the character ranges to learn."""

    text: str
    targets: tuple[tuple[int, int], ...]  # (first character, past-last character), ascending


class ChatRenderer:
    """Renders conversations with the chat template of a tokenizer.

    What is learned of an assistant's turn is its text and whatever ends the turn, not the header before it. A template
    that marks this with `{% generation %}` is believed. Otherwise the turn is what the template adds to the
    conversation before it when the turn is put in; that needs prefixes of a conversation to render to prefixes of it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = {token.content for token in tokenizer.added_tokens_decoder.values()}
        self._special_tokens = tuple(sorted(added | set(tokenizer.all_special_tokens)))

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has any chat template."""
        return bool(self._tokenizer.chat_template)

    def render(self, example: ChatExample) -> RenderedText:
        """The conversation's text and the assistant's parts of it that have weight 1. Raises `ChatTemplateError`."""
        template = self._template(example)
        if _GENERATION_TAG.search(template):
            return self._render_marked(template, example)
        return self._render_by_prefixes(template, example)

    def _template(self, example: ChatExample) -> str:
        try:
            template: str = self._tokenizer.get_chat_template(tools=list(example.tools) if example.tools else None)
        except ValueError as error:
            raise ChatTemplateError(str(error)) from error
        return template

    def _run(
        self, template: str, example: ChatExample, num_messages: int, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Renders the first messages; with `marks`, also returns the character ranges of the generation blocks."""
        try:
            texts, ranges = render_jinja_template(
                conversations=[list(example.messages[:num_messages])],
                tools=list(example.tools) if example.tools else None,
                chat_template=template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **self._tokenizer.special_tokens_map,
            )
            texts[0].encode()
        # A template is a program of the model's maker: what it raises is not ours to foresee.
        except Exception as error:
            part = "the conversation" if num_messages == len(example.messages) else f"its first {num_messages} messages"
            raise ChatTemplateError(f"the chat template fails on {part}: {type(error).__name__}: {error}") from error
        return texts[0], list(ranges[0]) if marks else []

    def _render_marked(self, template: str, example: ChatExample) -> RenderedText:
        text, ranges = self._run(template, example, len(example.messages), marks=True)
        weights = [w for m, w in zip(example.messages, example.weights, strict=True) if m["role"] == "assistant"]
        if all(weights):
            return RenderedText(text=text, targets=tuple(ranges))
        if len(ranges) != len(weights):
            raise ChatTemplateError(
                f"the chat template marks {len(ranges)} parts as the assistant's in a conversation with {len(weights)} "
                "assistant messages, so weights of 0 cannot be applied"
            )
        return RenderedText(text=text, targets=tuple(r for r, w in zip(ranges, weights, strict=True) if w))

    def _render_by_prefixes(self, template: str, example: ChatExample) -> RenderedText:
        text, _ = self._run(template, example, len(example.messages))
        targets = []
        for i, (message, weight) in enumerate(zip(example.messages, example.weights, strict=True)):
            if message["role"] != "assistant" or not weight:
                continue
            before, _ = self._run(template, example, i, prompt=True)
            through, _ = self._run(template, example, i + 1)
            for prefix in (before, through):
                if not text.startswith(prefix):
                    raise ChatTemplateError(
                        f"the chat template renders the conversation to messages[{i}] differently when more follows, "
                        "so the assistant's part is unknown; use a template with {% generation %} marks, or end each "
                        "example with the one assistant message to learn and give earlier ones weight 0"
                    )
            if len(before) > len(through):
                raise ChatTemplateError(f"the chat template's generation prompt is longer than messages[{i}] itself")
            targets.append((len(before), self._end_of_turn(text, len(before), len(through))))
        return RenderedText(text=text, targets=tuple(targets))

    def _end_of_turn(self, text: str, start: int, end: int) -> int:
        """The end of a turn without the line breaks after its end-of-turn token: nobody generates past that token."""
        kept = text[start:end].rstrip()
        return start + len(kept) if kept.endswith(self._special_tokens) else end
