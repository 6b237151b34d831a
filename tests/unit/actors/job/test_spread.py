"""The factor is that of Student's t."""

import math

import pytest

from windlass.actors.job import factor_of_nine_in_ten


@pytest.mark.parametrize(
    ("num_degrees", "quantile"), [(1, 6.314), (2, 2.92), (3, 2.353), (4, 2.132), (10, 1.812), (100, 1.66)]
)
def test_factor_is_students_t(num_degrees: float, quantile: float) -> None:
    assert math.log(factor_of_nine_in_ten(0.01, num_degrees)) == pytest.approx(0.1 * quantile, rel=0.02)
    assert factor_of_nine_in_ten(0.0, num_degrees) == 1.0
