"""Sums have the same bits on every version of Python."""

from windlass.actors.policy.folding import fold


def test_fold_rounds_after_each_addition() -> None:
    assert fold([1.0, 1e16, -1e16]) == 0.0  # `sum` of Python 3.12 gives 1.0
    assert fold(iter([0.1] * 10)) == 0.1 + 0.1 + 0.1 + 0.1 + 0.1 + 0.1 + 0.1 + 0.1 + 0.1 + 0.1
    assert fold([]) == 0.0
