"""Steps in one process that goes on keep its state, and have limits and logs of their own."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from windlass.service.installation.process_ids import find_process
from windlass.service.preparation.sandbox.process import LimitedCommand, LimitedProcess
from windlass.service.preparation.sandbox.warm_process import WarmProcess

# A step's module: runs the code that it gets. `kept` is there from one step to the next.
_MODULE = """
import os, signal, sys, time
def main():
    run(sys.argv[1:], [])
def begin():
    kept = []
    return lambda arguments: run(arguments, kept)
def run(arguments, kept):
    exec(arguments[0], globals() | {"kept": kept})
if __name__ == "__main__":
    main()
"""
LIMITS: dict[str, Any] = {"cpu_s": 60, "address_space_nbytes": 4 << 30, "memory_nbytes": 1 << 30}


@pytest.fixture
def warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WarmProcess]:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "a_step.py").write_text(_MODULE)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    made = WarmProcess("a_step", tmp_path / "warm.log")
    yield made
    made.close()


def begin(warm: WarmProcess, folder: Path, code: str, *, log: str = "log", **limits: Any) -> LimitedProcess:
    command = (sys.executable, "-m", "a_step", code)
    with (folder / log).open("ab") as file:
        return warm.start(LimitedCommand(command=command, home=folder, **LIMITS | limits), file)


def test_steps_share_a_process_and_what_it_keeps_but_no_log(warm: WarmProcess, tmp_path: Path) -> None:
    code = "kept.append(1); print(os.getpid(), len(kept), os.getcwd())"
    for log in ("first", "second"):
        assert begin(warm, tmp_path, code, log=log).wait() == 0
    assert [(tmp_path / log).read_text() for log in ("first", "second")] == [
        f"{warm.pid} {number} {tmp_path}\n" for number in (1, 2)
    ]
    assert (tmp_path / "warm.log").read_text() == ""


def test_process_outlives_the_thread_that_asked_for_its_first_step(warm: WarmProcess, tmp_path: Path) -> None:
    thread = threading.Thread(target=lambda: begin(warm, tmp_path, "pass").wait())
    thread.start()
    thread.join()
    pid = warm.pid
    assert begin(warm, tmp_path, "pass").wait() == 0
    assert warm.pid == pid


@pytest.mark.long
def test_each_step_has_its_own_cpu_time(warm: WarmProcess, tmp_path: Path) -> None:
    busy = "until = time.process_time() + 0.7\nwhile time.process_time() < until: pass"
    assert [begin(warm, tmp_path, busy, cpu_s=1).wait() for _ in range(3)] == [0, 0, 0]
    assert begin(warm, tmp_path, "while True: pass", cpu_s=1).wait() == -signal.SIGXCPU


def test_each_step_has_its_own_memory(warm: WarmProcess, tmp_path: Path) -> None:
    take = "taken = bytearray(300 << 20)"
    assert begin(warm, tmp_path, take).wait() == 0
    assert begin(warm, tmp_path, take, memory_nbytes=200 << 20, log="short").wait() == 1
    assert "MemoryError" in (tmp_path / "short").read_text()


@pytest.mark.parametrize(
    ("code", "expected"), [("raise KeyError('x')", 1), ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM)]
)
def test_failed_step_ends_the_process_and_the_next_step_begins_another(
    warm: WarmProcess, tmp_path: Path, code: str, expected: int
) -> None:
    assert begin(warm, tmp_path, "kept.append(1)").wait() == 0
    first = warm.pid
    failed = begin(warm, tmp_path, code)
    assert (failed.wait(), failed.poll()) == (expected, expected)
    assert warm.pid is None
    assert begin(warm, tmp_path, "assert not kept").wait() == 0
    assert warm.pid not in (None, first)


def test_renewed_process_is_another_one_unless_it_runs_a_step(warm: WarmProcess, tmp_path: Path) -> None:
    warm.renew()
    assert begin(warm, tmp_path, "kept.append(1)").wait() == 0
    warm.renew()
    assert warm.pid is None
    step = begin(warm, tmp_path, "assert not kept")
    warm.renew()
    assert step.wait() == 0


@pytest.mark.long
def test_killed_step_is_gone(warm: WarmProcess, tmp_path: Path) -> None:
    step = begin(warm, tmp_path, "time.sleep(60)")
    pid = step.pid
    assert pid is not None
    step.kill()
    assert step.wait() == -signal.SIGKILL
    assert find_process(pid) is None


@pytest.mark.long
def test_step_beside_a_running_one_gets_a_process_of_its_own(warm: WarmProcess, tmp_path: Path) -> None:
    running = begin(warm, tmp_path, "time.sleep(60)")
    assert begin(warm, tmp_path, "print(os.getpid())", log="other").wait() == 0
    assert int((tmp_path / "other").read_text()) != running.pid
    running.kill()
    running.wait()


@pytest.mark.long
def test_process_that_holds_half_of_the_memory_of_a_step_is_replaced(warm: WarmProcess, tmp_path: Path) -> None:
    assert begin(warm, tmp_path, "kept.append(b'x' * (150 << 20))").wait() == 0
    first = warm.pid
    assert begin(warm, tmp_path, "assert kept").wait() == 0
    assert warm.pid == first
    assert begin(warm, tmp_path, "assert not kept", memory_nbytes=256 << 20).wait() == 0
    assert warm.pid != first


def test_idle_process_ends_and_a_busy_one_does_not(
    warm: WarmProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "_idle_s", 0.05)
    assert begin(warm, tmp_path, "pass").wait() == 0
    until_s = time.monotonic() + 60
    while warm.pid is not None:
        assert time.monotonic() < until_s, "it goes on"
        time.sleep(0.01)
    assert begin(warm, tmp_path, "time.sleep(0.3)").wait() == 0


@pytest.mark.long
def test_close_ends_a_running_step(warm: WarmProcess, tmp_path: Path) -> None:
    step = begin(warm, tmp_path, "time.sleep(60)")
    warm.close()
    assert step.wait() == -signal.SIGKILL
