"""A streamed layer's params on the device: pieces of its flat vector, in a few buffers that are filled again and again.

While an operation is computed, what needs a piece holds it, and lets it go; the buffer that was let go of longest ago
takes the next piece. Streams wait for each other, no thread does: a copy comes after what used its buffer before, and
what uses a piece after its copy. The piece that followed the last time in the same place is copied ahead.
"""

import functools
from dataclasses import dataclass
from typing import Protocol

import torch

from windlass.engine.device import Device, Event
from windlass.storage.ids import BlockIndex


class PieceBuffersHeldError(RuntimeError):
    """A layer needs more pieces of its params at once than there are buffers for."""


class PieceSource(Protocol):
    """A block's params in host memory, which stay there until the operation is computed."""

    def load(self, target: torch.Tensor, start: int) -> None:
        """Fills a flat tensor of the device with the elements from `start` on. Work for a stream."""

    def loaded(self, begun: Event, copied: Event, nbytes: int) -> None:
        """A piece was copied between these events. Called by a thread of the stream's."""


@dataclass(frozen=True, slots=True, eq=False)
class StreamedParams:
    """The params of a layer for one operation: pieces that come when they are needed, and the rest of them as it is."""

    buffers: "PieceBuffers"
    source: PieceSource
    bounds: tuple[int, ...]  # the first element of each piece in the flat vector, and the end of the last
    rest: torch.Tensor  # on the device: the elements that follow


# Where an operation is in its way through the pieces: its block, whether it goes backward through it; whether this is
# its last micro-batch, and goes backward already; the piece that was held last, None before the first.
_Moment = tuple[BlockIndex, bool, bool, bool, int | None]


@dataclass(slots=True, eq=False)
class _Buffer:
    flat: torch.Tensor
    unused: Event  # after what used it last
    piece: int | None = None  # what lies there, or is on its way
    copied: Event | None = None  # what the compute stream has not waited for
    num_holders: int = 0


class PieceBuffers:
    """Buffers of one size for the pieces of all streamed layers, for one operation at a time.

    All but the constructor is work of the compute stream's.
    """

    def __init__(self, device: Device, numel: int, dtype: torch.dtype, num_buffers: int) -> None:
        self._device = device
        # Not the one that brings other params: copies for later operations wait there for operations before them.
        self._stream = device.open_stream()
        unused = device.compute.record()
        # That which was let go of longest ago first.
        self._buffers = [
            _Buffer(torch.empty(numel, dtype=dtype, device=device.device), unused) for _ in range(num_buffers)
        ]
        self._followers: dict[_Moment, int] = {}
        self._params: StreamedParams | None = None
        self._moment: _Moment | None = None
        self.is_last = False  # micro-batch of the operation: what follows it is not copied ahead

    def begin(self, params: StreamedParams, block: BlockIndex, *, goes_backward: bool) -> None:
        """An operation begins; what is copied first follows from the last time."""
        self.end()
        self._params = params
        self._moment = (block, goes_backward, False, False, None)
        self._copy_ahead()

    def end(self) -> None:
        """What the compute stream is given from now on is after all copies, and has no pieces any more."""
        for buffer in self._buffers:
            if buffer.copied is not None:
                self._device.compute.wait(buffer.copied)
            if buffer.num_holders:
                buffer.num_holders = 0
                self._device.poison(buffer.flat, self._device.compute)
                buffer.unused = self._device.compute.record()
            buffer.piece = buffer.copied = None
        self._params = self._moment = None

    def close(self) -> None:
        """Ends the stream's thread."""
        self._stream.close()

    def hold(self, piece: int, *, backward: bool) -> torch.Tensor:
        """A piece, for what the compute stream is given until `let_go`. `backward`: for a gradient's sake.

        Raises:
            PieceBuffersHeldError: all buffers are held.
        """
        buffer = next((each for each in self._buffers if each.piece == piece), None) or self._fill(piece)
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
        start, stop = self._params.bounds[piece : piece + 2]
        return buffer.flat[: stop - start]

    def let_go(self, piece: int) -> None:
        """What follows does not use it, unless it is held again; once for each `hold`."""
        (buffer,) = (each for each in self._buffers if each.piece == piece)
        buffer.num_holders -= 1
        if not buffer.num_holders:
            if self._device.poisons_released:
                self._device.poison(buffer.flat, self._device.compute)
                buffer.piece = None
            buffer.unused = self._device.compute.record()
            self._buffers.remove(buffer)
            self._buffers.append(buffer)

    def place_of(self, tensor: torch.Tensor) -> int | None:
        """Where a tensor that lies in a piece begins: bytes from the start of its layer's flat vector."""
        address = tensor.data_ptr()
        for buffer in self._buffers:
            offset = address - buffer.flat.data_ptr()
            if self._params is not None and buffer.piece is not None and 0 <= offset < buffer.flat.nbytes:
                return self._params.bounds[buffer.piece] * buffer.flat.itemsize + offset
        return None

    def _copy_ahead(self) -> None:
        """Where the last operation that came here went on with a piece, that is on its way before it is asked for."""
        assert self._moment is not None
        piece = self._followers.get(self._moment)
        is_there = any(buffer.piece == piece for buffer in self._buffers)
        if piece is not None and not is_there and not all(buffer.num_holders for buffer in self._buffers):
            self._fill(piece)

    def _fill(self, piece: int) -> _Buffer:
        assert self._params is not None
        buffer = next((each for each in self._buffers if not each.num_holders), None)
        if buffer is None:
            raise PieceBuffersHeldError(
                f"a layer whose params come to the device in pieces needs more than {len(self._buffers)} pieces at "
                "once; leave its block out of streamed_blocks"
            )
        start, stop = self._params.bounds[piece : piece + 2]
        target, source, stream = buffer.flat[: stop - start], self._params.source, self._stream
        stream.wait(buffer.unused)
        begun = stream.record()
        stream.run(functools.partial(source.load, target, start))
        buffer.piece, buffer.copied = piece, stream.record()
        stream.then(functools.partial(source.loaded, begun, buffer.copied, target.nbytes))
        return buffer
