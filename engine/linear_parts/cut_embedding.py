"""An embedding whose matrix is computed in parts of rows, because the device has no memory for all of it.

Each token takes its row from the part that has it. Gradients are made by part, with the tokens in their order. So no
number depends on the division.

Shapes: T tokens, of any shape; H elements of a row.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from windlass.engine.linear_parts.cut_linear import CutModule

_aten = torch.ops.aten


class CutEmbedding(CutModule):
    """The computation of one embedding in parts, in place of its module's own."""

    def __init__(
        self,
        module: nn.Embedding,
        shape: tuple[int, int],
        parts: Sequence[tuple[str, int, int]],
        add_grad: Callable[[str, int, torch.Tensor], None],
    ) -> None:
        """Divides a matrix.

        Args:
            module: the embedding. Its rows are neither normalised nor sparse, and not scaled by their tokens' number.
            shape: of the matrix.
            parts: (name, offset in the block's flat vector, elements) of each part.
            add_grad: gets the gradient of each part with its name and offset, the last part first.
        """
        super().__init__(module, self._rows_of, shape[1], parts, add_grad)
        self._padding_idx = module.padding_idx  # a row that is not trained

    def _rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = _Rows.apply(ids, self._anchor, self)  # type: ignore[no-untyped-call]
        return rows

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows of tokens (T): (T, H)."""
        assert self._parts is not None, "the parts are installed"
        found: torch.Tensor | None = None
        for start, stop in itertools.pairwise(self._rows):
            with self._parts.rows(start, stop) as part:
                rows = F.embedding((ids - start).clamp_(0, stop - start - 1), part)
            if found is None:
                found = rows  # later parts replace the rows of their tokens
            else:
                torch.where(((ids >= start) & (ids < stop)).unsqueeze(-1), rows, found, out=found)
        assert found is not None, "a matrix has a part"
        return found

    def add_matrix_grads(self, ids: torch.Tensor, grad: torch.Tensor) -> None:
        """Makes the gradient of each part from that of the rows: (T) and (T, H)."""
        for (name, offset), (start, stop) in reversed(
            list(zip(self._names, itertools.pairwise(self._rows), strict=True))
        ):
            num_rows = stop - start
            is_here = (ids >= start) & (ids < stop)
            if self._padding_idx is not None:
                is_here &= ids != self._padding_idx
            # Tokens of other parts have an index that the kernel skips.
            local = torch.where(is_here, ids - start, num_rows)
            self._add_grad(name, offset, _aten.embedding_dense_backward(grad, local, num_rows, num_rows, False))


class _Rows(torch.autograd.Function):
    """The rows of tokens in an embedding. Autograd saves the tokens, and nothing of the matrix."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, anchor: torch.Tensor | None, embedding: CutEmbedding) -> torch.Tensor:
        if anchor is not None:
            ctx.save_for_backward(ids)
        ctx.embedding = embedding
        return embedding.rows(ids)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        ctx.embedding.add_matrix_grads(ids, grad)
        return None, None, None
