"""Forecasts of SSD endurance from a job's metrics."""

from typing import Any

import pytest

from windlass.service.jobs.ssd_endurance import EnduranceForecast, SsdWear, forecast_endurance, ssd_wear

GB, TB = 10**9, 10**12
# Two SSDs, the second written half as fast as the first; loading the model wrote 10 and 5 GB.
METRICS: dict[str, Any] = {
    "step": 4,
    "step_s": 2.7,
    "ssd_bytes_written_step_by_ssd": [2 * GB, 1 * GB],
    "ssd_bytes_written_by_ssd": [18 * GB, 9 * GB],
}


def wear_of(**changes: Any) -> SsdWear:
    options: dict[str, Any] = {"total_steps": 100, "is_over": False, "rated_nbytes": (600.0 * TB, 150.0 * TB)}
    wear = ssd_wear(METRICS, **(options | changes))
    assert wear is not None
    return wear


def test_the_ssd_that_reaches_its_rating_first_counts() -> None:
    # The first is written twice as much, but is rated for four times as much.
    forecast = forecast_endurance(
        step_nbytes=(2 * GB, 1 * GB), job_nbytes=(210 * GB, 105 * GB), rated_nbytes=(600.0 * TB, 150.0 * TB), step_s=2.7
    )
    assert forecast == EnduranceForecast(
        steps=150_000, days=pytest.approx(150_000 * 2.7 / 86400), share_of_rating=pytest.approx(105 / 150_000)
    )


def test_an_ssd_that_is_not_written_lasts() -> None:
    rated_nbytes = (1.0 * TB, 1.0 * TB)
    idle = forecast_endurance(step_nbytes=(0, 0), job_nbytes=(5 * GB, 0), rated_nbytes=rated_nbytes, step_s=1.0)
    assert (idle.steps, idle.days, idle.share_of_rating) == (None, None, 0.005)
    half = forecast_endurance(step_nbytes=(0, GB), job_nbytes=(0, GB), rated_nbytes=rated_nbytes, step_s=1.0)
    assert half.steps == 1000


def test_ratings_are_given_for_each_ssd() -> None:
    with pytest.raises(ValueError):
        forecast_endurance(step_nbytes=(1, 1), job_nbytes=(1, 1), rated_nbytes=(1.0,), step_s=1.0)


def test_the_whole_job_is_what_is_written_and_the_steps_to_come() -> None:
    wear = wear_of()
    assert (wear.bytes_per_step, wear.bytes_written, wear.bytes_of_whole_job) == (3 * GB, 27 * GB, (27 + 96 * 3) * GB)
    assert wear.forecast is not None
    assert wear.forecast.share_of_rating == pytest.approx((9 + 96) / 150_000)
    assert wear.summary == (
        "2.79 GiB a step, 293.37 GiB by the whole job (0.07 % of the rating); "
        "the rating lasts 150 k steps or 4.7 days of training"
    )


def test_a_job_that_is_over_has_no_steps_to_come() -> None:
    wear = wear_of(is_over=True)
    assert wear.bytes_of_whole_job == wear.bytes_written == 27 * GB
    assert wear.summary.startswith("2.79 GiB a step, 25.15 GiB by this job (less than 0.01 % of the rating);")


def test_a_job_that_had_another_number_of_ssds_counts_what_it_wrote_on_all_of_them() -> None:
    wear = ssd_wear(METRICS | {"ssd_bytes_written": 40 * GB}, total_steps=100, is_over=False, rated_nbytes=())
    assert wear is not None
    assert (wear.bytes_written, wear.bytes_of_whole_job) == (40 * GB, (40 + 96 * 3) * GB)


@pytest.mark.parametrize("rated_nbytes", [(), (600.0 * TB,), (600.0 * TB,) * 3])
def test_without_the_rating_of_each_there_is_no_forecast(rated_nbytes: tuple[float, ...]) -> None:
    wear = wear_of(rated_nbytes=rated_nbytes)
    assert wear.forecast is None
    assert wear.summary == "2.79 GiB a step, 293.37 GiB by the whole job"


def test_metrics_without_bytes_tell_nothing() -> None:
    evaluation = {"step": 4, "valid_loss": 2.0}
    assert ssd_wear(evaluation, total_steps=100, is_over=False, rated_nbytes=(1.0 * TB, 1.0 * TB)) is None


@pytest.mark.parametrize(
    ("step_nbytes", "rated_nbytes", "expected"),
    [
        (0, 1e15, "0 bytes a step, 4.66 GiB by this job (less than 0.01 % of the rating)"),
        (999, 1e13, "999 bytes a step, 4.66 GiB by this job (0.05 % of the rating); the rating lasts 10 G steps or"),
        (
            9_949_999,
            1e10,
            "9.49 MiB a step, 4.66 GiB by this job (50 % of the rating); the rating lasts 1.0 k steps or",
        ),
        (999_500, 1e9, "0.95 MiB a step, 4.66 GiB by this job (500 % of the rating); the rating lasts 1.0 k steps or"),
        (
            5 * 10**12,
            6e14,
            "4656.61 GiB a step, 4.66 GiB by this job (less than 0.01 % of the rating); the rating lasts 120",
        ),
    ],
)
def test_amounts_are_rounded_for_display(step_nbytes: int, rated_nbytes: float, expected: str) -> None:
    metrics = METRICS | {"ssd_bytes_written_step_by_ssd": [step_nbytes], "ssd_bytes_written_by_ssd": [5 * GB]}
    wear = ssd_wear(metrics, total_steps=4, is_over=True, rated_nbytes=(rated_nbytes,))
    assert wear is not None
    assert wear.summary.startswith(expected)
    assert ("days of training" in wear.summary) == (step_nbytes > 0)
