"""A page of text and tables that does not depend on the machine."""

import argparse
import json
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.reporting.report import rounded, table

DOCS = Path(__file__).parents[2] / "docs"

_WIDTH = 120


class Page:
    """A Markdown document that is built step by step."""

    def __init__(self, title: str) -> None:
        self._lines = [f"# {title}"]

    def add(self, *paragraphs: str) -> None:
        """Adds headings and paragraphs."""
        for paragraph in paragraphs:
            self._lines += ["", *textwrap.wrap(paragraph, _WIDTH, break_long_words=False, break_on_hyphens=False)]

    def add_table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Adds a table."""
        self._lines += ["", *table(header, rows)]

    def add_command(self, command: str) -> None:
        """Adds a command line."""
        self._lines += ["", "```console", f"$ {command}", "```"]

    @property
    def text(self) -> str:
        """The whole document."""
        return "\n".join(self._lines) + "\n"


def compared(published: float, computed: float, digits: int = 2) -> tuple[str, str, str]:
    """Returns table cells: a published figure, a computed one, and their ratio."""
    return f"{published:g}", f"{computed:.{digits}f}", f"{computed / published:.2f}"


def write_page(
    name: str, help_text: str | None, page: Callable[[bool], tuple[str, dict[str, float]]], *, quick_help: str
) -> None:
    """Implements `python -m benchmarks.NAME [--quick]`: computes a page, prints it, and writes it to docs.

    The last line has the figures. `page` gets true for the quick form, which writes no file; it returns text and
    figures.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=help_text)
    parser.add_argument("--quick", action="store_true", help=f"{quick_help}; writes nothing")
    options = parser.parse_args()
    text, figures = page(options.quick)
    print(text)
    if not options.quick:
        (DOCS / f"{name}.md").write_text(text)
    print(json.dumps(rounded(figures)))
