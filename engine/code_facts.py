"""What something found out by this code depends on besides what it was asked: versions, and the code itself."""

from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

_PACKAGES = ("torch", "transformers", "safetensors")


def code_facts() -> list[object]:
    """As JSON has it; other facts where packages or the modules of the engine have changed."""
    return [[(name, version(name)) for name in _PACKAGES], stats_of(Path(__file__).parent.glob("*.py"))]


def stats_of(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Names, sizes and times of files: other ones where a file has changed."""
    found = []
    for path in sorted(paths):
        status = path.stat()
        found.append((path.name, status.st_size, status.st_mtime_ns))
    return found
