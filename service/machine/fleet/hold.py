"""The file by which a box's agent tells its dispatcher to hold: to begin no attempts, and to end those that run."""

import json
from pathlib import Path

from windlass.storage.files import write_durably

_FILE = "hold.json"


def read_hold(home: Path) -> str | None:
    """Returns the reason why a home's dispatcher begins no attempts; None: it begins them."""
    try:
        reason = json.loads((home / _FILE).read_text())["reason"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError):
        return "the file that says why it holds cannot be read"
    return str(reason)


def write_hold(home: Path, reason: str | None) -> None:
    """Tells a home's dispatcher to hold for this reason; None: not to hold. Raises OSError."""
    path = home / _FILE
    if reason is None:
        path.unlink(missing_ok=True)
    elif read_hold(home) != reason:
        write_durably(path, json.dumps({"reason": reason}))
