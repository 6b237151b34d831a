"""Sessions that compute yield the cores to the service's session."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from windlass.actors.lifecycle import lower_session
from windlass.actors.lifecycle.session_priority import COMPUTING_NICENESS

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/autogroup").exists(), reason="the kernel does not group processes by session"
)


@pytest.fixture
def session() -> Iterator[int]:
    """A process that leads a session of its own."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        yield process.pid
        process.kill()


def _niceness(pid: int) -> int:
    found = re.search(r"nice (-?\d+)", Path(f"/proc/{pid}/autogroup").read_text())
    assert found is not None
    return int(found[1])


def test_a_session_is_lowered_and_no_other(session: int) -> None:
    # Compared as text: a process that started before any session did has no group, and the file is empty.
    own = Path("/proc/self/autogroup")
    before = own.read_text()
    assert lower_session(session)
    assert _niceness(session) == COMPUTING_NICENESS
    assert own.read_text() == before


def test_several_sessions_are_lowered_one_soon_after_the_other(session: int) -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        try:
            assert lower_session(session)
            assert lower_session(other.pid)
            assert _niceness(other.pid) == COMPUTING_NICENESS
        finally:
            other.kill()


def test_a_process_that_has_ended_is_no_error(session: int) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
        assert not lower_session(process.pid)


def test_a_preparation_has_a_lowered_session_of_its_own() -> None:
    show = "import os; print(os.getsid(0) == os.getpid(), open('/proc/self/autogroup').read())"
    limited = [sys.executable, "-m", "windlass.service.preparation.sandbox.limited_exec"]
    command = [*limited, f"--parent-pid={os.getpid()}", "--", sys.executable, "-c", show]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(rf"True .* nice {COMPUTING_NICENESS}\s*", printed)
