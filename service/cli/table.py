"""Columns of text for the terminal, never cut: ids are for copying."""

from collections.abc import Sequence


def print_columns(rows: Sequence[Sequence[object]]) -> None:
    """Print rows with their cells below each other, and no spaces at the ends, which would wrap on narrow terminals."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
