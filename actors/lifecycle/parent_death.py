"""Ends a process together with the one that started it."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


class ParentGoneError(RuntimeError):
    """The parent of this process has already ended."""


def die_with_parent(parent_pid: int) -> None:
    """Makes the kernel kill this process as soon as the thread that started it ends, or its whole parent.

    Raises ParentGoneError if the parent is gone already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        raise ParentGoneError(f"process {parent_pid}, which started this one, has ended")
