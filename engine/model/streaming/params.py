"""A streamed layer's params on the device: pieces of its flat vector, in a few buffers that are reused.

During an operation a module or graph node holds a piece and then releases it. The next piece goes into the least
recently released buffer. Only streams wait, not threads: a copy waits for its buffer's last use, and the use of a piece
waits for its copy. The piece that followed at the same point in the last step is prefetched.
"""

import functools
from dataclasses import dataclass
from typing import Protocol

import torch

from windlass.engine.device import Device, Event
from windlass.engine.linear_parts import Columns
from windlass.storage.ids import BlockIndex


class PieceBuffersHeldError(RuntimeError):
    """A layer needs more pieces of its params at once than there are buffers."""


# A piece is on the device at once: one of the flat vector, by its index, or columns of a matrix that is cut.
Piece = int | Columns


class PieceSource(Protocol):
    """A block's params in host memory, which stay there until the operation is over."""

    def load(self, target: torch.Tensor, start: int) -> None:
        """Fills a flat device tensor with the elements from `start` on. For use as work of a stream."""

    def load_columns(self, target: torch.Tensor, columns: Columns) -> None:
        """Fills a flat device tensor with columns of a matrix, row by row. For use as work of a stream."""

    def loaded(self, begun: Event, copied: Event, nbytes: int) -> None:
        """Records that a piece was copied between these events. The stream's thread calls it."""


@dataclass(frozen=True, slots=True, eq=False)
class StreamedParams:
    """The params of a layer for one operation: pieces that are copied on demand, and the rest on the device."""

    buffers: "PieceBuffers"
    source: PieceSource
    bounds: tuple[int, ...]  # the first element of each piece in the flat vector, and the end of the last
    rest: torch.Tensor  # on the device: the elements after the last piece


# The point of an operation: its block, whether it is a backward operation, whether this is its last micro-batch,
# whether the piece was held for a graph node, and the piece that was held last (None before the first).
_Moment = tuple[BlockIndex, bool, bool, bool, Piece | None]


@dataclass(slots=True, eq=False)
class _Buffer:
    flat: torch.Tensor
    unused: Event  # ends its last use
    piece: Piece | None = None  # the piece in it, or in flight to it
    copied: Event | None = None  # ends the copy; None once the compute stream has waited for it
    num_holders: int = 0


class PieceBuffers:
    """Buffers of equal size for the pieces of all streamed layers, for one operation at a time.

    All methods except the constructor run as work of the compute stream.
    """

    def __init__(self, device: Device, numel: int, dtype: torch.dtype, num_buffers: int) -> None:
        self._device = device
        # A stream of its own, because in h2d the copies for later operations wait for earlier operations.
        self._stream = device.open_stream()
        flats = [torch.empty(numel, dtype=dtype, device=device.device) for _ in range(num_buffers)]
        # Recorded after the allocations, because earlier kernels may still use the same memory.
        unused = device.compute.record()
        # Ordered by the time of their release, the least recent first.
        self._buffers = [_Buffer(flat, unused) for flat in flats]
        self._followers: dict[_Moment, Piece] = {}
        self._params: StreamedParams | None = None
        self._moment: _Moment | None = None
        self.is_last = False  # this is the operation's last micro-batch: nothing is prefetched after it

    def begin(self, params: StreamedParams, block: BlockIndex, *, goes_backward: bool) -> None:
        """Begins an operation, and prefetches the piece that was first in the block's last operation."""
        self.end()
        self._params = params
        self._moment = (block, goes_backward, False, False, None)
        self._copy_ahead()

    def end(self) -> None:
        """Ends an operation: the compute stream waits for all copies, and all pieces are released."""
        for buffer in self._buffers:
            if buffer.copied is not None:
                self._device.compute.wait(buffer.copied)
            if buffer.num_holders:
                buffer.num_holders = 0
                self._device.poison(buffer.flat, self._device.compute)
                buffer.unused = self._device.compute.record()
            buffer.piece = buffer.copied = None
        self._params = self._moment = None

    def hold(self, piece: Piece, *, backward: bool) -> torch.Tensor:
        """Acquires a piece for work of the compute stream until `release`. `backward`: for a node of the backward pass.

        Returns its elements, flat.

        Raises:
            PieceBuffersHeldError: all buffers are held.
        """
        buffer = next((b for b in self._buffers if b.piece == piece), None) or self._fill(piece)
        buffer.num_holders += 1
        if buffer.copied is not None:
            self._device.compute.wait(buffer.copied)
            buffer.copied = None
        assert self._params is not None
        assert self._moment is not None
        if self._moment[-1] != piece:
            self._followers[self._moment] = piece
        self._moment = (*self._moment[:2], self.is_last, backward, piece)
        self._copy_ahead()
        return buffer.flat[: self._numel_of(piece)]

    def release(self, piece: Piece) -> None:
        """Releases a piece. Call it once for each `hold`."""
        (buffer,) = (b for b in self._buffers if b.piece == piece)
        buffer.num_holders -= 1
        if not buffer.num_holders:
            if self._device.poisons_released:
                self._device.poison(buffer.flat, self._device.compute)
                buffer.piece = None
            buffer.unused = self._device.compute.record()
            self._buffers.remove(buffer)
            self._buffers.append(buffer)

    def place_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the byte offset in the flat vector of a tensor in a piece, None for other tensors."""
        address = tensor.data_ptr()
        for buffer in self._buffers:
            offset = address - buffer.flat.data_ptr()
            if self._params is not None and isinstance(buffer.piece, int) and 0 <= offset < buffer.flat.nbytes:
                return self._params.bounds[buffer.piece] * buffer.flat.itemsize + offset
        return None

    def _copy_ahead(self) -> None:
        """Prefetches the piece that followed at this point in the last operation."""
        assert self._moment is not None
        piece = self._followers.get(self._moment)
        is_present = any(buffer.piece == piece for buffer in self._buffers)
        if piece is not None and not is_present and not all(buffer.num_holders for buffer in self._buffers):
            self._fill(piece)

    def _numel_of(self, piece: Piece) -> int:
        if isinstance(piece, Columns):
            return piece.numel
        assert self._params is not None
        start, stop = self._params.bounds[piece : piece + 2]
        return stop - start

    def _fill(self, piece: Piece) -> _Buffer:
        assert self._params is not None
        buffer = next((b for b in self._buffers if not b.num_holders), None)
        if buffer is None:
            raise PieceBuffersHeldError(
                f"a block whose params come to the device in pieces needs more than {len(self._buffers)} pieces at "
                "once; leave it out of streamed_blocks, or leave streams_ends out"
            )
        target, source, stream = buffer.flat[: self._numel_of(piece)], self._params.source, self._stream
        stream.wait(buffer.unused)
        begun = stream.record()
        if isinstance(piece, Columns):
            stream.run(functools.partial(source.load_columns, target, piece))
        else:
            stream.run(functools.partial(source.load, target, self._params.bounds[piece]))
        buffer.piece, buffer.copied = piece, stream.record()
        stream.then(functools.partial(source.loaded, begun, buffer.copied, target.nbytes))
        return buffer
