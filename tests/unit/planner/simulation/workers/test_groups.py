"""Simulated groups of micro-batches: params are read once per group and direction; sums move between groups.

At the turns, the params of the last operations are still on the device.
"""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.actors.specs import make_layout
from tests.support.planner.simulated import CHUNK, Simulated, job, moved, rates, run
from windlass.actors.messages import SpanKind
from windlass.actors.worker_policy.block_queue import Ordering
from windlass.engine.memory_plan.plan import Placement
from windlass.planner.simulation import simulate as simulate_module
from windlass.storage.ids import BlockIndex

NUM_MICROBATCHES = 4
NUM_BLOCKS = 6
NUMEL = NUM_BLOCKS * 2 * CHUNK


def grouped(group_size: int, **placement: Any) -> dict[str, Any]:
    return {
        "training": {"num_microbatches": NUM_MICROBATCHES},
        "placement": Placement(group_size=group_size, **{"num_cached_params": 0, **placement}),
    }


@pytest.mark.parametrize(("group_size", "num_groups"), [(4, 1), (3, 2), (2, 2), (1, 4)])
def test_bytes_are_those_of_the_groups(group_size: int, num_groups: int) -> None:
    spans = job(**grouped(group_size)).spans()
    for step in range(1, 5):
        # Every block except the head forward and backward. The two buffers still hold the last layer after the head,
        # and the first two blocks between groups. The stored step is the previous one.
        num_loads = (2 * NUM_BLOCKS - 1) * num_groups - num_groups - 2 * (num_groups - 1)
        params = 2 * num_loads * 2 * CHUNK
        assert moved(spans, SpanKind.COPY_PARAMS_IN, step - 1) == params
        assert moved(spans, SpanKind.COPY_PARTIAL_OUT, step) == 4 * NUMEL * (num_groups - 1)
        assert moved(spans, SpanKind.COPY_PARTIAL_IN, step) == 4 * NUMEL * (num_groups - 1)
        assert moved(spans, SpanKind.COPY_GRAD_OUT, step) == 4 * NUMEL


def test_sums_in_half_precision_are_half_as_large() -> None:
    options = grouped(2)
    options["training"]["accumulation_precision"] = "bf16"
    spans = job(**options).spans()
    assert moved(spans, SpanKind.COPY_PARTIAL_OUT, 2) == 2 * NUMEL


def test_sums_of_device_blocks_stay_there() -> None:
    spans = job(**grouped(1, device_blocks=(1, 2), commit_every=100, num_cached_params=None)).spans()
    assert {span.block for span in spans if span.kind is SpanKind.COPY_PARTIAL_OUT} == {0, 3, 4, 5}
    assert moved(spans, SpanKind.COPY_PARTIAL_IN, 2) == 4 * 4 * 2 * CHUNK * 3


def test_the_head_has_a_sum_of_its_own_for_the_embedding_it_shares() -> None:
    layout = make_layout(*[CHUNK] * 4, chunk_numel=CHUNK)
    tied = replace(layout, shared=(*layout.shared[:-1], (BlockIndex(3), BlockIndex(0))))
    spans = job(layout=tied, **grouped(2)).spans()
    assert moved(spans, SpanKind.COPY_PARTIAL_OUT, 2) == moved(spans, SpanKind.COPY_PARTIAL_IN, 2) == 4 * 5 * CHUNK
    assert moved(spans, SpanKind.COPY_GRAD_OUT, 2) == 4 * 4 * CHUNK


@pytest.mark.parametrize(("group_size", "num_operations"), [(4, 11), (2, 22), (1, 44)])
def test_where_all_else_is_fast_a_step_is_the_compute_of_its_groups(group_size: int, num_operations: int) -> None:
    for step in run(**grouped(group_size))[1:]:
        assert step.summary["period_s"] == pytest.approx(num_operations, rel=1e-6)


def test_a_smaller_last_group_takes_its_share() -> None:
    for step in run(**grouped(3))[1:]:
        assert step.summary["period_s"] == pytest.approx(11 + 11 / 3, rel=1e-6)


@pytest.mark.parametrize("rate", ["h2d_bytes", "d2h_bytes"])
def test_where_a_link_is_slow_a_step_is_its_bytes(rate: str) -> None:
    step = run(num_blocks=24, compute_s=1e-4, machine=rates(**{rate: 1e5}), **grouped(1))[-1]
    nbytes = step.summary["moved_bytes"][f"gpu-0/{rate[:3]}"]
    assert step.summary["period_s"] == pytest.approx(nbytes / 1e5, rel=0.05)


def test_sums_are_back_before_the_next_group_adds_to_them() -> None:
    found: Simulated = job(machine=rates(h2d_bytes=5e4, d2h_bytes=5e4), num_steps=2, **grouped(2))
    spans = [span for span in found.spans() if span.step == 2]
    for block in range(NUM_BLOCKS):
        of_block = [span for span in spans if span.block == block]
        kinds = (SpanKind.HEAD if block == NUM_BLOCKS - 1 else SpanKind.BACKWARD,)
        first, second = (span for span in of_block if span.kind in kinds)
        out = [span for span in of_block if span.kind is SpanKind.COPY_PARTIAL_OUT]
        back = [span for span in of_block if span.kind is SpanKind.COPY_PARTIAL_IN]
        (*_, gradient) = (span for span in of_block if span.kind is SpanKind.COPY_GRAD_OUT)
        assert first.end_s <= out[0].start_s
        assert out[-1].end_s <= back[0].start_s
        assert back[-1].end_s <= second.start_s
        assert second.end_s <= gradient.start_s


def test_sums_of_one_operation_at_a_time_are_prefetched() -> None:
    """For any number of known operations: those of the next one wait until one has received its own."""
    spans = job(num_steps=1, ordering=Ordering(max_prefetched=4), **grouped(2)).spans()
    second = {span.block: span for span in spans if span.kind is SpanKind.BACKWARD}  # the later of two
    for block in range(NUM_BLOCKS - 2):
        back = [span for span in spans if span.kind is SpanKind.COPY_PARTIAL_IN and span.block == block]
        assert second[block + 1].start_s - 1e-6 <= back[0].start_s < second[block + 1].end_s


@pytest.mark.parametrize(("lanes", "group_size", "num_sums"), [(2, 2, 1), (2, 1, 3 + 1), (3, 1, 3 + 1), (4, 1, 3)])
def test_groups_that_end_inside_of_lanes_move_their_sums_too(lanes: int, group_size: int, num_sums: int) -> None:
    options = grouped(group_size)
    options["training"]["lanes"] = lanes
    spans = job(**options).spans()
    for step in range(1, 5):
        assert moved(spans, SpanKind.COPY_PARTIAL_OUT, step) == 4 * NUMEL * num_sums
        assert moved(spans, SpanKind.COPY_PARTIAL_IN, step) == 4 * NUMEL * num_sums
        assert moved(spans, SpanKind.COPY_GRAD_OUT, step) == 4 * NUMEL


@pytest.mark.parametrize("group_size", [4, 3, 1])
def test_where_adding_lanes_is_slow_a_step_takes_their_elements_too(group_size: int) -> None:
    options = grouped(group_size) | {"machine": rates(device_added_params=NUMEL / 2)}
    plain = run(**options)[-1].summary["period_s"]
    options["training"]["lanes"] = 3
    assert run(**options)[-1].summary["period_s"] == pytest.approx(plain + 2 * 2, rel=1e-6)


@pytest.mark.parametrize("group_size", [4, 3, 1])
def test_norms_of_lanes_take_their_time_once_a_step(group_size: int) -> None:
    """Those of the head are computed at its end, those of other blocks at the end of their backward pass."""
    plain = job(**grouped(group_size))
    norms = replace(plain, work=replace(plain.work, norms_s=dict.fromkeys(range(NUM_BLOCKS), 0.5)))
    longer = norms.steps()[-1].summary["period_s"] - plain.steps()[-1].summary["period_s"]
    assert longer == pytest.approx(NUM_BLOCKS * 0.5, rel=1e-6)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("group_size", "clip_norm"), [(1, None), (2, 1.0)])
@pytest.mark.parametrize("slow", [{}, {"h2d_bytes": 1e5, "d2h_bytes": 1e5}, {"ssd_read_bytes": (1e5, 1e5)}])
def test_step_of_many_rounds_takes_as_long_as_if_all_were_simulated(
    num_ranks: int, group_size: int, clip_norm: float | None, slow: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the last group is smaller, and the last round has a group for the first rank only."""
    number = 2 * group_size * num_ranks * 4 + 1
    options = {
        "training": {"num_microbatches": number, "batch_size": number, "clip_norm": clip_norm},
        "placement": Placement(group_size=group_size, num_cached_params=0),
        "num_ranks": num_ranks,
    }
    found = job(machine=rates(**slow), **options)
    num_left_out = []
    without_rounds = simulate_module._without_rounds
    monkeypatch.setattr(
        simulate_module, "_without_rounds", lambda *given: num_left_out.append(given[1]) or without_rounds(*given)
    )
    step_s = found.steady_step_s()
    assert num_left_out == [9 - 4]
    monkeypatch.setattr(simulate_module, "_MANY_ROUNDS", 10)
    assert step_s == pytest.approx(found.steady_step_s(), rel=1e-6)
    assert len(num_left_out) == 1


def test_step_whose_rounds_differ_is_simulated_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    number = 8
    found = job(training={"num_microbatches": number, "batch_size": number}, placement=Placement(group_size=1))
    monkeypatch.setattr(simulate_module, "_SAME", -1.0)  # no rounds count as equal
    assert found.steady_step_s() == pytest.approx(number * 11, rel=1e-6)
