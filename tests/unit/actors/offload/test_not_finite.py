"""Gradients that are not finite leave the same parameters as in the plain loop, NaN for NaN."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.actors.offload_models import PlainAdam, adamw, offloaded, seeded

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN, CHUNK_NUMEL = 48, 2048
# Above the norm of all finite gradients: the scale of those steps is 1, so the last bits do not differ.
CLIP_NORM = 1e6


class GivenGrad(torch.autograd.Function):
    """Passes its input on, and sets the parameter's gradient to the given one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(grad)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad, ctx.saved_tensors[0], None


class Given(nn.Module):
    """An MLP, and a parameter that does not affect the output and gets any given gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.param = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = GivenGrad.apply(x + self.linear(x).tanh(), self.param, grad)  # type: ignore[no-untyped-call]
        return given


class Model(nn.Module):
    """Layers and one module outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Given() for _ in range(3))
        self.outside = Given()

    def forward(self, x: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
        for layer, grad in zip((*self.layers, self.outside), grads, strict=True):
            x = layer(x, grad)
        return x


# For each step: the gradients of single elements, by (module, element); module 3 is the one outside of the layers.
STEPS: list[dict[tuple[int, int], float]] = [
    {},
    {(1, 5): math.inf},
    {},
    {(3, 0): -math.inf},
    {(0, 0): math.inf, (2, HIDDEN - 1): -math.inf, (3, 7): math.inf},
    {},
    {(2, 3): math.nan},
]
INF_AND_NAN = [{}, {(0, 1): math.nan, (2, 3): math.inf}]


def weights_of_steps(
    model: nn.Module, optimizer: Any, steps: list[dict[tuple[int, int], float]], num_backwards: int
) -> list[tuple[float | None, dict[str, torch.Tensor]]]:
    """The norm of each step's gradients, and the weights after each step."""
    dtype, found = model.outside.param.dtype, []  # type: ignore[union-attr]
    for step, bad in enumerate(steps):
        for i in range(num_backwards):
            generator = torch.Generator().manual_seed(step * num_backwards + i)
            x = torch.randn(2, HIDDEN, generator=generator).to(dtype)
            grads = [torch.randn(HIDDEN, generator=generator).to(dtype) for _ in range(4)]
            for (module, element), value in bad.items():
                if i == 0:
                    grads[module][element] = value
            model(x, grads).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((optimizer.grad_norm, {name: each.clone() for name, each in model.state_dict().items()}))
    return found


@pytest.mark.parametrize(
    ("dtype", "options", "num_backwards", "steps"),
    [
        (torch.float32, {}, 1, STEPS),
        (torch.float32, {"host_memory_gib": 1.0}, 2, STEPS),
        (torch.float32, {"host_memory_gib": 1.0}, 1, INF_AND_NAN),
        (torch.bfloat16, {}, 2, STEPS),
        (torch.bfloat16, {"state_precision": "split", "host_memory_gib": 1.0}, 1, STEPS),
        (torch.bfloat16, {"state_precision": "split"}, 1, INF_AND_NAN),
        (torch.bfloat16, {"state_precision": "bf16"}, 1, STEPS),
        (torch.float32, {"clip_norm": None}, 2, STEPS),
        (torch.bfloat16, {"clip_norm": None, "state_precision": "split"}, 1, STEPS),
    ],
)
def test_step_with_gradients_not_finite_leaves_what_plain_loop_does(
    dtype: torch.dtype, options: dict[str, Any], num_backwards: int, steps: Any, tmp_path: Path
) -> None:
    options = {"clip_norm": CLIP_NORM, "backwards_per_step": num_backwards, "chunk_numel": CHUNK_NUMEL, **options}
    plain = seeded(Model, dtype)
    expected = weights_of_steps(plain, PlainAdam(adamw(plain), options["clip_norm"]), steps, num_backwards)
    with offloaded(seeded(Model, dtype), tmp_path, num_ssds=1, **options) as (model, optimizer):
        found = weights_of_steps(model, optimizer, steps, num_backwards)
    tolerance = 0.05 if options.get("state_precision") == "bf16" else 0.0  # masters in bf16, rounded stochastically
    for (norm, weights), (plain_norm, plain_weights) in zip(found, expected, strict=True):
        assert norm == (None if plain_norm is None else pytest.approx(plain_norm, rel=2e-2, nan_ok=True))
        for name, weight in plain_weights.items():
            torch.testing.assert_close(weights[name], weight, rtol=tolerance, atol=tolerance, equal_nan=True, msg=name)
    num_nan = [sum(int(each.isnan().sum()) for each in weights.values()) for _, weights in found]
    if steps is STEPS:
        assert num_nan[:-1] == [0, 1, 1, 2, 5, 5]
    if options["clip_norm"] is not None:  # a norm of NaN gives no update to compare
        assert num_nan[-1] == sum(each.numel() for each in plain.state_dict().values())


def test_step_with_infinite_norm_leaves_what_torchs_own_loop_does(tmp_path: Path) -> None:
    make_optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)  # noqa: E731
    plain = seeded(Model)
    fused = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True)

    class Loop:
        grad_norm: float | None = None
        zero_grad: Callable[[], None] = fused.zero_grad

        def step(self) -> None:
            self.grad_norm = float(nn.utils.clip_grad_norm_(plain.parameters(), CLIP_NORM))
            fused.step()

    expected = weights_of_steps(plain, Loop(), STEPS, 1)
    options = {"clip_norm": CLIP_NORM, "chunk_numel": CHUNK_NUMEL, "make_optimizer": make_optimizer}
    with offloaded(seeded(Model), tmp_path, num_ssds=1, **options) as (model, optimizer):
        found = weights_of_steps(model, optimizer, STEPS, 1)
    for (norm, weights), (plain_norm, plain_weights) in zip(found, expected, strict=True):
        assert norm == pytest.approx(plain_norm, nan_ok=True)
        torch.testing.assert_close(weights, plain_weights, rtol=0, atol=0, equal_nan=True)
