"""The comparisons of `benchmarks.scaling`, and its conclusions from the measurements."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers.workload import ModelShape
from benchmarks.scaling import Measured, add_table, measure, ranked, ratios_of, ssd_nbytes_of, workload_of
from benchmarks.scheduler.cases import Bench
from benchmarks.scheduler.throttle import Throttle
from tests.support.training import has_direct_io
from tests.unit.benchmarks.tables import Tables
from windlass.actors.messages import SpanKind, WorkSpan


def measured(num_ranks: int, *step_s: float, ssd_nbytes: float = 2e6, predicted_s: float | None = None) -> Measured:
    return Measured(num_ranks=num_ranks, step_s=step_s, ssd_nbytes=ssd_nbytes, predicted_s=predicted_s)


EQUAL = [
    measured(1, 7.0, 9.0, predicted_s=8.0),
    measured(2, 4.0, predicted_s=4.2),
    measured(4, 2.5, ssd_nbytes=2.5e6, predicted_s=2.25),
]
UNEQUAL = measured(2, 6.4)


def test_ratios_are_of_mean_steps_and_of_the_worst_number() -> None:
    assert ratios_of(EQUAL, UNEQUAL) == {
        "ssd_bytes_growth": 0.25,
        "speedup_over_ranks_min": pytest.approx(8.0 / 2.5 / 4),
        "simulator_error_max": pytest.approx(0.1),
        "speedup_by_ranks": {"2": 2.0, "4": pytest.approx(3.2)},
        "unequal_over_one": 1.25,
    }


def test_the_table_has_a_row_for_each_number_and_for_unequal_gpus() -> None:
    report = Tables()
    add_table(report, EQUAL, UNEQUAL)
    assert report.rows == [
        ("1", "8.00 (7.00 to 9.00)", "1.00", "1.000", "2.00", "8.00", "+0.0"),
        ("2", "4.00 (4.00 to 4.00)", "2.00", "1.000", "2.00", "4.20", "+5.0"),
        ("4", "2.50 (2.50 to 2.50)", "3.20", "0.800", "2.50", "2.25", "-10.0"),
        ("2, one half as fast", "6.40 (6.40 to 6.40)", "1.25", "0.625", "2.00", "", ""),
    ]


def test_bytes_are_those_of_the_inner_steps_on_the_ssds() -> None:
    spans = [
        WorkSpan(resource, SpanKind.READ_PARAMS, step, 0, 0, 0.0, 1.0, 10**step)
        for resource in ("ssd-0", "ssd-1", "gpu-0/h2d")
        for step in range(5)
    ]
    assert ssd_nbytes_of(spans, num_steps=4) == 2 * (10 + 100 + 1000) / 3


@pytest.mark.parametrize("quick", [False, True])
def test_blocks_are_a_small_part_of_a_step_and_micro_batches_can_be_dealt_evenly(quick: bool) -> None:
    workload = workload_of(quick=quick)
    assert workload.shape.num_layers >= 12
    assert all(workload.batch_size % num_ranks == 0 for num_ranks in (1, 2, 3, 4))


@pytest.mark.long
def test_jobs_are_trained_on_as_many_gpus(tmp_path: Path) -> None:
    if not has_direct_io(tmp_path):
        pytest.skip("the temporary folder takes no O_DIRECT")
    shape = ModelShape(hidden=32, num_layers=2, vocab=64, intermediate=64, num_heads=2)
    workload = replace(workload_of(quick=True), shape=shape, sequence_length=8)
    bench = Bench(tmp_path, workload)
    reference, _ = bench.reference(0.2, ranked(bench.spec(), 1))
    throttle = Throttle(compute_flop_per_s=sum(reference.flop) / 0.2)
    one, three = (
        measure(bench, workload, number, throttle, lambda spec: bench.predict(spec, reference, throttle))
        for number in (1, 3)
    )
    assert one.ssd_nbytes == three.ssd_nbytes > 0
    assert len(one.step_s) == len(three.step_s) == 2
    assert one.predicted_s is not None
    assert three.predicted_s is not None
    # Every operation has a third of the micro-batches. A GPU begins its backward pass one block after the one before.
    assert one.predicted_s >= 0.2
    assert 0.2 / 3 <= three.predicted_s < one.predicted_s
    half = replace(throttle, gpu_shares=(1.0, 0.5))
    slower = measure(bench, workload, 2, half, lambda _: None)
    assert slower.predicted_s is None
    assert slower.mean_step_s >= 0.2  # half of the micro-batches at half the rate
