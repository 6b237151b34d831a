"""The squared norms of a gradient's chunks, where the gradient comes in pieces."""

import torch

from windlass.engine.memory_plan import NUM_GATHERED_CHUNKS
from windlass.engine.optimizer import portable_squared_norms


class ChunkNorms:
    """Computes `portable_squared_norm` of each chunk of a flat fp32 tensor that is put part by part, each part once.

    The additions of a chunk have one order. So a chunk that lies in several parts is gathered in memory of its own,
    until the last of them is put. At most `NUM_GATHERED_CHUNKS` are gathered at once, if the caller puts parts in this
    order: first those for which there is room (`has_room`), then the others from the first one on. The latter gather
    one chunk at a time.
    """

    def __init__(self, numel: int, chunk_numel: int, device: torch.device) -> None:
        """`numel`: of the whole tensor. The last chunk may be shorter than `chunk_numel`."""
        self._numel, self._chunk_numel, self._device = numel, chunk_numel, device
        self._norms: dict[int, torch.Tensor] = {}  # by chunk
        self._gathered: dict[int, torch.Tensor] = {}  # by chunk
        self._num_missing: dict[int, int] = {}  # elements, by chunk that is gathered

    def has_room(self, start: int, stop: int) -> bool:
        """Returns whether the part from `start` to `stop` can be put before the end."""
        num_gathered = len(self._gathered)
        for chunk in self._ends_of(start, stop):
            first, last = self._range_of(chunk)
            num_missing = self._num_missing.get(chunk, last - first) - (min(stop, last) - max(start, first))
            num_gathered += (num_missing > 0) - (chunk in self._gathered)
        return num_gathered < NUM_GATHERED_CHUNKS

    def put(self, part: torch.Tensor, start: int) -> None:
        """Adds a part that begins at element `start`. Parts come in any order."""
        size, stop = self._chunk_numel, start + part.numel()
        first = -(-start // size)
        last = -(-self._numel // size) if stop == self._numel else stop // size
        if first < last:
            whole = portable_squared_norms(part[first * size - start : last * size - start], size)
            self._norms.update(zip(range(first, last), whole, strict=True))
        for chunk in self._ends_of(start, stop):
            self._gather(chunk, part, start)

    def total(self) -> list[torch.Tensor]:
        """Returns the norms in the chunks' order, as 0-dim fp64 tensors on the device. All parts must be there."""
        return [self._norms[chunk] for chunk in range(max(1, -(-self._numel // self._chunk_numel)))]

    def _range_of(self, chunk: int) -> tuple[int, int]:
        return chunk * self._chunk_numel, min((chunk + 1) * self._chunk_numel, self._numel)

    def _ends_of(self, start: int, stop: int) -> list[int]:
        """Returns the first and last chunk of a part that lack a norm, those first that it may complete."""
        chunks = {start // self._chunk_numel, (stop - 1) // self._chunk_numel} if start < stop else set[int]()
        return sorted(chunks - self._norms.keys(), key=lambda chunk: (chunk not in self._gathered, chunk))

    def _gather(self, chunk: int, part: torch.Tensor, start: int) -> None:
        first, stop = self._range_of(chunk)
        if chunk not in self._gathered:
            self._gathered[chunk] = torch.empty(stop - first, dtype=torch.float32, device=self._device)
            self._num_missing[chunk] = stop - first
        low, high = max(start, first), min(start + part.numel(), stop)
        self._gathered[chunk][low - first : high - first].copy_(part[low - start : high - start])
        self._num_missing[chunk] -= high - low
        if not self._num_missing[chunk]:
            del self._num_missing[chunk]
            (self._norms[chunk],) = portable_squared_norms(self._gathered.pop(chunk), self._chunk_numel)
