"""The cases of the GPU check, its settings, and the file of its results.

This module loads no torch, so that the process that only starts the cases stays small.
"""

import importlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, cast

from benchmarks.peers.contenders import without_paths
from windlass.storage.memory import InsufficientSpaceError

_REASON_LENGTH = 240  # maximum characters of an error in the results


class NotHereError(Exception):
    """Raised if this machine lacks what a case needs. It is no failure."""


class Case(Protocol):
    """One entry of the check. The module of its part, `benchmarks.gpu_check.PART`, has `measure(case, setting)`."""

    @property
    def name(self) -> str:
        """The unique name, as for `--only`."""
        ...

    @property
    def part(self) -> str:
        """The name of its module."""
        ...

    @property
    def expected_s(self) -> float:
        """The seconds that it takes on a machine of usual speed."""
        ...


class Status(StrEnum):
    """The end of a case."""

    DONE = "done"
    FAILED = "failed"
    LEFT_OUT = "left out"  # this machine lacks something, and the reason says what


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of the results file."""

    case: str
    part: str
    status: Status
    reason: str = ""  # why there are no measurements
    took_s: float = 0.0
    predicted: dict[str, Any] = field(default_factory=dict)  # written down before the case was measured
    measured: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ResultsFile:
    """The results so far, one JSON line a case. The last line of a case counts."""

    path: Path

    def add(self, result: Result) -> None:
        """Appends a line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def read(self) -> dict[str, Result]:
        """Returns the results by case. A line that was cut off is left out, because its case was killed."""
        results: dict[str, Result] = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                fields = json.loads(line)
            except ValueError:
                continue
            results[fields["case"]] = Result(**fields | {"status": Status(fields["status"])})
        return results

    def note_prediction(self, case: str, predicted: Mapping[str, Any]) -> None:
        """Appends a prediction to a file of its own, which proves that it is older than the measurement."""
        with self.path.with_suffix(".predicted.jsonl").open("a") as file:
            file.write(json.dumps({"case": case, "predicted": predicted}) + "\n")

    @property
    def trace_path(self) -> Path:
        """The file of the worst case's trace."""
        return self.path.with_suffix(".worst-trace.json.gz")


@dataclass(slots=True, kw_only=True)
class Setting:
    """The circumstances of a case."""

    root: Path  # folder for temporary files, on the SSD to use
    results: ResultsFile
    device: str  # "cuda" or "cpu"
    is_tiny: bool
    plan: Mapping[str, Any] = field(default_factory=dict)  # predictions made elsewhere, by case
    predicted: dict[str, Any] = field(default_factory=dict)

    def predict(self, case: Case, predicted: dict[str, Any]) -> None:
        """Writes a case's prediction down, before the case is measured."""
        self.predicted = predicted
        self.results.note_prediction(case.name, predicted)
        print(f"  predicted: {', '.join(f'{key} {_short(value)}' for key, value in predicted.items())}", flush=True)

    def measured(self, case: str) -> dict[str, Any]:
        """Returns the measurements of an earlier case; {} if there are none."""
        result = self.results.read().get(case)
        return {} if result is None else result.measured


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_case(case: Case, setting: Setting) -> Result:
    """Measures a case in this process and adds its line to the results. An error of the case becomes its result."""
    start_s = time.monotonic()
    setting.predicted = {}
    status, reason, measured = Status.DONE, "", dict[str, Any]()
    try:
        part = importlib.import_module(f"benchmarks.gpu_check.{case.part}")
        measured = cast("dict[str, Any]", part.measure(case, setting))
    except (NotHereError, InsufficientSpaceError) as error:
        status, reason = Status.LEFT_OUT, in_short(error)
    except Exception as error:  # noqa: BLE001 - a case fails alone
        status, reason = Status.FAILED, in_short(error)
    result = Result(
        case=case.name,
        part=case.part,
        status=status,
        reason=reason,
        took_s=time.monotonic() - start_s,
        predicted=setting.predicted,
        measured=measured,
    )
    setting.results.add(result)
    return result


def in_short(error: BaseException) -> str:
    """Describes an error in one line without paths."""
    text = str(error) if isinstance(error, NotHereError) else f"{type(error).__name__}: {error}"
    return without_paths(" ".join(text.split()))[:_REASON_LENGTH]


def named(cases: Iterable[Case], text: str) -> list[Case]:
    """Returns the case of that name, or all whose names have the text."""
    listed = list(cases)
    return [case for case in listed if case.name == text] or [case for case in listed if text in case.name]
