"""The mark of a home that was restored from a backup.

Its database may be older than what boxes have done since. So jobs that seem never to have begun wait for the boxes'
calls. The dispatcher then removes the mark.
"""

from pathlib import Path

from windlass.storage.files import write_durably

_MARK = "restored"


def mark_restored(home: Path) -> None:
    """Marks a home as restored. Raises OSError."""
    write_durably(home / _MARK, "")


def was_restored(home: Path) -> bool:
    """Returns whether a home was restored, and its boxes may not all have called since."""
    return (home / _MARK).exists()


def forget_restored(home: Path) -> None:
    """Removes the mark. Raises OSError."""
    (home / _MARK).unlink(missing_ok=True)
