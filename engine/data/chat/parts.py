"""The parts of a conversation that must not be lost, and how to write a mark into each."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from windlass.engine.data.chat.template import Conversation, arguments_object, with_arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a conversation that must not be lost, with a function that writes a mark into it."""

    field: str  # such as messages[2].content
    message: int | None  # the message's index; None: the part is a tool
    is_said: bool  # content or a tool call, not reasoning
    text: str | None  # must be in the rendered text, apart from white space; None: the mark is enough
    mark: str
    put: Callable[[Conversation, str], Conversation]  # returns the conversation with a mark at the part's end


def parts_of(conversation: Conversation, learned: frozenset[int]) -> list[Part]:
    """Lists the parts that must not be lost: contents, tool calls, tools, and the reasoning of learned messages."""
    parts: list[Part] = []

    def add(field: str, message: int | None, put: Callable[[Conversation, str], Conversation], **more: Any) -> None:
        part = {"is_said": True, "text": None} | more
        parts.append(Part(field=field, message=message, mark=f"zqx{len(parts)}xqz", put=put, **part))

    for i, message in enumerate(conversation.messages):
        fields = ["content", *(["reasoning_content"] if i in learned else [])]
        for field in fields:
            if (message.get(field) or "").strip():
                said = field == "content"
                add(f"messages[{i}].{field}", i, _put_text(i, field), text=message[field], is_said=said)
        for number, _ in enumerate(message.get("tool_calls", ())):
            place = f"messages[{i}].tool_calls[{number}].function"
            add(f"{place}.name", i, _put_name(i, number))
            add(f"{place}.arguments", i, _put_argument(i, number))
    for number, tool in enumerate(conversation.tools or ()):
        if isinstance(tool_description(tool).get("name"), str):
            add(f"tools[{number}]", None, _put_tool(number))
    return parts


def marked(conversation: Conversation, parts: list[Part]) -> Conversation:
    """Returns the conversation with the marks of all given parts."""
    for part in parts:
        conversation = part.put(conversation, part.mark)
    return conversation


def _put_text(index: int, field: str) -> Callable[[Conversation, str], Conversation]:
    def put(conversation: Conversation, mark: str) -> Conversation:
        message = conversation.messages[index]
        return _with_text(conversation, index, field, message[field] + mark)

    return put


def _with_text(conversation: Conversation, index: int, field: str, text: str) -> Conversation:
    names = ("reasoning_content", "thinking") if field == "reasoning_content" else (field,)
    return conversation.with_message(index, {**conversation.messages[index], **dict.fromkeys(names, text)})


def with_call(conversation: Conversation, index: int, number: int, call: dict[str, Any]) -> Conversation:
    message = conversation.messages[index]
    calls = [*message["tool_calls"][:number], call, *message["tool_calls"][number + 1 :]]
    return conversation.with_message(index, {**message, "tool_calls": calls})


def _put_name(index: int, number: int) -> Callable[[Conversation, str], Conversation]:
    def put(conversation: Conversation, mark: str) -> Conversation:
        call = conversation.messages[index]["tool_calls"][number]
        function = {**call["function"], "name": call["function"]["name"] + mark}
        return with_call(conversation, index, number, {**call, "function": function})

    return put


def _put_argument(index: int, number: int) -> Callable[[Conversation, str], Conversation]:
    def put(conversation: Conversation, mark: str) -> Conversation:
        call = conversation.messages[index]["tool_calls"][number]
        as_text = isinstance(call["function"]["arguments"], str)
        changed = with_arguments(call, {**arguments_object(call), mark: mark}, as_text=as_text)
        return with_call(conversation, index, number, changed)

    return put


def tool_description(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, dict) else tool


def _put_tool(number: int) -> Callable[[Conversation, str], Conversation]:
    def put(conversation: Conversation, mark: str) -> Conversation:
        tools = list(conversation.tools or ())
        tool, function = tools[number], tool_description(tools[number])
        renamed = {**function, "name": function["name"] + mark}
        tools[number] = renamed if function is tool else {**tool, "function": renamed}
        return replace(conversation, tools=tuple(tools))

    return put


def reasoning_in(part: Part) -> Part:
    """Returns the part cut after its reasoning, or at its middle without one: there a template may cut it too."""
    assert part.text is not None, "only texts can be cut"
    assert part.message is not None, "only messages have texts"
    end = part.text.find("</think>")
    end = len(part.text) // 2 if end < 0 else end
    index, field, text = part.message, part.field.rsplit(".", 1)[1], part.text

    def put(conversation: Conversation, mark: str) -> Conversation:
        return _with_text(conversation, index, field, text[:end] + mark + text[end:])

    return replace(part, text=text[:end], put=put)
