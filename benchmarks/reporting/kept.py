"""Keeps the results of a long benchmark's parts, so that it may be interrupted and run again."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class KeptResults:
    """A folder of results, or nothing: then every part is measured."""

    folder: Path | None

    def of(self, part: str, measure: Callable[[], _Result]) -> _Result:
        """Returns the kept result of a part. Measures it, and keeps it, if there is none."""
        if self.folder is None:
            return measure()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{part.replace('/', '-')}.pickle"
        if path.exists():
            kept: Any = pickle.loads(path.read_bytes())
            return kept  # type: ignore[no-any-return]
        result = measure()
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(pickle.dumps(result))
        unfinished.rename(path)
        return result
