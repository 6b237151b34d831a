"""Whole layers in memory that are lent in pieces: for the check of an architecture, and for tests."""

from collections.abc import Mapping, Sequence

import torch

from windlass.engine.device import Device, Event, copy
from windlass.engine.memory_plan import NUM_PIECE_BUFFERS, cut_layers, largest_piece
from windlass.engine.model.partition import Partition
from windlass.engine.model.streamed_params import PieceBuffers, StreamedParams
from windlass.storage.ids import BlockIndex


class _Whole:
    """A PieceSource that lies in one tensor."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat

    def load(self, target: torch.Tensor, start: int) -> None:
        """See PieceSource."""
        copy(target, self._flat[start : start + target.numel()])

    def loaded(self, begun: Event, copied: Event, nbytes: int) -> None:
        """See PieceSource."""


class StreamedFlats:
    """Cuts some layers of a model as a job would, with buffers for them."""

    def __init__(self, partition: Partition, layers: Sequence[BlockIndex], device: Device) -> None:
        blocks = partition.layout.blocks
        self._bounds = dict(
            zip(layers, cut_layers([blocks[layer].decay_numels_by_module for layer in layers]), strict=True)
        )
        dtype = next(partition.model.parameters()).dtype
        numel = largest_piece(list(self._bounds.values()))
        self.buffers = PieceBuffers(device, numel, dtype, NUM_PIECE_BUFFERS)

    def of(self, flats: Mapping[BlockIndex, torch.Tensor]) -> dict[BlockIndex, torch.Tensor | StreamedParams]:
        """What a runner is lent for one operation, from whole flat params."""
        return {block: self._streamed(block, flat) if block in self._bounds else flat for block, flat in flats.items()}

    def close(self) -> None:
        """Ends the thread that copies."""
        self.buffers.close()

    def _streamed(self, block: BlockIndex, flat: torch.Tensor) -> StreamedParams:
        bounds = self._bounds[block]
        return StreamedParams(self.buffers, _Whole(flat), bounds, flat[bounds[-1] :])
