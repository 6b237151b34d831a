"""Linear layers in plain PyTorch that compute in the parts of a job with cut matrices, with all of them in memory."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from windlass.engine.memory_plan.param_slices import column_bounds, row_bounds


def _product(left: torch.Tensor, right: torch.Tensor, cuts: Sequence[int], bias: Any = None) -> torch.Tensor:
    """The product of two matrices, some columns at a time. Each column of `right` is a whole sum's factors."""
    product = left.new_empty(left.shape[0], right.shape[1])
    for start, stop in itertools.pairwise(cuts):
        # In the layout of the whole matrix, because kernels may sum in another order for another one.
        part = right[:, start:stop].contiguous() if right.is_contiguous() else right.t()[start:stop].t()
        if bias is None:
            torch.mm(left, part, out=product[:, start:stop])
        else:
            torch.addmm(bias[start:stop], left, part, out=product[:, start:stop])
    return product


class _PlainCut(torch.autograd.Function):
    """A linear layer. `cuts`: the bounds of the parts of outputs, of inputs, and of its matrix's rows."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: Any, is_conv: bool, cuts: Any) -> Any:
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias, ctx.is_conv, ctx.cuts = bias is not None, is_conv, cuts
        outputs = _product(inputs.flatten(0, -2), weight if is_conv else weight.t(), cuts[0], bias)
        return outputs.view(*inputs.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        flat_grad, flat = grad.flatten(0, -2), inputs.flatten(0, -2)
        of_inputs = _product(flat_grad, weight.t() if ctx.is_conv else weight, ctx.cuts[1])
        by_row, by_column = (flat, flat_grad) if ctx.is_conv else (flat_grad, flat)
        of_weight = [by_row[:, start:stop].t() @ by_column for start, stop in itertools.pairwise(ctx.cuts[2])]
        of_bias = flat_grad.sum(0) if ctx.has_bias else None
        return of_inputs.view(inputs.shape), torch.cat(of_weight), of_bias, None, None


def cut_plainly(model: Any, cut_matrices: int) -> int:
    """Makes the linear layers of a model compute in parts. Returns the number of those that are cut.

    A head that is tied to an embedding of the model's own class stays whole.
    """
    num_cut, embedding = 0, model.get_input_embeddings()
    for module in model.modules():
        is_linear = type(module) in (nn.Linear, Conv1D)
        may_be_cut = is_linear and (module.weight is not embedding.weight or type(embedding) is nn.Embedding)
        if may_be_cut and module.weight.numel() > cut_matrices:
            is_conv, shape = type(module) is Conv1D, tuple(module.weight.shape)
            rows, columns = row_bounds(shape, cut_matrices), column_bounds(shape, cut_matrices)
            cuts = (columns, rows, rows) if is_conv else (rows, columns, rows)

            def forward(inputs: torch.Tensor, module: Any = module, is_conv: bool = is_conv, cuts: Any = cuts) -> Any:
                return _PlainCut.apply(inputs, module.weight, module.bias, is_conv, cuts)

            module.forward = forward
            num_cut += 1
    return num_cut
