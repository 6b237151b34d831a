"""What a process frees stays with it, if it wants that."""

import os
import subprocess
import sys

import pytest

# Page faults of one more round of tensors that were all freed before, by a thread as the one that computes steps. It
# takes some rounds until glibc finds all of it again.
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


# 48 MiB: more than what glibc calls small at the most.
@pytest.mark.parametrize("mib_each", [1, 8, 48])
def test_freed_memory_is_taken_again_without_page_faults(mib_each: int) -> None:
    assert num_faults("keep", mib_each) < NUM_PAGES / 20


def test_what_a_person_sets_holds() -> None:
    assert num_faults("keep", MALLOC_MMAP_THRESHOLD_="65536") > NUM_PAGES / 2
