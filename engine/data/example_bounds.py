"""Limits of the time, memory and disk space that the preparation of training data may use.

A chat template is a program of the model's author, and a line may have any length. Without limits a single line could
take hours and all memory. With them the user gets an error that names the line.
"""

import resource
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

from windlass.amounts import bytes_text

# CPU seconds of all threads for all renderings of one line of the file.
MAX_RENDER_CPU_S = 60.0
# Characters of one rendered example. The largest sequence length is 2**20 tokens, and a tokenizer needs about 300 bytes
# of memory for each character.
MAX_NUM_CHARS = 8 * 2**20

# Limit of a file's tokens on the disk: this multiple of the file's bytes, or the bytes below if these are more.
MAX_GROWTH = 64
ALWAYS_ALLOWED_NBYTES = 2**30

_Item = TypeVar("_Item")


class RenderTimeError(BaseException):
    """The rendering of a line exceeded its CPU time.

    It is no `Exception`, because it is raised inside a chat template, and handlers of the template's own errors must
    not catch it.
    """


def within_cpu_time(items: Iterator[_Item], limit_s: float) -> Iterator[_Item]:
    """Yields an iterator's items. Raises RenderTimeError when the iterator has used `limit_s` seconds of CPU time.

    The consumer's own time does not count. Call it in the main thread only, because signals are handled there. A call
    into C is interrupted only when it returns.
    """
    left_s = limit_s
    while True:
        with _CpuTimer(left_s) as timer:
            try:
                item = next(items)
            except StopIteration:
                return
        left_s -= timer.spent_s
        if left_s <= 0:  # a timer of 0 seconds would never fire
            raise RenderTimeError
        yield item


def memory_limit() -> str:
    """Returns this process's memory limit as text in brackets, an empty string without a limit."""
    limit_nbytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return "" if limit_nbytes == resource.RLIM_INFINITY else f" ({bytes_text(limit_nbytes)})"


class _CpuTimer:
    """Raises RenderTimeError inside its block when the process has used `limit_s` seconds of CPU time in it."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        self.spent_s = 0.0

    def __enter__(self) -> "_CpuTimer":
        self._before = signal.signal(signal.SIGPROF, _raise)
        self._began_s = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, self._limit_s)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        self.spent_s = time.process_time() - self._began_s
        signal.signal(signal.SIGPROF, self._before)


def _raise(_signum: int, _frame: FrameType | None) -> None:
    raise RenderTimeError
