"""Memory that a process has freed stays with it if the setting asks for it."""

import os
import subprocess
import sys

import pytest

# Counts page faults of one more round of tensors that were all freed before. A thread like the one that computes steps
# allocates them. glibc needs some rounds until it reuses all of it.
PROGRAM = """
import resource, sys, threading, torch
from windlass.engine.device.malloc import retain_freed_memory
if sys.argv[1] == "keep":
    retain_freed_memory()
mib_each = int(sys.argv[2])
def fill():
    tensors = [torch.ones(mib_each << 18) for _ in range(192 // mib_each)]
    while tensors:
        tensors.pop()
def run():
    for _ in range(8):
        fill()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    fill()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""
NUM_PAGES = 192 * (1 << 20) // os.sysconf("SC_PAGE_SIZE")


def num_faults(how: str, mib_each: int = 1, **environment: str) -> int:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, how, str(mib_each)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(found.stdout)


# 48 MiB is above glibc's largest threshold for small allocations.
@pytest.mark.long
@pytest.mark.parametrize("mib_each", [1, *(pytest.param(mib, marks=pytest.mark.long) for mib in (8, 48))])
def test_freed_memory_is_taken_again_without_page_faults(mib_each: int) -> None:
    assert num_faults("keep", mib_each) < NUM_PAGES / 20


@pytest.mark.long
def test_environment_setting_of_user_wins() -> None:
    assert num_faults("keep", MALLOC_MMAP_THRESHOLD_="65536") > NUM_PAGES / 2
