"""Simulated jobs over several boxes: times by hand, bytes of one box, and no deadlock."""

from typing import Any

import pytest

from tests.support.planner.simulated import moved, rates
from tests.support.planner.simulated_boxes import HIDDEN_NBYTES, job_over
from windlass.actors.messages import SpanKind
from windlass.engine.memory_plan.memory_tier import MemoryTier
from windlass.planner.simulation.simulate import steady_step_s
from windlass.planner.stages.pipeline import Pipeline, StageTimes

ON_SSDS = (SpanKind.READ_STATES, SpanKind.WRITE_STATES)
INSTANT = 1e-6  # seconds of all copies and updates of a step, at most


def formula_step_s(rounds_s: tuple[float, ...], num_rounds: int, crossing_s: float) -> float:
    stages = tuple(
        StageTimes(
            round_s=seconds,
            computed_s=seconds,
            beside_updates_s=0.0,
            updates_s=0.0,
            first_update_s=0.0,
            alone_s=num_rounds * seconds,
        )
        for seconds in rounds_s
    )
    network = (1.0,) * len(stages)
    return Pipeline(stages=stages, num_rounds=num_rounds, crossing_nbytes=crossing_s, network_bytes=network).step_s


# Two boxes of three blocks each, and an operation takes a second. A round of the first takes 3 s forward and 3 s
# backward, and one of the second 5 s, because the head goes forward and backward at once.
@pytest.mark.parametrize(
    ("num_groups", "step_s"),
    [
        (1, 3 + 5 + 3),
        # Rounds are sent at 3 and 6 s, and come back at 8 and 13 s; then the first box needs 3 s for the last.
        (2, 13 + 3),
        # F0 to 3, F1 to 6, B0 8 to 11, F2 to 14, B1 to 17, F3 to 20, B2 to 23; round 3 is back at 25.
        (4, 25 + 3),
    ],
)
def test_two_boxes_with_an_infinite_network_take_the_time_computed_by_hand(num_groups: int, step_s: float) -> None:
    assert job_over(3, 6, num_groups=num_groups).steady_step_s() == pytest.approx(step_s, abs=INSTANT)


def test_groups_pass_as_a_whole() -> None:
    # An operation is that of a whole group, so the time is that of as many groups of one micro-batch.
    assert job_over(3, 6, group_size=3).steady_step_s() == pytest.approx(16, abs=INSTANT)


def test_a_slow_network_bounds_the_step_at_its_rate() -> None:
    # 20 s for hidden states, and as long for gradients: only two rounds are in flight, so one ends every
    # (6 + 5 + 2 x 20) / 2 seconds on average. The formula adds a whole round of each box, of which some overlaps.
    simulated_s = job_over(3, 6, num_groups=8, card_bytes=HIDDEN_NBYTES / 20).steady_step_s()
    assert 0.95 <= simulated_s / formula_step_s((6.0, 5.0), 8, 20.0) <= 1.0


def test_a_card_between_two_boxes_sends_to_both() -> None:
    # Boxes compute for 3 s a round at most. The middle one's card takes 2 x 4 s each way for a round.
    simulated_s = job_over(1, 2, 3, num_groups=12, card_bytes=HIDDEN_NBYTES / 4).steady_step_s()
    assert simulated_s > 12 * 2 * 4
    assert 0.9 <= simulated_s / formula_step_s((2.0, 2.0, 1.0), 12, 4.0) <= 1.1


@pytest.mark.parametrize("stops", [(2, 4, 6), (2, 4, 6, 8, 10, 12)])
@pytest.mark.parametrize("crossing_s", [0.5, 1.0, 2.0, 4.0])
def test_the_formula_is_near_the_simulation_where_boxes_share_cards(stops: tuple[int, ...], crossing_s: float) -> None:
    # A round of a box takes 4 s, and of the last one 3 s. The formula of these cases is 3 percent short, or 9 long.
    rounds_s = (*[4.0] * (len(stops) - 1), 3.0)
    simulated_s = job_over(*stops, num_groups=8, card_bytes=HIDDEN_NBYTES / crossing_s).steady_step_s()
    assert 0.95 <= formula_step_s(rounds_s, 8, crossing_s) / simulated_s <= 1.1


def test_groups_in_flight_keep_their_own_swapped_activations() -> None:
    # The first box has two groups in flight, and room for the tensors of both.
    spans = job_over(3, 6, num_groups=4, first_layer_swaps=3000).spans()
    for kind in (SpanKind.COPY_ACTIVATIONS_OUT, SpanKind.COPY_ACTIVATIONS_IN):
        assert moved([span for span in spans if span.block == 1], kind, 2) == 4 * 3000


def test_a_round_trip_delays_each_crossing() -> None:
    # The offer and the request pass once each way, and the last byte half a round trip later: 1.5 of them each way.
    near_s, far_s = (job_over(3, 6, num_groups=1, round_trip_s=trip_s).steady_step_s() for trip_s in (0.0, 0.2))
    assert far_s - near_s == pytest.approx(2 * 1.5 * 0.2, abs=0.11)  # and at most half a round trip for a report


def test_a_slower_box_bounds_the_step() -> None:
    simulated_s = job_over(3, 6, num_groups=8, compute_s=(1.0, 4.0)).steady_step_s()
    assert simulated_s == pytest.approx(8 * 5 * 4.0 + 3.0 + 3.0, abs=INSTANT)


@pytest.mark.parametrize("stops", [(3, 8), (2, 4, 8), (1, 2, 3, 4, 8)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_groups": 4},
        {"num_groups": 3, "group_size": 2},
        {"num_groups": 5, "num_ranks": 2},
        {"num_groups": 3, "training": {"clip_norm": 1.0}},
        {"num_groups": 3, "is_tied": True},
        {"num_groups": 2, "is_tied": True, "training": {"clip_norm": 1.0, "lanes": 2}},
        {"num_groups": 5, "is_tied": True, "num_ranks": 2},
        {"num_groups": 3, "is_tied": True, "num_ranks": 3, "training": {"clip_norm": 1.0, "lanes": 2}},
    ],
)
def test_boxes_without_costs_end_with_the_ssd_bytes_of_one(stops: tuple[int, ...], options: dict[str, Any]) -> None:
    fast: dict[str, Any] = {"compute_s": 0.0, "num_steps": 3, **options}
    one, several = job_over(8, **fast).spans(), job_over(*stops, **fast).spans()
    for kind in ON_SSDS:
        assert moved(several, kind) == moved(one, kind) > 0


def test_one_box_is_the_job_on_one_box() -> None:
    slow = rates(h2d_bytes=3e4, d2h_bytes=2e4, ssd_read_bytes=(2e4, 2e4), ssd_write_bytes=(3e4, 3e4))
    found = job_over(6, num_groups=3, machine=slow)
    (box,) = found.boxes
    assert found.steady_step_s() == steady_step_s(box.context, found.shape, box.rates, box.work)


def test_shared_params_that_are_slow_delay_the_head() -> None:
    # Params are 2 bytes of 8192 elements, the gradient's are 4: 8 and 16 s, of which the passes hide some.
    quick_s, slow_s = (job_over(3, 6, is_tied=True, card_bytes=rate).steady_step_s() for rate in (1e15, 2 * 8192 / 8))
    hidden_s = 2 * 2 * HIDDEN_NBYTES / (2 * 8192 / 8)
    assert 16.0 - 3.0 <= slow_s - quick_s <= 8.0 + 16.0 + hidden_s


@pytest.mark.parametrize("num_groups", [2, 4])
def test_gpu_workers_of_the_heads_box_pass_on_its_sum_and_receive_params_once(num_groups: int) -> None:
    """The embedding has 8192 elements."""
    spans = job_over(3, 6, num_groups=num_groups, num_ranks=2, num_steps=2, is_tied=True).spans()
    of_embedding = [span for span in spans if span.block == 0 and span.resource.startswith("b1/")]
    assert moved(of_embedding, SpanKind.COPY_PARTIAL_OUT, 2) == (num_groups - 1) * 4 * 8192
    assert moved(of_embedding, SpanKind.COPY_PARTIAL_IN, 2) == (num_groups - 1) * 4 * 8192
    assert moved(of_embedding, SpanKind.COPY_GRAD_OUT, 2) == 4 * 8192
    assert moved(of_embedding, SpanKind.COPY_PARAMS_IN, 2) == 2 * 2 * 8192


@pytest.mark.parametrize("options", [{}, {"is_tied": True}, {"is_tied": True, "num_ranks": 2, "num_groups": 4}])
def test_memory_of_each_box_is_that_of_its_plan(options: dict[str, Any]) -> None:
    found = job_over(3, 6, num_steps=2, **options)
    job = found.started()
    job.run()
    in_host = sum(level.allocated_nbytes or 0 for level in job.levels if level.tier is MemoryTier.HOST)
    assert in_host == sum(context.plan.arena_nbytes for context in found.contexts)


def test_rates_of_cards_that_do_not_fit_the_boxes_are_refused() -> None:
    found, more = job_over(3, 6), job_over(2, 4, 6)
    first, *others = found.boxes
    with pytest.raises(ValueError, match="the job has 2 boxes; give the rate of each one's network card"):
        steady_step_s(first.context, found.shape, first.rates, first.work, others=others, network=more.network)
