"""Output of a C library does not reach the program's standard output."""

import subprocess
import sys

PROGRAM = """
import ctypes, os, sys
from windlass.planner.solver.native_stdout import suppress_native_stdout

print("before")
with suppress_native_stdout():
    ctypes.CDLL(None).puts(b"noise of the C library")
    os.write(1, b"noise past all buffers\\n")
print("after")
try:
    with suppress_native_stdout():
        raise ValueError
except ValueError:
    print("after an error")
"""


def test_suppressed_stdout_shows_only_output_before_and_after() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "before\nafter\nafter an error\n"


def test_a_process_without_a_standard_output_goes_on() -> None:
    program = "import os, sys\nfrom windlass.planner.solver.native_stdout import suppress_native_stdout\nos.close(1)\n"
    program += "with suppress_native_stdout():\n    sys.stderr.write('went on')\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.startswith("went on")
