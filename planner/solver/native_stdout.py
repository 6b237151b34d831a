"""Suppresses output that C libraries print to standard output."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def suppress_native_stdout() -> Iterator[None]:
    """Discards all that this process writes to standard output meanwhile, from any thread.

    Use it for moments only. HiGHS sometimes prints a line even if its output is off (its issue 2783), which would
    corrupt a program's JSON output.
    """
    fflush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    fflush(None)
    try:
        kept = os.dup(1)
    except OSError:  # standard output is closed
        yield
        return
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        fflush(None)  # flush the C library's own buffer
        os.dup2(kept, 1)
        os.close(kept)
