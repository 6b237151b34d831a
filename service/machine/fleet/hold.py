"""The files by which a box's agent tells its dispatcher to hold: to begin no attempts, and to end those that run.

One has a reason. The other has the time of the head's last answer. So the dispatcher holds by itself once the lease is
over, also if the agent is dead.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from windlass.service.installation import boot_id
from windlass.storage.files import write_atomically, write_durably

_HOLD_FILE = "hold.json"
_ANSWER_FILE = "answered.json"
# Characters of that file, so that a rewrite in place leaves none of the old ones.
_ANSWER_CHARS = 256


@dataclass(frozen=True, slots=True)
class Silence:
    """The time since the head's last answer, and how long the head allows."""

    seconds: float
    lease_s: float

    @property
    def is_too_long(self) -> bool:
        """True if the lease is over."""
        return self.seconds >= self.lease_s

    def reason(self, box: str) -> str:
        """Returns the reason to hold once the lease is over."""
        return f"the head has not answered {box} for longer than its lease of {self.lease_s / 60:g} minutes"


def read_hold(home: Path) -> str | None:
    """Returns the reason why a home's dispatcher begins no attempts; None: it begins them."""
    if (reason := _told_reason(home)) is not None:
        return reason
    silence = read_silence(home)
    return silence.reason("this box") if silence is not None and silence.is_too_long else None


def write_hold(home: Path, reason: str | None) -> None:
    """Tells a home's dispatcher to hold for this reason; None: not to hold. Raises OSError."""
    path = home / _HOLD_FILE
    if reason is None:
        path.unlink(missing_ok=True)
    elif _told_reason(home) != reason:
        write_durably(path, json.dumps({"reason": reason}))


def note_answer(home: Path, lease_s: float) -> None:
    """Notes that the head answers now. Raises OSError."""
    path = home / _ANSWER_FILE
    noted = {"lease_s": lease_s, "boot": boot_id(), "uptime_s": _uptime_s()}
    text = json.dumps(noted).ljust(_ANSWER_CHARS)
    try:
        write_atomically(path, text)
    except OSError:  # a full disk: the file's own block still takes the new time
        with path.open("r+") as file:
            file.write(text)


def read_silence(home: Path) -> Silence | None:
    """Returns the time since the head's last answer; None: it has never answered.

    The wall clock, which may be set, counts only if the machine was started since.
    """
    path = home / _ANSWER_FILE
    try:
        noted = json.loads(path.read_text())
        if noted.get("boot") == boot_id():
            seconds = _uptime_s() - float(noted["uptime_s"])
        else:
            seconds = time.time() - path.stat().st_mtime
        return Silence(max(0.0, seconds), float(noted["lease_s"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def stop_holding(home: Path) -> None:
    """Removes both files, because the home belongs to no head any more."""
    for name in (_HOLD_FILE, _ANSWER_FILE):
        (home / name).unlink(missing_ok=True)


def _uptime_s() -> float:
    """Returns the time since the machine's start, with the time that it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _told_reason(home: Path) -> str | None:
    try:
        reason = json.loads((home / _HOLD_FILE).read_text())["reason"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError):
        return "the file that says why it holds cannot be read"
    return str(reason)
