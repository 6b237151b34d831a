"""SSD wear of jobs: the bytes they write, relative to an SSD's rated terabytes written (TBW)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.amounts import bytes_text
from windlass.planner.hardware import Ssds, endurance_tbw_of
from windlass.service.installation import Settings

_DAY_S = 86400
_COUNT_UNITS = ("", "k", "M", "G", "T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnduranceForecast:
    """The use of the SSDs' ratings by a job."""

    steps: float | None  # until a new SSD, the first one, reaches its rating; None: nothing is written
    days: float | None  # of training without a break, for these steps
    share_of_rating: float  # used by the whole job, on the SSD with the largest share; 1.0 is all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdWear:
    """A job's SSD wear as clients see it. Bytes are sums over its SSDs."""

    bytes_per_step: int
    bytes_written: int  # by all attempts so far: `ssd_bytes_written` in the metrics
    bytes_of_whole_job: int  # including the future steps
    forecast: EnduranceForecast | None  # None: the ratings are unknown
    summary: str  # one line for users


def least_rated_tb(settings: Settings, ssds: Ssds, *, is_here: bool) -> float | None:
    """Returns the least terabytes (10^12 bytes) that one SSD of a planned machine is rated for; None: unknown.

    `is_here`: the machine is this one, whose installation may tell.
    """
    if is_here and settings.ssd_endurance_tbw:
        return min(settings.ssd_endurance_tbw)
    return None if is_here else endurance_tbw_of(ssds)


def forecast_endurance(
    *, step_nbytes: Sequence[int], job_nbytes: Sequence[int], rated_nbytes: Sequence[float], step_s: float
) -> EnduranceForecast:
    """Computes the forecast from each SSD's bytes per step, bytes of the whole job, and rated bytes, in the same order.

    Ratings and figures are of bytes that the host writes. A rating already includes the drive's internal write
    amplification. Source: JEDEC JESD218, which defines TBW.
    """
    pairs = zip(step_nbytes, rated_nbytes, strict=True)
    steps = min((rated / nbytes for nbytes, rated in pairs if nbytes > 0), default=None)
    return EnduranceForecast(
        steps=steps,
        days=None if steps is None else steps * step_s / _DAY_S,
        share_of_rating=max(nbytes / rated for nbytes, rated in zip(job_nbytes, rated_nbytes, strict=True)),
    )


def ssd_wear(
    metrics: Mapping[str, Any], *, total_steps: int, is_over: bool, rated_nbytes: Sequence[float]
) -> SsdWear | None:
    """Returns the SSD wear by a job's last metrics, or None if they have no such data.

    `is_over`: no more steps follow. `rated_nbytes`: of each SSD, empty if unknown. A job that ran on another number of
    SSDs gets no forecast, because the SSDs cannot be matched with their ratings.
    """
    step_nbytes = metrics.get("ssd_bytes_written_step_by_ssd")
    written_nbytes = metrics.get("ssd_bytes_written_by_ssd")
    if step_nbytes is None or written_nbytes is None:
        return None
    steps_left = 0 if is_over else total_steps - metrics["step"]
    job_nbytes = [done + steps_left * each for done, each in zip(written_nbytes, step_nbytes, strict=True)]
    forecast = None
    if len(rated_nbytes) == len(step_nbytes):
        forecast = forecast_endurance(
            step_nbytes=step_nbytes, job_nbytes=job_nbytes, rated_nbytes=rated_nbytes, step_s=metrics["step_s"]
        )
    # More than the sum of `written_nbytes` if the job once had another number of SSDs. Older versions counted the total
    # of one attempt.
    total_nbytes = max(metrics.get("ssd_bytes_written", 0), sum(written_nbytes))
    whole_nbytes = total_nbytes + steps_left * sum(step_nbytes)
    # In the units of the dashboard's other amounts, so that users can compare them.
    of_job = f"{bytes_text(whole_nbytes)} by {'this' if is_over else 'the whole'} job"
    return SsdWear(
        bytes_per_step=sum(step_nbytes),
        bytes_written=total_nbytes,
        bytes_of_whole_job=whole_nbytes,
        forecast=forecast,
        summary=f"{bytes_text(sum(step_nbytes))} a step, {of_job}{_describe(forecast)}",
    )


def _describe(forecast: EnduranceForecast | None) -> str:
    if forecast is None:
        return ""
    share = f" ({_percent(forecast.share_of_rating)} of the rating)"
    if forecast.steps is None or forecast.days is None:
        return share
    days = f"{forecast.days:,.{0 if forecast.days >= 9.95 else 1}f}"
    return f"{share}; the rating lasts {_scaled(forecast.steps, _COUNT_UNITS)} steps or {days} days of training"


def _scaled(value: float, units: Sequence[str]) -> str:
    power = 0
    while value >= 999.5 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    digits = 0 if power == 0 or value >= 9.95 else 1
    return f"{value:,.{digits}f} {units[power]}".rstrip()


def _percent(share: float) -> str:
    percent = 100 * share
    if percent < 0.01:
        return "less than 0.01 %"
    return f"{percent:,.0f} %" if percent >= 9.95 else f"{percent:.2g} %"
