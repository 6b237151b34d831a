"""What a process frees stays with it, if it wants that."""

import os
import subprocess
import sys

# Page faults of one more round of tensors that were all freed before.
PROGRAM = """
import resource, sys, torch
from windlass.engine.kept_memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def fill():
    tensors = [torch.ones(1 << 18) for _ in range(200)]
    return len(tensors)
fill(); fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
NUM_PAGES = 200 * (1 << 20) // os.sysconf("SC_PAGE_SIZE")


def num_faults(how: str, **environment: str) -> int:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(found.stdout)


def test_freed_memory_is_taken_again_without_page_faults() -> None:
    assert num_faults("keep") < NUM_PAGES / 20


def test_what_a_person_sets_holds() -> None:
    assert num_faults("keep", MALLOC_MMAP_THRESHOLD_="65536") > NUM_PAGES / 2
