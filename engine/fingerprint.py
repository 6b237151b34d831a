"""Fingerprints of the code and of its libraries, for the keys of cached results."""

from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

_PACKAGES = ("torch", "transformers", "safetensors")


def code_fingerprint(*folders: Path) -> list[object]:
    """Returns values for JSON that change when packages, modules of the engine, or modules in `folders` change."""
    modules = [path for folder in (Path(__file__).parent, *folders) for path in folder.rglob("*.py")]
    return [[(name, version(name)) for name in _PACKAGES], file_stats(modules)]


def file_stats(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Returns the names, sizes in bytes and modification times in ns of files; they differ if a file has changed."""
    stats = []
    for path in sorted(paths):
        status = path.stat()
        stats.append((path.name, status.st_size, status.st_mtime_ns))
    return stats
