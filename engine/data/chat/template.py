"""Converts conversations into the forms that chat templates expect, and renders them by a template."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from typing import Any

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from windlass.engine.data import ChatExample, memory_limit

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_STRFTIME_DIRECTIVES = "aAbBcdHIjmMpSUwWxXyYZ"


class ChatTemplateError(Exception):
    """The chat template cannot render a conversation, drops a part of it, or leaves the assistant's part unclear.

    `field` is the part of the line at fault, such as `messages[2]`.
    """

    def __init__(self, message: str, field: str = "messages") -> None:
        super().__init__(message, field)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A way to write the parts of a conversation for which chat templates expect different forms."""

    null_content: str | None  # replaces the missing content of a message with tool calls
    arguments_as_text: bool  # a tool call's arguments are JSON in a string, as OpenAI writes them; else an object


# In the order of the attempts.
_FORMS = tuple(
    Form(null_content=content, arguments_as_text=as_text) for as_text in (False, True) for content in (None, "")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The input of a chat template: messages in one form, and tools."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None

    def first(self, num_messages: int) -> "Conversation":
        """Returns the conversation's first messages with the same tools."""
        return replace(self, messages=self.messages[:num_messages])

    def with_message(self, index: int, message: dict[str, Any]) -> "Conversation":
        """Returns the conversation with one message replaced, or appended if `index` is past the last."""
        return replace(self, messages=(*self.messages[:index], message, *self.messages[index + 1 :]))


def conversations_of(example: ChatExample) -> Iterator[Conversation]:
    """Yields the conversation in each distinct form, the most likely first."""
    has_null = any(message["content"] is None for message in example.messages)
    has_calls = any(message.get("tool_calls") for message in example.messages)
    for form in _FORMS:
        if (has_null or form.null_content is None) and (has_calls or not form.arguments_as_text):
            messages = tuple(_message_in_form(message, form) for message in example.messages)
            yield Conversation(messages=messages, tools=example.tools)


def arguments_object(call: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool call's arguments as an object, from an object or from JSON in a string."""
    arguments = call["function"].get("arguments", {})
    parsed: dict[str, Any] = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    return parsed


def with_arguments(call: dict[str, Any], arguments: dict[str, Any], *, as_text: bool) -> dict[str, Any]:
    """Returns a tool call with other arguments."""
    written = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
    return {**call, "function": {**call["function"], "arguments": written}}


def _message_in_form(message: dict[str, Any], form: Form) -> dict[str, Any]:
    written = dict(message)
    if written["content"] is None:
        written["content"] = form.null_content
    if "tool_calls" in written:
        written["tool_calls"] = [_call_in_form(call, form) for call in written["tool_calls"]]
    if "reasoning_content" in written:
        written["thinking"] = written["reasoning_content"]  # the name that gpt-oss reads
    return written


def _call_in_form(call: dict[str, Any], form: Form) -> dict[str, Any]:
    if form.arguments_as_text and isinstance(call["function"].get("arguments"), str):
        return call  # unchanged, so that the author's spelling of the JSON is kept
    return with_arguments(call, arguments_object(call), as_text=form.arguments_as_text)


class ChatTemplate:
    """The chat template of a tokenizer. It runs in the sandbox of transformers.

    Some templates print the current day by `strftime_now`. Here it always returns `day` at midnight, so that a file
    gives the same tokens on every day.
    """

    def __init__(self, tokenizer: Any, day: date) -> None:
        self._tokenizer = tokenizer
        added = {token.content for token in tokenizer.added_tokens_decoder.values()}
        self.special_tokens = tuple(sorted(added | set(tokenizer.all_special_tokens)))
        self._day_macro = _strftime_macro(datetime.combine(day, time()))

    @property
    def exists(self) -> bool:
        """True if the tokenizer has any chat template."""
        return bool(self._tokenizer.chat_template)

    def has_marks(self, conversation: Conversation) -> bool:
        """Checks whether the conversation's template marks the assistant's part by `{% generation %}`."""
        return bool(_GENERATION_TAG.search(self._source(conversation)))

    def render(self, conversation: Conversation, *, prompt: bool = False) -> str:
        """Renders a conversation, with `prompt` followed by the generation prompt. Raises `ChatTemplateError`."""
        return self._run(conversation, prompt=prompt, marks=False)[0]

    def render_with_marks(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text and the character ranges of `{% generation %}` blocks. Raises `ChatTemplateError`."""
        return self._run(conversation, prompt=False, marks=True)

    def try_render(self, conversation: Conversation, *, prompt: bool = False) -> str | None:
        """Renders like `render`, but returns None if the template fails on the conversation."""
        try:
            return self.render(conversation, prompt=prompt)
        except ChatTemplateError:
            return None

    def locate(self, conversation: Conversation, error: ChatTemplateError) -> ChatTemplateError:
        """Returns the error with the field at fault: the tools, or the first message with which it occurs."""
        if conversation.tools and self._error_on(replace(conversation, tools=None)) != str(error):
            return ChatTemplateError(error.message, "tools")
        for num_messages in range(1, len(conversation.messages) + 1):
            if self._error_on(conversation.first(num_messages)) == str(error):
                return ChatTemplateError(error.message, f"messages[{num_messages - 1}]")
        return error

    def _error_on(self, conversation: Conversation) -> str | None:
        try:
            self.render(conversation)
        except ChatTemplateError as error:
            return str(error)
        return None

    def _source(self, conversation: Conversation) -> str:
        try:
            source: str = self._tokenizer.get_chat_template(tools=list(conversation.tools or ()) or None)
        except ValueError as error:
            raise ChatTemplateError(str(error)) from error
        return source

    def _run(self, conversation: Conversation, *, prompt: bool, marks: bool) -> tuple[str, list[tuple[int, int]]]:
        source = self._source(conversation)
        if "strftime_now" in source:
            source = self._day_macro + source
        try:
            texts, ranges = render_jinja_template(
                conversations=[list(conversation.messages)],
                tools=list(conversation.tools) if conversation.tools else None,
                chat_template=source,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **self._tokenizer.special_tokens_map,
            )
            texts[0].encode()
        except MemoryError as error:
            why = f"MemoryError: it takes more memory than a preparation gets{memory_limit()}"
            raise ChatTemplateError(f"the chat template fails: {why}") from error
        # A template is a program of the model's author and may raise any exception.
        except Exception as error:
            # The text of the template's own refusal is for the user. Other exceptions need their type too.
            refusal = str(error) if type(error) is TemplateError else f"{type(error).__name__}: {error}"
            raise ChatTemplateError(f"the chat template fails: {refusal}") from error
        return texts[0], [(start, stop) for start, stop in ranges[0]] if marks else []


def is_refusal(error: ChatTemplateError) -> bool:
    """Checks whether the template itself refused the conversation, by `raise_exception`."""
    return type(error.__cause__) is TemplateError


def _strftime_macro(moment: datetime) -> str:
    """Returns a Jinja macro that replaces `strftime_now`: it inserts the fixed text of each directive."""
    replacements = {f"%{letter}": moment.strftime(f"%{letter}") for letter in _STRFTIME_DIRECTIVES}
    replacements |= {"%-d": str(moment.day), "%-m": str(moment.month), "%%": "%"}
    chain = "".join(f" | replace({json.dumps(key)}, {json.dumps(value)})" for key, value in replacements.items())
    # The empty expression keeps a line break at the template's start, because Jinja drops one after a block's tag.
    return "{% macro strftime_now(format) %}{{ format" + chain + " }}{% endmacro %}{{ '' }}"
