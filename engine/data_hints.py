"""Hints for files in other forms than the three that are taken: which form is needed, shown with the file's own data.

Nothing is converted: what a column means is its owner's to say. The hint shows the first record as it would be written.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from typing import Any

HEAD_NBYTES = 256 * 1024  # of a file, that a hint is made from
_MOST_CHARS = 60  # of each text in an example
_MOST_MESSAGES = 4
_FORMATS = (
    '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}, or {"text": "…"}, or '
    '{"prompt": "…", "completion": "…"}'
)
_MAGICS = {
    b"PAR1": "a Parquet file",
    b"\x1f\x8b": "a gzip archive",
    b"PK\x03\x04": "a zip archive or a spreadsheet",
    b"(\xb5/\xfd": "a zstd archive",
    b"BZh": "a bzip2 archive",
    b"\xfd7zXZ": "an xz archive",
    b"ARROW1": "an Arrow file",
    b"SQLite format 3": "an SQLite database",
    b"%PDF": "a PDF",
}
# ShareGPT's names of who speaks.
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
# Fields that people write instead: the names of a question and of its answer.
_PAIRS = (
    ("prompt", ("completion", "response", "answer", "output", "chosen")),
    ("question", ("answer", "response", "output")),
    ("query", ("response", "answer", "output")),
    ("input", ("output", "target", "response", "answer")),
    ("source", ("target",)),
)
_TEXTS = ("content", "body", "document", "sentence", "article")


def hint_for_record(record: object) -> str | None:
    """Show a record of another form as a line that would be taken; None where nobody can tell what it means."""
    found = _in_form(record)
    return None if found is None else f"in the form that is needed it would be {json.dumps(found, ensure_ascii=False)}"


def hint_for_head(head: bytes) -> str | None:
    """Tell what a file is that begins so and is not JSON lines, and how its first record would be written.

    None for what may be JSON lines with a mistake in them.
    """
    for magic, what in _MAGICS.items():
        if head.startswith(magic):
            return f"it is {what}; write JSON lines, one object a line: {_FORMATS}"
    text = head.decode("utf-8-sig", errors="replace").strip()
    if text.startswith("["):
        return _with_example(
            "it is one JSON array; write each of its elements on a line of its own (`jq -c '.[]' a.json > a.jsonl`)",
            _first_value(text[1:].lstrip()),
        )
    if text.startswith("{"):
        lines = text.split("\n", 1)
        if len(lines) == 1 or _is_json(lines[0]):
            return None
        return _with_example(
            "its objects go over several lines; write each on one line (`jq -c . a.json > a.jsonl`)", _first_value(text)
        )
    rows = _csv_rows(text)
    if rows is None:
        return None
    names, values = rows
    return _with_example(
        f"it is a table with the columns {', '.join(names[:8])}; write each row as a JSON object on a line of its own",
        dict(zip(names, values, strict=False)),
    )


def _with_example(hint: str, record: object) -> str:
    example = hint_for_record(record)
    return f"{hint}. Its first record: {example}" if example else f"{hint}: {_FORMATS}"


def _in_form(record: object) -> dict[str, Any] | None:
    if isinstance(record, list):
        messages = _messages(record)
        return None if messages is None else {"messages": messages}
    if not isinstance(record, dict):
        return {"text": _short(record)} if isinstance(record, str) else None
    for name in ("messages", "conversations", "conversation", "dialog", "dialogue", "chat"):
        if (messages := _messages(record.get(name))) is not None:
            system = record.get("system")
            if isinstance(system, str) and system and messages[0]["role"] != "system":
                messages = [{"role": "system", "content": _short(system)}, *messages]
            return {"messages": messages}
    if isinstance(record.get("instruction"), str):
        answer = next((record[name] for name in ("output", "response", "answer", "completion") if name in record), None)
        if isinstance(answer, str):
            parts = [record["instruction"], record.get("input")]
            question = "\n\n".join(part for part in parts if isinstance(part, str) and part)
            return {"messages": [_message("user", question), _message("assistant", answer)]}
    for question, answers in _PAIRS:
        for answer in answers:
            if isinstance(record.get(question), str) and isinstance(record.get(answer), str):
                return {"prompt": _short(record[question]), "completion": _short(record[answer])}
    texts = [record[name] for name in ("text", *_TEXTS) if isinstance(record.get(name), str)]
    return {"text": _short(texts[0])} if texts else None


def _messages(found: object) -> list[dict[str, str]] | None:
    """A list of messages, by the names of OpenAI or of ShareGPT; None where it is none."""
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        return None
    messages = []
    for each in found[:_MOST_MESSAGES]:
        if not isinstance(each, Mapping):
            return None
        speaker = each.get("role", each.get("from"))
        content = each.get("content", each.get("value"))
        if not isinstance(speaker, str) or not isinstance(content, str):
            return None
        messages.append(_message(_SPEAKERS.get(speaker.lower(), speaker), content))
    return messages


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": _short(content)}


def _short(text: str) -> str:
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}…"


def _first_value(text: str) -> object:
    try:
        return json.JSONDecoder().raw_decode(text)[0]
    except (ValueError, RecursionError):  # or it is longer than the head
        return None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _csv_rows(text: str) -> tuple[list[str], list[str]] | None:
    """A table's header and its first row; None where it is no table."""
    first = text.split("\n", 1)[0]
    delimiter = max(",\t;", key=first.count)
    if not first.count(delimiter):
        return None
    try:
        reader = csv.reader(text.splitlines(keepends=True), delimiter=delimiter)
        names, values = next(reader), next(reader)
    except (csv.Error, StopIteration):
        return None
    is_table = len(names) > 1 and len(values) == len(names) and all(0 < len(name.strip()) <= 64 for name in names)
    return ([name.strip() for name in names], values) if is_table else None
