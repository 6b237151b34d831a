"""The factor by which clipping by the global norm multiplies every gradient."""

import math

# Added to the norm before the division.
_EPSILON = 1e-6


def clip_scale(clip_norm: float, grad_norm: float) -> float:
    """The factor of `torch.nn.utils.clip_grad_norm_`: at most 1; 0 where the norm is infinite, NaN where it is NaN.

    An infinite gradient times 0 is NaN, and a finite one 0.
    """
    scale = clip_norm / (grad_norm + _EPSILON)
    return scale if math.isnan(scale) else min(scale, 1.0)
