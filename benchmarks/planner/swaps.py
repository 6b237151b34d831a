"""Checks whether the planner swaps the best amount of activations, by jobs that swap more and less.

All jobs have the same memory and are planned in the same way. In each of the other jobs, every layer must swap the
outputs of the same number of operators, by their benefit. The number goes from none to all. The jobs run in turns, so
that changes of the machine's pace affect all of them.

Source of the sweep: Ratel, figure 9.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.planner.case import MIB, Case, Predicted, only, predict, question_of
from benchmarks.planner.run import run_timed
from benchmarks.reporting.report import Report
from windlass.planner.hardware import Hardware
from windlass.planner.question import Profiles
from windlass.planner.solver import DoesNotFitError

_NUM_TURNS = 3  # runs of each job, of which the median counts
_NUM_TIMED_STEPS = 6
# Numbers of operators whose outputs are swapped. None: those of all operators, without recomputation.
_NUMBERS: tuple[int | None, ...] = (0, 4, 8, None)
_CHOSEN = "chosen"
SWAPS = tuple(
    Case(
        title=f"batch of {batch_size}",
        hidden=512,
        num_layers=8,
        batch_size=batch_size,
        sequence_length=512,
        device_mib=device_mib,
    )
    for batch_size, device_mib in ((1, 130), (2, 190), (4, 310))
)
QUICK_SWAPS = (Case(title="small", hidden=128, num_layers=4, batch_size=2, sequence_length=64, device_mib=20),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """One job of a sweep."""

    case: Case
    title: str
    predicted: Predicted
    step_s: float  # measured: the median of the turns


def sweep(cases: Iterable[Case], machine: Hardware, directory: Path) -> list[Swap]:
    """Runs the jobs of each case that fit, the planner's choice first."""
    swaps = []
    for case in cases:
        planned: list[tuple[str, Path, Predicted]] = []
        question = question_of(case, machine)
        profiles = Profiles(question)
        for title, ways in ((_CHOSEN, question.ways), *((_title(number), only(number)) for number in _NUMBERS)):
            folder = directory / f"{case.title} {title}"
            case.workload(num_timed_steps=_NUM_TIMED_STEPS).write(folder)
            try:
                predicted, _ = predict(case, replace(question, ways=ways), profiles, folder, directory / "kernels")
            except DoesNotFitError:
                continue
            planned.append((title, folder, predicted))
        turns = [[run_timed(folder).step_s for _, folder, _ in planned] for _ in range(_NUM_TURNS)]
        for (title, _, predicted), taken in zip(planned, zip(*turns, strict=True), strict=True):
            swaps.append(Swap(case=case, title=title, predicted=predicted, step_s=statistics.median(taken)))
    return swaps


def add_swaps(report: Report, swaps: Sequence[Swap]) -> dict[str, float]:
    """Adds the table of all jobs. Returns the planner's largest step time relative to the best one of its sweep."""
    report.add(
        "", "Activations that are swapped: the planner's choice, and the same number of operators in all layers."
    )
    over = {}
    for case in dict.fromkeys(swap.case for swap in swaps):
        chosen, *others = (swap for swap in swaps if swap.case == case)
        assert chosen.title == _CHOSEN
        over[case.title] = chosen.step_s / min(swap.step_s for swap in others)
    rows = [
        (
            swap.case.title,
            swap.title,
            f"{swap.predicted.swapped_nbytes / MIB:.0f}",
            f"{swap.predicted.step_s:.3f}",
            f"{swap.step_s:.3f}",
        )
        for swap in swaps
    ]
    report.add_table(("job", "swapped", "room for it, MiB", "predicted, s", "measured, s"), rows)
    return {"choice_over_best_max": max(over.values())}


def _title(number: int | None) -> str:
    return "everything" if number is None else f"{number} operators"
