"""A page of text and tables that does not depend on the machine."""

import textwrap
from collections.abc import Sequence

from benchmarks.report import table

_WIDTH = 120


class Page:
    """Markdown, kept as it grows."""

    def __init__(self, title: str) -> None:
        self._lines = [f"# {title}"]

    def add(self, *paragraphs: str) -> None:
        """Headings and paragraphs."""
        for paragraph in paragraphs:
            self._lines += ["", *textwrap.wrap(paragraph, _WIDTH, break_long_words=False, break_on_hyphens=False)]

    def add_table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table."""
        self._lines += ["", *table(header, rows)]

    @property
    def text(self) -> str:
        """All of it."""
        return "\n".join(self._lines) + "\n"


def compared(published: float, computed: float, digits: int = 2) -> tuple[str, str, str]:
    """Cells: a published figure, a computed one, and their ratio."""
    return f"{published:g}", f"{computed:.{digits}f}", f"{computed / published:.2f}"
