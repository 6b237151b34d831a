"""The page of papers: the committed page equals the computed one."""

import json

import pytest

from benchmarks.papers import benchmark as papers
from benchmarks.reporting.page import DOCS, Page, compared, write_page


def test_the_page_in_docs_is_up_to_date() -> None:
    """Except for the parts that use torch."""
    text, _ = papers.page(True)
    committed = (DOCS / "papers.md").read_text().splitlines()
    assert [line for line in text.splitlines() if line not in committed] == [], "run python -m benchmarks.papers"


def test_the_last_line_has_the_figures(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["papers", "--quick"])
    write_page("papers", papers.__doc__, papers.page, quick_help="short")
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["memory_error_max"] < 0.05
    assert figures["stage_error_max"] == pytest.approx(0.23, abs=0.01)  # Ratel's backward pass
    assert figures["largest_at_768_gb"] == 412
    assert figures["largest_at_256_gb"] == 175


def test_a_page_is_wrapped_and_its_tables_are_not() -> None:
    page = Page("title")
    page.add("word " * 50)
    page.add_table(("a", "b"), [("x" * 200, "y")])
    lines = page.text.splitlines()
    assert lines[0] == "# title"
    assert max(len(line) for line in lines[2:5]) <= 120
    assert lines[-1].startswith("| " + "x" * 200)


def test_a_comparison_has_both_figures_and_their_ratio() -> None:
    assert compared(4, 3) == ("4", "3.00", "0.75")
    assert compared(0.36, 0.377, 1) == ("0.36", "0.4", "1.05")
