"""The buffer in which a block's gradient is summed."""

from collections.abc import Iterable, Sequence

import torch


class GradBuffer:
    """The gradient of one block on the device, flat, accumulated over micro-batches in the buffer's dtype."""

    def __init__(self, flat: torch.Tensor, touched: Iterable[str] = ()) -> None:
        """`touched`: names of the tensors whose sums are already in the buffer; the rest of it is undefined."""
        self.flat = flat
        self.touched = set(touched)

    def add(self, name: str, offset: int, grad: torch.Tensor) -> None:
        """Adds one tensor's gradient at its place."""
        view = self.flat[offset : offset + grad.numel()]
        if name in self.touched:
            view.add_(grad.reshape(-1))
        else:
            view.copy_(grad.reshape(-1))
            self.touched.add(name)

    def merge(self, other: "GradBuffer", params: Sequence[tuple[str, int, int]]) -> None:
        """Adds the sums of another buffer of the same block. `params`: (name, offset, numel)."""
        for name, offset, numel in params:
            if name in other.touched:
                self.add(name, offset, other.flat[offset : offset + numel])

    def finish(self, params: Sequence[tuple[str, int, int]]) -> None:
        """Zeroes tensors without a gradient, such as an expert without tokens. `params`: (name, offset, numel)."""
        for name, offset, numel in params:
            if name not in self.touched:
                self.flat[offset : offset + numel].zero_()
