"""What was found of a model when it was checked, kept for the next jobs that train it: a check takes seconds."""

import contextlib
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass.engine.fingerprint import code_fingerprint, file_stats

_MOST_KEPT = 64


@dataclass(slots=True, kw_only=True)
class CheckCache:
    """One model's, as one kind of job needs it. Whatever of the model's files has changed, it is checked again."""

    folder: Path  # of all that are kept; made when there is one
    model_dir: Path
    layout_file: Path  # what the check writes beside its result
    asked: tuple[str, ...]  # how it is checked
    _looked_for: str | None = field(default=None, init=False)

    def find(self) -> dict[str, Any] | None:
        """The result, and the layout in its place; None if the model has to be checked."""
        self._looked_for = self._fingerprint()
        try:
            kept = json.loads(self._path(self._looked_for).read_text())
            result: dict[str, Any] = kept["result"]
            self.layout_file.parent.mkdir(parents=True, exist_ok=True)
            self.layout_file.write_text(kept["layout"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return result

    def keep(self, result: dict[str, Any]) -> None:
        """Keep what a check found; nothing happens if the model has changed since it was looked for."""
        if self._looked_for is None or self._fingerprint() != self._looked_for:
            return
        with contextlib.suppress(OSError):  # a full disk costs the next job a check, and this one nothing
            self._write(self._path(self._looked_for), result)

    def _write(self, path: Path, result: dict[str, Any]) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"result": result, "layout": self.layout_file.read_text()}))
        partial.replace(path)
        kept = sorted(self.folder.glob("*.json"), key=lambda each: each.stat().st_mtime_ns)
        for old in kept[:-_MOST_KEPT]:
            old.unlink(missing_ok=True)

    def _path(self, fingerprint: str) -> Path:
        return self.folder / f"{fingerprint}.json"

    def _fingerprint(self) -> str:
        files = self.model_dir.iterdir() if self.model_dir.is_dir() else ()
        facts = [str(self.model_dir.resolve()), self.asked, file_stats(files), code_fingerprint()]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
