"""Formats benchmark reports: tables of medians and spreads, and one line of ratios at the end."""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.reporting.machine import describe_machine

GIB = 1 << 30


def parse_options(
    name: str,
    description: str | None,
    *,
    quick: str,
    directory: str = "on an SSD",
    keeps: bool = False,
    parts: Sequence[str] = (),
) -> argparse.Namespace:
    """Parses the command line of a benchmark that needs a disk.

    `quick`: description of its quick form. `keeps`: it keeps the results of its parts (`benchmarks/reporting/kept.py`).
    `parts`: those that can be measured alone.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--directory", type=Path, default=Path(), help=f"{directory} (default: here)")
    if keeps:
        parser.add_argument("--keep", type=Path, help="folder for finished parts, which another run takes from there")
    if parts:
        parser.add_argument(
            "--only", nargs="+", choices=parts, default=parts, help="the parts to measure; default: all"
        )
    return parser.parse_args()


@dataclass(slots=True)
class Report:
    """A benchmark's report in Markdown, printed as it grows."""

    title: str
    directory: Path  # on the measured file system
    configuration: Mapping[str, Any]
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.add(f"# {self.title}", "", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC")
        self.add_table(("machine", ""), describe_machine(self.directory))
        self.add_table(("configuration", ""), [(key, str(value)) for key, value in self.configuration.items()])

    def add(self, *lines: str) -> None:
        """Prints lines and stores them."""
        self.lines += lines
        for line in lines:
            print(line, flush=True)

    def add_table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Prints a table and stores it."""
        self.add("", *table(header, rows), "")

    def finish(self, ratios: Mapping[str, Any]) -> None:
        """Prints the last line: all ratios as one JSON object, with null for missing ones."""
        self.add(json.dumps(rounded(ratios)))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table with aligned columns."""
    cells = [list(header), *([cell.replace("|", "/") for cell in row] for row in rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def spread(values: Sequence[float], *, scale: float = 1.0, digits: int = 2) -> str:
    """Returns the median and, in brackets, the smallest and largest value."""
    if not values:
        return "missing"
    low, middle, high = (
        f"{value / scale:.{digits}f}" for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} ({low} to {high})"


def ratio(over: float | None, under: float | None) -> float | None:
    """Returns a quotient, or None if a part of it is missing."""
    return None if over is None or not under else over / under


def rounded(value: Any) -> Any:
    """Returns the same structure with its numbers rounded to four significant digits."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
