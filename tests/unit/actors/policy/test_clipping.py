"""The clipping factor equals torch's, also for norms that are not finite."""

import math

import pytest
import torch

from windlass.actors.policy.clipping import clip_scale


@pytest.mark.parametrize("norm", [0.0, 1e-7, 0.5, 1.0, 3.0, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("clip_norm", [1e-3, 1.0, 1e6])
def test_clip_scale_of_any_norm_is_what_torch_multiplies_by(clip_norm: float, norm: float) -> None:
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    param.grad = torch.tensor([norm, 0.0], dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([param], clip_norm)
    expected = norm * torch.tensor(clip_scale(clip_norm, norm), dtype=torch.float64)
    torch.testing.assert_close(param.grad[0], expected, rtol=1e-12, atol=0, equal_nan=True)
    assert math.isnan(clip_scale(clip_norm, norm)) == math.isnan(norm)
