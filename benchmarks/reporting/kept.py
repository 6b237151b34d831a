"""Keeps the results of a long benchmark's parts, so that it may be interrupted and run again."""

import hashlib
import pickle
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

_Result = TypeVar("_Result")
ROOT = Path(__file__).parents[2]
_NO_CODE = ("README.md", "docs", "tests")


def tree_digest(root: Path = ROOT, *, without: Sequence[str] = ()) -> str:
    """Returns a short name of a repository's files, with the changes that are not committed yet.

    `without`: top-level folders and files that do not count.
    """

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=True)
        return done.stdout.decode(errors="backslashreplace")

    entries = [line for line in git("ls-tree", "HEAD").splitlines() if line.partition("\t")[2] not in without]
    changes = git("diff", "HEAD", "--", ".", *(f":(exclude,top){path}" for path in without))
    return hashlib.sha256("\n".join([*entries, changes]).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class KeptResults:
    """A folder of the results of one form of a benchmark by one version of the code, or nothing: then every part is
    measured.
    """

    folder: Path | None

    @classmethod
    def in_folder(cls, folder: Path | None, *, form: str) -> "KeptResults":
        """Returns the results in a folder that are of this form, such as quick, and of the code as it is now.

        Texts and tests may have changed.
        """
        return cls(None if folder is None else folder / f"{form}-{tree_digest(without=_NO_CODE)}")

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
