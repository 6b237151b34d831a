"""Columns of text for the terminal. They are never truncated, because users copy ids from them."""

from collections.abc import Sequence


def print_columns(rows: Sequence[Sequence[object]]) -> None:
    """Prints rows in aligned columns, without trailing spaces, because these would wrap on narrow terminals."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
