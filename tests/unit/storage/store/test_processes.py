"""Real processes that share one SSD directory, some of them killed."""

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.storage import job_process
from tests.support.storage.stores import FILE_INDEX_NBYTES, open_volume, used_nbytes, volume_file

_ROOT = Path(__file__).parents[4]
_DEADLINE_S = 120
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process of jobs. Processes that run at the end of the test are killed."""
    with ExitStack() as stack:

        def start(*arguments: object) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", job_process.__name__, *(str(each) for each in arguments)]
            process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def _finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=_DEADLINE_S)
    assert process.returncode == 0, output
    return output


@pytest.mark.long
def test_four_processes_make_train_and_delete_jobs_at_once(tmp_path: Path, start: Start) -> None:
    """They also make the volume at once. One is killed repeatedly; the others, and its successors, continue."""
    chance = random.Random(7)
    steady = [start("churn", tmp_path, f"job{i}", 1, 100) for i in range(3)]
    for attempt in range(1, 6):
        victim = start("churn", tmp_path, "victim", attempt, 10_000)
        # Once it is at work.
        while victim.poll() is None and not _has_job(tmp_path, f"victim-{attempt}"):
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.1))
        victim.kill()
        output, _ = victim.communicate(timeout=_DEADLINE_S)
        assert victim.returncode == -9, output
    _finish(start("churn", tmp_path, "victim", 6, 5))
    for process in steady:
        _finish(process)
    volume = open_volume(tmp_path)
    assert volume.allocations() == {}
    volume.free_nbytes()
    volume.close()
    (tmp_path / "empty").mkdir()
    open_volume(tmp_path / "empty").close()
    empty = volume_file(tmp_path / "empty")
    assert volume_file(tmp_path).stat().st_size == empty.stat().st_size
    assert used_nbytes(volume_file(tmp_path)) <= used_nbytes(empty) + FILE_INDEX_NBYTES


@pytest.mark.long
def test_killed_before_every_operation(tmp_path: Path, start: Start) -> None:
    """At any point of a process, its stores are complete or free, and its neighbour is not affected."""
    num_operations = int(_finish(start("live-and-die", tmp_path)))
    assert num_operations > 40


def _has_job(directory: Path, prefix: str) -> bool:
    if not volume_file(directory).exists():
        return False
    volume = open_volume(directory)
    try:
        return any(job.startswith(prefix) for job in volume.allocations())
    finally:
        volume.close()
