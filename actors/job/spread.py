"""Intervals for times that vary by a factor: nine of ten lie between low and high."""

import math

# The 95th percentile of the standard normal distribution: one in twenty is above it, one in twenty below its negative.
_Z = 1.6449
# Factor for numbers with one or two degrees of freedom, for which the expansion below is too small.
_T_OF_FEW = {1: 6.31, 2: 2.92}


def factor_of_nine_in_ten(log_variance: float, num_degrees: float) -> float:
    """Returns the factor by which nine of ten times differ at most, up or down.

    `log_variance`: the mean square of the logarithms of such factors, estimated from `num_degrees` independent ones.
    Source: Student's t, by the expansion of Fisher and Cornish in 1 / `num_degrees`.
    """
    if num_degrees <= 2:
        return math.exp(_T_OF_FEW[max(1, int(num_degrees))] * math.sqrt(log_variance))
    first = (_Z**3 + _Z) / 4
    second = (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96
    quantile = _Z + first / num_degrees + second / num_degrees**2
    return math.exp(quantile * math.sqrt(log_variance))
