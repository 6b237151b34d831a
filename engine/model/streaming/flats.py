"""Streams blocks that are whole in memory in pieces, for the check of an architecture and for tests."""

from collections.abc import Mapping, Sequence

import torch

from windlass.engine.device import Device, Event, copy
from windlass.engine.linear_parts import Columns
from windlass.engine.memory_plan import NUM_PIECE_BUFFERS, cut_layers, largest_piece
from windlass.engine.model import Partition
from windlass.engine.model.streaming.params import PieceBuffers, StreamedParams
from windlass.storage.ids import BlockIndex


class _Whole:
    """A PieceSource that reads from one tensor."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat

    def load(self, target: torch.Tensor, start: int) -> None:
        """See PieceSource."""
        copy(target, self._flat[start : start + target.numel()])

    def load_columns(self, target: torch.Tensor, columns: Columns) -> None:
        """See PieceSource."""
        columns.load(target, self._flat, 0)

    def loaded(self, begun: Event, copied: Event, nbytes: int) -> None:
        """See PieceSource."""


class StreamedFlats:
    """Cuts blocks of a model into pieces like a job, and has buffers for the pieces."""

    def __init__(
        self, partition: Partition, streamed: Sequence[BlockIndex], device: Device, *, cut_matrices: int | None = None
    ) -> None:
        """`cut_matrices`: as in the job's `TrainingConfig`."""
        blocks = partition.layout.blocks
        numels = [blocks[block].part_numels_by_module(cut_matrices) for block in streamed]
        self._bounds = dict(zip(streamed, cut_layers(numels), strict=True))
        dtype = next(partition.model.parameters()).dtype
        numel = largest_piece(list(self._bounds.values()))
        self.buffers = PieceBuffers(device, numel, dtype, NUM_PIECE_BUFFERS)

    def of(self, flats: Mapping[BlockIndex, torch.Tensor]) -> dict[BlockIndex, torch.Tensor | StreamedParams]:
        """Converts whole flat params to the arguments of `BlockRunner.install` for one operation."""
        return {block: self._streamed(block, flat) if block in self._bounds else flat for block, flat in flats.items()}

    def _streamed(self, block: BlockIndex, flat: torch.Tensor) -> StreamedParams:
        bounds = self._bounds[block]
        return StreamedParams(self.buffers, _Whole(flat), bounds, flat[bounds[-1] :])
