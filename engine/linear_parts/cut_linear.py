"""Linear layers whose matrix is computed in parts, because the device has no memory for all of it at once.

A product takes one part of the matrix after the other. The parts divide its outputs, so no sum is split: outputs of the
layer for the forward pass, inputs for the input's gradient, and elements of the matrix for its own gradient. Parts lie
in memory as rows or as columns of the matrix.

Shapes: N tokens, I inputs, O outputs.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from windlass.engine.activations import as_one_operator
from windlass.engine.memory_plan import column_bounds

_aten = torch.ops.aten


class MatrixParts(Protocol):
    """The matrix of a linear layer during one operation. A part is contiguous on the device until its context ends."""

    def rows(self, start: int, stop: int) -> AbstractContextManager[torch.Tensor]:
        """Provides rows, as a matrix (stop - start, columns)."""

    def columns(self, start: int, stop: int) -> AbstractContextManager[torch.Tensor]:
        """Provides columns, as a matrix (rows, stop - start)."""


class CutModule:
    """A module that computes in parts of its matrix, in place of its own computation."""

    def __init__(
        self,
        module: nn.Module,
        compute: Callable[[torch.Tensor], torch.Tensor],
        width: int,
        parts: Sequence[tuple[str, int, int]],
        add_grad: Callable[[str, int, torch.Tensor], None],
    ) -> None:
        """`compute` takes the place of the forward of `module`. `width`: elements of a row. See `CutLinear`."""
        self._module, self._compute = module, compute
        self._rows = tuple(end // width for end in itertools.accumulate((n for *_, n in parts), initial=0))
        self._names = [(name, offset) for name, offset, _ in parts]
        self._add_grad = add_grad
        # Without an input that needs a gradient, autograd would not call the backward pass.
        self._own_anchor = torch.empty(0, requires_grad=True)
        self._wants_grad = False
        self._parts: MatrixParts | None = None

    def install(self, parts: MatrixParts) -> None:
        """Computes with these parts until `remove`. The module's own bias must be installed while it runs."""
        self._parts, self._wants_grad = parts, False
        self._module.forward = self._compute

    def require_grad(self) -> None:
        """Has the backward pass of what is computed from now on call `add_grad`."""
        self._wants_grad = True

    def remove(self) -> None:
        """Restores the module's own computation."""
        self._parts = None
        del self._module.forward

    @property
    def _anchor(self) -> torch.Tensor | None:
        """An input by which autograd calls the backward pass; None: it need not."""
        return self._own_anchor if self._wants_grad else None


class CutLinear(CutModule):
    """The computation of one linear layer in parts, in place of its module's own."""

    def __init__(
        self,
        module: nn.Module,
        shape: tuple[int, int],
        parts: Sequence[tuple[str, int, int]],
        add_grad: Callable[[str, int, torch.Tensor], None],
        *,
        cut_matrices: int,
        add_product: Callable[[str, int, torch.Tensor, torch.Tensor], None] | None = None,
    ) -> None:
        """Divides a matrix.

        Args:
            module: an `nn.Linear`, whose matrix is (O, I), or a `Conv1D` of transformers, whose matrix is (I, O).
            shape: of the matrix.
            parts: (name, offset in the block's flat vector, elements) of each part of rows.
            add_grad: gets the gradient of each part of rows with its name and offset, in no particular order.
            cut_matrices: as in the job's `TrainingConfig`.
            add_product: gets the factors of each part's gradient in place of it: the gradient is `left.T @ right`.
        """
        num_rows, width = shape
        super().__init__(module, self._outputs_of, width, parts, add_grad)
        self._add_product = add_product
        self._is_transposed = isinstance(module, nn.Linear)  # the matrix is (O, I)
        self._columns = column_bounds(shape, cut_matrices)
        self._num_inputs, self._num_outputs = (width, num_rows) if self._is_transposed else (num_rows, width)
        # Shows the size of the product to those that count operators.
        self._like_matrix = torch.empty(self._num_inputs, self._num_outputs, device="meta")

    def _outputs_of(self, inputs: torch.Tensor) -> torch.Tensor:
        bias, anchor = self._module.bias, self._anchor
        outputs: torch.Tensor = _Product.apply(inputs, bias, anchor, self)  # type: ignore[no-untyped-call]
        return outputs

    def product(self, inputs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns the product of inputs (..., I) with the matrix, plus the bias: (..., O)."""
        flat = inputs.reshape(-1, self._num_inputs)
        biases = () if bias is None else (bias,)
        operator = _aten.addmm.default if biases else _aten.mm.default
        outputs = as_one_operator(operator, lambda: self._outputs(flat, bias), *biases, flat, self._like_matrix)
        shape = *inputs.shape[:-1], self._num_outputs
        # The same operators as PyTorch calls for a whole layer, so that a layer's operators have the same numbers.
        return outputs.view(shape) if biases or inputs.dim() == 2 else _aten._unsafe_view(outputs, shape)

    def _outputs(self, flat: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        outputs = flat.new_empty(flat.shape[0], self._num_outputs)
        for start, stop in itertools.pairwise(self._rows if self._is_transposed else self._columns):
            with self._held(start, stop, is_rows=self._is_transposed) as part:
                target = outputs[:, start:stop]
                matrix = part.t() if self._is_transposed else part
                if bias is None:
                    torch.mm(flat, matrix, out=target)
                else:
                    torch.addmm(bias[start:stop], flat, matrix, out=target)
        return outputs

    def input_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of the inputs (N, I) from that of the outputs (N, O)."""
        grads = grad.new_empty(grad.shape[0], self._num_inputs)
        for start, stop in itertools.pairwise(self._columns if self._is_transposed else self._rows):
            with self._held(start, stop, is_rows=not self._is_transposed) as part:
                torch.mm(grad, part if self._is_transposed else part.t(), out=grads[:, start:stop])
        return grads

    def add_matrix_grads(self, inputs: torch.Tensor, grad: torch.Tensor) -> None:
        """Makes the gradient of each part of rows. `inputs`: (N, I); `grad`: of the outputs, (N, O).

        The last part comes first, as the backward pass goes from the end of a block's flat vector to its start.
        """
        by_row, by_column = (grad, inputs) if self._is_transposed else (inputs, grad)
        for (name, offset), rows in reversed(list(zip(self._names, itertools.pairwise(self._rows), strict=True))):
            factor = by_row[:, slice(*rows)]
            if self._add_product is not None:
                self._add_product(name, offset, factor, by_column)
            else:
                self._add_grad(name, offset, factor.t() @ by_column)

    def _held(self, start: int, stop: int, *, is_rows: bool) -> AbstractContextManager[torch.Tensor]:
        assert self._parts is not None, "the layer's parts are installed"
        return self._parts.rows(start, stop) if is_rows else self._parts.columns(start, stop)


class _Product(torch.autograd.Function):
    """The product of a cut layer. Autograd saves its inputs, and nothing of the matrix."""

    is_one_operator = True  # see `as_one_operator`

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, bias: torch.Tensor | None, anchor: torch.Tensor | None, linear: CutLinear
    ) -> torch.Tensor:
        if anchor is not None:
            ctx.save_for_backward(inputs)
        ctx.linear = linear
        return linear.product(inputs, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        linear: CutLinear = ctx.linear
        wants_inputs, wants_bias, wants_matrix, _ = ctx.needs_input_grad
        flat = grad.reshape(-1, grad.shape[-1])
        if wants_matrix:
            (inputs,) = ctx.saved_tensors
            linear.add_matrix_grads(inputs.reshape(-1, inputs.shape[-1]), flat)
        bias = flat.sum(0) if wants_bias else None
        if not wants_inputs:
            return None, bias, None, None
        inputs_grad = linear.input_grad(flat)
        return inputs_grad.view(*grad.shape[:-1], inputs_grad.shape[-1]), bias, None, None
