"""The page of what windlass can train: the committed page equals the computed one."""

import pytest

from benchmarks.reach import benchmark as reach
from benchmarks.reporting.page import DOCS


@pytest.mark.long
def test_the_page_in_docs_is_up_to_date() -> None:
    """Except for the parts that take minutes."""
    text, figures = reach.page(True)
    committed = (DOCS / "reach.md").read_text().splitlines()
    assert [line for line in text.splitlines() if line not in committed] == [], "run python -m benchmarks.reach"
    steps = [seconds for name, seconds in figures.items() if name.startswith("step_s_")]
    assert len(steps) > 1
    assert steps == sorted(steps, reverse=True)  # more SSDs are never slower


def test_the_machine_is_the_published_one_with_less_of_something() -> None:
    small = reach.machine(ram_gib=32, num_ssds=2)
    assert (small.host.memory_gib, small.ssds.count, small.ssds.combined_gb_per_s) == (32, 2, 32)
    assert small.gpus.memory_gib == 24
