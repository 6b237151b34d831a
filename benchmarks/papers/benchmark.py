"""Compares figures of three papers with the planner's arithmetic: `python -m benchmarks.papers [--quick]`

Nothing is measured, so the page is the same on every machine. The full form writes it to docs/papers.md.
"""

from benchmarks.papers import largest_table as papers_largest
from benchmarks.papers import memory_table as papers_memory
from benchmarks.papers import several_gpus as papers_several
from benchmarks.papers import stages_table as papers_stages
from benchmarks.papers import throughput_table as papers_throughput
from benchmarks.reporting.page import Page, write_page

_INTRODUCTION = (
    "windlass plans with arithmetic on bytes, operations and rates. Here that arithmetic is put to what three papers "
    "print that windlass follows: Ratel, MemAscend, AutoHete. *Published* is a figure of a paper. *Computed* follows "
    "from shapes and rates alone. *Ratio* is computed over published. Nothing here was run or measured by windlass."
)


def page(quick: bool) -> tuple[str, dict[str, float]]:
    """Returns the page's text, and the figures of the last line."""
    text = Page("What papers print, and what arithmetic gives")
    text.add(_INTRODUCTION, "`python -m benchmarks.papers` writes this page.")
    figures = {"stage_error_max": papers_stages.add_stages(text)}
    papers_stages.add_statements(text)
    if not quick:
        figures |= papers_throughput.add_throughputs(text)
    papers_stages.add_amounts(text)
    papers_stages.add_systems(text)
    if not quick:
        papers_stages.add_own_profile(text)
    figures["memory_error_max"] = papers_memory.add_peaks(text)
    papers_memory.add_growths(text)
    figures |= papers_largest.add_largest(text)
    papers_largest.add_resident(text)
    if not quick:
        figures |= papers_several.add_several_gpus(text)
    return text.text, figures


def main() -> None:
    """Writes the page, and prints the figures as the last line."""
    write_page("papers", __doc__, page, quick_help="without windlass's own profile and plans")


if __name__ == "__main__":
    main()
