"""A report that keeps what would be printed."""

from typing import Any

from benchmarks.reporting.report import Report


class Tables(Report):
    """The rows of its tables."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, ...]] = []

    def add_table(self, header: Any, rows: Any) -> None:
        self.rows += rows

    def add(self, *lines: str) -> None:
        """Text."""
