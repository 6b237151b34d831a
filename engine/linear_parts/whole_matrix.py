"""The parts of a matrix that lies whole on the device."""

import contextlib
from collections.abc import Iterator

import torch


class WholeMatrix:
    """A MatrixParts. Columns are copied, because kernels may give other bits for an operand with another stride."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self._matrix = matrix

    @contextlib.contextmanager
    def rows(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """See MatrixParts."""
        yield self._matrix[start:stop]

    @contextlib.contextmanager
    def columns(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """See MatrixParts."""
        yield self._matrix[:, start:stop].contiguous()
