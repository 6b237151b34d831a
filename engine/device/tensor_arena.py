"""An arena's bytes as tensors."""

from dataclasses import dataclass

import torch

from windlass.storage.ids import Span
from windlass.storage.memory import Arena


@dataclass(frozen=True, slots=True, eq=False)
class TensorArena:
    """The bytes of an arena. The arena may be closed when no tensor of it is used any more."""

    memory: torch.Tensor  # flat uint8; the offsets of spans count from its start

    @classmethod
    def of(cls, arena: Arena) -> "TensorArena":
        """Returns the bytes of an arena, without a copy."""
        return cls(torch.frombuffer(arena.buffer(Span(0, arena.nbytes)), dtype=torch.uint8))

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns the bytes from `offset` on as a flat tensor of `numel` elements."""
        return self.memory[offset : offset + numel * dtype.itemsize].view(dtype)
