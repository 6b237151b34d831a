"""One line or one chat template may use only limited time and memory, and the error names the line."""

import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.folders import PLAIN_TEMPLATE, make_tokenizer, make_tokenizer_folder
from windlass.engine.data.example_bounds import RenderTimeError, within_cpu_time
from windlass.engine.data.examples import DataError, DataErrorCode
from windlass.engine.data.tokenize import prepare

_CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
_LOOPS = "{% for i in range(100000) %}{% for j in range(100000) %}{{ BODY }}{% endfor %}{% endfor %}"
_FOREVER = _LOOPS.replace("BODY", "''")


def _prepare(folder: Path, template: str | None, *lines: Any) -> dict[str, Any]:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    make_tokenizer_folder(folder / "model", tokenizer)
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return prepare(
        model_dir=folder / "model",
        training_file=folder / "train.jsonl",
        training_name="mine.jsonl",
        validation_file=None,
        sequence_length=8,
        output_dir=folder / "out",
    )


def test_a_template_that_loops_gets_an_error_with_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.engine.data.tokenize.MAX_RENDER_CPU_S", 0.2)
    with pytest.raises(DataError, match=r"mine\.jsonl, line 1, field messages: .* more than 0\.2 s .* 2 messages") as e:
        _prepare(tmp_path, _FOREVER, _CHAT)
    assert e.value.code is DataErrorCode.EXAMPLE_TOO_LARGE
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_a_template_that_catches_what_it_can_is_interrupted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks also render in other ways, and take a template's own errors as an answer."""
    monkeypatch.setattr("windlass.engine.data.tokenize.MAX_RENDER_CPU_S", 0.3)
    with pytest.raises(DataError, match=r"more than 0\.3 s"):
        _prepare(
            tmp_path, PLAIN_TEMPLATE + "{% if messages[-1].content == '\ue000' %}" + _FOREVER + "{% endif %}", _CHAT
        )


def test_a_long_example_is_refused_with_its_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.engine.data.tokenize.MAX_NUM_CHARS", 1000)
    with pytest.raises(DataError, match=r"mine\.jsonl, line 2: its text has 1,001 characters, of at most 1,000; split"):
        _prepare(tmp_path, None, {"text": "a" * 1000}, {"text": "a" * 1001})


def test_a_file_that_becomes_too_much_on_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.engine.data.tokenize.ALWAYS_ALLOWED_NBYTES", 100)
    monkeypatch.setattr("windlass.engine.data.tokenize.MAX_GROWTH", 0)
    with pytest.raises(DataError, match=r"mine\.jsonl, line 9: the lines up to this one became \d+ bytes of tokens"):
        _prepare(tmp_path, None, *({"text": "the user"} for _ in range(9)))


@pytest.mark.long
def test_a_template_that_takes_all_memory_gets_an_error_with_the_line(tmp_path: Path) -> None:
    """In a separate process, with the limit of preparation steps."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = _LOOPS.replace("BODY", "'x' * 1000")
    make_tokenizer_folder(tmp_path / "model", tokenizer)
    (tmp_path / "train.jsonl").write_text(json.dumps(_CHAT) + "\n")
    command = [
        *(sys.executable, "-m", "windlass.engine.data.tokenize", "--model-dir", tmp_path / "model", "--training-file"),
        *(tmp_path / "train.jsonl", "--sequence-length", "8", "--output-dir", tmp_path / "out"),
        *("--result", tmp_path / "result.json"),
    ]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (600 << 20, 600 << 20))

    assert subprocess.run(command, preexec_fn=limit, check=False).returncode == 0
    error = json.loads((tmp_path / "result.json").read_text())["error"]
    assert error["code"] == "chat_template_failed"
    assert "train.jsonl, line 1, field messages" in error["message"]
    assert "it takes more memory than a preparation gets (0.59 GiB)" in error["message"]


def test_a_line_that_takes_all_memory_to_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short_of_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("windlass.engine.data.tokenize.ExampleEncoder.encode", short_of_memory)
    with pytest.raises(DataError, match=r"mine\.jsonl, line 2: this line, .* than a preparation gets; split"):
        _prepare(tmp_path, None, {"text": "a"}, {"text": "b"})


def test_time_of_the_consumer_does_not_count() -> None:
    def quick() -> Iterator[int]:
        yield from range(3)

    found = []
    for item in within_cpu_time(quick(), 0.2):
        _compute(0.15)
        found.append(item)
    assert found == [0, 1, 2]


def test_time_adds_up_over_the_items() -> None:
    def slow() -> Iterator[int]:
        for number in range(100):
            _compute(0.06)
            yield number

    found = []
    with pytest.raises(RenderTimeError):
        found.extend(within_cpu_time(slow(), 0.2))
    before = signal.getsignal(signal.SIGPROF)
    assert before is signal.SIG_DFL, "the handler is taken away again"


def _compute(cpu_s: float) -> None:
    until_s = time.process_time() + cpu_s
    while time.process_time() < until_s:
        pass
