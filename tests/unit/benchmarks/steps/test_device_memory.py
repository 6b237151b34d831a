"""The comparisons of `benchmarks.device_memory`."""

import pytest

from benchmarks.device_memory import CASES, error_of
from windlass.engine.memory_plan.device_moments import DeviceNeed, Moment, MomentNeed, Pass


def need(leaving_nbytes: int) -> DeviceNeed:
    return DeviceNeed(
        params_nbytes=400,
        grads_nbytes=300,
        states_nbytes=200,
        constants_nbytes=10,
        activations=MomentNeed(
            held_nbytes=50, hidden_nbytes=30, returning_nbytes=6, leaving_nbytes=leaving_nbytes, operation_nbytes=4
        ),
        moment=Moment(direction=Pass.HEAD, block=3, microbatch=0),
        settled_activations_nbytes=90,
    )


@pytest.mark.parametrize(
    ("leaving_nbytes", "found_nbytes", "expected"),
    [
        (0, 1100, 0.1),
        (0, 900, -0.1),
        (0, 1000, 0.0),
        # Up to 250 bytes may still be in flight: a peak within that range is as predicted.
        (250, 1100, 0.0),
        (250, 1500, 0.2),
        (250, 900, -0.1),
    ],
)
def test_errors_are_of_the_predicted_peak(leaving_nbytes: int, found_nbytes: int, expected: float) -> None:
    assert error_of(need(leaving_nbytes), found_nbytes) == pytest.approx(expected)


def test_cases_differ() -> None:
    assert len({case.title for case in CASES}) == len({case.run for case in CASES}) == len(CASES) >= 6
