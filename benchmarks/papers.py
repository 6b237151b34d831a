"""What three papers print, beside what the planner's arithmetic gives: `python -m benchmarks.papers [--quick]`

Nothing is measured: the page is the same on every machine. The full form writes it to docs/papers.md.
"""

import argparse
import json
from pathlib import Path

from benchmarks import papers_largest, papers_memory, papers_stages
from benchmarks.page import Page
from benchmarks.report import rounded

DOCUMENT = Path(__file__).parents[1] / "docs" / "papers.md"
_INTRODUCTION = (
    "windlass plans with arithmetic on bytes, operations and rates. Here that arithmetic is put to what three papers "
    "print that windlass follows: Ratel, MemAscend, AutoHete. *Published* is a figure of a paper. *Computed* follows "
    "from shapes and rates alone. *Ratio* is computed over published. Nothing here was run or measured by windlass."
)


def page(*, quick: bool) -> tuple[str, dict[str, float]]:
    """The text, and the figures of the last line."""
    text = Page("What papers print, and what arithmetic gives")
    text.add(_INTRODUCTION, "`python -m benchmarks.papers` writes this page.")
    figures = {"stage_error_max": papers_stages.add_stages(text)}
    papers_stages.add_statements(text)
    papers_stages.add_amounts(text)
    papers_stages.add_systems(text)
    if not quick:
        papers_stages.add_own_profile(text)
    figures["memory_error_max"] = papers_memory.add_peaks(text)
    papers_memory.add_growths(text)
    figures |= papers_largest.add_largest(text)
    papers_largest.add_resident(text)
    return text.text, figures


def main() -> None:
    """Compute, print, write, end with the line of figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="without windlass's own profile; writes nothing")
    options = parser.parse_args()
    text, figures = page(quick=options.quick)
    print(text)
    if not options.quick:
        DOCUMENT.write_text(text)
    print(json.dumps(rounded(figures)))


if __name__ == "__main__":
    main()
