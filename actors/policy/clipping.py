"""The factor of gradient clipping by the global norm."""

import math

# Added to the norm before the division, as in torch.
_EPSILON = 1e-6


def clip_scale(clip_norm: float, grad_norm: float) -> float:
    """Returns the factor of `torch.nn.utils.clip_grad_norm_`: at most 1; 0 for an infinite norm, NaN for a NaN norm.

    With a factor of 0, finite gradients become 0 and infinite ones NaN.
    """
    scale = clip_norm / (grad_norm + _EPSILON)
    return scale if math.isnan(scale) else min(scale, 1.0)
