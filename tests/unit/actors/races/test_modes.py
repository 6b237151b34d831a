"""Jobs in all modes, `windlass.offload` and single parts have no races."""

from pathlib import Path

import pytest

from tests.support.races.scenarios import SCENARIOS, reports_of

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT = ("job: active", "offload: on SSDs")


@pytest.mark.short("part: *", "offload: on SSDs")
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(name, marks=() if name in SHORT or name.startswith("part:") else pytest.mark.long)
        for name in SCENARIOS
    ],
)
def test_nothing_is_reported(scenario: str, tmp_path: Path) -> None:
    reports, _ = reports_of(scenario, tmp_path)
    assert not reports, "\n".join(map(str, reports))
