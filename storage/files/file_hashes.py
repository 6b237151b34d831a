"""SHA-256 digests of files, each computed once for a path, a size and a time of change."""

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from windlass.storage.files.result_cache import ResultCache

# Bytes that are read at once. The digest of a block is computed without the GIL.
_BLOCK_NBYTES = 4 * 1024**2
# Folders whose digests are kept.
_MAX_FOLDERS = 1000


class FileChangedError(OSError):
    """A file changed while its bytes were read."""


@dataclass(slots=True)
class FileHashes:
    """Digests of the files of whole folders. Several threads and processes may use one cache.

    `cache_dir`: where the digests are kept, one file for each folder.
    """

    cache_dir: Path
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, root: Path, path: Path, on_progress: Callable[[int], None] = lambda nbytes: None) -> str:
        """Returns the digest of a file below `root` in hex.

        `on_progress` gets the bytes of each block that was read. Raises OSError, and FileChangedError if the file
        changed meanwhile.
        """
        name, key = str(path.relative_to(root)), hashlib.sha256(os.fsencode(root)).hexdigest()
        seen = _facts(path.stat())
        with self._lock:
            known = (self._cache.find(key) or {}).get(name)
        if isinstance(known, list) and known[:-1] == seen:
            on_progress(seen[0])
            return str(known[-1])
        digest = hash_file(path, on_progress)
        if _facts(path.stat()) != seen:
            raise FileChangedError(f"{path} changed while it was read; try again")
        with self._lock:
            self._cache.keep(key, {**(self._cache.find(key) or {}), name: [*seen, digest]})
        return digest

    def forget(self, root: Path) -> None:
        """Forgets the digests of a folder that was removed."""
        key = hashlib.sha256(os.fsencode(root)).hexdigest()
        (self.cache_dir / f"{key}.json").unlink(missing_ok=True)

    @property
    def _cache(self) -> ResultCache:
        return ResultCache(folder=self.cache_dir, max_results=_MAX_FOLDERS)


def hash_file(path: Path, on_progress: Callable[[int], None] = lambda nbytes: None) -> str:
    """Returns the SHA-256 of a file in hex. `on_progress` gets the bytes of each block. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_NBYTES):
            digest.update(block)
            on_progress(len(block))
    return digest.hexdigest()


def _facts(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]
