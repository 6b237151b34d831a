"""A report that keeps its output instead of printing it."""

from typing import Any

from benchmarks.reporting.report import Report


class Tables(Report):
    """Keeps the rows of its tables."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, ...]] = []

    def add_table(self, header: Any, rows: Any) -> None:
        self.rows += rows

    def add(self, *lines: str) -> None:
        """Ignores text."""
