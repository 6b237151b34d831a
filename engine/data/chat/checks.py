"""Checks that a chat template renders all parts of a conversation.

A template is a program, so the checks test it: they write a mark into a part of the conversation, render it again and
search the text for the mark. If the mark is missing, the template drops that part.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from windlass.engine.data.chat.parts import Part, marked, parts_of, reasoning_in, tool_description, with_call
from windlass.engine.data.chat.template import ChatTemplate, ChatTemplateError, Conversation, with_arguments

# Fields that need no warning. Templates may omit tool_call_id and a tool's name, because the order identifies the call.
_KNOWN_FIELDS = {"role", "content", "tool_calls", "tool_call_id", "reasoning_content", "thinking"}


class ConversationChecks:
    """The checks of one chat template. Each role and each unknown field is tested once and remembered."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._told_apart: set[str] = set()  # roles
        self._asked_fields: set[str] = set()

    def check(
        self, conversation: Conversation, learned: frozenset[int], text: str, *, is_marked: bool = False
    ) -> tuple[str, ...]:
        """Raises `ChatTemplateError` if `text`, the rendered conversation, lacks a part of the conversation.

        A template may drop two things if it renders them while their message is the last one: the reasoning of earlier
        assistant messages, and the content of messages that are not learned. `is_marked`: the template has
        `{% generation %}` marks, so the text is one example. Then messages to learn may lack their reasoning too.

        Returns:
            Warnings about parts that are dropped without being an error.
        """
        parts = parts_of(conversation, learned)
        marked_text = self._template.try_render(marked(conversation, parts)) or ""
        squeezed = _squeeze(text)
        notes: set[str] = set()
        for part in parts:
            whole = self._is_whole(part, squeezed)
            is_context = _is_assistant(conversation, part) and part.message not in learned
            if part.mark in marked_text and (whole or is_context):
                continue
            cut = part if part.mark not in marked_text else reasoning_in(part)
            if self._shows(conversation, cut):
                continue
            if whole and self._template.try_render(cut.put(conversation, cut.mark)) is None:
                continue  # the template renders the unmarked text and fails on the marked one
            is_lost = is_marked and not is_context and part.is_said and part.mark not in marked_text
            if part.message is not None and conversation.messages[part.message]["role"] == "developer":
                raise ChatTemplateError(
                    "the chat template drops messages of role developer; write role system", part.field
                )
            if is_lost or part.message is None or part.text is None or not _is_assistant(conversation, part):
                raise _dropped(cut.field, cut.text)
            # Without generation marks, each example ends with the last of its messages to learn.
            if not self._shows(conversation.first(part.message + 1), cut):
                raise _dropped(cut.field, cut.text)
            if is_marked and not is_context:
                notes.add(
                    "the chat template drops the reasoning of assistant messages when more follows, and marks a whole "
                    "conversation as one example: the earlier messages are learned without their reasoning"
                )
        self._check_tools(conversation, text)
        self._check_roles(conversation, text)
        self._check_python_values(conversation, text)
        return (*sorted(notes), *self._notes_on_fields(conversation, text))

    def _shows(self, conversation: Conversation, part: Part) -> bool:
        return part.mark in (self._template.try_render(part.put(conversation, part.mark)) or "")

    @staticmethod
    def _is_whole(part: Part, squeezed: str) -> bool:
        """Checks whether the text holds the whole part, plain or inside a JSON string; ignores white space."""
        if part.text is None:
            return True
        spellings = (part.text, *(json.dumps(part.text, ensure_ascii=ascii)[1:-1] for ascii in (False, True)))
        return any(_squeeze(spelling) in squeezed for spelling in spellings)

    def _check_tools(self, conversation: Conversation, text: str) -> None:
        """Checks tools without names all at once, because they cannot be marked one by one."""
        if not conversation.tools or any(isinstance(tool_description(t).get("name"), str) for t in conversation.tools):
            return
        if self._template.try_render(replace(conversation, tools=None)) == text:
            raise _dropped("tools")

    def _check_roles(self, conversation: Conversation, text: str) -> None:
        """Checks, once for each role, that the template distinguishes it from other roles.

        A template that fails with another role distinguishes the two.
        """
        for role in {message["role"]: None for message in conversation.messages}:
            if role in self._told_apart:
                continue
            for other in {"user", "assistant"} - {role}:
                swapped = tuple({**m, "role": other} if m["role"] == role else m for m in conversation.messages)
                if self._template.try_render(replace(conversation, messages=swapped)) == text:
                    first = next(i for i, message in enumerate(conversation.messages) if message["role"] == role)
                    raise ChatTemplateError(
                        f"the chat template drops the role: it shows {role} messages as it shows {other} messages",
                        f"messages[{first}].role",
                    )
            self._told_apart.add(role)

    def _check_python_values(self, conversation: Conversation, text: str) -> None:
        """Raises `ChatTemplateError` if the template prints values in Python's notation, such as `None` for null."""
        if "None" in text and _has_null(conversation):
            without = self._template.try_render(_without_nulls(conversation))
            if without is not None and without.count("None") < text.count("None"):
                raise ChatTemplateError("the chat template prints null as the word None; remove nulls", "messages")
        for i, message in enumerate(conversation.messages):
            for number, call in enumerate(message.get("tool_calls", ())):
                for value in _containers(call["function"]["arguments"]):
                    if (
                        "'" in str(value)
                        and str(value) in text
                        and json.dumps(value, ensure_ascii=False) not in text
                        and self._prints_of_call(conversation, i, number, str(value), text)
                    ):
                        raise ChatTemplateError(
                            f"the chat template prints {str(value)[:60]} in Python's spelling, not as JSON",
                            f"messages[{i}].tool_calls[{number}].function.arguments",
                        )

    def _prints_of_call(self, conversation: Conversation, index: int, number: int, words: str, text: str) -> bool:
        """Checks whether words in the text come from a call's arguments, and not from another part."""
        call = conversation.messages[index]["tool_calls"][number]
        without = self._template.try_render(
            with_call(conversation, index, number, with_arguments(call, {}, as_text=False))
        )
        return without is None or without.count(words) < text.count(words)

    def check_form(self, conversation: Conversation, text: str) -> None:
        """Raises `ChatTemplateError` if the template needs tool calls or missing contents in another form.

        `text` is the rendered conversation.
        """
        nulls = [i for i, message in enumerate(conversation.messages) if message["content"] is None]
        if nulls and ("None" in text or "null" in text):
            empty = conversation
            for i in nulls:
                empty = empty.with_message(i, {**empty.messages[i], "content": ""})
            without = self._template.try_render(empty) or ""
            if any(without.count(word) < text.count(word) for word in ("None", "null")):
                raise ChatTemplateError("the chat template prints None for null", f"messages[{nulls[0]}].content")
        calls = [part for part in parts_of(conversation, frozenset()) if ".tool_calls[" in part.field]
        marked_text = self._template.try_render(marked(conversation, calls))
        for part in calls:
            if marked_text is None or part.mark not in marked_text:
                if not self._shows(conversation, part):
                    shows_any = any(each.mark in (marked_text or "") for each in calls if each.message == part.message)
                    raise _dropped(part.field if shows_any else f"messages[{part.message}].tool_calls")
                continue
            if f"'{part.mark}': '{part.mark}'" in marked_text:
                raise ChatTemplateError("the chat template prints it in Python's spelling, not as JSON", part.field)
            if f'\\"{part.mark}' in marked_text:
                raise ChatTemplateError("the chat template encodes it as JSON twice", part.field)

    def _notes_on_fields(self, conversation: Conversation, text: str) -> tuple[str, ...]:
        """Returns a warning for each unknown field that the template does not read, once for each field."""
        notes = []
        unknown = {key for message in conversation.messages for key in _unknown_fields(message)}
        for key in sorted(unknown - self._asked_fields):
            self._asked_fields.add(key)
            without = tuple(
                {k: v for k, v in message.items() if k != key} if key in _unknown_fields(message) else message
                for message in conversation.messages
            )
            if self._template.try_render(replace(conversation, messages=without)) == text:
                notes.append(
                    f'the chat template does not read the field "{key}" of messages; the model does not see it'
                )
        return tuple(notes)


def _unknown_fields(message: dict[str, Any]) -> set[str]:
    return message.keys() - _KNOWN_FIELDS - ({"name"} if message["role"] == "tool" else set())


def _is_assistant(conversation: Conversation, part: Part) -> bool:
    return part.message is not None and bool(conversation.messages[part.message]["role"] == "assistant")


def _dropped(field: str, text: str | None = None) -> ChatTemplateError:
    ending = "" if text is None else f" (it ends with {text.rstrip()[-40:]!r})"
    return ChatTemplateError(
        f"the chat template drops it{ending}, so the model would not see it; remove it from the file, or use a chat "
        "template that renders it",
        field,
    )


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _containers(value: Any) -> Iterator[Any]:
    """Yields the objects and lists in a JSON value, the value itself included."""
    if isinstance(value, dict | list):
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item)


def _has_null(value: Any) -> bool:
    if isinstance(value, Conversation):
        return _has_null([m.get("tool_calls") or [] for m in value.messages]) or _has_null(list(value.tools or ()))
    if isinstance(value, dict | list):
        return any(map(_has_null, value.values() if isinstance(value, dict) else value))
    return value is None


def _without_nulls(conversation: Conversation) -> Conversation:
    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: fill(item) for key, item in value.items()}
        if isinstance(value, list):
            return [fill(item) for item in value]
        return "" if value is None else value

    messages = tuple(
        {**message, "tool_calls": fill(message["tool_calls"])} if "tool_calls" in message else message
        for message in conversation.messages
    )
    tools = tuple(fill(tool) for tool in conversation.tools) if conversation.tools else None
    return replace(conversation, messages=messages, tools=tools)
