"""Hints for training files in another format. The tests run the commands that they name."""

import gzip
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from windlass.engine.data.examples import DataError, DataFile
from windlass.engine.data.hints import Hint, format_hint

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
ALPACA = {"instruction": "hi", "input": "", "output": "hello"}
PAIR = {"prompt": "hi", "completion": "hello"}
LONG = "word " * 100


def lines(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def pretty(*records: Any) -> bytes:
    return b"\n".join(json.dumps(record, indent=2).encode() for record in records)


def refusal(tmp_path: Path, content: bytes, name: str = "my data.jsonl") -> str:
    path = tmp_path / "file-1"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(DataFile(path=path, param="training_file", name=name).examples())
    return caught.value.message


def shown(message: str) -> dict[str, Any]:
    """The record in a message."""
    record, _ = json.JSONDecoder().raw_decode(message.split(", such as ")[1])
    assert isinstance(record, dict)
    return record


CONVERTIBLE = [
    (lines(SHAREGPT, SHAREGPT), "ShareGPT's form", CHAT),
    (
        lines(SHAREGPT | {"system": "be kind"}, SHAREGPT),
        "ShareGPT's form",
        {"messages": [{"role": "system", "content": "be kind"}, *CHAT["messages"]]},
    ),
    (lines({"messages": SHAREGPT["conversations"]}), "ShareGPT's form", CHAT),
    (lines({"conversation": CHAT["messages"]}), 'a conversation under "conversation"', CHAT),
    (
        lines({"messages": [{"role": "human", "content": "hi"}, {"role": "bot", "content": "hello"}]}),
        'a conversation with "role" and "content"',
        CHAT,
    ),
    (lines({"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}), 'in "prompt" and "completion"', CHAT),
    (lines(ALPACA, ALPACA), "Alpaca's form", CHAT),
    (
        lines({"instruction": "add", "input": "1 2", "output": "3"}),
        "Alpaca's form",
        {"messages": [{"role": "user", "content": "add\n\n1 2"}, {"role": "assistant", "content": "3"}]},
    ),
    (lines({"Question": "hi", "Answer": "hello"}), 'a record with "Question" and "Answer"', CHAT),
    (lines({"input": "hi", "output": "hello"}), 'a record with "input" and "output"', CHAT),
    (lines({"prompt": "hi", "response": "hello"}), 'a record with "prompt" and "response"', PAIR),
    (lines({"content": "hi", "id": 1}), 'a text under "content"', {"text": "hi"}),
    (json.dumps([CHAT, CHAT]).encode(), "one JSON array", CHAT),
    (b"\xef\xbb\xbf\n" + pretty([PAIR, PAIR]), "one JSON array", PAIR),
    (pretty([ALPACA, ALPACA]), "one JSON array, with records in Alpaca's form", CHAT),
    (lines(CHAT["messages"], CHAT["messages"]), "a list of messages without a name", CHAT),
    (pretty(CHAT, CHAT), "JSON over several lines", CHAT),
    (pretty(ALPACA), "JSON over several lines, with records in Alpaca's form", CHAT),
    (lines(PAIR).strip() * 2, "several JSON objects in one line", PAIR),
    (lines(PAIR).replace(b"}", b"},"), "JSON objects with commas between them", PAIR),
    (b"prompt,completion\nhi,hello\n", "CSV", PAIR),
    (b"\xef\xbb\xbfinstruction;output\r\nhi;hello\r\n", "CSV, with records in Alpaca's form", CHAT),
    (b"question,answer\nhi,hello\n", 'CSV, with "question" and "answer" in each record', CHAT),
    (b'text\tsource\n"hi"\tx\n', "tab-separated values", {"text": "hi", "source": "x"}),
    (b"text\nhi\n", "CSV", {"text": "hi"}),
]


@pytest.mark.skipif(shutil.which("jq") is None, reason="the commands need jq")
@pytest.mark.parametrize(("content", "form", "record"), CONVERTIBLE)
def test_hint_shows_the_first_record_and_its_command_converts_the_file(
    tmp_path: Path, content: bytes, form: str, record: dict[str, Any]
) -> None:
    message = refusal(tmp_path, content)
    assert form in message
    assert "\n" not in message
    assert shown(message) == record
    source = tmp_path / "my data.jsonl"
    source.write_bytes(content)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = message.split("convert it: ")[1]
    subprocess.run(command, shell=True, check=True, cwd=tmp_path, env=os.environ | {"PATH": path})
    converted = tmp_path / "converted.jsonl"
    assert json.loads(converted.read_text().splitlines()[0]) == record
    assert list(DataFile(path=converted, param="training_file").examples())


@pytest.mark.parametrize(
    ("content", "form", "command"),
    [
        (b"PAR1\x15\x04", "a Parquet file", "pandas.read_parquet"),
        (b"ARROW1\0\0", "an Arrow file", "pandas.read_feather"),
        (gzip.compress(lines(CHAT), mtime=0), "compressed by gzip", "gunzip -c < 'my data.jsonl' > converted.jsonl"),
        (b"\x28\xb5\x2f\xfd\x04", "compressed by Zstandard", "zstd -dc"),
        (b"BZh91AY", "compressed by bzip2", "bunzip2 -c"),
        (b"\xfd7zXZ\x00\x00", "compressed by xz", "xz -dc"),
        (b"PK\x03\x04\x14\x00[Content_Types].xml", "an Excel workbook", "pandas.read_excel"),
        (b"PK\x03\x04\x14\x00train.jsonl", "a zip archive", "unzip -p"),
        (
            '{"text": "café"}\n'.encode("latin-1"),
            "text in another encoding, such as Windows-1252",
            "iconv -f WINDOWS-1252 -t UTF-8 'my data.jsonl'",
        ),
        ("{}".encode("utf-16"), "text in UTF-16, not in UTF-8", "iconv -f UTF-16 -t UTF-8 'my data.jsonl'"),
        (b"{'text': 'hi'}\n", "Python's notation, with single quotes", "ast.literal_eval"),
    ],
)
def test_hint_names_the_form_of_a_file_that_is_no_json(tmp_path: Path, content: bytes, form: str, command: str) -> None:
    message = refusal(tmp_path, content)
    assert f"this is {form}; a training file has one JSON object a line; convert it: " in message
    assert command in message.split("convert it: ")[1]


@pytest.mark.parametrize(
    "content",
    [
        b"{\n",
        b'{"text": "hi"\n{"text": "ho"}\n',
        lines({"foo": "bar"}),
        lines({"messages": [{"role": ["user"], "content": "hi"}]}),
        lines({"messages": [{"from": "human", "value": "nobody answers"}]}),
        lines(PAIR, ALPACA)[:-3],
        lines({"messages": [], "question": "hi", "answer": "ho"}),
    ],
)
def test_hint_is_left_out_where_no_form_is_recognized(tmp_path: Path, content: bytes) -> None:
    assert "this is" not in refusal(tmp_path, content)


@pytest.mark.parametrize(
    ("content", "form"),
    [
        (
            b"Dear Ann,\nthanks, and yours,\n",
            'text without JSON; a training file has one JSON object a line, such as {"t',
        ),
        (b"hello\n", 'such as {"text": "hello"}'),
        (b"\x7fELF\0\n", "this is a binary file; a training file has one JSON object a line"),
    ],
)
def test_hint_tells_what_is_needed_where_there_is_no_json(tmp_path: Path, content: bytes, form: str) -> None:
    message = refusal(tmp_path, content)
    assert form in message
    assert "convert it" not in message


def test_hint_comes_also_for_a_later_line(tmp_path: Path) -> None:
    message = refusal(tmp_path, lines(CHAT, ALPACA))
    assert "line 2: expected" in message
    assert shown(message) == CHAT


@pytest.mark.parametrize(
    "content", [lines(ALPACA | {"output": LONG}), lines({**SHAREGPT, "system": LONG}), pretty([{"text": LONG}])]
)
def test_hint_cuts_long_texts(tmp_path: Path, content: bytes) -> None:
    message = refusal(tmp_path, content)
    assert f"{LONG[:80]}…" in json.dumps(shown(message), ensure_ascii=False)
    assert len(message) < 1500


def test_hint_shows_no_more_than_the_first_exchange(tmp_path: Path) -> None:
    turns = SHAREGPT["conversations"] * 50
    assert shown(refusal(tmp_path, lines({"conversations": turns}))) == CHAT


def test_hint_escapes_what_terminals_obey(tmp_path: Path) -> None:
    content = json.dumps({"prompt": "\x9b31m\u202e", "answer": "日本"}, ensure_ascii=False).encode() + b"\n"
    message = refusal(tmp_path, content)
    assert r'{"prompt": "\u009b31m\u202e", "completion": "日本"}' in message


def test_hint_quotes_the_name_in_its_command(tmp_path: Path) -> None:
    message = refusal(tmp_path, lines(ALPACA), name="$(reboot) 'x'.jsonl")
    assert shlex.quote("$(reboot) 'x'.jsonl") + " > converted.jsonl" in message


def test_hint_has_the_senders_name_of_an_uploaded_file_in_its_command(tmp_path: Path) -> None:
    message = refusal(tmp_path, lines(ALPACA), name="a.jsonl (file-54f1463f)")
    assert message.startswith("a.jsonl (file-54f1463f), line 1: ")
    assert message.endswith(" a.jsonl > converted.jsonl")


def test_hint_shows_no_record_that_the_parser_refuses() -> None:
    hint = Hint(form="of another form", record=CHAT, jq=".[]")
    assert format_hint(hint, "a.json", lambda _record: False) == (
        "this is of another form; a training file has one JSON object a line; "
        "convert it: jq -c '.[]' a.json > converted.jsonl"
    )


def test_hint_for_an_array_of_more_than_a_head_has_no_record(tmp_path: Path) -> None:
    message = refusal(tmp_path, json.dumps([{"text": "x" * 2**20}]).encode())
    assert "this is one JSON array; a training file has one JSON object a line; convert it: jq -c '.[]'" in message
