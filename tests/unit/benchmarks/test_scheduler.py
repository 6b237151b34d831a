"""What `benchmarks.scheduler` compares, and what it makes of its measurements."""

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest

from benchmarks.scheduler import (
    Bottleneck,
    Case,
    Demand,
    Reference,
    Result,
    bottlenecks,
    cases,
    compute_s_of,
    contender_of,
    depth_cases,
    noted_bound_s_of,
    ratios_of,
    timed_metrics,
    workload_of,
)
from benchmarks.windlass_runner import ordering_of, throttle_of
from windlass.actors.journal import METRICS, Journal
from windlass.actors.policy.ordering import Ordering, QueueOrder

OPTIMIZER = Bottleneck(resource="optimizer", over_compute=2.0)
SSD = Bottleneck(resource="ssd", over_compute=1.5)
REFERENCE = Reference(compute_s=2.0, ssd_nbytes=3000, num_params=100)


def options_of(arguments: tuple[str, ...], name: str) -> list[str]:
    return [value for flag, value in pairwise(arguments) if flag == name]


@pytest.mark.parametrize("quick", [False, True])
def test_every_bottleneck_is_met_in_every_order(quick: bool) -> None:
    found = [case for case in cases(quick=quick) if case.max_updating is None]
    for bottleneck, clips, overlaps, queues in product(
        bottlenecks(quick=quick), (False, True), (False, True), QueueOrder
    ):
        case = Case(bottleneck=bottleneck, clips=clips, queues=queues, overlaps_steps=overlaps)
        assert found.count(case) == 1
    assert len({case.name for case in cases(quick=quick)}) == len(list(cases(quick=quick)))
    assert workload_of(quick=quick).shape.num_layers >= 24


def test_rates_make_a_resource_as_slow_as_it_is_to_be() -> None:
    assert REFERENCE.rate(OPTIMIZER) == 100 / 4.0
    assert REFERENCE.rate(SSD) == 3000 / 3.0


def test_what_a_step_asks_for_follows_from_counts_and_rates() -> None:
    optimizer = REFERENCE.demand(OPTIMIZER, compute_s=2.5, ssd_nbytes=2900)
    assert optimizer == Demand(compute_s=2.5, optimizer_s=4.0, ssd_s=0.0, update_io_s=0.0)
    ssd = REFERENCE.demand(SSD, compute_s=2.5, ssd_nbytes=2900)
    assert ssd == Demand(compute_s=2.5, optimizer_s=0.0, ssd_s=2.9, update_io_s=2.6)
    assert (optimizer.busiest_s, ssd.busiest_s) == (4.0, 2.9)


@pytest.mark.parametrize(
    ("demand", "clips", "bound_s"),
    [
        # The updates, and one block's forward and backward pass.
        (Demand(compute_s=4.0, optimizer_s=6.0, ssd_s=0.0, update_io_s=0.0), False, 6.2),
        # With clipping the backward pass comes before.
        (Demand(compute_s=4.0, optimizer_s=6.0, ssd_s=0.0, update_io_s=0.0), True, 9.2),
        (Demand(compute_s=4.0, optimizer_s=0.0, ssd_s=3.0, update_io_s=2.6), True, 5.8),
        # Nothing is shorter than what the busiest resource does.
        (Demand(compute_s=4.0, optimizer_s=1.0, ssd_s=0.0, update_io_s=0.0), False, 4.0),
        (Demand(compute_s=4.0, optimizer_s=0.0, ssd_s=9.0, update_io_s=2.0), True, 9.0),
    ],
)
def test_the_bound_is_the_longest_chain(demand: Demand, clips: bool, bound_s: float) -> None:
    assert demand.bound_s(clips=clips, num_blocks=20) == pytest.approx(bound_s)


def test_a_case_is_told_to_windlass() -> None:
    case = Case(bottleneck=OPTIMIZER, clips=True, queues=QueueOrder.FIFO, overlaps_steps=False, max_updating=3)
    arguments = contender_of(Path("/folder"), case, REFERENCE).arguments
    expected = Ordering(queues=QueueOrder.FIFO, overlaps_steps=False, max_updating=3)
    assert ordering_of(options_of(arguments, "--order")) == expected
    assert throttle_of(options_of(arguments, "--throttle")).optimizer_params_per_s == 25.0
    assert options_of(arguments, "--change") == ["clip_norm=1.0"]
    slow_ssd = contender_of(Path("/folder"), replace(case, bottleneck=SSD, clips=False), REFERENCE).arguments
    assert throttle_of(options_of(slow_ssd, "--throttle")).ssd_bytes_per_s == 1000.0
    assert options_of(slow_ssd, "--change") == []
    assert options_of(contender_of(Path("/folder"), None, None).arguments, "--throttle") == []


def test_the_journal_tells_of_the_timed_steps_and_may_know_their_bound(tmp_path: Path) -> None:
    workload = workload_of(quick=True)
    journal = Journal(tmp_path / "journal.jsonl", attempt=1)
    for step in range(1, workload.num_steps + 1):
        journal.append(METRICS, "", step=step, compute_s=2.0 * step)
    journal.append(METRICS, "", step=workload.num_steps, valid_loss=1.0)
    journal.close()
    metrics = timed_metrics(workload, tmp_path / "journal.jsonl")
    assert [data["step"] for data in metrics] == [2, 3]
    assert compute_s_of(metrics) == 5.0
    assert noted_bound_s_of(metrics) is None
    told = [{"timeline": {"dependency_bound_s": each}} for each in (3.0, None, 4.0)]
    assert noted_bound_s_of(told) == 3.5


def result(*step_s: float) -> Result:
    demand = Demand(compute_s=4.0, optimizer_s=3.0, ssd_s=0.0, update_io_s=0.0)
    return Result(step_s=step_s, demand=demand, noted_bound_s=None)


def test_ratios_are_of_means_and_worst_of_all() -> None:
    found = {}
    for case in cases(quick=False):
        found[case] = result(4.0, 6.0)
        if case.queues is QueueOrder.FIFO and case.overlaps_steps:
            found[case] = result(5.5, 6.5) if not case.clips else result(4.5)
        elif not case.overlaps_steps:
            found[case] = result(7.5)
    found[depth_cases()[0]] = result(10.0)
    ratios = ratios_of(found, quick=False, num_blocks=20)
    one = ratios["unclipped"]["optimizer-1"]
    assert one["fifo_over_priority"] == 1.2
    assert one["alone_over_overlapped"] == 1.5
    assert one["overlap_efficiency"] == 4.0 / 5.0
    assert one["step_over_bound"] == pytest.approx(5.0 / 4.0)
    assert ratios["clipped"]["ssd-1.5"]["step_over_bound"] == pytest.approx(5.0 / 6.2)
    assert ratios["gain_where_optimizer_binds"] == pytest.approx(1.2)
    assert ratios["least_gain"] == 0.9
    assert ratios["depth"] == {"1": 2.0, "4": 1.0, "16": 1.0}
