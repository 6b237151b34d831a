"""A linear layer in parts beside PyTorch's own."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from windlass.engine.linear_parts.cut_linear import CutLinear
from windlass.engine.linear_parts.whole_matrix import WholeMatrix
from windlass.engine.memory_plan.param_slices import row_bounds

I, O, CUT = 20, 36, 200  # noqa: E741


def make(kind: Any) -> nn.Module:
    torch.manual_seed(3)
    match kind:
        case "Conv1D":
            return Conv1D(O, I)
        case "bias":
            return nn.Linear(I, O)
    return nn.Linear(I, O, bias=False)


class Part:
    """A cut layer whose gradients are collected, by offset."""

    def __init__(self, kind: str, *, wants_grad: bool = True) -> None:
        self.module = make(kind)
        self.weight = self.module.weight.detach().clone()
        self.grads: dict[int, torch.Tensor] = {}
        rows = row_bounds(self.weight.shape, CUT)
        width = self.weight.shape[1]
        parts = [(f"weight {low}", low * width, (high - low) * width) for low, high in itertools.pairwise(rows)]
        assert len(parts) > 2
        linear = CutLinear(self.module, tuple(self.weight.shape), parts, self.add, cut_matrices=CUT)
        linear.install(WholeMatrix(self.weight))
        if wants_grad:
            linear.require_grad()
        self.linear = linear
        del self.module._parameters["weight"]  # it is not read

    def add(self, name: str, offset: int, grad: torch.Tensor) -> None:
        assert name == f"weight {offset // self.weight.shape[1]}"
        assert offset not in self.grads
        self.grads[offset] = grad

    @property
    def grad(self) -> torch.Tensor:
        return torch.cat([self.grads[offset] for offset in sorted(self.grads)])


@pytest.mark.parametrize("shape", [(7,), (2, 3), (2, 1, 3), (0,)])
@pytest.mark.parametrize("kind", ["Conv1D", "bias", "no bias"])
def test_parts_give_the_numbers_of_the_whole_layer(kind: str, shape: tuple[int, ...]) -> None:
    whole, part = make(kind), Part(kind)
    inputs = torch.randn(*shape, I)
    ours, theirs = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    outputs, expected = part.module(ours), whole(theirs)
    assert outputs.shape == (*shape, O)
    torch.testing.assert_close(outputs, expected)
    grad = torch.randn_like(outputs)
    outputs.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(part.grad, whole.weight.grad)
    assert list(part.grads) == sorted(part.grads, reverse=True)
    if kind != "no bias":
        torch.testing.assert_close(part.module.bias.grad, whole.bias.grad)


def test_the_matrix_gets_a_gradient_where_the_inputs_need_none() -> None:
    whole, part = make("no bias"), Part("no bias")
    inputs = torch.randn(5, I)
    whole(inputs).sum().backward()
    part.module(inputs).sum().backward()
    torch.testing.assert_close(part.grad, whole.weight.grad)


def test_a_layer_whose_gradient_is_not_required_passes_on_that_of_its_inputs_only() -> None:
    part = Part("no bias", wants_grad=False)
    inputs = torch.randn(5, I, requires_grad=True)
    part.module(inputs).sum().backward()
    assert inputs.grad is not None
    assert part.grads == {}
    assert not part.module(inputs.detach()).requires_grad


def test_inputs_that_are_not_contiguous_are_allowed() -> None:
    part, inputs = Part("bias"), torch.randn(I, 5, 3)
    torch.testing.assert_close(part.module(inputs.mT.permute(1, 2, 0)), make("bias")(inputs.mT.permute(1, 2, 0)))


def test_a_removed_layer_is_the_modules_own_again() -> None:
    part = Part("no bias")
    part.linear.remove()
    part.module.weight = nn.Parameter(part.weight)
    inputs = torch.randn(5, I)
    assert torch.equal(part.module(inputs), make("no bias")(inputs))
    assert "forward" not in vars(part.module)
