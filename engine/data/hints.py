"""Hints for files that have another format: its name, the first record in the expected format, and a command.

The command converts the file; nothing is converted here. `format_hint` shows a record only if the parser of training
files accepts it.
"""

import csv
import io
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

HEAD_NBYTES = 2**20  # bytes of a file's start from which its format is recognized
# Limits of the record in a message: characters of each text, and of the whole record.
_MAX_TEXT_CHARS = 80
_MAX_RECORD_CHARS = 1000
_CONVERTED = "converted.jsonl"

_PANDAS = (
    "python -c 'import pandas, sys; pandas.{reader}(sys.argv[1]).to_json(sys.argv[2], orient=\"records\", lines=True)'"
)
_CSV_ROWS = (
    'python -c \'import csv, json, sys; file = open(sys.argv[1], encoding="utf-8-sig", newline=""); '
    "[print(json.dumps(row)) for row in csv.DictReader(file{delimiter})]' {{name}}"
)
# First bytes of a file, its format, and the command that converts it to text; {name} is the file.
_MAGIC: tuple[tuple[bytes, str, str | None], ...] = (
    (b"PAR1", "a Parquet file", f"{_PANDAS.format(reader='read_parquet')} {{name}} {_CONVERTED}"),
    (b"ARROW1", "an Arrow file", f"{_PANDAS.format(reader='read_feather')} {{name}} {_CONVERTED}"),
    (b"\x1f\x8b", "compressed by gzip", f"gunzip -c < {{name}} > {_CONVERTED}"),
    (b"\x28\xb5\x2f\xfd", "compressed by Zstandard", f"zstd -dc < {{name}} > {_CONVERTED}"),
    (b"BZh", "compressed by bzip2", f"bunzip2 -c < {{name}} > {_CONVERTED}"),
    (b"\xfd7zXZ\x00", "compressed by xz", f"xz -dc < {{name}} > {_CONVERTED}"),
    (b"\xd0\xcf\x11\xe0", "an old Excel or Word document", None),
    (b"%PDF", "a PDF document", None),
    (b"SQLite format 3\x00", "an SQLite database", None),
    (b"\xff\xfe", "text in UTF-16, not in UTF-8", f"iconv -f UTF-16 -t UTF-8 {{name}} > {_CONVERTED}"),
    (b"\xfe\xff", "text in UTF-16, not in UTF-8", f"iconv -f UTF-16 -t UTF-8 {{name}} > {_CONVERTED}"),
)
_ZIP = b"PK\x03\x04"
_IN_WORKBOOKS = (b"[Content_Types].xml", b"xl/")

# Names in other formats for messages, role, content, prompt, completion and text of training files.
_CONVERSATIONS = ("messages", "conversations", "conversation", "message", "dialogue", "dialog", "chat", "turns")
_ROLES = ("role", "from", "speaker", "author")
_CONTENTS = ("content", "value", "text", "message")
_ROLE_NAMES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
_QUESTIONS = ("prompt", "instruction", "question", "query", "problem", "user", "human", "input")
_CONTEXTS = ("input", "context")
_ANSWERS = ("completion", "completions", "response", "output", "answer", "solution", "target", "assistant", "gpt")
_TEXTS = ("text", "content", "document", "body", "sentence")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """The format of a file or a record, and the conversion to a training file."""

    form: str  # completes the sentence "this is …"
    record: dict[str, Any] | None = None  # the first record in a format of training files
    jq: str | None = None  # the jq filter that makes such records from the file
    source: str | None = None  # the command whose output jq reads; None: it reads the file itself
    command: str | None = None  # converts a file that jq cannot read; {name} is the file


def foreign_file(head: bytes) -> Hint | None:
    """Recognizes a file by its first `HEAD_NBYTES` bytes. Returns None for JSON lines and for unknown formats."""
    for magic, form, command in _MAGIC:
        if head.startswith(magic):
            return Hint(form=form, command=command)
    if head.startswith(_ZIP):
        if any(part in head for part in _IN_WORKBOOKS):
            command = f"{_PANDAS.format(reader='read_excel')} {{name}} {_CONVERTED}"
            return Hint(form="an Excel workbook", command=command)
        return Hint(form="a zip archive", command=f"unzip -p {{name}} > {_CONVERTED}")
    # Errors are ignored, because the head may end inside a character.
    text = head.decode("utf-8-sig", errors="ignore").lstrip()
    if text.startswith("["):
        return _json_array(text)
    if text.startswith("{'"):
        form = "Python's notation, with single quotes"
        lines = "[print(json.dumps(ast.literal_eval(line))) for line in sys.stdin]"
        return Hint(form=form, command=f"python -c 'import ast, json, sys; {lines}' < {{name}} > {_CONVERTED}")
    if text.startswith("{"):
        return _json_objects(text)
    if b"\0" in head:
        return Hint(form="a binary file")
    line = text.split("\n", 1)[0].strip()
    return _table(text) or (Hint(form="text without JSON", record={"text": line}) if line else None)


def hint_for_encoding(line: bytes) -> Hint | None:
    """Returns a hint for a line that is not UTF-8, None if it is no JSON object in a single-byte encoding either."""
    try:
        is_object = isinstance(json.loads(line.decode("latin-1")), dict)
    except (ValueError, RecursionError):
        return None
    command = f"iconv -f WINDOWS-1252 -t UTF-8 {{name}} > {_CONVERTED}"
    return Hint(form="text in another encoding, such as Windows-1252", command=command) if is_object else None


def hint_for_record(record: Mapping[str, Any]) -> Hint | None:
    """Returns a hint for a record of another format, with the nearest accepted format; None if none is near."""
    keys = {key.casefold(): key for key in reversed(list(record)) if isinstance(key, str)}
    if (hint := _conversation(record, keys) or _two_lists(record)) is not None or {"messages", "text"} & record.keys():
        return hint
    return _pair(record, keys) or _text(record, keys)


def format_hint(hint: Hint, name: str, accepts: Callable[[dict[str, Any]], bool]) -> str:
    """Returns a hint as text for the end of an error message about the file `name`."""
    parts = [f"this is {hint.form}; a training file has one JSON object a line"]
    if hint.record is not None and (line := _one_line(hint.record, accepts)) is not None:
        parts[0] += f", such as {line}"
    if hint.command is not None:
        parts.append(f"convert it: {hint.command.format(name=shlex.quote(name))}")
    elif hint.jq is not None:
        filtered = f"jq -c {shlex.quote(hint.jq)}"
        source = None if hint.source is None else hint.source.format(name=shlex.quote(name))
        if source is not None:
            command = source if hint.jq == "." else f"{source} | {filtered}"
        else:
            command = f"{filtered} {shlex.quote(name)}"
        parts.append(f"convert it: {command} > {_CONVERTED}")
    return "; ".join(parts)


def _in(hint: Hint | None, record: dict[str, Any], *, form: str, jq: str, source: str | None = None) -> Hint:
    """Returns the hint for records inside another format. `hint` is the hint for the first record."""
    if hint is None:
        return Hint(form=form, record=record, jq=jq, source=source)
    inner = hint.jq if jq == "." else f"{jq} | {hint.jq}"
    if hint.form.endswith("'s form"):
        records = f"records in {hint.form}"
    else:
        records = f"{hint.form.removeprefix('a record with ')} in each record"
    return replace(hint, form=f"{form}, with {records}", jq=inner, source=source)


def _json_array(text: str) -> Hint:
    form = "one JSON array"
    first = _decode(text[1:].lstrip())
    if not isinstance(first, dict):
        return Hint(form=form, jq=".[]")
    if any(name in first for name in _ROLES) and any(name in first for name in _CONTENTS):
        whole = _decode(text)
        messages = {"messages": whole} if isinstance(whole, list) else None
        return Hint(form="a list of messages without a name", record=messages, jq="{messages: .}")
    return _in(hint_for_record(first), first, form=form, jq=".[]")


def _json_objects(text: str) -> Hint | None:
    """Returns a hint for JSON objects that are not one on each line."""
    try:
        first, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    rest = text[end:].lstrip(" \t")
    if "\n" in text[:end].rstrip():
        form, command = "JSON over several lines", None
    elif rest.startswith("{"):
        form, command = "several JSON objects in one line", None
    elif rest.startswith(","):
        form, command = "JSON objects with commas between them", rf"sed 's/,[[:space:]]*$//' {{name}} > {_CONVERTED}"
    else:
        return None
    hint = _in(hint_for_record(first), first, form=form, jq=".")
    return hint if command is None else replace(hint, jq=None, command=command)


def _table(text: str) -> Hint | None:
    """Returns a hint for a table of separated values whose first line holds the names of columns."""
    begin = text.split("\n", 1)[0]
    delimiter = next((mark for mark in "\t;," if mark in begin), ",")
    try:
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        names, first = next(rows), next(rows)
    except (csv.Error, StopIteration):
        return None
    record = dict(zip((name.strip() for name in names), first, strict=False))
    near = hint_for_record(record)
    known = {*_QUESTIONS, *_ANSWERS, *_TEXTS}
    # Prose has commas too, so a table needs a known column name.
    if len(names) != len(first) or not any(name.casefold() in known for name in record):
        return None
    option = "" if delimiter == "," else f", delimiter={json.dumps(delimiter)}"
    form = "tab-separated values" if delimiter == "\t" else "CSV"
    return _in(near, record, form=form, jq=".", source=_CSV_ROWS.format(delimiter=option))


def _conversation(record: Mapping[str, Any], keys: Mapping[str, str]) -> Hint | None:
    key = next((keys[name] for name in _CONVERSATIONS if name in keys and _is_objects(record[keys[name]])), None)
    if key is None:
        return None
    turns = record[key]
    role = next((name for name in _ROLES if name in turns[0]), None)
    content = next((name for name in _CONTENTS if name in turns[0] and name != role), None)
    if role is None or content is None:
        return None
    if (role, content) == ("role", "content") and all(_role(turn, role) == turn.get(role) for turn in turns):
        if key == "messages":
            return None
        return Hint(form=f'a conversation under "{key}"', record={"messages": turns}, jq=f"{{messages: .{key}}}")
    messages = [{"role": _role(turn, role), "content": turn.get(content)} for turn in turns]
    names = json.dumps(_ROLE_NAMES)
    jq = f"[.{key}[] | {{role: ({names}[.{role}] // .{role}), content: .{content}}}]"
    if isinstance(system := record.get("system"), str) and system:
        messages.insert(0, {"role": "system", "content": system})
        jq = f'[.system | select(. != null and . != "") | {{role: "system", content: .}}] + {jq}'
        jq = f"({jq})"
    form = (
        "ShareGPT's form" if (role, content) == ("from", "value") else f'a conversation with "{role}" and "{content}"'
    )
    return Hint(form=form, record={"messages": messages}, jq=f"{{messages: {jq}}}")


def _role(turn: Mapping[str, Any], key: str) -> Any:
    """Returns a message's role by the name that training files use."""
    name = turn.get(key)
    return _ROLE_NAMES.get(name, name) if isinstance(name, str) else name


def _two_lists(record: Mapping[str, Any]) -> Hint | None:
    """Returns a hint for a conversation in a prompt and a completion that are both lists of messages."""
    prompt, completion = record.get("prompt"), record.get("completion")
    if not (_is_objects(prompt) and _is_objects(completion)):
        return None
    assert isinstance(prompt, list)
    assert isinstance(completion, list)
    form = 'a conversation in "prompt" and "completion"'
    return Hint(form=form, record={"messages": [*prompt, *completion]}, jq="{messages: (.prompt + .completion)}")


def _pair(record: Mapping[str, Any], keys: Mapping[str, str]) -> Hint | None:
    def named(names: tuple[str, ...], *, but: str | None = None) -> str | None:
        present = (keys[name] for name in names if name in keys)
        return next((key for key in present if key != but and isinstance(record[key], str)), None)

    question, answer = named(_QUESTIONS), named(_ANSWERS)
    if question is None or answer is None or (question, answer) == ("prompt", "completion"):
        return None
    form = f'a record with "{question}" and "{answer}"'
    if question.casefold() == "prompt":
        pair = {"prompt": record[question], "completion": record[answer]}
        return Hint(form=form, record=pair, jq=f"{{prompt: .{question}, completion: .{answer}}}")
    content, content_jq = record[question], f".{question}"
    if (context := named(_CONTEXTS, but=question)) is not None:
        content = f"{content}\n\n{record[context]}" if record[context] else content
        content_jq = f'([.{question}, .{context}] | map(select(. != null and . != "")) | join("\\n\\n"))'
    if (question, answer) == ("instruction", "output"):
        form = "Alpaca's form"
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": record[answer]}]
    jq = f'{{messages: [{{role: "user", content: {content_jq}}}, {{role: "assistant", content: .{answer}}}]}}'
    return Hint(form=form, record={"messages": messages}, jq=jq)


def _text(record: Mapping[str, Any], keys: Mapping[str, str]) -> Hint | None:
    key = next((keys[name] for name in _TEXTS if name in keys and isinstance(record[keys[name]], str)), None)
    others = {*_QUESTIONS, *_ANSWERS, *_CONVERSATIONS}
    if key is None or key == "text" or others & keys.keys():
        return None
    return Hint(form=f'a text under "{key}"', record={"text": record[key]}, jq=f"{{text: .{key}}}")


def _is_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _decode(text: str) -> Any:
    """Returns the first JSON value of a text, None if there is none or it is cut off."""
    try:
        return json.JSONDecoder().raw_decode(text)[0]
    except (ValueError, RecursionError):
        return None


def _one_line(record: dict[str, Any], accepts: Callable[[dict[str, Any]], bool]) -> str | None:
    """Returns a record as one line of JSON with shortened texts; None if the parser refuses it or it is too long."""
    short = _cut(record)
    if isinstance(messages := short.get("messages"), list):
        short["messages"] = _first_exchange(messages)
    if not accepts(short):
        return None
    line = json.dumps(short, ensure_ascii=False)
    # Escaped, because terminals interpret unprintable characters.
    line = "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in line)
    return line if len(line) <= _MAX_RECORD_CHARS else None


def _first_exchange(messages: list[Any]) -> list[Any]:
    """Returns the messages up to the assistant's first one."""
    for number, message in enumerate(messages, start=1):
        if isinstance(message, dict) and message.get("role") == "assistant":
            return messages[:number]
    return messages


def _cut(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _MAX_TEXT_CHARS else f"{value[:_MAX_TEXT_CHARS]}…"
    if isinstance(value, dict):
        return {key: _cut(item) for key, item in value.items()}
    return [_cut(item) for item in value] if isinstance(value, list) else value
