"""The loss of a slice of the head, and the gradient of the head's projections.

Logits are a model's largest activations. So the head goes over the tokens of a micro-batch slice by slice, and the loss
over the logits of a slice piece by piece.

Shapes: S tokens of a slice, V vocabulary, H hidden.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from windlass.engine.model.grad_buffer import GradSink
from windlass.engine.model.partition import ParamSite
from windlass.storage.ids import BlockIndex

IGNORED_TARGET = -100


@dataclass(slots=True)
class LossSums:
    """Sums over target tokens, as 0-dim tensors on the device. Creating them does not wait for the device."""

    num_targets: int  # target tokens of the whole step
    terms: list[torch.Tensor]  # losses, to be added in this order in fp64
    num_correct: torch.Tensor  # int64

    @classmethod
    def nothing(cls, num_targets: int, device: torch.device) -> "LossSums":
        """Returns sums over no tokens."""
        return cls(num_targets, [], torch.zeros((), dtype=torch.int64, device=device))

    @property
    def loss_sum(self) -> torch.Tensor:
        """The sum of all terms, in fp64."""
        total = torch.zeros((), dtype=torch.float64, device=self.num_correct.device)
        for term in self.terms:
            total += term
        return total

    def add(self, other: "LossSums") -> None:
        """Adds the sums of a later micro-batch, whose loss is one term."""
        self.terms.append(other.loss_sum)
        self.num_correct += other.num_correct


def add_loss(
    pieces: list[torch.Tensor], targets: torch.Tensor, sums: LossSums, loss_scale: float | None
) -> torch.Tensor | None:
    """Adds the cross-entropy of a slice to `sums`, and returns the gradient of its logits (S, V) in their type.

    Args:
        pieces: the logits of the slice, cut along the tokens, without gradients. They are removed from the list, so
            that their memory becomes free if the caller has no other reference.
        targets: token ids, (S,).
        sums: the loss is normalised by its number of targets.
        loss_scale: the factor of the gradient; None: no gradient is computed.
    """
    grad, start = None, 0
    num_pieces = len(pieces)
    while pieces:
        piece = pieces.pop(0)
        stop, dtype, width = start + piece.shape[0], piece.dtype, piece.shape[1]
        logits = piece.float().requires_grad_(loss_scale is not None)
        del piece
        with torch.set_grad_enabled(loss_scale is not None):
            loss_sum = F.cross_entropy(logits, targets[start:stop], ignore_index=IGNORED_TARGET, reduction="sum")
            if loss_scale is not None:
                torch.autograd.backward(loss_sum / sums.num_targets * loss_scale)
        sums.terms.append(loss_sum.detach())
        sums.num_correct += (logits.detach().argmax(-1) == targets[start:stop]).sum()
        if loss_scale is not None:
            assert logits.grad is not None
            if num_pieces == 1:
                return logits.grad.to(dtype)
            if grad is None:
                grad = torch.empty(targets.numel(), width, dtype=dtype, device=logits.device)
            grad[start:stop] = logits.grad
        start = stop
    return grad


class _Project(torch.autograd.Function):
    """The product with a weight, whose gradient is added to a buffer and not returned."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, site: ParamSite, sums: GradSink, in_fp32: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.site, ctx.sums, ctx.in_fp32 = site, sums, in_fp32
        return F.linear(hidden, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        name, offset, factors = ctx.site.param.name, ctx.site.param.offset, (grad.flatten(0, -2), hidden.flatten(0, -2))
        ctx.sums.add_product(name, offset, *factors, in_fp32=ctx.in_fp32)
        return grad @ weight, None, None, None, None


@contextlib.contextmanager
def projections_in_place(
    sites: Iterable[ParamSite], grads: Mapping[BlockIndex, GradSink], *, in_fp32: bool = False
) -> Iterator[None]:
    """Lets the linear layers without bias among `sites` add their weight's gradient to its buffer in place.

    Autograd would first make the whole gradient, vocabulary times hidden, for each slice. `in_fp32`: see
    `GradBuffer.add_product`.
    """
    replaced = [site.module for site in sites if _is_plain_linear(site.module)]
    for site in sites:
        if site.module in replaced:
            site.module.forward = functools.partial(_project, site, grads[site.block], in_fp32)
    try:
        yield
    finally:
        for module in replaced:
            del module.forward


def _is_plain_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.bias is None and "forward" not in vars(module)


def _project(site: ParamSite, sums: GradSink, in_fp32: bool, hidden: torch.Tensor) -> torch.Tensor:
    weight = site.module.get_parameter(site.attribute).detach()  # autograd must not expect a gradient of it
    projected: torch.Tensor = _Project.apply(hidden, weight, site, sums, in_fp32)  # type: ignore[no-untyped-call]
    return projected
