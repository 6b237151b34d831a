"""The passes of a step through a stage, and what passes between stages."""

from itertools import product

import pytest

from windlass.actors.messages import Phase
from windlass.actors.worker_policy.stages import GroupPass, Stage, check_stages, num_groups_ahead, passes_of_step

HEAD = 4
FIRST, SECOND, LAST = Stage(0, 2), Stage(2, 4), Stage(4, 5)


def in_short(stage: int, ranks: tuple[int, ...], num_groups: int) -> str:
    passes = passes_of_step(stage, ranks, num_groups)
    return " ".join(f"{'F' if each.goes_forward else 'B'}{each.group}" for each in passes)


def test_passes_of_one_stage_are_group_by_group() -> None:
    assert in_short(0, (1,), 3) == "F0 B0 F1 B1 F2 B2"


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, "F0 F1 F2 B0 F3 B1 B2 B3"),
        (1, "F0 F1 B0 F2 B1 F3 B2 B3"),
        (2, "F0 B0 F1 B1 F2 B2 F3 B3"),
    ],
)
def test_earlier_stages_are_further_ahead(stage: int, expected: str) -> None:
    assert in_short(stage, (1, 1, 1), 4) == expected


def test_groups_of_one_round_pass_together() -> None:
    assert in_short(0, (2, 2), 5) == "F0 F1 F2 F3 B0 B1 F4 B2 B3 B4"


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((1, 4), "F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 F7 B3 B4 B5 B6 B7"),
        ((4, 1), "F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7"),
        ((2, 1), "F0 F1 F2 F3 B0 B1 F4 F5 B2 B3 F6 F7 B4 B5 B6 B7"),
    ],
)
def test_stage_is_as_far_ahead_as_the_gpus_of_the_next_one_need(ranks: tuple[int, ...], expected: str) -> None:
    assert in_short(0, ranks, 8) == expected


# The numbers of GPUs of up to four boxes.
_RANKS = [
    *((number,) * num_stages for number, num_stages in product((1, 2, 3), (1, 2, 3, 5))),
    *((1, 2), (2, 1), (1, 4), (4, 1), (3, 2), (2, 1, 2), (1, 3, 1), (4, 2, 1), (1, 2, 4), (4, 1, 3, 2)),
]


@pytest.mark.parametrize(("ranks", "num_groups"), list(product(_RANKS, (1, 2, 5, 9))))
def test_each_group_passes_both_ways_and_sums_go_on_in_order(ranks: tuple[int, ...], num_groups: int) -> None:
    for stage, num_ranks in enumerate(ranks):
        passes = list(passes_of_step(stage, ranks, num_groups))
        backward = [each.group for each in passes if not each.goes_forward]
        assert backward == [each.group for each in passes if each.goes_forward] == list(range(num_groups))
        most = num_groups_ahead(stage, ranks, num_groups)
        for rank in range(num_ranks):
            in_flight = 0
            for each in (each for each in passes if each.group % num_ranks == rank):
                in_flight += 1 if each.goes_forward else -1
                assert 0 <= in_flight <= most


@pytest.mark.parametrize(("ranks", "num_groups"), list(product(_RANKS, (1, 2, 4, 7, 13))))
def test_stages_never_wait_for_each_other_in_a_circle(ranks: tuple[int, ...], num_groups: int) -> None:
    """Each rank makes its passes in order, when the neighbour's pass and the sum of the group before are there.

    It has one slot for what it sends to a neighbour, which is free once the neighbour has begun what was sent before.
    """
    left = {
        (stage, rank): [each for each in passes_of_step(stage, ranks, num_groups) if each.group % ranks[stage] == rank]
        for stage, num_ranks in enumerate(ranks)
        for rank in range(num_ranks)
    }
    begun: set[tuple[int, GroupPass]] = set()
    done: set[tuple[int, GroupPass]] = set()
    while any(left.values()):
        before = len(done) + len(begun)
        for (stage, _), passes in left.items():
            while passes and _can_begin(stage, passes[0], len(ranks), done):
                begun.add((stage, passes[0]))
                if not _can_send(stage, passes[0], ranks, begun):
                    break
                done.add((stage, passes.pop(0)))
        assert len(done) + len(begun) > before, "no stage can go on"


def _can_begin(stage: int, each: GroupPass, num_stages: int, done: set[tuple[int, GroupPass]]) -> bool:
    if each.goes_forward:
        return stage == 0 or (stage - 1, each) in done
    is_there = stage + 1 == num_stages or (stage + 1, each) in done
    return is_there and (each.group == 0 or (stage, GroupPass(each.group - 1, goes_forward=False)) in done)


def _can_send(stage: int, each: GroupPass, ranks: tuple[int, ...], begun: set[tuple[int, GroupPass]]) -> bool:
    taker, before = stage + (1 if each.goes_forward else -1), each.group - ranks[stage]
    if not 0 <= taker < len(ranks) or before < 0:
        return True
    return (taker, GroupPass(before, each.goes_forward)) in begun


@pytest.mark.parametrize(
    ("stage", "phase", "block", "expected"),
    [
        (FIRST, Phase.FORWARD, 0, None),
        (FIRST, Phase.FORWARD, 1, (Phase.FORWARD, 2)),
        (FIRST, Phase.EVALUATE, 1, (Phase.EVALUATE, 2)),
        (FIRST, Phase.BACKWARD, 0, None),
        (SECOND, Phase.FORWARD, 3, (Phase.HEAD, HEAD)),
        (SECOND, Phase.EVALUATE, 3, (Phase.EVALUATE_HEAD, HEAD)),
        (SECOND, Phase.BACKWARD, 3, None),
        (SECOND, Phase.BACKWARD, 2, (Phase.BACKWARD, 1)),
        (LAST, Phase.HEAD, HEAD, (Phase.BACKWARD, 3)),
        (LAST, Phase.EVALUATE_HEAD, HEAD, None),
        (Stage(2, 5), Phase.HEAD, HEAD, None),
        (Stage(0, 5), Phase.FORWARD, 3, None),
    ],
)
def test_operation_that_takes_results_is_on_the_neighbour(
    stage: Stage, phase: Phase, block: int, expected: tuple[Phase, int] | None
) -> None:
    assert stage.taker_of(phase, block, HEAD + 1) == expected
    if expected is not None:
        (taker,) = [other for other in (FIRST, SECOND, LAST) if other.has(expected[1])]
        assert taker.takes_results(*expected)


@pytest.mark.parametrize("stages", [(), ((0, 2), (3, 5)), ((0, 3), (2, 5)), ((0, 2), (2, 2), (2, 5)), ((0, 4),)])
def test_stages_that_do_not_divide_the_blocks_are_refused(stages: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="must divide blocks 0 to 4 into runs, in order"):
        check_stages(tuple(Stage(*stage) for stage in stages), HEAD + 1)
