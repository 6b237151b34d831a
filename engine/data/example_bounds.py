"""Bounds on what one training example may take while it is prepared, and its file on the disk.

A chat template is a program of the model's maker, and a line is as long as its author likes. Without bounds one of them
takes hours and all memory; with them it gets an error that names the line.
"""

import resource
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

from windlass.amounts import bytes_text

# CPU seconds of all threads in which the chat template renders one line of the file, however often it has to.
MAX_RENDER_CPU_S = 60.0
# Characters of one rendered example. The largest sequence length is 2**20 tokens; a tokenizer takes some 300 bytes of
# memory a character.
MAX_NUM_CHARS = 8 * 2**20

# What a file may become on the disk: so many times its own bytes, or this, whichever is more.
MAX_GROWTH = 64
ALWAYS_ALLOWED_NBYTES = 2**30

_Item = TypeVar("_Item")


class RenderTimeError(BaseException):
    """Rendering a line took longer than it may.

    Not an `Exception`: it is raised in the middle of a chat template, whose own errors are caught as such.
    """


def within_cpu_time(items: Iterator[_Item], limit_s: float) -> Iterator[_Item]:
    """Pass on what an iterator gives; RenderTimeError once making it has taken `limit_s` seconds of CPU time in all.

    Time in which the consumer computes does not count. Only for the main thread, as signals are handled there; a call
    into C is interrupted when it returns.
    """
    left_s = limit_s
    while True:
        with _CpuTimer(left_s) as timer:
            try:
                item = next(items)
            except StopIteration:
                return
        left_s -= timer.spent_s
        if left_s <= 0:  # the handler would be called for the next one at once
            raise RenderTimeError
        yield item


def memory_limit() -> str:
    """Tell what memory this process may take, in brackets; nothing where it has no limit."""
    limit_nbytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return "" if limit_nbytes == resource.RLIM_INFINITY else f" ({bytes_text(limit_nbytes)})"


class _CpuTimer:
    """Raises RenderTimeError inside its block after so much CPU time of the process."""

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
