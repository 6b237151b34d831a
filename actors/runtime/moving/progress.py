"""The progress of a move: messages in the job's journal now and then, and a file that says how far it is."""

import contextlib
import json
from pathlib import Path

from windlass.amounts import bytes_text
from windlass.storage.files import write_atomically
from windlass.storage.ids import Attempt

_FILE = "moving.json"  # in the job's folder
_TELL_INTERVAL_S = 30.0  # between two messages


class MoveProgress:
    """Says what a move is to move, and then how many bytes of it have come."""

    def __init__(self, job_dir: Path, attempt: Attempt, blocks: str, total_nbytes: int) -> None:
        """`blocks`: what passes between boxes, in words."""
        self._path, self._attempt, self._blocks, self._total_nbytes = job_dir / _FILE, attempt, blocks, total_nbytes
        self._told_at: float | None = None

    def note(self, nbytes: int) -> None:
        """Writes the number of bytes that have come to the file."""
        facts = {"attempt": self._attempt, "come_nbytes": nbytes, "total_nbytes": self._total_nbytes}
        with contextlib.suppress(OSError):  # the disk may be full, and only users miss it
            write_atomically(self._path, json.dumps(facts))

    def text(self, nbytes: int, now: float) -> str | None:
        """Returns the message to tell now, None if it is too early for the next one."""
        if self._told_at is None:
            self._told_at = now
            return f"Moving {self._blocks or 'its states to other SSDs of its boxes'}"
        if now - self._told_at < _TELL_INTERVAL_S:
            return None
        self._told_at = now
        return f"Moved {bytes_text(nbytes)} of {bytes_text(self._total_nbytes)}"


def progress_of_move(job_dir: Path, attempt: Attempt) -> tuple[int, int] | None:
    """Returns the bytes that have come in an attempt, and those of all states; None if it is no move, or begins."""
    try:
        facts = json.loads((job_dir / _FILE).read_text())
        told, come_nbytes, total_nbytes = (int(facts[name]) for name in ("attempt", "come_nbytes", "total_nbytes"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (come_nbytes, total_nbytes) if told == attempt else None
