"""What something found out by this code depends on besides what it was asked: versions, and the code itself."""

from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

_PACKAGES = ("torch", "transformers", "safetensors")


def code_fingerprint(*folders: Path) -> list[object]:
    """As JSON has it; other facts where packages, modules of the engine, or modules in `folders` have changed."""
    modules = [path for folder in (Path(__file__).parent, *folders) for path in folder.rglob("*.py")]
    return [[(name, version(name)) for name in _PACKAGES], file_stats(modules)]


def file_stats(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Names, sizes and times of files: other ones where a file has changed."""
    found = []
    for path in sorted(paths):
        status = path.stat()
        found.append((path.name, status.st_size, status.st_mtime_ns))
    return found
