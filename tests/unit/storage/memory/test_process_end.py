"""Descriptions of the end of a child process, for users."""

import errno
import signal
import subprocess
import sys

import pytest

from windlass.storage.memory.process_end import (
    describe_process_end,
    explain_process_end,
    is_out_of_memory,
    last_line,
    reports_out_of_memory,
)


def _end_of(code: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import os, resource, sys\n{code}"], capture_output=True, text=True
    )
    return done.returncode, done.stderr


def test_a_killed_process_is_described_by_signal_time_and_memory() -> None:
    code, _ = _end_of("os.kill(os.getpid(), 9)")
    told = describe_process_end(code, after_s=362.4, limit_nbytes=16 << 30)
    assert told.startswith("was killed by signal 9 (SIGKILL) after 362 s, most likely because the machine ran out of")
    assert told.endswith("GiB are free without it; its limit was 16.0 GiB)")


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (3, "ended with exit code 3 after 7 s"),
        (-signal.SIGTERM, "was ended by signal 15 (SIGTERM) after 7 s"),
        (-signal.SIGSEGV, "crashed with signal 11 (SIGSEGV) after 7 s: a defect of a library, or too little memory"),
        (-(signal.SIGRTMIN + 1), f"was ended by signal {signal.SIGRTMIN + 1} after 7 s"),
    ],
)
def test_other_ends_are_described_by_exit_code_or_signal(code: int, told: str) -> None:
    assert describe_process_end(code, after_s=7.2) == told


def test_the_error_that_a_process_printed_explains_its_end() -> None:
    assert explain_process_end(*_end_of("sys.exit('no SSD here')")) == "no SSD here"
    assert explain_process_end(*_end_of("sys.exit(3)")) == "its process ended with exit code 3"


def test_what_a_killed_process_printed_does_not_hide_its_signal() -> None:
    told = explain_process_end(*_end_of("print('loading', file=sys.stderr, flush=True); os.abort()"))
    assert told.startswith("its process crashed with signal 6 (SIGABRT)")
    assert told.endswith("; last output line: loading")


def test_a_failed_allocation_is_found_in_the_last_line() -> None:
    limit = "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))"
    _, output = _end_of(f"{limit}; bytearray(2 << 30)")
    assert reports_out_of_memory(last_line(output))
    assert reports_out_of_memory("OpenBLAS error: Memory allocation still failed after 10 retries, giving up.")
    assert not reports_out_of_memory("ValueError: MemoryErrors are rare")


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (ValueError("empty"), False),
        (OSError(errno.ENOENT, "no such file"), False),
    ],
)
def test_error_of_a_failed_allocation_is_told_from_others(error: Exception, *, is_memory: bool) -> None:
    assert is_out_of_memory(error) is is_memory


def test_a_last_line_is_short_and_printable() -> None:
    assert last_line("first\n" + "x\0y" * 1000 + "\n \n") == ("x y" * 100) + "…"
    assert last_line(" \n") == ""
