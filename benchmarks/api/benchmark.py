"""Measures the API under load on both databases: request rates, latencies, and the delay of live streams.

`python -m benchmarks.api` stores 100,000 jobs with 10 million events. It runs the real processes of the service, and
sends load from another process. Then it repeats this while a job trains on the same cores. Last, it measures the time
from the submission of a job to its first step.
"""

import argparse
import math
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.api.fill import Filled, fill
from benchmarks.api.first_step import FirstStep, first_step
from benchmarks.api.load import MIX, Order
from benchmarks.api.service import FILE_ID, Running, job_body, make_home, run_load, running
from benchmarks.reporting.report import GIB, Report, ratio
from benchmarks.scratch_folder import scratch_folder
from tests.support.postgresql import find_programs, postgres_server
from windlass.storage.sql import Database
from windlass.storage.sql.repositories import EventRepository

_RATE = 100.0  # requests per second
_NUM_STREAMS = 50
_BEAT_S = 0.2  # interval between events written for the live streams
_EDGE = 20  # events at each end that do not count
_MOST_MS = 50.0  # target for the 99th percentile of latencies
_MOST_FIRST_STEP_S = 15.0  # target for the time to a job's first step
_WARM_RUNS = 3  # jobs measured after a warm-up job


def main() -> None:
    """Fills the database, measures without and with a training job, and prints the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.api", description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000, help="number of stored jobs")
    parser.add_argument("--events", type=int, default=10_000_000, help="number of stored events")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each load")
    parser.add_argument("--databases", nargs="+", default=["sqlite", "postgresql"], choices=("sqlite", "postgresql"))
    parser.add_argument("--quick", action="store_true", help="few jobs and events, and short loads")
    parser.add_argument("--no-training", action="store_true", help="the API alone")
    parser.add_argument("--directory", type=Path, help="where homes and databases go (default: a temporary one)")
    options = parser.parse_args()
    if options.quick:
        options.jobs, options.events, options.seconds = 2000, 100_000, 5.0
    report = Report(
        title="The API under load",
        directory=options.directory or Path(tempfile.gettempdir()),
        configuration={
            "stored": f"{options.jobs} jobs, {options.events} events",
            "load": f"{_RATE:g} requests a second for {options.seconds:g} s, {_NUM_STREAMS} live streams",
            "mix": ", ".join(f"{often} % {kind}" for kind, often in MIX.items()),
            "measured from": "when a request was due, to its answer's end, in the client",
        },
    )
    ratios: dict[str, Any] = {}
    for kind in options.databases:
        with (
            scratch_folder(options.directory) as folder,
            _database(kind, folder) as url,
        ):
            if url is None:
                report.add("", "PostgreSQL is not installed: left out.")
            else:
                ratios |= _measure(report, kind, url, folder, options)
    report.finish(ratios)


@contextmanager
def _database(kind: str, folder: Path) -> Iterator[str | None]:
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'filled.db'}"
    elif (programs := find_programs()) is None:
        yield None
    else:
        with postgres_server(programs, is_durable=True) as server, server.new_database(migrated=True) as url:
            yield url


def _measure(report: Report, kind: str, url: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    filled = fill(url, num_jobs=options.jobs, num_events=options.events, file_id=FILE_ID)
    report.add("", f"## {kind}", "", f"Filled in {filled.seconds:.0f} s; {_nbytes(url) / GIB:.2f} GiB.")
    ratios: dict[str, Any] = {}
    with running(folder / "home", url, trains=False) as service:
        make_home(service.settings)
        _most(report, service, filled, options.seconds / 6)
        ratios |= _at_rate(report, service, filled, options.seconds, f"{kind}, nothing trains")
    if not options.no_training:
        with running(folder / "home", url, trains=True, measures=not options.quick) as service:
            ratios |= _first_steps(report, service, kind)
            training = service.submit()
            service.wait_for_step(training, 3)
            ratios |= _at_rate(report, service, filled, options.seconds, f"{kind}, a job trains")
            steps = service.job(training)["windlass"]["step"]
            report.add(f"The job was at step {steps} in the end.")
            service.end_job(training)
    return ratios


def _nbytes(url: str) -> int:
    if url.startswith("sqlite"):
        return Path(url.removeprefix("sqlite:///")).stat().st_size
    database = Database(url)
    with database.read() as session:
        nbytes = session.connection().exec_driver_sql("SELECT pg_database_size(current_database())").scalar_one()
    database.close()
    return int(nbytes)


def _most(report: Report, service: Running, filled: Filled, seconds: float) -> None:
    """Measures the maximum rate of one kind of request at a time."""
    rows = []
    for kind in ("retrieve", "list", "events", "submit"):
        before_s = service.api_cpu_s()
        measured = run_load(_order(service, filled, seconds, kinds={kind: 1}))
        cpu_s, values = service.api_cpu_s() - before_s, measured["latencies_s"][kind]
        rows.append(
            (
                "submit, and cancel untimed" if kind == "submit" else kind,
                f"{len(values) / measured['seconds']:.0f}",
                *_in_ms(values),
                f"{cpu_s / len(values) * 1000:.2f}",
                str(_refused(measured)),
            )
        )
    report.add("", "As many requests as are answered, 16 at once, nothing trains:")
    report.add_table(("request", "a second", "p50, ms", "p99, ms", "API's CPU ms for each", "not 200"), rows)


def _at_rate(report: Report, service: Running, filled: Filled, seconds: float, title: str) -> dict[str, Any]:
    with _beats(service.settings.database_url, filled.job_ids[0]) as written:
        before_s = service.api_cpu_s()
        measured = run_load(_order(service, filled, seconds, rate=_RATE, num_streams=_NUM_STREAMS))
        cpu_s = service.api_cpu_s() - before_s
    by_kind = measured["latencies_s"]
    everything = [value for values in by_kind.values() for value in values]
    rows = [(kind, str(len(values)), *_in_ms(values)) for kind, values in {**by_kind, "all": everything}.items()]
    arrivals = measured["arrivals"]
    lags = [at_s - committed_s for beat, committed_s in written.items() for at_s in arrivals.get(beat, ())]
    # Leave out events at both ends, which were written while streams opened or closed.
    middle = sorted(written, key=written.__getitem__)[_EDGE:-_EDGE]
    missing = sum(_NUM_STREAMS - len(arrivals.get(message, ())) for message in middle)
    rows.append((f"event on {_NUM_STREAMS} streams, after its commit", str(len(lags)), *_in_ms(lags)))
    report.add("", f"At {_RATE:g} requests a second, {title} ({_refused(measured)} not answered with 200):")
    report.add_table(("request", "number", "p50, ms", "p99, ms"), rows)
    report.add(*(f"Refused: {refusal}" for refusal in measured["refusals"]))
    report.add(f"The API computed {cpu_s / measured['seconds']:.2f} s in a second.")
    return {
        f"{title}: p99 over {_MOST_MS:g} ms": ratio(_percentile(everything, 99), _MOST_MS / 1000),
        **{f"{title}: p99 {kind} ms": _percentile(values, 99) * 1000 for kind, values in by_kind.items()},
        f"{title}: cores of the API": cpu_s / measured["seconds"],
        f"{title}: not 200": _refused(measured),
        f"{title}: p99 lag ms": _percentile(lags, 99) * 1000,
        f"{title}: events that did not arrive": missing,
    }


def _first_steps(report: Report, service: Running, kind: str) -> dict[str, Any]:
    runs: list[FirstStep] = []
    for _ in range(1 + _WARM_RUNS):  # the first one warms up
        job_id, found = first_step(service)
        runs.append(found)
        service.end_job(job_id)
    warm = sorted(runs[1:], key=lambda run: run.after_s)[_WARM_RUNS // 2]
    before_s = [0.0, *(phase.at_s for phase in warm.phases)]
    report.add("", f"From submitting a job to its first step, warm ({kind}; the median of {_WARM_RUNS}):")
    report.add_table(
        ("what had happened", "after, s", "since the line before, s"),
        [
            (phase.what, f"{phase.at_s:.2f}", f"{phase.at_s - before:.2f}")
            for phase, before in zip(warm.phases, before_s, strict=False)
        ],
    )
    computed = ", ".join(f"{who} {seconds:.1f} s" for who, seconds in warm.computed_s.items())
    report.add(f"Processors computed meanwhile: {computed}.")
    report.add(f"The first job after the service came up: {runs[0].after_s:.1f} s.")
    return {f"{kind}: first step warm over {_MOST_FIRST_STEP_S:g} s": warm.after_s / _MOST_FIRST_STEP_S}


def _order(service: Running, filled: Filled, seconds: float, **more: Any) -> Mapping[str, Any]:
    order = Order(
        url=service.settings.base_url,
        seconds=seconds,
        job_ids=list(filled.job_ids),
        job=job_body(),
        key=service.key,
        **more,
    )
    return asdict(order)


@contextmanager
def _beats(url: str, job_id: str) -> Iterator[dict[str, float]]:
    """Writes events in the context, as the dispatcher does. Yields the commit time of each, by message."""
    written: dict[str, float] = {}
    ending = threading.Event()

    def write() -> None:
        database = Database(url)
        while not ending.wait(_BEAT_S):
            message = f"beat {len(written)}"
            with database.write() as session:
                EventRepository(session).add(job_id, attempt=1, message=message)
            written[message] = time.monotonic()
        database.close()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield written
    finally:
        ending.set()
        thread.join()


def _refused(measured: Mapping[str, Any]) -> int:
    return sum(number for status, number in measured["statuses"].items() if status != "200")


def _in_ms(values: Sequence[float]) -> tuple[str, str]:
    return f"{_percentile(values, 50) * 1000:.1f}", f"{_percentile(values, 99) * 1000:.1f}"


def _percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest value that `percent` percent of the values do not exceed."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


if __name__ == "__main__":
    main()
