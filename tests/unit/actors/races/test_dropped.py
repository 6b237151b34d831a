"""Whatever orders a device's work is left out in turn. The checker reports it by name."""

from pathlib import Path

import pytest

from tests.support.races.scenarios import reports_without
from tests.support.races.sites import HOST_WAITS, Site, functions, handed_on, sites
from tests.support.races.table import CAUGHT_BY, NOT_OF_THE_DEVICE

pytestmark = pytest.mark.usefixtures("one_thread")


def cases() -> list[object]:
    """All calls of the table. Those that need a job or a model in training take longer."""
    found = []
    for site in sites():
        scenario = CAUGHT_BY.get(site.path, {}).get(site.call)
        if scenario is not None:
            is_long = not scenario.startswith("part:")
            found.append(pytest.param(site, scenario, id=site.name, marks=pytest.mark.long if is_long else ()))
    return found


def test_every_call_has_its_place_in_the_tables() -> None:
    tables = (CAUGHT_BY, NOT_OF_THE_DEVICE)
    listed = [f"{path}: {call}" for table in tables for path, calls in table.items() for call in calls]
    assert sorted(listed) == sorted(site.name for site in sites())


def test_functions_that_may_wait_for_the_device_exist() -> None:
    assert set(HOST_WAITS) <= functions()


def test_a_wait_is_handed_on_only_by_streams_of_a_cpu() -> None:
    """The scan finds calls by the name of the method, so methods must not be called by other names."""
    assert handed_on() == ["engine/device/streams.py: event.wait"]


@pytest.mark.parametrize(("site", "scenario"), cases())
def test_a_call_that_is_left_out_is_reported_by_name(site: Site, scenario: str, tmp_path: Path) -> None:
    assert reports_without(site, scenario, tmp_path)
