"""A picture of several tables of numbers, each cell shaded by its number: an SVG that needs no library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# Pixels.
_CELL_WIDTH, _CELL_HEIGHT = 44, 22
_LEFT, _TOP, _GAP = 44, 74, 22
_PANEL_LEFT, _PANEL_TOP = 30, 40
# Widths of a character of a panel's title and of the picture's title, which fonts seldom exceed.
_TITLE_CHARACTER, _HEADING_CHARACTER = 8.0, 8.8
_FONT = "font-family='system-ui, sans-serif'"
# RGB of the smallest and of the largest number. Text is white on shades past the middle.
_PALE, _DARK = (233, 241, 250), (8, 48, 107)
_EMPTY = "#f2f2f2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A table: a number for each row and column; None: there is none."""

    title: str
    numbers: Sequence[Sequence[float | None]]


def heat_maps(
    panels: Sequence[Sequence[Panel]],
    *,
    title: str,
    columns: Sequence[str],
    rows: Sequence[str],
    column_title: str,
    row_title: str,
    most: float,
) -> str:
    """Returns an SVG of rows of panels with the same axes, shaded by the logarithm. `most`: shown as "or more"."""
    longest = max(len(each.title) for line in panels for each in line)
    width = math.ceil(max(len(columns) * _CELL_WIDTH, longest * _TITLE_CHARACTER)) + _PANEL_LEFT + _GAP
    height = len(rows) * _CELL_HEIGHT + _PANEL_TOP + _GAP
    known = [number for line in panels for each in line for row in each.numbers for number in row if number]
    low, high = math.log(min(known, default=1)), math.log(max(known, default=2))
    most_width = max(width * max(map(len, panels)), math.ceil(len(title) * _HEADING_CHARACTER) + _GAP)
    whole = (_LEFT + most_width, _TOP + height * len(panels))
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {whole[0]} {whole[1]}' {_FONT} font-size='12' "
        "text-anchor='middle'>",
        f"<title>{escape(title)}</title>",
        "<rect width='100%' height='100%' fill='white'/>",
        _text(_LEFT, 24, title, size=16, anchor="start"),
        _text(_LEFT, 44, f"Across: {column_title}. Down: {row_title}.", anchor="start"),
    ]
    for line, in_line in enumerate(panels):
        for place, panel in enumerate(in_line):
            left, top = _LEFT + place * width + _PANEL_LEFT, _TOP + line * height + _PANEL_TOP
            lines.append(_text(left, top - 24, panel.title, size=13, anchor="start", weight="bold"))
            for x, name in enumerate(columns):
                lines.append(_text(left + (x + 0.5) * _CELL_WIDTH, top - 6, name, color="#555"))
            for y, (name, numbers) in enumerate(zip(rows, panel.numbers, strict=True)):
                base = top + (y + 0.68) * _CELL_HEIGHT
                lines.append(_text(left - 6, base, name, anchor="end", color="#555"))
                for x, number in enumerate(numbers):
                    share = 0.0 if not number or high == low else (math.log(number) - low) / (high - low)
                    fill = _shade(share) if number else _EMPTY
                    shown = "-" if not number else f"{number:g}{'+' if number >= most else ''}"
                    lines.append(
                        f"<rect x='{left + x * _CELL_WIDTH}' y='{top + y * _CELL_HEIGHT}' width='{_CELL_WIDTH - 1}' "
                        f"height='{_CELL_HEIGHT - 1}' fill='{fill}'/>"
                    )
                    color = "white" if share > 0.5 else "black"
                    lines.append(_text(left + (x + 0.5) * _CELL_WIDTH, base, shown, color=color))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _shade(share: float) -> str:
    red, green, blue = (round(pale + share * (dark - pale)) for pale, dark in zip(_PALE, _DARK, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 12,
    anchor: str = "middle",
    color: str = "black",
    weight: str = "normal",
) -> str:
    given = {"font-size": (str(size), "12"), "text-anchor": (anchor, "middle"), "fill": (color, "black")}
    given["font-weight"] = (weight, "normal")
    styles = "".join(f" {name}='{value}'" for name, (value, default) in given.items() if value != default)
    return f"<text x='{x:g}' y='{y:.4g}'{styles}>{escape(words)}</text>"
