"""The comparisons of `benchmarks.ssds`, and its conclusions from the measurements."""

from pathlib import Path

import pytest

from benchmarks.peers.contenders import ContenderRun
from benchmarks.peers.windlass_runner import throttle_of
from benchmarks.ssds import Reference, Setup, contender_of, ratios_of

REFERENCE = Reference(compute_s=1.0, ssd_nbytes=600)


def test_each_server_has_a_folder_and_the_same_rate(tmp_path: Path) -> None:
    arguments = contender_of(Setup(4, 25.0), tmp_path).arguments
    folders = arguments[: arguments.index("--throttle")]
    assert len(set(folders)) == 4
    assert throttle_of([arguments[arguments.index("--throttle") + 1]]).ssd_bytes_per_s == 25.0


@pytest.mark.parametrize(("num_ssds", "limit_s"), [(1, 6.0), (4, 1.5), (8, 1.0)])
def test_the_limit_is_the_servers_until_it_is_the_compute(num_ssds: int, limit_s: float) -> None:
    assert Setup(num_ssds, 100.0).limit_s(REFERENCE, 600) == limit_s


def test_ratios_are_of_mean_steps_and_null_where_nothing_ran() -> None:
    setups = [Setup(1, 100.0), Setup(2, 100.0)]
    runs = {
        "ssds-1": [ContenderRun(step_s=(6.0, 7.0), ssd_nbytes=(200, 400))],
        "ssds-2": [ContenderRun(step_s=(3.0, 3.0), ssd_nbytes=(200, 400)), ContenderRun(step_s=(3.5, 3.5))],
    }
    found = ratios_of(setups, runs, REFERENCE)
    assert found["two_over_one"] == 2.0
    assert found["four_over_one"] is None
    assert found["step_over_limit"] == {"1": 6.5 / 6.0, "2": 3.25 / 3.0}
