"""Titles of panels are beside each other, and within the picture."""

import xml.etree.ElementTree as ET

from benchmarks.reporting.heat_map import Panel, heat_maps

# The width of a character of a panel's title, as browsers draw it.
CHARACTER = 8.0


def test_titles_are_as_wide_as_there_is_room() -> None:
    titles = ["a model of 405 billion parameters, 4 GPUs a box", "another model of 70 billion, one GPU a box"]
    panels = [
        [Panel(title=titles[0], numbers=[[1.0, 2.0]])],
        [Panel(title=each, numbers=[[1.0, 2.0]]) for each in titles],
    ]
    names = {"columns": ["10", "25"], "rows": ["1"], "column_title": "Gbit/s", "row_title": "boxes"}
    root = ET.fromstring(heat_maps(panels, title="Tokens a second", most=9.0, **names))
    lefts: dict[float, list[tuple[float, int]]] = {}
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        if text.text in titles:
            lefts.setdefault(float(text.attrib["y"]), []).append((float(text.attrib["x"]), len(text.text)))
    width = float(root.attrib["viewBox"].split()[2])
    assert sorted(map(len, lefts.values())) == [1, 2]
    for in_line in lefts.values():
        ends = [left + CHARACTER * length for left, length in in_line]
        assert all(end <= start for end, (start, _) in zip(ends, in_line[1:], strict=False))
        assert ends[-1] <= width
