"""Log lines as text and as JSON."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from windlass.service.installation.logs import LogFormat, about, rotate_logs, set_up_logs

LOG = logging.getLogger("windlass.test")


@contextmanager
def logs(format: LogFormat, role: str) -> Iterator[None]:
    """Sets logs up as in a process of its own, and restores pytest's handlers afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    set_up_logs(format, role)
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_of_json_has_the_job_and_the_attempt(capsys: pytest.CaptureFixture[str]) -> None:
    with logs(LogFormat.JSON, "dispatcher"):
        LOG.warning("job %s is slow", "ftjob-1", extra=about("ftjob-1", 3))
        LOG.info("dispatching")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first.pop("time").startswith("20")
    assert first == {
        "level": "WARNING",
        "logger": "windlass.test",
        "message": "job ftjob-1 is slow",
        "job": "ftjob-1",
        "attempt": 3,
        "process": "dispatcher",
    }
    assert second["message"] == "dispatching"
    assert "job" not in second


def test_an_error_keeps_its_trace_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with logs(LogFormat.JSON, "api"):
        try:
            raise RuntimeError("broken\nin two")
        except RuntimeError:
            LOG.exception("it failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert "RuntimeError: broken\nin two" in json.loads(line)["exc_info"]


def test_log_format_text_writes_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with logs(LogFormat.TEXT, "api"):
        LOG.info("launched", extra=about("ftjob-1", 3))
        LOG.info("claimed", extra=about("ftjob-1"))
        LOG.info("serving")
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.endswith(" INFO windlass.test: job ftjob-1, attempt 3: launched")
    assert second.endswith(" INFO windlass.test: job ftjob-1: claimed")
    assert third.endswith(" INFO windlass.test: serving")


def test_a_log_that_has_grown_is_begun_anew_and_its_writer_goes_on_in_it(tmp_path: Path) -> None:
    log, small = tmp_path / "api.log", tmp_path / "dispatcher.log"
    small.write_text("a line\n")
    with log.open("ab", buffering=0) as writer:
        for number in range(3):
            writer.write(f"{number}".encode() * 100)
            rotate_logs(tmp_path, limit_nbytes=99)
            assert log.stat().st_size == 0
            assert (tmp_path / "api.log.1").read_text() == f"{number}" * 100
        writer.write(b"next")
        rotate_logs(tmp_path, limit_nbytes=99)
    assert log.read_text() == "next"
    assert small.read_text() == "a line\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["api.log", "api.log.1", "dispatcher.log"]
