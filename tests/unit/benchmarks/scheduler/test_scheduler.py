"""The comparisons of `benchmarks.scheduler`, and its conclusions from the measurements."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.workload import ModelShape, Workload
from benchmarks.reporting.report import Report
from benchmarks.scheduler.benchmark import add_table, bottlenecks, bound_s, cases, ratios_of, workload_of
from benchmarks.scheduler.cases import Bench, Bottleneck, Case, Reference, Result, result_of
from benchmarks.scheduler.places import Place, first_over_spread, throttle_of
from benchmarks.scheduler.throttle import BACKWARD_FLOP, FORWARD_FLOP, HEAD_FLOP, Throttle
from tests.support.actors.specs import make_layout
from tests.support.training import has_direct_io
from windlass.actors.worker_policy.block_queue import QueueOrder

OPTIMIZER = Bottleneck(resource="optimizer", over_compute=2.0)
SSD = Bottleneck(resource="ssd", over_compute=1.5)
# Embedding, two layers, head.
REFERENCE = Reference(compute_s=2.0, ssd_nbytes=3000, layout=make_layout(100, 100, 100, 100), num_tokens=5)
FLOP = 5 * (300 * (FORWARD_FLOP + BACKWARD_FLOP) + 100 * HEAD_FLOP)


@pytest.mark.parametrize("quick", [False, True])
def test_every_bottleneck_is_met_in_every_order(quick: bool) -> None:
    found = list(cases(quick=quick))
    for bottleneck, clips, overlaps, queues in product(
        bottlenecks(quick=quick), (False, True), (False, True), QueueOrder
    ):
        case = Case(bottleneck=bottleneck, clips=clips, queues=queues, overlaps_steps=overlaps)
        assert found.count(case) == 1
    assert len(found) == len(bottlenecks(quick=quick)) * 8
    assert workload_of(quick=quick).shape.num_layers >= 24


def test_rates_make_a_resource_as_slow_as_it_is_to_be() -> None:
    assert REFERENCE.throttle(OPTIMIZER) == Throttle(compute_flop_per_s=FLOP / 2.0, optimizer_params_per_s=400 / 4.0)
    assert REFERENCE.throttle(SSD) == Throttle(compute_flop_per_s=FLOP / 2.0, ssd_bytes_per_s=3000 / 3.0)


def test_the_chain_is_of_all_updates_the_head_and_with_clipping_the_backward_pass() -> None:
    head_s = 2.0 * 5 * 100 * HEAD_FLOP / FLOP
    backward_s = 2.0 * 5 * 300 * BACKWARD_FLOP / FLOP
    assert REFERENCE.chain_s(OPTIMIZER, clips=False) == pytest.approx(4.0 + head_s)
    assert REFERENCE.chain_s(OPTIMIZER, clips=True) == pytest.approx(4.0 + head_s + backward_s)
    # 26 bytes for each of 400 parameters, at 1000 bytes a second.
    assert REFERENCE.chain_s(SSD, clips=False) == pytest.approx(10.4 + head_s)


def result(*step_s: float, busy_s: float = 4.0, cycle_s: float = 4.0) -> Result:
    busy = {"gpu-0/compute": 3.0, "optimizer-0": busy_s, "ssd-0": 1.0}
    return Result(step_s=step_s, busy_s=busy, cycle_s=cycle_s)


def test_the_bound_is_the_longer_of_chain_and_cycle() -> None:
    case = Case(bottleneck=OPTIMIZER, clips=False)
    chain_s = REFERENCE.chain_s(OPTIMIZER, clips=False)
    assert bound_s({case: result(9.0, cycle_s=8.0)}, case, REFERENCE) == 8.0
    assert bound_s({case: result(9.0, cycle_s=1.0)}, case, REFERENCE) == chain_s


def test_a_result_is_of_the_timelines_of_the_timed_steps() -> None:
    def metrics(period_s: float, busy_s: float, bound_s: float) -> dict[str, Any]:
        timeline = {
            "period_s": period_s,
            "busy_s": {"ssd-0": busy_s, "gpu-0/compute": 1.0},
            "moved_bytes": {"ssd-0": 90},
        }
        return {"timeline": {**timeline, "dependency_bound_s": bound_s}}

    steps = [metrics(2.0, 1.5, 3.0), metrics(3.0, 2.5, 1.0), metrics(4.0, 2.0, 1.5)]
    found = result_of(steps, Throttle())
    assert found == Result(step_s=(2.0, 3.0, 4.0), busy_s={"ssd-0": 2.0, "gpu-0/compute": 1.0}, cycle_s=1.5)
    assert (found.mean_step_s, found.busiest, found.efficiency) == (3.0, "ssd-0", 2.0 / 3.0)
    # A throttled SSD counts as busy for its bytes at the declared rate.
    assert result_of(steps, Throttle(ssd_bytes_per_s=40.0)).busy_s == {"ssd-0": 90 / 40.0, "gpu-0/compute": 1.0}


def test_ratios_are_of_means_and_worst_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for case in cases(quick=False):
        # With clipping the bound is too long for an efficiency of 0.92.
        found[case] = result(5.0, 6.0, busy_s=5.0, cycle_s=5.4 if not case.clips else 5.5)
        if case.queues is QueueOrder.FIFO and case.overlaps_steps:
            found[case] = result(6.5, 7.5) if not case.clips else result(5.4)
        elif not case.overlaps_steps:
            found[case] = result(8.0 if case.queues is QueueOrder.FIFO else 8.25)
    slow = Case(bottleneck=Bottleneck(resource="ssd", over_compute=1.0), clips=False)
    found[slow] = replace(found[slow], step_s=(6.25,))
    reference = replace(REFERENCE, compute_s=0.01)  # its chain is shorter than the cycles
    simulated = dict.fromkeys(found, 5.0)
    ratios = ratios_of(found, reference, simulated)
    one = ratios["unclipped"]["optimizer-1"]
    assert one["priority_over_fifo"] == pytest.approx(7.0 / 5.5)
    assert one["overlapped_over_alone"] == 1.5
    assert one["overlap_efficiency"] == pytest.approx(5.0 / 5.5)
    assert one["step_over_bound"] == pytest.approx(5.5 / 5.4)
    assert ratios["priority_over_fifo_best"] == pytest.approx(7.0 / 5.5)
    assert ratios["priority_over_fifo_min"] == pytest.approx(5.4 / 5.5)
    assert ratios["priority_over_fifo_alone_min"] == pytest.approx(8.0 / 8.25)
    assert ratios["overlap_efficiency_min"] == pytest.approx(5.0 / 6.25)
    assert ratios["step_over_bound_max"] == 1.0
    assert ratios["simulator_error_max"] == pytest.approx(1 - 5.0 / 8.25)
    report = Report("", tmp_path, {})
    add_table(report, found, reference, simulated)
    rows = [line for line in report.lines if line.startswith(("| optimizer", "| ssd"))]
    assert len(rows) == len(found)
    capsys.readouterr()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("bench")
    if not has_direct_io(folder):
        pytest.skip("the temporary folder takes no O_DIRECT")
    shape = ModelShape(hidden=32, num_layers=2, vocab=64, intermediate=64, num_heads=2)
    counts = {"batch_size": 1, "sequence_length": 8, "num_warmup_steps": 1, "num_timed_steps": 2, "num_threads": 1}
    return Bench(folder / "jobs", Workload(shape=shape, seed=1, **counts))


@pytest.mark.parametrize("clips", [False, True])
def test_jobs_are_trained_as_the_case_says(bench: Bench, clips: bool) -> None:
    """Compute and optimizer are throttled to a few hundredths of a second a step."""
    reference, free = bench.reference(0.01)
    assert len(free.step_s) == 2
    assert reference.num_tokens == 8
    assert 26 <= reference.ssd_nbytes / reference.layout.numel < 36  # whole pages are transferred
    case = Case(bottleneck=OPTIMIZER, clips=clips)
    found = bench.measure(case, reference)
    assert len(found.step_s) == 2
    # The declared time, regardless of the real one.
    assert 0.0 < found.busy_s["gpu-0/compute"] < 0.01001
    assert 0.0 < found.busy_s["optimizer-0"] < 3 / 2 * 0.02001  # at most the updates of three steps within two steps
    alone = bench.measure(replace(case, overlaps_steps=False), reference)
    assert len(alone.step_s) == 1
    # In the simulator too, no step is shorter than its updates nor, with clipping, than these and the backward pass.
    assert bench.simulate(case, reference) >= 0.02 + (0.005 if clips else 0.0)


def test_places_have_half_of_the_layers_in_host_memory() -> None:
    assert Place(is_spread=False, clips=True).host_blocks(7) == (1, 2, 3, 4)
    assert Place(is_spread=True, clips=True).host_blocks(7) == (1, 3, 5, 7)
    assert throttle_of(REFERENCE).optimizer_params_per_s == 400 / 2.0


def test_states_among_the_others_are_compared_with_the_same_clipping() -> None:
    steps = {(False, True): 6.0, (True, True): 5.0, (False, False): 4.0, (True, False): 2.0}
    measured = {Place(is_spread=among, clips=clips): result(step_s) for (among, clips), step_s in steps.items()}
    assert first_over_spread(measured, clips=True) == 6.0 / 5.0
    assert first_over_spread(measured, clips=False) == 2.0
