"""The table and the sum of a job's fixed memory, from samples of its processes."""

import subprocess
import sys

import pytest

from benchmarks.memory.fixed_memory import fixed_nbytes, kind_of, rows_of, sample_of
from benchmarks.reporting.pss import ProcessMemory

MIB = 1 << 20


def memory(pss_mib: int, anon_mib: int) -> ProcessMemory:
    return ProcessMemory(pss_mib * MIB, anon_mib * MIB)


SAMPLES = [
    {"SSD server": [memory(60, 50), memory(50, 50)], "runner": [memory(50, 40)]},
    {"SSD server": [memory(60, 50), memory(60, 50)], "runner": [memory(60, 40)]},
    {"SSD server": [memory(60, 50), memory(60, 50)], "runner": [memory(55, 40)], "other": [memory(900, 900)]},
]


def test_fixed_nbytes_is_the_median_of_the_sums() -> None:
    assert fixed_nbytes(SAMPLES) == 180 * MIB


def test_rows_are_medians_by_kind_and_the_largest_comes_first() -> None:
    assert rows_of(SAMPLES) == [
        ("SSD server", "2", "120", "100"),
        ("runner", "1", "55", "40"),
        ("other", "0", "0", "0"),
    ]


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("ray::Runner", "runner"),
        ("ray::IDLE", "Ray: idle worker"),
        ("ray::RuntimeEnvAgent", "Ray: runtime environment agent"),
        ("/lib/ray/gcs_server", "Ray: GCS"),
        ("something", "other"),
    ],
)
def test_kind_follows_from_the_command_line(title: str, kind: str) -> None:
    command = [title, "-c", "print('started', flush=True); input()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, executable=sys.executable, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        assert kind_of(process.pid) == kind
        process.stdin.write(b"\n")


_WORKER = """
import threading
from windlass.storage.threads import GuardedThreads

class CpuOptimizer:
    def _run_updates(self):
        print("started", flush=True)
        threading.Event().wait()

GuardedThreads("optimizer-0", "job", print).start((CpuOptimizer()._run_updates,))
input()
"""


def test_kind_of_a_worker_follows_from_its_threads() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", _WORKER], **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        assert list(sample_of([process.pid])) == ["CPU optimizer"]
        process.stdin.write(b"\n")


def test_processes_that_have_ended_do_not_count() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert sample_of([process.pid]) == {}
