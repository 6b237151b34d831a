"""The gradient of a streamed layer on the device: pieces of its flat vector, in a few buffers that are reused.

Autograd reaches a layer's matrices one after the other. As soon as all of a piece's gradients are added, it is copied
to host memory, and its buffer serves the next piece. A piece that gets a further gradient comes back first. So sums
have the same order, and the same bits, as in one buffer of the whole layer. Only streams wait, not threads: the use of
a buffer waits for the copies from it and to it.
"""

import functools
import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from windlass.engine.device import Device, Event, Stream
from windlass.engine.memory_plan import NORM_ROW_NUMEL
from windlass.engine.model import GradBuffer
from windlass.engine.optimizer import NormInParts


class GradHome(Protocol):
    """The place of a block's gradient in host memory."""

    def store(self, source: torch.Tensor, start: int) -> None:
        """Copies a piece from the device. It begins at element `start`. For use as work of a stream."""

    def load(self, target: torch.Tensor, start: int) -> None:
        """Copies a piece to the device. It begins at element `start`. For use as work of a stream."""

    def moved(self, begun: Event, ended: Event, nbytes: int, *, is_out: bool) -> None:
        """Records that a piece was copied between these events. The stream's thread calls it."""


@dataclass(slots=True, eq=False)
class PieceSums:
    """The sums of a block's gradient so far, in host memory."""

    touched: set[str] = field(default_factory=set)  # names of the tensors that have a sum
    stored: dict[int, tuple[GradHome, Event]] = field(default_factory=dict)  # by piece; the event is after its copy


@dataclass(slots=True, eq=False)
class _Buffer:
    flat: torch.Tensor
    usable: Event  # after the last copy from the buffer, or to it
    piece: int | None = None  # the piece in it, or in flight to it; None: its contents have left, or are leaving


class GradPieceBuffers:
    """The buffers of all streamed layers' gradients, for one operation at a time.

    There are buffers for pieces, and smaller ones for the rest of a layer: norms and biases, which are reached
    throughout an operation. All methods except the constructor and `then` run as work of the compute stream.
    """

    def __init__(self, device: Device, pieces: Sequence[torch.Tensor], rests: Sequence[torch.Tensor]) -> None:
        """`pieces` and `rests` are the flat memory of each buffer, of the sizes in `grad_piece_numels`."""
        self.device = device
        self.dtype = pieces[0].dtype
        # Streams of their own, because in the others copies of other operations wait for their turn.
        self.h2d, self.d2h = device.open_stream(), device.open_stream()
        # Recorded after the allocations, because earlier kernels may still use the same memory.
        usable = device.compute.record()
        self.pieces = [_Buffer(flat, usable) for flat in pieces]
        self.rests = [_Buffer(flat, usable) for flat in rests]

    def wait_for_others(self, events: Sequence[Event]) -> None:
        """Makes the next operation wait for others' work in the same memory."""
        for event in events:
            self.device.compute.wait(event)
        if events:
            usable = self.device.compute.record()
            for buffer in (*self.pieces, *self.rests):
                buffer.usable = usable

    @property
    def ends(self) -> dict[int, Event]:
        """The ends of the last work in each buffer, between two operations."""
        return {number: buffer.usable for number, buffer in enumerate((*self.pieces, *self.rests))}

    def then(self, callback: Callable[[], None]) -> None:
        """Calls back when all pieces that have left until now are in host memory."""
        self.d2h.then(callback)


class StreamedGrad:
    """The gradient of a streamed layer during one operation. The caller must call `end` afterwards.

    All methods except the constructor run as work of the compute stream.
    """

    def __init__(
        self,
        buffers: GradPieceBuffers,
        bounds: Sequence[int],
        params: Sequence[tuple[str, int, int]],
        sums: PieceSums,
        home: GradHome,
        *,
        is_complete: bool,
    ) -> None:
        """Continues the sums of earlier micro-batches.

        Args:
            buffers: no other operation may use them before `end`.
            bounds: the first element of each piece in the flat vector, of the rest after them, and the rest's end.
            params: (name, offset, numel) of all tensors.
            sums: of the block in this step; it is changed.
            home: the pieces' place after the operation.
            is_complete: the operation completes the gradient.
        """
        self._buffers = buffers
        self._bounds = tuple(bounds)
        self._sums = sums
        self._home = home
        self._names: list[list[tuple[str, int, int]]] = [[] for _ in itertools.pairwise(bounds)]
        for name, offset, numel in params:
            self._names[self._piece_at(offset)].append((name, offset, numel))
        self._left: dict[int, set[str]] = {}  # by piece in a buffer: the tensors that this micro-batch has not reached
        self.norm = NormInParts(self._bounds, buffers.dtype, buffers.device.device) if is_complete else None

    def begin(self) -> None:
        """Has the sums that are needed first copied to the device."""
        self._bring(len(self._names) - 2)

    def add(self, name: str, offset: int, grad: torch.Tensor) -> None:
        """Adds one tensor's gradient at its place."""
        self._change(name, offset, lambda piece, place: piece.add(name, place, grad))

    def add_product(
        self, name: str, offset: int, left: torch.Tensor, right: torch.Tensor, *, in_fp32: bool = False
    ) -> None:
        """Adds `left.T @ right`, the gradient of a matrix; see `GradBuffer.add_product`."""
        self._change(name, offset, lambda piece, place: piece.add_product(name, place, left, right, in_fp32=in_fp32))

    def end(self) -> None:
        """Copies what is still on the device to host memory. A complete gradient is zero where nothing was added."""
        for piece, names in enumerate(self._names):
            if not names:
                continue
            stored = self._sums.stored.get(piece)
            if self.norm is None:
                if piece in self._left:
                    self._store(piece)
                continue
            untouched = [(offset, numel) for name, offset, numel in names if name not in self._sums.touched]
            if piece in self._left or untouched or stored is None or stored[0] is not self._home:
                flat, start = self._open(piece), self._bounds[piece]
                for offset, numel in untouched:
                    flat[offset - start : offset - start + numel].zero_()
                self._store(piece)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _change(self, name: str, offset: int, change: Callable[[GradBuffer, int], None]) -> None:
        piece = self._piece_at(offset)
        buffer = GradBuffer(self._open(piece), self._sums.touched)
        change(buffer, offset - self._bounds[piece])
        self._sums.touched.add(name)
        left = self._left[piece]
        left.discard(name)
        if not left:
            self._store(piece)
        if piece != len(self._names) - 1:
            self._bring(piece - 1)  # the backward pass goes from the end to the start

    def _piece_at(self, offset: int) -> int:
        return bisect_right(self._bounds, offset, hi=len(self._bounds) - 1) - 1

    def _buffers_of(self, piece: int) -> list[_Buffer]:
        return self._buffers.rests if piece == len(self._names) - 1 else self._buffers.pieces

    def _view(self, buffer: _Buffer, piece: int) -> torch.Tensor:
        start, stop = self._bounds[piece : piece + 2]
        # A GPU's kernels reduce rows of a misaligned piece in another order; see `NormInParts`.
        shift = start % NORM_ROW_NUMEL
        return buffer.flat[shift : shift + stop - start]

    def _open(self, piece: int) -> torch.Tensor:
        """Returns a piece's sums so far, for work of the compute stream."""
        buffer = next((b for b in self._buffers_of(piece) if b.piece == piece), None) or self._fill(piece)
        self._buffers.device.compute.wait(buffer.usable)
        return self._view(buffer, piece)

    def _fill(self, piece: int) -> _Buffer:
        """Takes the buffer that was used least recently, and has the piece's sums copied to it if there are any."""
        buffers = self._buffers_of(piece)
        buffer = next((b for b in buffers if b.piece is None), buffers[0])
        if buffer.piece is not None:
            self._store(buffer.piece)  # it comes back if it gets a further gradient
        buffers.remove(buffer)
        buffers.append(buffer)
        buffer.piece, self._left[piece] = piece, {name for name, *_ in self._names[piece]}
        if piece in self._sums.stored:
            home, stored = self._sums.stored[piece]
            stream, target = self._buffers.h2d, self._view(buffer, piece)
            stream.wait(buffer.usable)
            stream.wait(stored)
            buffer.usable = self._copy(stream, home, functools.partial(home.load, target), piece, is_out=False)
        return buffer

    def _bring(self, piece: int) -> None:
        """Has a piece's sums copied to a free buffer, if there are any."""
        buffers = self._buffers.pieces
        if piece in self._sums.stored and piece not in self._left and any(b.piece is None for b in buffers):
            self._fill(piece)

    def _store(self, piece: int) -> None:
        """Has a piece copied to host memory, after all queued work of the compute stream."""
        buffer = next(b for b in self._buffers_of(piece) if b.piece == piece)
        device, stream, view = self._buffers.device, self._buffers.d2h, self._view(buffer, piece)
        device.compute.wait(buffer.usable)
        if self.norm is not None:
            self.norm.put(view, self._bounds[piece])
        stream.wait(device.compute.record())
        stored = self._copy(stream, self._home, functools.partial(self._home.store, view), piece, is_out=True)
        device.poison(buffer.flat, stream)
        buffer.piece, buffer.usable = None, stream.record()
        self._sums.stored[piece] = self._home, stored
        del self._left[piece]

    def _copy(self, stream: Stream, home: GradHome, copy: Callable[[int], None], piece: int, *, is_out: bool) -> Event:
        start, stop = self._bounds[piece : piece + 2]
        begun = stream.record()
        stream.run(functools.partial(copy, start))
        ended = stream.record()
        nbytes = (stop - start) * self._buffers.dtype.itemsize
        stream.then(functools.partial(home.moved, begun, ended, nbytes, is_out=is_out))
        return ended
