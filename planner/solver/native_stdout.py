"""Keeps what a library in C prints out of a program's own output."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def suppress_native_stdout() -> Iterator[None]:
    """What this process writes to its standard output meanwhile is lost; for moments only, as that of all threads is.

    For HiGHS, which at times prints a line whatever it is told (its issue 2783), also before a program's JSON.
    """
    fflush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    fflush(None)
    try:
        kept = os.dup(1)
    except OSError:  # there is none
        yield
        return
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        fflush(None)  # the C library has a buffer of its own
        os.dup2(kept, 1)
        os.close(kept)
