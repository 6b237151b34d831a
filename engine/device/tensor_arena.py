"""An arena's bytes as tensors."""

import torch

from windlass.storage.ids import Span
from windlass.storage.memory import Arena


class TensorArena:
    """The bytes of an arena. The arena stays mapped until `release` and the end of the last tensor of a `view`."""

    def __init__(self, memory: torch.Tensor) -> None:
        """`memory` is flat uint8; the offsets of spans count from its start."""
        self._memory: torch.Tensor | None = memory

    @classmethod
    def of(cls, arena: Arena) -> "TensorArena":
        """Returns the bytes of an arena, without a copy."""
        return cls(torch.frombuffer(arena.buffer(Span(0, arena.nbytes)), dtype=torch.uint8))

    @property
    def memory(self) -> torch.Tensor:
        """All bytes, as flat uint8. Only for `pin`, `unpin` and short-lived slices."""
        assert self._memory is not None, "no tensor is made after `release`"
        return self._memory

    def release(self) -> None:
        """Drops the bytes, for all who share this object. It may be called again."""
        self._memory = None

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns the bytes from `offset` on as a flat tensor of `numel` elements."""
        return self.memory[offset : offset + numel * dtype.itemsize].view(dtype)
