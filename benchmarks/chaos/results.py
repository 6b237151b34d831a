"""Stores and reports the results of `benchmarks.chaos`. A file of results lets a later call continue."""

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.chaos.plan import KINDS_OF_BOXES, KINDS_OF_SPREAD, ONLY_OF_BOXES, DatabaseKind, Injury, Kind, Run
from benchmarks.chaos.record import Complaint, Wrong
from benchmarks.reporting.report import Report, ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """An injury that was carried out."""

    injury: Injury
    at_s: float  # seconds since the job was submitted
    # Of one job over several boxes, else None:
    step: int | None = None  # last one that it had reported
    num_attempts: int | None = None  # that began before the next injury
    # Seconds to the second new step, because the first may have been on its way, or to the job's end.
    progress_s: float | None = None

    def __str__(self) -> str:
        return f"{self.injury} at {self.at_s:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a run."""

    run: Run
    done: tuple[Done, ...]  # without injuries for which the job ended too early
    took_s: float | None
    lost_s: float | None  # additional seconds, compared with the undisturbed job
    num_attempts: int | None
    load: float  # load average of the machine in the run's last minute
    complaints: tuple[Complaint, ...]
    num_jobs: int = 1

    @property
    def is_right(self) -> bool:
        """True if there are no complaints."""
        return not self.complaints

    def __str__(self) -> str:
        what = "; ".join(map(str, self.done)) or "nothing came in time"
        if self.took_s is None or self.complaints:
            how = f"NOT RIGHT: {'; '.join(map(str, self.complaints))}"
        else:
            how = f"right after {self.took_s:.1f} s, {self.num_attempts} attempts"
        return f"Run {self.run.number}, {self.run.database}: {what}: {how} (load {self.load:.1f})."

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Reverses `asdict`, after a conversion to JSON and back."""
        run = fields["run"]
        return cls(
            **{
                **fields,
                "run": Run(
                    number=run["number"],
                    database=DatabaseKind(run["database"]),
                    injuries=tuple(map(_injury, run["injuries"])),
                ),
                "done": tuple(Done(**{**each, "injury": _injury(each["injury"])}) for each in fields["done"]),
                "complaints": tuple(
                    Complaint(**{**each, "wrong": Wrong(each["wrong"])}) for each in fields["complaints"]
                ),
            }
        )


def _injury(fields: Mapping[str, Any]) -> Injury:
    return Injury(**{**fields, "kind": Kind(fields["kind"])})


class Results:
    """The results of one seed's runs. A file, if given, gets a line of JSON at the end of each run."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lines: list[dict[str, Any]] = []
        if path is not None and path.exists():
            self._lines = [json.loads(line) for line in path.read_text().splitlines()]

    @property
    def said(self) -> list[str]:
        """One line of text for each call's undisturbed jobs, and for each run."""
        return [self._say(line) for line in self._lines]

    @property
    def all(self) -> list[Result]:
        """All results in order. A run that failed may occur several times."""
        return [Result.from_fields(line["result"]) for line in self._lines if "result" in line]

    @property
    def right(self) -> set[int]:
        """The numbers of the runs that succeeded and need no repetition."""
        return {each.run.number for each in self.all if each.is_right}

    def begin(self, facts: Mapping[str, Any], undisturbed_s: Mapping[DatabaseKind, float]) -> None:
        """Stores the facts that all results of a file must share, and the durations of undisturbed jobs.

        Raises ValueError if earlier calls had other facts.
        """
        for line in self._lines:
            if (before := line.get("facts")) is not None and before != dict(facts):
                raise ValueError(f"{self._path} has the results of other runs: {before} instead of {dict(facts)}")
        self._keep({"facts": dict(facts), "undisturbed_s": dict(undisturbed_s)})

    def add(self, result: Result) -> None:
        """Stores a result."""
        self._keep({"result": asdict(result)})

    @staticmethod
    def _say(line: Mapping[str, Any]) -> str:
        if "result" in line:
            return str(Result.from_fields(line["result"]))
        times = (f"{took_s:.1f} s on {database}" for database, took_s in line["undisturbed_s"].items())
        return f"Undisturbed: {', '.join(times)}."

    def _keep(self, line: dict[str, Any]) -> None:
        self._lines.append(line)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def report_results(report: Report, results: Sequence[Result], *, num_boxes: int = 1, is_spread: bool = False) -> None:
    """Adds the table by kind of injury, and the line of ratios. `is_spread`: each job took all boxes."""
    if is_spread:
        _report_each(report, results)
    came: dict[tuple[Kind, DatabaseKind], list[Result]] = defaultdict(list)
    for result in results:
        for each in result.done:
            came[each.injury.kind, result.run.database].append(result)
    databases = [each for each in DatabaseKind if num_boxes == 1 or each is DatabaseKind.SQLITE]
    rows = []
    for kind in Kind if num_boxes == 1 else KINDS_OF_SPREAD if is_spread else KINDS_OF_BOXES:
        met = [result for database in databases for result in came[kind, database]]
        if num_boxes == 1 and kind in ONLY_OF_BOXES:
            continue
        alone = [each.lost_s for each in met if len(each.done) == 1 and each.lost_s is not None]
        times = (str(len(came[kind, database])) for database in databases)
        mean_s = f"{statistics.mean(alone):.1f} ({len(alone)})" if alone else "missing"
        # With several boxes no injury comes alone.
        last = [mean_s] if num_boxes == 1 else _progress_after(kind, results) if is_spread else []
        rows.append((str(kind), *times, str(sum(each.is_right for each in met)), *last))
    times_on = (f"times on {database}" for database in databases)
    report.add_table(
        (
            "injury",
            *times_on,
            "in runs that ended right",
            *(["mean time lost where alone, s (runs)"] if num_boxes == 1 else []),
            *(["attempts that began after it", "s to progress: median", "most"] if is_spread else []),
        ),
        rows,
    )
    num_injuries = sum(len(result.done) for result in results)
    lost_s = sum(result.lost_s for result in results if result.lost_s is not None)
    if num_boxes == 1:
        report.add("Time lost is what a run took longer than the undisturbed one on the same database.")
    report.finish(
        {
            "ended_right": ratio(float(sum(result.is_right for result in results)), float(len(results))),
            "runs": len(results),
            "boxes": num_boxes,
            "injuries": num_injuries,
            **count_wrongs(results),
            "lost_s_per_injury": ratio(lost_s, float(num_injuries)),
        }
    )


def _report_each(report: Report, results: Sequence[Result]) -> None:
    """Adds a table with each injury of jobs over several boxes."""
    rows = []
    for result in results:
        for each in result.done:
            progress = "missing" if each.progress_s is None else f"{each.progress_s:.1f}"
            followed = (str(each.step), str(each.num_attempts), progress, "yes" if result.is_right else "NO")
            rows.append((str(result.run.number), str(each.injury), f"{each.at_s:.1f}", *followed))
    columns = ("run", "injury", "at, s", "step", "attempts that began after it", "s to progress", "ended right")
    report.add_table(columns, rows)
    report.add(
        "Progress is the second new step after an injury, or the job's end. The first one may have been on its way. "
        "Other injuries may have come meanwhile."
    )


def _progress_after(kind: Kind, results: Sequence[Result]) -> list[str]:
    done = [each for result in results for each in result.done if each.injury.kind is kind]
    times_s = [each.progress_s for each in done if each.progress_s is not None]
    attempts = str(sum(each.num_attempts or 0 for each in done))
    if not times_s:
        return [attempts, "missing", "missing"]
    return [attempts, f"{statistics.median(times_s):.1f}", f"{max(times_s):.1f}"]


def count_wrongs(results: Sequence[Result]) -> dict[str, int]:
    """Counts the jobs of all runs with which something is wrong, by what it is. A job may count several times."""
    found = Counter(wrong for result in results for wrong, _ in {(each.wrong, each.job) for each in result.complaints})
    return {wrong.value: found[wrong] for wrong in Wrong if wrong is not Wrong.OTHER}
