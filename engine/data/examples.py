"""Reads training files, which are JSON lines, and checks each line.

There are three formats: chat (`messages`), text, and prompt with completion. An error names the file, the line and the
field.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from windlass.engine.data.hints import HEAD_NBYTES, Hint, foreign_file, format_hint, hint_for_encoding, hint_for_record

FORMAT_VERSION = 1  # of the prepared folder
NO_TARGET = -100  # PyTorch's cross-entropy ignores targets with this value
# Bytes of a line. Memory holds a whole line, so a file without line ends must be refused.
MAX_LINE_NBYTES = 64 * 2**20

ROLES = ("system", "developer", "user", "assistant", "tool")
# The field names for an assistant message's reasoning in training files. The parser stores it under the first one.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Fields that change the meaning of a conversation but do not reach the chat template.
_UNSUPPORTED = {
    "functions": 'it is the old form; write "tools" instead',
    "chat_template_kwargs": "options of the chat template are not supported; remove it",
}


class DataErrorCode(StrEnum):
    """The kinds of errors in training data, or in the model folder whose tokenizer is used."""

    UNREADABLE_FILE = "unreadable_file"
    EMPTY_FILE = "empty_file"
    INVALID_JSON = "invalid_json"
    INVALID_FIELD = "invalid_field"
    UNKNOWN_FORMAT = "unknown_format"
    MIXED_FORMATS = "mixed_formats"
    UNKNOWN_ROLE = "unknown_role"
    NO_ASSISTANT_MESSAGE = "no_assistant_message"
    NO_USABLE_EXAMPLE = "no_usable_example"
    NO_CHAT_TEMPLATE = "no_chat_template"
    CHAT_TEMPLATE_FAILED = "chat_template_failed"
    INVALID_TOKENIZER = "invalid_tokenizer"
    EXAMPLE_TOO_LARGE = "example_too_large"


class DataError(Exception):
    """The data cannot be used for training. `param` is the request's field at fault: that of a file, or "model"."""

    def __init__(self, code: DataErrorCode, message: str, param: str) -> None:
        super().__init__(code, message, param)
        self.code = code
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatExample:
    """A conversation.

    Each message has a `content`: a text, or None beside tool calls. Text parts are joined. Null fields and empty lists
    of tool calls are removed. Reasoning is in `reasoning_content`. The arguments of tool calls are unchanged: an
    object, or JSON in a string.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None
    weights: tuple[int, ...]  # 0 or 1 for each message; 0 for messages of roles other than assistant


@dataclass(frozen=True, slots=True, kw_only=True)
class TextExample:
    """A text of which all tokens are learned."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionExample:
    """A prompt, and the completion that is learned."""

    prompt: str
    completion: str


Example = ChatExample | TextExample | CompletionExample


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A JSONL file, the request's field that names it, and its name in messages to the user."""

    path: Path
    param: str
    name: str | None = None  # else the path's last part

    def error(self, code: DataErrorCode, message: str, *, line: int | None = None, field: str = "") -> DataError:
        """Returns a `DataError` whose message begins with file, line and field."""
        place = self.told_name
        if line is not None:
            place += f", line {line}"
        if field:
            place += f", field {field}"
        return DataError(code, f"{place}: {message}", self.param)

    @property
    def told_name(self) -> str:
        """The file's name in messages."""
        return self.name or self.path.name

    def nbytes(self) -> int:
        """Returns the file's size in bytes. Raises `DataError` if it cannot be read."""
        try:
            return self.path.stat().st_size
        except OSError as error:
            raise self._unreadable(error) from error

    def examples(self) -> Iterator[tuple[int, int, Example]]:
        """Yields the file's examples as (line from 1, bytes read so far, example). Raises `DataError` at a bad one.

        Blank lines are skipped. All lines must be of one format.
        """
        first: tuple[int, type[Example]] | None = None
        try:
            for line, nbytes_read, raw in self._lines():
                example = _Line(self, line).parse(raw)
                if first is None:
                    first = (line, type(example))
                elif type(example) is not first[1]:
                    raise self.error(
                        DataErrorCode.MIXED_FORMATS,
                        f"this line is {_FORMAT_NAMES[type(example)]}, but line {first[0]} is "
                        f"{_FORMAT_NAMES[first[1]]}; use one format throughout the file",
                        line=line,
                    )
                yield line, nbytes_read, example
        except DataError as error:
            # An error in the first line may mean that the whole file has another format.
            if first is None and (form := self.foreign_form()) is not None:
                raise self.hinted(error, form) from None
            raise
        if first is None:
            raise self.error(DataErrorCode.EMPTY_FILE, "the file holds no examples; write one JSON object a line")

    def foreign_form(self) -> Hint | None:
        """Recognizes a format other than JSON lines. Returns None for JSON lines and for unknown formats."""
        try:
            with self.path.open("rb") as file:
                return foreign_file(file.read(HEAD_NBYTES))
        except OSError:
            return None

    def hinted(self, error: DataError, hint: Hint) -> DataError:
        """Returns the error with a hint appended that shows the expected format."""
        # In a job's messages the file's id follows its name. The hint's command is for the user's own file.
        name = self.told_name.partition(" (file-")[0]
        return DataError(error.code, f"{error.message}; {format_hint(hint, name, is_accepted)}", error.param)

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        nbytes_read = 0
        try:
            with self.path.open("rb") as file:
                for line, raw in enumerate(iter(lambda: file.readline(MAX_LINE_NBYTES + 1), b""), start=1):
                    nbytes_read += len(raw)
                    if len(raw) > MAX_LINE_NBYTES:
                        raise self.error(
                            DataErrorCode.INVALID_JSON, f"longer than {MAX_LINE_NBYTES} bytes; split it", line=line
                        )
                    if raw.strip():
                        yield line, nbytes_read, raw
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> DataError:
        return self.error(DataErrorCode.UNREADABLE_FILE, f"cannot be read: {error.strerror or error}")


_FORMAT_NAMES: dict[type[Example], str] = {
    ChatExample: 'chat ("messages")',
    TextExample: 'plain text ("text")',
    CompletionExample: '"prompt" with "completion"',
}


@dataclass(frozen=True, slots=True)
class _Line:
    """Parses one line into a checked example."""

    file: DataFile
    number: int

    def parse(self, raw: bytes) -> Example:
        record = self._decode(raw)
        if not isinstance(record, dict):
            raise self._error(f"expected a JSON object, not {_kind(record)}")
        try:
            return self.example(record)
        except DataError as error:
            if (near := hint_for_record(record)) is None or near.record is None or not is_accepted(near.record):
                raise
            raise self.file.hinted(error, near) from None

    def example(self, record: dict[str, Any]) -> Example:
        """Returns the example in a decoded line."""
        for name in ("preferred_output", "non_preferred_output", "chosen", "rejected"):
            if name in record:
                raise self._error(
                    f'preference data ("{name}") is for DPO, which is not supported', code=DataErrorCode.UNKNOWN_FORMAT
                )
        found = [key for key in ("messages", "text", "prompt", "completion") if key in record]
        if found == ["messages"]:
            return self._chat(record)
        if found == ["text"]:
            return TextExample(text=self._string(record, "text"))
        if found == ["prompt", "completion"]:
            return CompletionExample(
                prompt=self._string(record, "prompt"), completion=self._string(record, "completion")
            )
        raise self._error(
            'expected "messages", or "text", or "prompt" with "completion"; found '
            + (" with ".join(f'"{key}"' for key in found) if found else f"the keys {sorted(record)[:8]}"),
            code=DataErrorCode.UNKNOWN_FORMAT,
        )

    def _error(self, message: str, field: str = "", code: DataErrorCode = DataErrorCode.INVALID_FIELD) -> DataError:
        return self.file.error(code, message, line=self.number, field=field)

    def _decode(self, raw: bytes) -> Any:
        try:
            # A byte order mark is allowed at the file's start, because editors write it there.
            text = raw.decode("utf-8-sig" if self.number == 1 else "utf-8")
            # Without the line end, because the decoder counts columns from the last line break.
            return json.loads(text.rstrip("\r\n"))
        except UnicodeDecodeError as error:
            found = self._error(
                f"not UTF-8 text: byte {error.start + 1} of the line is 0x{raw[error.start]:02x}",
                code=DataErrorCode.INVALID_JSON,
            )
            if (encoded := hint_for_encoding(raw)) is None:
                raise found from None
            raise self.file.hinted(found, encoded) from None
        except json.JSONDecodeError as error:
            message = f"not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        except RecursionError:
            message = "not usable JSON: nested too deeply"
        except ValueError:
            message = f"not usable JSON: a whole number has more than {sys.get_int_max_str_digits()} digits"
        raise self._error(message, code=DataErrorCode.INVALID_JSON)

    def _string(self, record: dict[str, Any], key: str, field: str = "") -> str:
        value = record[key]
        if not isinstance(value, str):
            raise self._error(f"expected a string, not {_kind(value)}", field or key)
        return self._encodable(value, field or key)

    def _encodable(self, value: str, field: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self._error(f"half a surrogate pair at character {error.start + 1}", field) from error
        return value

    def _chat(self, record: dict[str, Any]) -> ChatExample:
        for key, advice in _UNSUPPORTED.items():
            if record.get(key):
                raise self._error(advice, key)
        messages = record["messages"]
        if not isinstance(messages, list) or not messages:
            raise self._error(f"expected a list of messages, not {_kind(messages)}", "messages")
        parsed = [self._message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        if not any(message["role"] == "assistant" for message, _ in parsed):
            raise self._error(
                "the conversation has no assistant message, so there is nothing to learn from it",
                "messages",
                DataErrorCode.NO_ASSISTANT_MESSAGE,
            )
        self._check_links([message for message, _ in parsed])
        return ChatExample(
            messages=tuple(message for message, _ in parsed),
            tools=self._tools(record.get("tools")),
            weights=tuple(weight for _, weight in parsed),
        )

    def _tools(self, tools: Any) -> tuple[dict[str, Any], ...] | None:
        if tools is None:
            return None
        if not isinstance(tools, list):
            raise self._error(f"expected a list of tools, not {_kind(tools)}", "tools")
        for i, tool in enumerate(tools):
            if not isinstance(tool, dict):
                raise self._error(f"expected an object, not {_kind(tool)}", f"tools[{i}]")
        return tuple(tools) or None

    def _message(self, message: Any, field: str) -> tuple[dict[str, Any], int]:
        if not isinstance(message, dict):
            raise self._error(f"expected an object, not {_kind(message)}", field)
        role = message.get("role")
        if not isinstance(role, str):
            problem = f"expected a string, not {_kind(role)}" if "role" in message else "missing"
            raise self._error(problem, f"{field}.role")
        if role not in ROLES:
            raise self._error(
                f'unknown role "{role}"; use one of {", ".join(ROLES)}', f"{field}.role", DataErrorCode.UNKNOWN_ROLE
            )
        weight = self._weight(message, role, field)
        names = (*REASONING_FIELDS, "weight", "tool_calls")
        parsed = {key: value for key, value in message.items() if key not in names and value is not None}
        if message.get("function_call") is not None:
            raise self._error('it is the old form; write "tool_calls" instead', f"{field}.function_call")
        calls = message.get("tool_calls")
        if calls is not None and (calls := self._tool_calls(calls, f"{field}.tool_calls")):
            if role != "assistant":
                raise self._error(
                    f"only assistant messages call tools, not those of role {role}", f"{field}.tool_calls"
                )
            parsed["tool_calls"] = calls
        # Beside tool calls, training files write a missing content as null, as an empty text, or not at all.
        is_missing = bool(calls) and message.get("content") in (None, "", [])
        parsed["content"] = None if is_missing else self._content(message, f"{field}.content")
        if (reasoning := self._reasoning(message, role, field)) is not None:
            parsed["reasoning_content"] = reasoning
        return parsed, weight

    def _reasoning(self, message: dict[str, Any], role: str, field: str) -> str | None:
        names = [name for name in REASONING_FIELDS if message.get(name) is not None]
        for name in names:
            if role != "assistant":
                raise self._error(
                    f"only assistant messages have reasoning, not those of role {role}", f"{field}.{name}"
                )
            if message[name] != message[names[0]]:
                raise self._error(f'it differs from "{names[0]}"; write the reasoning once', f"{field}.{name}")
            self._string(message, name, f"{field}.{name}")
        return message[names[0]] if names else None

    def _check_links(self, messages: list[dict[str, Any]]) -> None:
        """Checks that a tool's answer refers to an earlier call, if both have ids."""
        ids: set[Any] = set()
        for i, message in enumerate(messages):
            ids |= {call["id"] for call in message.get("tool_calls", ()) if isinstance(call.get("id"), str)}
            answered = message.get("tool_call_id")
            if answered is not None and not isinstance(answered, str):
                raise self._error(f"expected a string, not {_kind(answered)}", f"messages[{i}].tool_call_id")
            if message["role"] == "tool" and answered is not None and ids and answered not in ids:
                raise self._error(
                    f"no tool call before it has the id {json.dumps(answered)[:60]}", f"messages[{i}].tool_call_id"
                )

    def _weight(self, message: dict[str, Any], role: str, field: str) -> int:
        if "weight" not in message:
            return int(role == "assistant")
        weight = message["weight"]
        if role != "assistant":
            raise self._error(
                f"only assistant messages may carry a weight, not those of role {role}", f"{field}.weight"
            )
        if isinstance(weight, bool) or weight not in (0, 1):
            raise self._error(f"expected 0 or 1, not {json.dumps(weight)[:40]}", f"{field}.weight")
        return int(weight)

    def _content(self, message: dict[str, Any], field: str) -> str:
        if "content" not in message:
            raise self._error("missing", field)
        content = message["content"]
        if isinstance(content, str):
            return self._encodable(content, field)
        if not isinstance(content, list):
            raise self._error(f"expected a string or a list of text parts, not {_kind(content)}", field)
        texts = []
        for i, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise self._error('only parts like {"type": "text", "text": "…"} are supported', f"{field}[{i}]")
            texts.append(self._encodable(part["text"], f"{field}[{i}].text"))
        return "".join(texts)

    def _tool_calls(self, calls: Any, field: str) -> list[dict[str, Any]]:
        if not isinstance(calls, list):
            raise self._error(f"expected a list, not {_kind(calls)}", field)
        return [self._tool_call(call, f"{field}[{i}]") for i, call in enumerate(calls)]

    def _tool_call(self, call: Any, field: str) -> dict[str, Any]:
        """Checks a tool call. Its arguments are an object, or a string with the object's JSON, as OpenAI has them."""
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise self._error('expected an object with "function", an object with "name"', field)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise self._error(f"not valid JSON: {error}", f"{field}.function.arguments") from error
        if not isinstance(arguments, dict):
            raise self._error(f"expected an object, not {_kind(arguments)}", f"{field}.function.arguments")
        return {**call, "function": {"arguments": {}, **function}}


def _kind(value: Any) -> str:
    """Returns the name of a JSON value's type, such as "an object"."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
    name = names[type(value)]
    return f"an empty {name.split()[-1]}" if isinstance(value, list) and not value else name


def is_accepted(record: dict[str, Any]) -> bool:
    """Checks whether a record is a valid line of a training file."""
    try:
        _Line(DataFile(path=Path(), param=""), 1).example(record)
    except DataError:
        return False
    return True
