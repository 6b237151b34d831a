"""The formula of the step time of a job in stages, beside hand-made cases and the real order of passes."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from windlass.actors.worker_policy.stages import passes_of_step
from windlass.planner.stages.pipeline import LeastWork, Limit, Pipeline, StageTimes, least_step_s


def stage(
    round_s: float,
    *,
    computed_s: float = 0.0,
    beside_s: float = 0.0,
    updates_s: float = 0.0,
    first_update_s: float = 0.0,
    alone_s: float = 0.0,
) -> StageTimes:
    return StageTimes(
        round_s=round_s,
        computed_s=computed_s,
        beside_updates_s=beside_s,
        updates_s=updates_s,
        first_update_s=first_update_s,
        alone_s=alone_s,
    )


def pipeline(
    stages: Sequence[StageTimes],
    num_rounds: int,
    *,
    crossing: float = 0.0,
    rates: Sequence[float] | None = None,
    ranks: tuple[int, ...] = (),
) -> Pipeline:
    return Pipeline(
        ranks=ranks,
        stages=tuple(stages),
        num_rounds=num_rounds,
        crossing_nbytes=crossing,
        network_bytes=tuple(rates or [1.0] * len(stages)),
    )


def replayed_s(
    rounds_s: Sequence[float], num_rounds: int, crossing_s: float, ranks: tuple[int, ...] | None = None
) -> float:
    """Returns the time of a step in which each box makes its passes in the order of the job's policy.

    `rounds_s`: of a group for each GPU of the box with most. All GPUs of a box send at once.
    """
    num_boxes, forward = len(rounds_s), 1 / 3
    ranks = ranks or (1,) * num_boxes
    group_s = [each * num_ranks / max(ranks) for each, num_ranks in zip(rounds_s, ranks, strict=True)]
    waiting = [
        (box, [each for each in passes_of_step(box, ranks, num_rounds * max(ranks)) if each.group % ranks[box] == rank])
        for box in range(num_boxes)
        for rank in range(ranks[box])
    ]
    free = [0.0] * len(waiting)
    done = dict[tuple[int, int, bool], float]()
    while any(passes for _, passes in waiting):
        for gpu, (box, passes) in enumerate(waiting):
            while passes:
                group, goes_forward = passes[0]
                source = box - 1 if goes_forward else box + 1
                if not 0 <= source < num_boxes:
                    ready = 0.0 if goes_forward else done.get((box, group, True))
                else:
                    ready = done.get((source, group, goes_forward))
                    ready = None if ready is None else ready + crossing_s * ranks[source] / max(ranks)
                if ready is None:
                    break
                passes.pop(0)
                share = forward if goes_forward else 1 - forward
                free[gpu] = max(free[gpu], ready) + share * group_s[box]
                done[box, group, goes_forward] = free[gpu]
    return max(free)


def test_a_step_of_equal_stages_has_the_bubble_of_the_first_and_last_rounds() -> None:
    # Round 8 reaches the last box after 7 s. It has gone forward and back everywhere 4 s later.
    equal = pipeline([stage(1.0)] * 4, 8)
    assert equal.step_s == pytest.approx(11.0)
    assert equal.waiting_share == pytest.approx((4 - 1) / (8 + 4 - 1))
    assert equal.limit is Limit.BOX


def test_a_step_of_unequal_stages_is_that_of_the_slowest_and_one_round_of_the_others() -> None:
    unequal = pipeline([stage(1.0), stage(2.0), stage(1.5)], 4)
    assert unequal.step_s == pytest.approx(4 * 2.0 + 1.0 + 1.5)
    assert unequal.busiest_box == 1
    assert sum(unequal.parts_s.values()) == pytest.approx(unequal.step_s)


def test_more_boxes_than_rounds_are_limited_by_the_bubble() -> None:
    assert pipeline([stage(1.0)] * 4, 2).limit is Limit.BUBBLE


@pytest.mark.parametrize(("num_boxes", "num_rounds"), [*itertools.product((1, 2, 3, 8), (1, 2, 5, 16))])
def test_the_formula_of_equal_stages_is_the_time_of_the_policys_order(num_boxes: int, num_rounds: int) -> None:
    equal = pipeline([stage(1.0)] * num_boxes, num_rounds)
    assert equal.step_s == pytest.approx(replayed_s([1.0] * num_boxes, num_rounds, 0.0))


def test_the_formula_of_other_stages_is_near_the_time_of_the_policys_order() -> None:
    random_ = random.Random(1)
    for _ in range(200):
        num_boxes, num_rounds = random_.choice([2, 3, 4, 8]), random_.choice([1, 2, 4, 16, 32])
        rounds_s = [random_.uniform(0.8, 1.2) for _ in range(num_boxes)]
        # The replay has no cards, which crossings of more than two boxes share: `test_boxes.py` compares these.
        crossing_s = random_.choice([0.0, random_.uniform(0.0, 1.0)]) if num_boxes == 2 else 0.0
        near = pipeline([stage(each) for each in rounds_s], num_rounds, crossing=crossing_s)
        replay_s = replayed_s(rounds_s, num_rounds, crossing_s)
        if near.transfer_period_s <= max(rounds_s):
            assert 0.99 * replay_s <= near.step_s <= 1.15 * replay_s


@pytest.mark.parametrize("crossing_s", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("ranks", [(1, 4), (4, 1), (2, 1), (2, 3), (3, 2), (4, 4)])
def test_rounds_in_flight_are_those_of_boxes_with_other_numbers_of_gpus(
    ranks: tuple[int, ...], crossing_s: float
) -> None:
    formula = pipeline([stage(1.0), stage(1.0)], 64, crossing=crossing_s, ranks=ranks)
    assert formula.step_s == pytest.approx(replayed_s([1.0, 1.0], 64, crossing_s, ranks), rel=0.03)


@pytest.mark.parametrize("ranks", [(1, 2, 4), (4, 2, 1), (1, 4, 1)])
def test_boxes_with_other_numbers_of_gpus_do_not_wait_for_a_fast_network(ranks: tuple[int, ...]) -> None:
    formula = pipeline([stage(1.0)] * 3, 64, ranks=ranks)
    assert formula.step_s == pytest.approx(replayed_s([1.0] * 3, 64, 0.0, ranks), rel=0.03)


def test_a_card_between_two_others_sends_the_hidden_states_and_the_gradients_of_a_round() -> None:
    slow = pipeline([stage(1.0)] * 3, 10, crossing=6.0, rates=[4.0, 4.0, 3.0])
    assert slow.crossings_s == (1.5, 2.0)
    assert slow.transfer_period_s == pytest.approx(2 * 6.0 / 4.0)  # the box in the middle
    assert slow.limit is Limit.NETWORK
    # Three rounds are in flight, and each is back after 10 s, and after 12.5 / period more: crossings of 1.5 and 2 s
    # each way share the card in the middle.
    period_s = 4.302
    assert 3 * period_s == pytest.approx(10.0 + 12.5 / period_s, rel=1e-3)
    assert slow.step_s == pytest.approx(3 * 1.0 + 2 * (1.5 + 2.0) + 9 * period_s, rel=1e-3)


def test_shared_params_cost_the_time_that_no_pass_hides() -> None:
    """A round takes 6 s on both boxes, of which 2 s forward, and each crossing takes 1 s."""
    stages, rates = [stage(3.0), stage(3.0)], (1.0, 1.0)
    alone = pipeline(stages, 2, crossing=1.0, rates=rates)
    hidden = replace(alone, shared_params_nbytes=3.0, shared_sum_nbytes=5.0)
    late = replace(alone, shared_params_nbytes=4.0, shared_sum_nbytes=7.0)
    assert hidden.step_s == alone.step_s
    assert late.step_s == alone.step_s + 1.0 + 2.0
    assert late.sent_nbytes == (2.0 + 4.0, 2.0 + 7.0)
    assert late.sending_s == 9.0


def test_a_faster_network_never_makes_a_step_longer() -> None:
    random_ = random.Random(2)
    for _ in range(100):
        num_boxes = random_.randint(1, 6)
        stages = [stage(random_.uniform(0.1, 2.0)) for _ in range(num_boxes)]
        rates = [random_.uniform(0.1, 10.0) for _ in range(num_boxes)]
        faster = [rate * random_.uniform(1.0, 3.0) for rate in rates]
        num_rounds = random_.randint(1, 16)
        shared = {"shared_params_nbytes": random_.choice((0.0, 4.0)), "shared_sum_nbytes": random_.choice((0.0, 8.0))}
        slow = replace(pipeline(stages, num_rounds, crossing=1.0, rates=rates), **shared)
        assert replace(slow, network_bytes=tuple(faster)).step_s <= slow.step_s + 1e-12


def test_one_box_sends_nothing() -> None:
    alone = pipeline([stage(2.0)], 3, crossing=5.0)
    assert alone.transfer_period_s == 0.0
    assert alone.step_s == pytest.approx(6.0)


def test_updates_run_beside_the_passes_of_the_stages_before() -> None:
    stages = [stage(3.0, computed_s=3.0, beside_s=1.0, updates_s=updates_s) for updates_s in (4.0, 4.5)]
    assert pipeline(stages, 4).tail_s == pytest.approx(3.0)  # of the first box; 2.5 of the second one
    assert pipeline(stages, 4).step_s == pytest.approx(5 * 3.0 + 3.0)
    assert pipeline(stages, 4).parts_s[Limit.UPDATES] == pytest.approx(3.0)


def test_updates_that_wait_for_compute_run_beside_copies() -> None:
    copied = [stage(3.0, computed_s=2.0, updates_s=4.0)] * 2
    assert pipeline(copied, 4).step_s == pytest.approx(5 * 3.0)
    assert pipeline(copied, 1).step_s == pytest.approx(2 * 2.0 + 4.0)


def test_no_step_is_shorter_than_that_of_a_box_alone() -> None:
    stages = [stage(1.0, alone_s=4.0), stage(1.0, alone_s=9.0)]
    assert pipeline(stages, 4).step_s == 9.0
    assert pipeline(stages, 4).busiest_box == 1
    assert pipeline(stages, 4).waiting_share == 0.0


def test_the_lower_bound_holds_for_all_divisions() -> None:
    random_ = random.Random(3)
    for _ in range(100):
        num_boxes, num_rounds = random_.randint(1, 4), random_.randint(1, 8)
        passes_s = [random_.uniform(1.0, 5.0) for _ in range(num_boxes)]
        work_s = [seconds * random_.uniform(1.0, 2.0) for seconds in passes_s]
        shares = [random_.random() for _ in range(num_boxes)]
        shares = [share / math.fsum(shares) for share in shares]
        stages = [
            stage(share * passes / num_rounds, alone_s=share * work)
            for share, passes, work in zip(shares, passes_s, work_s, strict=True)
        ]
        least = [
            LeastWork(step_s=work, passes_s=passes, copied_s=passes, resident_share=0.0)
            for passes, work in zip(passes_s, work_s, strict=True)
        ]
        assert least_step_s(least, num_rounds) <= pipeline(stages, num_rounds).step_s * (1 + 1e-9)


def test_states_on_devices_save_copies_in_the_lower_bound() -> None:
    box = LeastWork(step_s=1.0, passes_s=1.0, copied_s=10.0, resident_share=0.25)
    assert least_step_s([box, box], 4) == pytest.approx(0.5 * (10.0 + 3 * 5.0) / 4)
