"""The documentation names only files, headings and modules that exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PAGES = sorted([_ROOT / "README.md", *(_ROOT / "docs").rglob("*.md"), *(_ROOT / "helm").rglob("README.md")])
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_PATH = re.compile(r"[\w.-]+(/[\w.-]+)*/?")
_FLOORS = ("service", "planner", "actors", "engine", "storage")
_FOLDERS = (*_FLOORS, "benchmarks", "docs", "helm", "src", "tests", "web")
_MODULE = re.compile(r"python -m ((?:windlass|benchmarks)[\w.]*\w)")
# Its table lists where files were, so most of its paths do not exist.
_MOVES = _ROOT / "docs/decisions/0031-rooms.md"


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    texts = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {text.replace(" ", "-") for text in texts}


def _broken_links(page: Path) -> Iterator[str]:
    for target in _LINK.findall(_FENCE.sub("", page.read_text())):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or (anchor and anchor not in _anchors(linked)):
            yield target


def _missing_paths(page: Path) -> Iterator[str]:
    """Paths in backticks: from the root or from a floor, and named from a folder of the project."""
    for code in _CODE.findall(_FENCE.sub("", page.read_text())):
        if not _PATH.fullmatch(code) or "/" not in code or code.split("/")[0] not in (*_FOLDERS, *_rooms()):
            continue
        if not any((base / code).exists() for base in (_ROOT, *(_ROOT / floor for floor in _FLOORS))):
            yield code


def _rooms() -> set[str]:
    return {room.name for floor in _FLOORS for room in (_ROOT / floor).iterdir() if (room / "__init__.py").exists()}


def _missing_modules(page: Path) -> Iterator[str]:
    for module in _MODULE.findall(page.read_text()):
        path = _ROOT / module.removeprefix("windlass.").replace(".", "/")
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            yield module


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_page_names_only_what_exists(page: Path) -> None:
    assert list(_broken_links(page)) == []
    assert list(_missing_modules(page)) == []
    if page != _MOVES:
        assert list(_missing_paths(page)) == []
