"""The cases that `benchmarks.activations` runs, and its conclusions from the results."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.activations.benchmark import WAYS, Budget, Form, add_curve, add_limits, form_of, largest, ratios_of
from benchmarks.activations.run import ActivationResult, ActivationRun
from tests.unit.benchmarks.tables import Tables
from windlass.engine.memory_plan.activation_policy import ActivationChoice

BUDGET = Budget(device_nbytes=100, host_nbytes=50, ssd_nbytes=1000)
RECOMPUTE, HOST, SSD = WAYS
RUN = ActivationRun(hidden=8, num_layers=4, batch_size=1, sequence_length=16, choice=ActivationChoice.SWAP)


def machine(run: ActivationRun) -> ActivationResult:
    """A machine whose inputs take 10 bytes for each example and layer, and the work as much again."""
    nbytes, room = 10 * run.batch_size * run.num_layers, (run.host_nbytes or 0) + run.ssd_nbytes
    if run.choice is ActivationChoice.RECOMPUTE:
        return ActivationResult(step_s=1.0, device_nbytes=10 * run.batch_size + nbytes)
    if nbytes > room:
        return ActivationResult(error="no room for activations")
    return ActivationResult(step_s=1.0, device_nbytes=10 * run.batch_size, out_nbytes=nbytes)


def test_each_way_has_the_room_that_the_budget_gives_it() -> None:
    found = [BUDGET.room(RUN, way) for way in WAYS]
    assert [(run.host_nbytes, run.ssd_nbytes) for run in found] == [(0, 0), (50, 0), (50, 1000)]
    assert [run.choice for run in found] == [way.choice for way in WAYS]


def test_the_largest_size_is_the_last_that_fits() -> None:
    def measure(size: int, way: Any) -> ActivationResult:
        return ActivationResult(device_nbytes=30 * size)

    best, rows = largest(iter((1, 2, 4, 8)), BUDGET, RECOMPUTE, measure)
    assert best == 2
    assert [row[1] for row in rows] == ["1", "2", "4"]
    assert rows[-1][-1] == "does not fit: device"
    assert largest(iter((4, 8)), BUDGET, RECOMPUTE, measure)[0] == 0


def test_ways_are_compared_within_one_budget() -> None:
    report = Tables()
    found = add_limits(report, "batch", RUN, BUDGET, lambda: iter((1, 2, 4, 8, 16)), machine)
    # With inputs on the device, 5 times 10 bytes an example; host memory has space for 50 bytes.
    assert found == {"recompute": 2, "host": 1, "ssd": 8}
    assert [row[-1] for row in report.rows if row[0] == "host"] == ["fits", "does not fit: no room"]


def test_the_curve_goes_from_nothing_to_all() -> None:
    report = Tables()
    runs: list[ActivationRun] = []

    def measure(run: ActivationRun) -> ActivationResult:
        runs.append(run)
        return ActivationResult(step_s=1.0, out_nbytes=sum(each.swaps for each in run.activations()))

    form = replace(form_of(quick=True), curve=RUN, batches=(2, 4))
    add_curve(report, form, measure)
    assert [run.batch_size for run in runs] == [2] * 7 + [4] * 7
    assert [run.num_swapping for run in runs[:7]] == [None, 0, 1, 2, 3, 4, None]
    assert (runs[0].choice, runs[6].choice) == (ActivationChoice.RECOMPUTE, ActivationChoice.KEEP)


def test_a_run_that_swaps_and_moves_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="swaps, and no bytes left the device"):
        add_curve(Tables(), form_of(quick=True), lambda run: ActivationResult(step_s=1.0))


def test_the_full_form_goes_to_128k_tokens() -> None:
    form: Form = form_of(quick=False)
    assert (form.contexts[0], form.contexts[-1]) == (4096, 131072)
    assert len(form.batches) == 3


def test_ratios() -> None:
    batches, contexts = {"recompute": 4, "host": 8, "ssd": 32}, {"recompute": 4096, "host": 8192, "ssd": 131072}
    found = ratios_of(batches, contexts)
    assert (found["max_batch_ssd_over_recompute"], found["context_128k_fits"]) == (8.0, True)
    assert ratios_of({**batches, "recompute": 0}, {**contexts, "ssd": 65536})["context_128k_fits"] is False
