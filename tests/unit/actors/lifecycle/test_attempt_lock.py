"""The lock that shows whether an attempt's processes are alive, held and lost by real processes."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.power_cut import PowerCut
from windlass.actors.lifecycle import attempt_lock
from windlass.actors.lifecycle.attempt_lock import (
    AttemptClosed,
    begin_attempt,
    close_attempt,
    has_begun,
    join_attempt,
    kill_attempt,
    last_sign_of_life,
    tell_alive,
)
from windlass.storage.ids import Attempt

FIRST, SECOND = Attempt(1), Attempt(2)
HOLDER = """
import sys, time
from pathlib import Path
from windlass.actors.lifecycle import attempt_lock
fd = getattr(attempt_lock, sys.argv[1])(Path(sys.argv[2]), int(sys.argv[3]))
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(verb: str, job_dir: Path, attempt: Attempt) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until its standard input is closed."""
    command = [sys.executable, "-c", HOLDER, verb, str(job_dir), str(attempt)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_an_attempt_lives_as_long_as_one_of_its_processes(tmp_path: Path) -> None:
    assert not has_begun(tmp_path, FIRST)
    with holder("begin_attempt", tmp_path, FIRST) as runner:
        assert has_begun(tmp_path, FIRST)
        with holder("join_attempt", tmp_path, FIRST) as worker:
            assert not close_attempt(tmp_path, FIRST)
            runner.kill()
            runner.wait()
            assert not close_attempt(tmp_path, FIRST)
            assert close_attempt(tmp_path, SECOND)  # it has never begun
            worker.kill()
            worker.wait()
            assert close_attempt(tmp_path, FIRST)
    assert not has_begun(tmp_path, FIRST)
    assert close_attempt(tmp_path, FIRST)


def test_closed_attempt_cannot_be_joined(tmp_path: Path) -> None:
    os.close(begin_attempt(tmp_path, FIRST))
    assert close_attempt(tmp_path, FIRST)
    with pytest.raises(AttemptClosed, match=r"attempt-1\.lock was removed"):
        join_attempt(tmp_path, FIRST)


def test_process_that_opened_the_file_before_close_cannot_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.close(begin_attempt(tmp_path, FIRST))
    real = os.open

    def open_then_close_attempt(*arguments: object, **options: object) -> int:
        fd = real(*arguments, **options)  # type: ignore[arg-type]
        monkeypatch.setattr(os, "open", real)
        assert close_attempt(tmp_path, FIRST)
        return fd

    monkeypatch.setattr(os, "open", open_then_close_attempt)
    with pytest.raises(AttemptClosed):
        join_attempt(tmp_path, FIRST)


def test_a_process_whose_first_thread_has_ended_still_counts(tmp_path: Path) -> None:
    """Its main thread shows as a zombie, as in a killed process with another thread inside a write."""
    code = HOLDER.replace(
        "sys.stdin.read()",
        "import ctypes, threading\n"
        "threading.Thread(target=sys.stdin.read).start()\n"
        "ctypes.CDLL(None).syscall(60, 0)",  # exit(2), of this thread only
    )
    command = [sys.executable, "-c", code, "begin_attempt", str(tmp_path), "1"]
    if os.uname().machine != "x86_64":
        pytest.skip(f"the number of exit(2) is not known for {os.uname().machine}")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        state = ""
        done = threading.Event()
        while state != "Z" and not done.wait(0.01):
            state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert not close_attempt(tmp_path, FIRST)
        process.kill()
        process.wait()
        assert close_attempt(tmp_path, FIRST)


def test_kill_attempt_kills_only_lock_holders(tmp_path: Path) -> None:
    with (
        holder("begin_attempt", tmp_path, FIRST) as runner,
        holder("join_attempt", tmp_path, FIRST) as worker,
        holder("begin_attempt", tmp_path, SECOND) as successor,
    ):
        assert sorted(kill_attempt(tmp_path, FIRST)) == sorted([runner.pid, worker.pid])
        assert [process.wait() for process in (runner, worker)] == [-signal.SIGKILL] * 2
        assert close_attempt(tmp_path, FIRST)
        assert successor.poll() is None
        assert kill_attempt(tmp_path, FIRST) == []


def test_kill_attempt_kills_a_holder_that_closes_another_file_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readlink = Path.readlink

    def read(link: Path) -> Path:
        if link.name == "0":  # stands for a file that is closed between the listing and the reading
            raise FileNotFoundError(link)
        return readlink(link)

    with holder("begin_attempt", tmp_path, FIRST) as runner:
        monkeypatch.setattr(Path, "readlink", read)
        assert kill_attempt(tmp_path, FIRST) == [runner.pid]
        assert runner.wait() == -signal.SIGKILL


def test_a_runner_tells_that_it_lives_until_the_attempt_is_closed(tmp_path: Path) -> None:
    assert last_sign_of_life(tmp_path, FIRST) is None
    assert not tell_alive(tmp_path, FIRST)
    os.close(begin_attempt(tmp_path, FIRST))
    os.utime(tmp_path / "attempt-1.lock", (0, 0))
    assert last_sign_of_life(tmp_path, FIRST) == 0
    assert tell_alive(tmp_path, FIRST)
    assert last_sign_of_life(tmp_path, FIRST) != 0
    assert close_attempt(tmp_path, FIRST)
    assert not tell_alive(tmp_path, FIRST)
    assert not has_begun(tmp_path, FIRST)


def test_an_attempt_that_was_given_up_before_it_began_cannot_begin(tmp_path: Path) -> None:
    assert close_attempt(tmp_path, SECOND)
    for attempt in (FIRST, SECOND):
        with pytest.raises(AttemptClosed, match=f"attempt-{attempt}.lock"):
            begin_attempt(tmp_path, attempt)
        assert not has_begun(tmp_path, attempt)
    os.close(begin_attempt(tmp_path, Attempt(3)))
    assert close_attempt(tmp_path, FIRST)  # a late request; a closed attempt stays closed
    with pytest.raises(AttemptClosed):
        begin_attempt(tmp_path, SECOND)


def test_attempt_begin_and_close_at_once_one_sees_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt is closed while it checks whether it is closed: the closer sees it as alive, and it ends itself."""
    real, seen = attempt_lock._last_closed, []

    def close_first(job_dir: Path) -> int:
        if not seen:
            seen.append(True)
            assert not close_attempt(job_dir, FIRST)
        return real(job_dir)

    monkeypatch.setattr(attempt_lock, "_last_closed", close_first)
    with pytest.raises(AttemptClosed):
        begin_attempt(tmp_path, FIRST)
    assert close_attempt(tmp_path, FIRST)


def test_close_attempt_power_loss_afterwards_leaves_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty file would hold no number, and no attempt of the job could begin or be closed."""
    cut = PowerCut(tmp_path, monkeypatch)
    assert close_attempt(tmp_path, SECOND)
    assert cut.left() == {"last-closed-attempt": b"2\n"}
