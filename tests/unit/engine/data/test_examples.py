import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from windlass.engine.data.examples import (
    ChatExample,
    CompletionExample,
    DataError,
    DataErrorCode,
    DataFile,
    TextExample,
)

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}
GOOD = {"messages": [USER, ASSISTANT]}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def write(tmp_path: Path, *lines: Any) -> DataFile:
    path = tmp_path / "train.jsonl"
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(encoded))
    return DataFile(path=path, param="training_file")


def examples(file: DataFile) -> list[Any]:
    return [example for _, _, example in file.examples()]


def failure(file: DataFile) -> DataError:
    with pytest.raises(DataError) as caught:
        examples(file)
    return caught.value


def test_the_three_formats_are_read(tmp_path: Path) -> None:
    assert examples(write(tmp_path, {"text": "a"}, {"text": "b", "source": 1})) == [
        TextExample(text="a"),
        TextExample(text="b"),
    ]
    assert examples(write(tmp_path, {"prompt": "a", "completion": "b"})) == [
        CompletionExample(prompt="a", completion="b")
    ]
    assert examples(write(tmp_path, GOOD)) == [ChatExample(messages=(USER, ASSISTANT), tools=None, weights=(0, 1))]


def test_line_numbers_count_blank_lines_and_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    file = write(tmp_path, b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), b"", b"  ", GOOD)
    assert [line for line, _, _ in file.examples()] == [1, 4]
    assert [nbytes for _, nbytes, _ in file.examples()][-1] == file.nbytes()


def test_weights_text_parts_and_tool_calls_become_what_templates_take(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "weight": 0},
        {"role": "tool", "content": "1", "tool_call_id": "1"},
        {"role": "assistant", "content": "one", "weight": 1},
    ]
    (example,) = examples(write(tmp_path, {"messages": messages, "tools": tools}))
    assert example.weights == (0, 0, 0, 1)
    assert example.tools == tuple(tools)
    assert example.messages[0]["content"] == "ab"
    assert example.messages[1]["content"] is None
    assert example.messages[1]["tool_calls"] == [CALL]  # the chat template decides the form of the arguments
    assert all("weight" not in message for message in example.messages)


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_a_content_missing_beside_tool_calls_is_null(tmp_path: Path, content: dict[str, Any]) -> None:
    message = {"role": "assistant", "tool_calls": [CALL], **content}
    (example,) = examples(write(tmp_path, {"messages": [USER, message]}))
    assert example.messages[1] == CALLING


def test_fields_that_are_null_and_empty_tool_calls_are_left_out(tmp_path: Path) -> None:
    nulls = {"tool_calls": None, "name": None, "tool_call_id": None, "reasoning_content": None}
    messages = [USER | nulls, ASSISTANT | nulls | {"tool_calls": []}]
    (example,) = examples(write(tmp_path, {"messages": messages, "tools": None}))
    assert example.messages == (USER, ASSISTANT)


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_read_under_each_of_its_names(tmp_path: Path, name: str) -> None:
    (example,) = examples(write(tmp_path, {"messages": [USER, ASSISTANT | {name: "because"}]}))
    assert example.messages[1] == ASSISTANT | {"reasoning_content": "because"}


def test_fields_of_unknown_name_are_kept_for_the_chat_template(tmp_path: Path) -> None:
    (example,) = examples(write(tmp_path, {"messages": [USER | {"name": "Ann"}, ASSISTANT]}))
    assert example.messages[0] == USER | {"name": "Ann"}


def with_message(**message: Any) -> dict[str, Any]:
    return {"messages": [USER, message, ASSISTANT]}


@pytest.mark.parametrize(
    ("line", "code", "field", "words"),
    [
        (b'{"messages": [', "invalid_json", "", "column 15"),
        (b"\xff\xfe", "invalid_json", "", "0xff"),
        (b'{"text": "a\0"}', "invalid_json", "", "Invalid control character at column 12"),
        (b"[" * 200_000, "invalid_json", "", "nested too deeply"),
        (b'{"text": ' + b"9" * 5000 + b"}", "invalid_json", "", "a whole number has more than 4300 digits"),
        ([1], "invalid_field", "", "not a list"),
        ({"input": 1}, "unknown_format", "", "['input']"),
        ({"prompt": "a"}, "unknown_format", "", '"prompt"'),
        ({**GOOD, "text": "a"}, "unknown_format", "", '"messages" with "text"'),
        ({"input": {}, "preferred_output": []}, "unknown_format", "", "DPO"),
        ({"text": 3}, "invalid_field", "text", "not a number"),
        ({"prompt": "a", "completion": None}, "invalid_field", "completion", "null"),
        (b'{"text": "\\ud800"}', "invalid_field", "text", "surrogate"),
        ({"messages": "hi"}, "invalid_field", "messages", "not a string"),
        ({"messages": []}, "invalid_field", "messages", "an empty list"),
        ({"messages": ["hi"]}, "invalid_field", "messages[0]", "not a string"),
        (with_message(content="x"), "invalid_field", "messages[1].role", "missing"),
        (with_message(role=1, content="x"), "invalid_field", "messages[1].role", "not a number"),
        (with_message(role="robot", content="x"), "unknown_role", "messages[1].role", '"robot"; use one of system'),
        (with_message(role="user"), "invalid_field", "messages[1].content", "missing"),
        (with_message(role="user", content={}), "invalid_field", "messages[1].content", "not an object"),
        (with_message(role="user", content=[{"type": "image"}]), "invalid_field", "messages[1].content[0]", "text"),
        (with_message(role="user", content="x", weight=1), "invalid_field", "messages[1].weight", "role user"),
        (with_message(role="assistant", content="x", weight=0.5), "invalid_field", "messages[1].weight", "0.5"),
        (with_message(role="assistant", content="x", weight=True), "invalid_field", "messages[1].weight", "true"),
        (with_message(role="assistant", tool_calls=[{}]), "invalid_field", "messages[1].tool_calls[0]", "function"),
        (
            with_message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
            "invalid_field",
            "messages[1].tool_calls[0].function.arguments",
            "not valid JSON",
        ),
        (with_message(role="assistant", content=None), "invalid_field", "messages[1].content", "null"),
        (with_message(role="tool", content=None), "invalid_field", "messages[1].content", "null"),
        (
            with_message(role="user", content="x", tool_calls=[CALL]),
            "invalid_field",
            "messages[1].tool_calls",
            "role user",
        ),
        (
            with_message(role="assistant", content="x", function_call={"name": "f"}),
            "invalid_field",
            "messages[1].function_call",
            '"tool_calls" instead',
        ),
        (with_message(role="user", content="x", thinking="r"), "invalid_field", "messages[1].thinking", "role user"),
        (
            with_message(role="assistant", content="x", reasoning=3),
            "invalid_field",
            "messages[1].reasoning",
            "a number",
        ),
        (
            with_message(role="assistant", content="x", reasoning_content="r", thinking="s"),
            "invalid_field",
            "messages[1].thinking",
            'differs from "reasoning_content"',
        ),
        (
            {"messages": [USER, CALLING, {"role": "tool", "content": "7", "tool_call_id": "2"}, ASSISTANT]},
            "invalid_field",
            "messages[2].tool_call_id",
            'has the id "2"',
        ),
        (
            {"messages": [USER, CALLING, {"role": "tool", "content": "7", "tool_call_id": [1]}, ASSISTANT]},
            "invalid_field",
            "messages[2].tool_call_id",
            "not a list",
        ),
        ({**GOOD, "functions": [{"name": "f"}]}, "invalid_field", "functions", '"tools" instead'),
        ({**GOOD, "chat_template_kwargs": {"x": 1}}, "invalid_field", "chat_template_kwargs", "not supported"),
        ({"messages": [USER]}, "no_assistant_message", "messages", "nothing to learn"),
        ({**GOOD, "tools": {}}, "invalid_field", "tools", "not an object"),
        ({**GOOD, "tools": [1]}, "invalid_field", "tools[0]", "not a number"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, code: str, field: str, words: str) -> None:
    error = failure(write(tmp_path, b"", line))
    assert (error.code, error.param) == (code, "training_file")
    place = f"train.jsonl, line 2, field {field}: " if field else "train.jsonl, line 2: "
    assert error.message.startswith(place)
    assert words in error.message


def test_a_line_that_is_cut_off_is_told_with_the_column_of_its_end(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 2: not valid JSON: .* at column 13$"):
        examples(write(tmp_path, {"text": "a"}, b'{"text": "b"', {"text": "c"}))


def test_an_error_comes_when_its_line_is_reached(tmp_path: Path) -> None:
    stream = write(tmp_path, {"text": "a"}, b"{").examples()
    assert next(stream)[2] == TextExample(text="a")
    with pytest.raises(DataError, match=r"train\.jsonl, line 2: not valid JSON"):
        next(stream)


def test_formats_must_not_be_mixed(tmp_path: Path) -> None:
    error = failure(write(tmp_path, {"text": "a"}, {"text": "b"}, GOOD))
    assert error.code == DataErrorCode.MIXED_FORMATS
    assert "line 3" in error.message
    assert "line 1 is plain text" in error.message


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    assert failure(write(tmp_path, content)).code == DataErrorCode.EMPTY_FILE


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    file = DataFile(path=tmp_path / "gone.jsonl", param="validation_file")
    error = failure(file)
    assert (error.code, error.param) == (DataErrorCode.UNREADABLE_FILE, "validation_file")
    assert "No such file" in error.message
    with pytest.raises(DataError, match="No such file"):
        file.nbytes()


def test_a_file_without_line_ends_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.engine.data.examples.MAX_LINE_NBYTES", 50)
    error = failure(write(tmp_path, {"text": "a" * 100}))
    assert "longer than 50 bytes" in error.message


def test_errors_cross_processes(tmp_path: Path) -> None:
    error = pickle.loads(pickle.dumps(failure(write(tmp_path, b"{"))))
    assert error.code == DataErrorCode.INVALID_JSON
    assert str(error) == error.message
