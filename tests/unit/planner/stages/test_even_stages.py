"""Plans over several boxes without a solver."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.engine.training_config.training_config import TrainingConfig
from windlass.planner.stages.even_stages import even_division, rounds_without_plan
from windlass.planner.stages.splits import Division, run_of
from windlass.planner.stages.stages_request import RequestedBox, StagesRequest


def sums_of_boxes(numels: list[int], division: Division) -> list[int]:
    runs = [run_of(division, box, (1,) * len(division)) for box in range(len(division))]
    return [sum(numels[run.first : run.stop]) for run in runs]


def squares(numels: list[int], division: Division) -> int:
    return sum(total**2 for total in sums_of_boxes(numels, division))


@given(st.lists(st.integers(0, 50), min_size=3, max_size=9), st.data())
def test_even_division_has_the_least_sum_of_squares(numels: list[int], data: st.DataObject) -> None:
    num_layers = len(numels) - 2
    num_boxes = data.draw(st.integers(1, num_layers))
    division = even_division(numels, num_boxes)
    assert len(division) == num_boxes
    assert min(division) >= 1
    assert sum(sums_of_boxes(numels, division)) == sum(numels), "each block is on one box"
    cuts = itertools.combinations(range(1, num_layers), num_boxes - 1)
    others = [tuple(stop - start for start, stop in itertools.pairwise((0, *cut, num_layers))) for cut in cuts]
    assert squares(numels, division) == min(squares(numels, other) for other in others)


def test_even_division_counts_the_embedding_and_the_head() -> None:
    assert even_division([20, 10, 10, 10, 10, 10, 10, 0], 2) == (2, 4)
    assert even_division([0, 10, 10, 10, 10, 10, 10, 20], 2) == (4, 2)


def test_even_division_of_a_large_model_is_quick_enough_to_be_exact() -> None:
    division = even_division([1, *[4] * 126, 1], 16)
    assert sorted(set(division)) == [7, 8]


@pytest.mark.parametrize(
    ("num_boxes", "num_ranks", "num_microbatches", "chooses", "expected"),
    [
        (2, 1, 8, False, (8, 4)),  # two groups
        (3, 1, 8, False, (8, 2)),  # four equal groups, because three are not equal
        (3, 1, 9, False, (9, 3)),
        (2, 1, 7, False, (7, 1)),
        (4, 1, 2, False, (2, 1)),  # the settings allow no more rounds
        (2, 2, 8, False, (8, 2)),  # two rounds of two GPUs
        (4, 1, 1, True, (4, 1)),
        (4, 1, 3, True, (6, 1)),
        (3, 2, 2, True, (8, 1)),
        (4, 1, 16, True, (16, 4)),
        (32, 1, 1, True, (16, 1)),  # the batch has no more examples
    ],
)
def test_rounds_without_a_plan_are_as_many_as_boxes(
    num_boxes: int, num_ranks: int, num_microbatches: int, chooses: bool, expected: tuple[int, int]
) -> None:
    boxes = tuple(
        RequestedBox(
            name=str(index), hardware=None, num_optimizers=1, host_memory_nbytes=None, device_memory_nbytes=None
        )
        for index in range(num_boxes)
    )
    training = TrainingConfig(batch_size=16, num_microbatches=num_microbatches, sequence_length=8, total_steps=1)
    request = StagesRequest(
        model_dir=Path("model"),
        layout_file=Path("layout.json"),
        dataset_dir=None,
        training=training,
        chooses_microbatches=chooses,
        num_ranks=num_ranks,
        boxes=boxes,
    )
    rounds = rounds_without_plan(request)
    assert (rounds.num_microbatches, rounds.group_size) == expected
    assert rounds.num_ranks == num_ranks
    assert rounds.number >= min(num_boxes, num_microbatches if not chooses else 16) // num_ranks
