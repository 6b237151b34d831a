import pytest

from windlass.engine.memory_plan.example_lengths import ExampleLengths

LENGTHS = ExampleLengths(longest=64, mean=20.0, mean_square=900.0, longest_validation=128, num_validation_examples=9)


@pytest.mark.parametrize(("mean", "mean_square"), [(0.0, 0.0), (65.0, 4225.0), (20.0, 399.0)])
def test_lengths_with_means_that_no_rows_have_are_refused(mean: float, mean_square: float) -> None:
    with pytest.raises(ValueError, match="no rows of at most 64 tokens have the mean"):
        ExampleLengths(longest=64, mean=mean, mean_square=mean_square)


def test_lengths_cut_shorter_than_the_examples_are_all_at_most_that() -> None:
    cut = LENGTHS.cut(16)
    assert (cut.longest, cut.mean, cut.mean_square, cut.longest_validation) == (16, 16.0, 256.0, 16)
    assert LENGTHS.cut(2048) == LENGTHS


def test_an_evaluations_first_group_has_only_the_examples_that_there_are() -> None:
    assert LENGTHS.evaluation_shapes(4, 2) == [(4, 128), (4, 128)]
    assert LENGTHS.evaluation_shapes(4, 3) == [(4, 128), (4, 128), (1, 128)]
    assert ExampleLengths(longest=8, mean=8.0, mean_square=64.0).evaluation_shapes(4, 3) == []
