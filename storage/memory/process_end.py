"""Describes how a child process ended: its exit code or signal by name, and what that usually means."""

import errno
import re
import signal

from windlass.amounts import GIB
from windlass.storage.memory.capacity import memory_available_nbytes

_CRASHES = frozenset(
    (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP)
)
# The last line that a process prints when an allocation fails: Python's exceptions, C++'s, the C library's error, and
# that of OpenBLAS.
_OUT_OF_MEMORY = re.compile(
    r"^[\w.]*MemoryError\b|std::bad_alloc|[Cc]an(not|'t) allocate memory|Memory allocation (still )?failed"
)
_MOST_CHARS = 300  # characters of a process's last line


def describe_process_end(exit_code: int, *, after_s: float | None = None, limit_nbytes: int | None = None) -> str:
    """Describes how a process ended, as the predicate of a sentence whose subject is the process.

    `exit_code`: as in `subprocess`, where signals are negative. `after_s`: the process's run time. `limit_nbytes`: the
    limit of its memory.
    """
    after = "" if after_s is None else f" after {after_s:.0f} s"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}{after}"
    name = _name(-exit_code)
    if -exit_code == signal.SIGKILL:
        limit = "" if limit_nbytes is None else f"; its limit was {limit_nbytes / GIB:.1f} GiB"
        free = f"{memory_available_nbytes() / GIB:.1f} GiB are free without it{limit}"
        return f"was killed by {name}{after}, most likely because the machine ran out of memory ({free})"
    if -exit_code in _CRASHES:
        limit = "" if limit_nbytes is None else f" (its limit was {limit_nbytes / GIB:.1f} GiB)"
        return f"crashed with {name}{after}: a defect of a library, or too little memory{limit}"
    return f"was ended by {name}{after}"


def explain_process_end(exit_code: int, output: str) -> str:
    """Explains why a process ended: by its last line of output if it exited with an error, else by its signal."""
    line = last_line(output)
    if exit_code > 0 and line:
        return line
    return f"its process {describe_process_end(exit_code)}" + (f"; last output line: {line}" if line else "")


def last_line(output: str) -> str:
    """Returns the last line that a process printed, shortened; "" if it printed nothing."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    printable = "".join(char if char.isprintable() else " " for char in lines[-1]) if lines else ""
    return printable if len(printable) <= _MOST_CHARS else f"{printable[:_MOST_CHARS]}…"


def reports_out_of_memory(line: str) -> bool:
    """Checks whether a process's last line says that an allocation failed."""
    return _OUT_OF_MEMORY.search(line) is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Checks whether an exception says that an allocation failed, whatever its type. Torch's are RuntimeErrors."""
    is_of_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return is_of_system or reports_out_of_memory(f"{type(error).__name__}: {error}")


def _name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"
