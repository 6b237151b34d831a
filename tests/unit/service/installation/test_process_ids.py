"""Processes are distinguished from later ones with the same pid, and ending them ends no other process."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from windlass.service.installation.process_ids import (
    ProcessId,
    end_processes,
    find_process,
    send_signal,
    wait_until_gone,
    with_descendants,
)

_SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", _SLEEP]) as process:
        yield process
        process.kill()


def _id(pid: int) -> ProcessId:
    found = find_process(pid)
    assert found is not None
    return found


def test_a_process_is_found_while_it_lives(sleeper: "subprocess.Popen[bytes]") -> None:
    process = _id(sleeper.pid)
    assert process.is_alive
    sleeper.kill()
    # A zombie, which exists until its parent waits for it, is no living process.
    assert wait_until_gone([process], timeout_s=60.0)
    assert find_process(sleeper.pid) is None


def test_another_process_with_the_same_pid_is_not_signalled(sleeper: "subprocess.Popen[bytes]") -> None:
    earlier = ProcessId(pid=sleeper.pid, start=f"{_id(sleeper.pid).start}0")
    assert not earlier.is_alive
    send_signal(earlier, signal.SIGKILL)
    end_processes([earlier], grace_s=0.0)
    assert with_descendants([earlier]) == []
    time.sleep(0.1)
    assert sleeper.poll() is None


def test_process_that_ignores_termination_is_killed(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({str(ready)!r}, 'w'); {_SLEEP}"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        while not ready.exists():
            time.sleep(0.01)
        end_processes([_id(process.pid)], grace_s=0.2)
        assert process.wait() == -signal.SIGKILL


def test_descendants_come_along(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {_SLEEP!r}]); "
    code += f"open({str(ready)!r}, 'w').write(str(p.pid)); p.wait()"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        while not (ready.exists() and ready.read_text()):
            time.sleep(0.01)
        family = with_descendants([_id(process.pid)])
        assert [member.pid for member in family] == [process.pid, int(ready.read_text())]
        end_processes(family, grace_s=5.0)
        assert wait_until_gone(family, timeout_s=0.0)
