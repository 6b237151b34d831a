"""Files in other forms are refused with a hint that shows their own first record in the form that is needed."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from windlass.engine.data import ChatExample, CompletionExample, DataError, DataFile, TextExample
from windlass.engine.data_hints import HEAD_NBYTES, hint_for_head

_SHARE_GPT = {"id": "x", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
_CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
_PAIR = {"prompt": "Hi", "completion": "Hello"}


def _refusal(path: Path, content: bytes | str) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as raised:
        list(DataFile(path=path, param="training_file", name="mine.jsonl").examples())
    return raised.value.message


def _shown(message: str) -> Any:
    """The example that a message shows."""
    return json.loads(message.split("in the form that is needed it would be ")[1])


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (_SHARE_GPT, _CHAT),
        ({"conversations": _CHAT["messages"]}, _CHAT),
        (
            {"system": "Be short", **_SHARE_GPT},
            {"messages": [{"role": "system", "content": "Be short"}, *_CHAT["messages"]]},
        ),
        (_CHAT["messages"], _CHAT),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, _CHAT),
        (
            {"instruction": "Add", "input": "1 and 2", "output": "3"},
            {"messages": [{"role": "user", "content": "Add\n\n1 and 2"}, {"role": "assistant", "content": "3"}]},
        ),
        ({"prompt": "Hi", "response": "Hello"}, _PAIR),
        ({"question": "Hi", "answer": "Hello"}, _PAIR),
        ({"input": "Hi", "output": "Hello"}, _PAIR),
        ({"content": "A text"}, {"text": "A text"}),
        ("A text", {"text": "A text"}),
    ],
)
def test_a_record_of_another_form_is_shown_in_the_form_that_is_needed(
    tmp_path: Path, record: Any, expected: dict[str, Any]
) -> None:
    message = _refusal(tmp_path / "a", json.dumps(record))
    assert message.startswith("mine.jsonl, line 1: expected ")
    assert _shown(message) == expected
    (tmp_path / "b").write_text(json.dumps(_shown(message)))
    ((_, _, example),) = DataFile(path=tmp_path / "b", param="training_file").examples()
    assert isinstance(example, (ChatExample, CompletionExample, TextExample)), "the hint's own form is taken"


@pytest.mark.parametrize(
    ("content", "words", "expected"),
    [
        (json.dumps([_SHARE_GPT, _SHARE_GPT]), "expected a JSON object, not a list; it is one JSON array", _CHAT),
        (json.dumps([_SHARE_GPT, _SHARE_GPT], indent=2), "it is one JSON array", _CHAT),
        (json.dumps([{"prompt": "Hi", "response": "Hello"}], indent=1), "`jq -c '.[]' a.json > a.jsonl`", _PAIR),
        (json.dumps(_CHAT, indent=2), "its objects go over several lines", _CHAT),
        ('prompt,completion\nHi,"Hello"\n', "a table with the columns prompt, completion", _PAIR),
        ("question;answer\nHi;Hello\n", "a table with the columns question, answer", _PAIR),
        ("instruction\toutput\nHi\tHello\n", "a table with the columns", _CHAT),
        ('text,label\n"A, text",3\n', "a table with the columns text, label", {"text": "A, text"}),
    ],
)
def test_a_file_of_another_form_is_named_and_its_first_record_shown(
    tmp_path: Path, content: str, words: str, expected: dict[str, Any] | None
) -> None:
    message = _refusal(tmp_path / "a", content)
    assert words in message
    if expected is not None:
        assert _shown(message) == expected


@pytest.mark.parametrize(
    ("content", "what"),
    [(b"PAR1\x15\x04", "a Parquet file"), (gzip.compress(b"{}"), "a gzip archive"), (b"PK\x03\x04..", "a spreadsheet")],
)
def test_a_binary_file_is_named(tmp_path: Path, content: bytes, what: str) -> None:
    message = _refusal(tmp_path / "a", content)
    assert what in message
    assert '{"messages": ' in message


def test_a_table_whose_columns_nobody_knows_shows_the_forms(tmp_path: Path) -> None:
    assert '{"prompt": "…", "completion": "…"}' in _refusal(tmp_path / "a", "x,y\n1,2\n")


def test_long_texts_are_cut_in_the_example(tmp_path: Path) -> None:
    shown = _shown(_refusal(tmp_path / "a", json.dumps({"question": "q" * 500, "answer": "a"})))
    assert shown["prompt"] == "q" * 60 + "…"


@pytest.mark.parametrize(
    "content", ['{"text": "a"', '{"text": "a"}\n{"text": }', "just words", "", "{" * 10_000, "[" * 100_000]
)
def test_a_mistake_in_json_lines_or_anything_else_gives_no_wrong_hint(content: str) -> None:
    hint = hint_for_head(content.encode())
    assert hint is None or "in the form that is needed" not in hint


def test_only_the_head_of_a_file_is_looked_at(tmp_path: Path) -> None:
    content = json.dumps([{"text": "a" * (2 * HEAD_NBYTES)}], indent=1)
    message = _refusal(tmp_path / "a", content)
    assert "it is one JSON array" in message
    assert len(message) < 1000
