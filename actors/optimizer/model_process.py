"""Moves a model between its folder and slots in a process of its own, which ends when that is done.

The process (`model_mover.py`) maps the job's arena and answers requests over a socket, one at a time. It dies with its
parent.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from windlass.actors.job import JobContext
from windlass.actors.optimizer.model_io import ModelTask
from windlass.storage.ids import ChunkKey, Span
from windlass.storage.memory import describe_process_end

_MOVER = "model_mover"  # the module that the process runs
_END_DEADLINE_S = 10.0  # seconds that the process has to remove an unfinished export, before it is killed


@dataclass(frozen=True, slots=True)
class Begin:
    """Asks for the begin of a task."""

    context: JobContext
    task: ModelTask


@dataclass(frozen=True, slots=True)
class Move:
    """Asks for the move of one chunk."""

    key: ChunkKey
    slot: Span


@dataclass(frozen=True, slots=True)
class Finish:
    """Asks for the task's completion."""


@dataclass(frozen=True, slots=True)
class Synced:
    """Reports that one more file of an export is on the disk, before the answer to `Finish`."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Reports the error that ended a request."""

    error: Exception
    detail: str  # traceback


class _ProcessTracebackError(Exception):
    """The cause of an error that was raised in the process; its text is the traceback there."""


class ModelProcess:
    """A `ModelWorker` whose work is done in another process. Its niceness and cores are those of the calling thread."""

    def __init__(self, context: JobContext) -> None:
        """Starts the process, which imports its modules at once. The calling thread must outlive it."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.{_MOVER}", str(os.getpid()), str(theirs.fileno())],
                # One heap for all threads, as in the job's other processes (`ActorShell`).
                env={**os.environ, "PYTHONSAFEPATH": "1", "MALLOC_ARENA_MAX": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        self._context = context
        self._has_task = False

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def begin(self, task: ModelTask) -> None:
        """Begins a task. Raises the process's errors, as all methods do, and RuntimeError if it died."""
        self._has_task = True
        self._request(Begin(self._context, task))

    def move(self, key: ChunkKey, slot: Span) -> None:
        """Moves one chunk into its slot, or from there to the folder."""
        self._request(Move(key, slot))

    def finish(self, on_synced: Callable[[], None]) -> None:
        """Completes the task. Calls `on_synced` after each file of an export that is on the disk."""
        self._request(Finish(), on_synced)

    def close(self) -> None:
        """Ends the process. It first removes an unfinished export."""
        self._connection.close()
        if not self._has_task:
            self._process.kill()
        try:
            self._process.wait(_END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _request(self, request: Begin | Move | Finish, on_synced: Callable[[], None] = lambda: None) -> None:
        try:
            self._connection.send(request)
            while isinstance(answer := self._connection.recv(), Synced):
                on_synced()
        except (EOFError, OSError) as error:
            how = describe_process_end(self._process.wait(_END_DEADLINE_S))
            raise RuntimeError(f"the process that loads and exports the model {how}") from error
        if isinstance(answer, Failed):
            raise answer.error from _ProcessTracebackError(f"\n{answer.detail}")
