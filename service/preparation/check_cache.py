"""A cache of model checks, for the next jobs that train the same model, because a check takes seconds."""

import contextlib
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass.engine.fingerprint import code_fingerprint, file_stats
from windlass.storage.files import ResultCache

_MOST_KEPT = 64


@dataclass(slots=True, kw_only=True)
class CheckCache:
    """The cache entry of one model for one kind of check. Any change of the model's files invalidates it."""

    folder: Path  # holds all cached checks; created with the first one
    model_dir: Path
    layout_file: Path  # written by the check beside its result
    asked: tuple[str, ...]  # the options of the check
    _looked_for: str | None = field(default=None, init=False)

    def find(self) -> dict[str, Any] | None:
        """Returns the cached result and restores the layout file, or returns None if the model must be checked."""
        self._looked_for = self._fingerprint()
        kept = self._results.find(self._looked_for)
        try:
            if kept is None:
                return None
            result: dict[str, Any] = kept["result"]
            self.layout_file.parent.mkdir(parents=True, exist_ok=True)
            self.layout_file.write_text(kept["layout"])
        except (OSError, KeyError, TypeError):
            return None
        return result

    def keep(self, result: dict[str, Any]) -> None:
        """Caches a check's result, unless the model has changed since `find`."""
        if self._looked_for is None or self._fingerprint() != self._looked_for:
            return
        with contextlib.suppress(OSError):
            self._results.keep(self._looked_for, {"result": result, "layout": self.layout_file.read_text()})

    @property
    def _results(self) -> ResultCache:
        return ResultCache(folder=self.folder, max_results=_MOST_KEPT)

    def _fingerprint(self) -> str:
        files = self.model_dir.iterdir() if self.model_dir.is_dir() else ()
        facts = [str(self.model_dir.resolve()), self.asked, file_stats(files), code_fingerprint()]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
