"""The journal survives crashes of its writer and is read exactly once."""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from windlass.actors.job.journal import Journal, JournalReader, read_journal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "job" / "journal.jsonl"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    journal = Journal(path, attempt=1)
    yield journal
    journal.close()


def _write(path: Path, attempt: int, *messages: str) -> None:
    journal = Journal(path, attempt)
    for message in messages:
        journal.append("message", message)
    journal.close()


def test_records_come_back_whole_and_in_order(path: Path, journal: Journal) -> None:
    journal.append("message", "loading")
    journal.append("metrics", "step 1", step=1, train_loss=2.5)
    journal.append_outcome("failed", "no room", error={"code": "disk_full", "message": "no room", "param": None})
    records = list(read_journal(path))
    assert [(r.attempt, r.seq, r.kind, r.level) for r in records] == [
        (1, 1, "message", "info"),
        (1, 2, "metrics", "info"),
        (1, 3, "outcome", "error"),
    ]
    assert records[1].data == {"step": 1, "train_loss": 2.5}
    assert records[2].data["status"] == "failed"
    assert records[2].data["error"]["code"] == "disk_full"


def test_a_record_is_on_disk_in_one_line_when_append_returns(path: Path, journal: Journal) -> None:
    journal.append("message", "two\nlines")
    assert path.read_bytes().count(b"\n") == 1
    assert json.loads(path.read_bytes())["message"] == "two\nlines"


def test_only_the_owner_reads_it(path: Path, journal: Journal) -> None:
    assert path.stat().st_mode & 0o777 == 0o600


def test_numbers_go_on_after_reopening_and_restart_with_an_attempt(path: Path) -> None:
    _write(path, 1, "a", "b")
    _write(path, 1, "c")
    _write(path, 2, "d")
    assert [(r.attempt, r.seq) for r in read_journal(path)] == [(1, 1), (1, 2), (1, 3), (2, 1)]


def test_read_after_a_number_skips_earlier_records(path: Path) -> None:
    _write(path, 1, "a", "b", "c")
    _write(path, 2, "d")
    assert [r.message for r in read_journal(path, after=(1, 2))] == ["c", "d"]
    assert [r.message for r in read_journal(path, after=(2, 1))] == []


def test_a_torn_last_line_is_ignored_and_closed_off(path: Path) -> None:
    _write(path, 1, "a", "b")
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    assert [r.message for r in read_journal(path)] == ["a"]
    _write(path, 1, "b again")
    assert [(r.seq, r.message) for r in read_journal(path)] == [(1, "a"), (2, "b again")]


def test_every_cut_of_the_last_line_leaves_the_rest_readable(path: Path) -> None:
    _write(path, 1, "a", "b")
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        _write(path, 1, "c")
        assert [(r.seq, r.message) for r in read_journal(path)] == [(1, "a"), (2, "c")]


@pytest.mark.parametrize("stop", [10, -1])
def test_a_short_write_raises_and_the_number_is_used_again(
    path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    journal.append("message", "a")
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:stop]))
    with pytest.raises(OSError, match="record 2 was cut at") as raised:
        journal.append("message", "b")
    assert raised.value.errno == errno.ENOSPC
    monkeypatch.undo()
    journal.append("message", "c")
    assert [(r.seq, r.message) for r in read_journal(path)] == [(1, "a"), (2, "c")]


def test_reader_goes_on_where_it_stopped(path: Path, journal: Journal) -> None:
    reader = JournalReader(path)
    assert reader.read_new() == []
    journal.append("message", "a")
    assert [r.message for r in reader.read_new()] == ["a"]
    assert reader.read_new() == []
    with path.open("ab") as file:
        file.write(b'{"attempt": 1, "seq')
    assert reader.read_new() == []
    with path.open("ab") as file:
        file.write(b'": 2, "created_at": 0.0, "kind": "message", "level": "info", "message": "b", "data": {}}\n')
    assert [r.message for r in reader.read_new()] == ["b"]


def test_records_of_a_lost_runner_are_ignored(path: Path) -> None:
    _write(path, 1, "a")
    _write(path, 2, "b")
    _write(path, 1, "stale")
    _write(path, 2, "c")
    assert [r.message for r in read_journal(path)] == ["a", "b", "c"]


def test_reading_a_journal_that_does_not_exist_yet(path: Path) -> None:
    assert list(read_journal(path)) == []


def test_a_diverged_loss_is_null(path: Path, journal: Journal) -> None:
    journal.append(
        "metrics", "step 1", train_loss=float("nan"), nested={"x": [float("inf"), 1.0], "y": (float("-inf"), 2.0)}
    )
    (record,) = read_journal(path)
    assert record.data == {"train_loss": None, "nested": {"x": [None, 1.0], "y": [None, 2.0]}}


def test_close_may_come_twice(path: Path) -> None:
    journal = Journal(path, 1)
    journal.close()
    journal.close()
