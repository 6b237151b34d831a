"""A folder of results by key, for results that take long to compute and are cheap to lose."""

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.storage.files.durable import write_atomically
from windlass.storage.files.locks import lock


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultCache:
    """Results as JSON objects. Several processes may use one folder."""

    folder: Path  # created with the first result, for its owner only
    max_results: int  # the oldest are deleted

    def find(self, key: str) -> dict[str, Any] | None:
        """Returns the result, or None if there is none or it cannot be read."""
        try:
            found = json.loads(self._path(key).read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def keep(self, key: str, result: dict[str, Any]) -> None:
        """Stores a result. Does nothing if it cannot, as on a full disk: the result is then computed again."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                lock(fd)  # because two may write the same result
                write_atomically(self._path(key), json.dumps(result))
            finally:
                os.close(fd)
            kept = sorted(self.folder.glob("*.json"), key=lambda each: each.stat().st_mtime_ns)
            for old in kept[: -self.max_results]:
                old.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"
