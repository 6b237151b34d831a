"""The gradient of a streamed block on the device: pieces of its flat vector, in a few buffers that are reused.

Autograd reaches a layer's matrices one after the other. As soon as all of a piece's gradients are added, it is copied
to host memory, and its buffer serves the next piece. A piece that gets a further gradient comes back first. So sums
have the same order, and the same bits, as in one buffer of the whole layer. Only streams wait, not threads: the use of
a buffer waits for the copies from it and to it.

The head goes over slices of a micro-batch, and each adds to all of its tensors. So its pieces come back for each slice.
Where the sum is wider than the gradient, a piece is rounded when it leaves for the last time.

With several lanes, a lane's sum and the total of the lanes before are two sums of a piece. In the lane's last
micro-batch the total comes to the device, too, and the piece leaves as the new total. In the head it is the last slice
of that micro-batch.
"""

import functools
import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from windlass.engine.device import Device, Event, Stream, round_in_place
from windlass.engine.lanes import LaneDivision
from windlass.engine.memory_plan import NORM_ROW_NUMEL
from windlass.engine.model import GradBuffer
from windlass.engine.optimizer import NormInParts
from windlass.engine.pieces.chunk_norms import ChunkNorms


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
    # By piece. The event is after its copy; None: it is over.
    stored: dict[int, tuple[GradHome, Event | None]] = field(default_factory=dict)


class SecondGradientError(RuntimeError):
    """A tensor gets two gradients in the last micro-batch of a sum, after which its piece has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceLanes:
    """The lanes of a job with several ones, for one operation. Its group of micro-batches has whole lanes."""

    division: LaneDivision
    last: int  # the last lane of the group in a full step
    home: GradHome | None  # the place of a lane's sum between micro-batches; None: a later lane has one only
    chunk_numel: int  # elements of a chunk of the block, for its norms


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedSums:
    """The total of an operation that completes a gradient, in a type that may be wider than that of the gradient."""

    between: GradHome  # its place until all is added, in the buffers' dtype
    last_microbatch: int  # of a full step: after it, or its last slice, all is added
    dtype: torch.dtype  # of the complete gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedSums:
    """The sum of a tied block's own operation, which completes the gradient. The total has that of the other use.

    It is added to the total in the last micro-batch, tensor by tensor, as a lane is.
    """

    own: PieceSums  # so far
    own_home: GradHome | None  # its place between micro-batches; None: there is one only


@dataclass(slots=True, eq=False)
class _Buffer:
    flat: torch.Tensor
    usable: Event  # after the last copy from the buffer, or to it
    piece: int | None = None  # the piece in it, or in flight to it; None: its contents have left, or are leaving
    is_lane: bool = False  # the piece's sum of a lane behind the first one; else its total
    is_changed: bool = False  # something was added since it was filled


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
        moves: bool = True,
        lanes: PieceLanes | None = None,
        rounded: RoundedSums | None = None,
        tied: TiedSums | None = None,
    ) -> None:
        """Continues the sums of earlier micro-batches.

        Args:
            buffers: no other operation may use them before `end`.
            bounds: the first element of each piece in the flat vector, of the rest after them, and the rest's end.
            params: (name, offset, numel) of all tensors.
            sums: the total of the block in this step; it is changed.
            home: the pieces' place after the operation.
            is_complete: the operation completes the gradient.
            moves: pieces to which nothing is added come to `home`, too.
            lanes: None if there is only one.
            rounded: of an operation that completes a gradient whose sums are in fp32. It has one lane.
            tied: of the operation that completes a tied block's gradient. It is `rounded`.
        """
        self._buffers = buffers
        self._bounds = tuple(bounds)
        self._total = sums
        # Of the open lane, if it is not the first one; or of a tied block's own operation.
        self._lane: PieceSums | None = None if tied is None else tied.own
        self._lane_home = lanes.home if lanes is not None else tied.own_home if tied is not None else None
        self._rounding = rounded
        self._is_tied = tied is not None
        self._home = home
        self._names: list[list[tuple[str, int, int]]] = [[] for _ in itertools.pairwise(bounds)]
        for name, offset, numel in params:
            self._names[self._piece_at(offset)].append((name, offset, numel))
        # By piece whose open sum is in a buffer: the tensors that this micro-batch has not reached.
        self._left: dict[int, set[str]] = {}
        self._is_complete, self._moves, self._lanes = is_complete, moves, lanes
        self._ends_lane = self._is_last_lane = False  # of the current micro-batch, or slice of it
        self._ends_lane_later = False  # of the current micro-batch, after its last slice
        self._completes = False  # the current slice is the last one that adds to a rounded total
        self._completes_later = False  # the current micro-batch is, after its last slice
        # Tensors that get no further gradient: those of the open lane that are in the total already, and rounded ones.
        self._ended: set[str] = set()
        self._normed: set[int] = set()  # pieces in `norms`
        device = buffers.device.device
        self._dtype = buffers.dtype if rounded is None else rounded.dtype  # of a complete gradient
        self.norm = NormInParts(self._bounds, self._dtype, device) if is_complete and lanes is None else None
        self.norms = ChunkNorms(self._bounds[-1], lanes.chunk_numel, device) if is_complete and lanes else None

    def begin(self) -> None:
        """Has the sums that are needed first copied to the device."""
        if self._lanes is None:
            self._bring(len(self._names) - 2)

    def begin_microbatch(self, microbatch: int) -> None:
        """See LaneSink."""
        for piece in self._left:
            self._left[piece] = self._names_of(piece)
        self._completes_later = self._rounding is not None and microbatch == self._rounding.last_microbatch
        if self._is_tied:
            self._ends_lane = self._is_last_lane = self._completes_later
            self._bring(len(self._names) - 2)
        if self._lanes is not None:
            lane = self._lanes.division.lane_of(microbatch)
            if lane > 0 and self._lane is None:
                self._lane = PieceSums()
            self._ends_lane = self._ends_lane_later = lane > 0 and self._lanes.division.ends_lane(microbatch)
            self._is_last_lane = lane == self._lanes.last
            self._bring(len(self._names) - 2)

    def begin_slice(self, *, is_last: bool) -> None:
        """See SliceSink."""
        for piece in self._left:
            self._left[piece] = self._names_of(piece)
        self._ends_lane = self._ends_lane_later and is_last
        self._completes = self._completes_later and is_last
        self._bring(len(self._names) - 2)

    def end_lane(self) -> None:
        """See LaneSink. All sums of the lane are added to the total."""
        if self._lane is not None:
            for piece, names in enumerate(self._names):
                if any(name in self._lane.touched for name, *_ in names):
                    self._merge(self._open(piece), is_over=True)
            self._lane, self._ends_lane = None, False
            self._ends_lane_later = False
            self._ended.clear()
        for buffer in (*self._buffers.pieces, *self._buffers.rests):
            if buffer.piece is not None:
                self._evict(buffer)

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
        self._is_last_lane = False  # lanes may be missing, and pieces without a norm come back for it in order
        if self._lane is not None:
            self.end_lane()
        for piece, names in enumerate(self._names):
            buffer = self._buffer_of(piece, is_lane=False)
            stored = self._total.stored.get(piece)
            is_elsewhere = stored is not None and stored[0] is not self._home
            needs_store = (buffer is not None and buffer.is_changed) or (is_elsewhere and self._moves)
            untouched = [(offset, numel) for name, offset, numel in names if name not in self._total.touched]
            if self._is_complete and names:
                lacks_norm = self.norms is not None and piece not in self._normed
                needs_store |= bool(untouched) or stored is None or lacks_norm
            if needs_store:
                buffer = self._open(piece)
                flat, start = self._view(buffer, piece), self._bounds[piece]
                for offset, numel in untouched if self._is_complete else ():
                    flat[offset - start : offset - start + numel].zero_()
                self._store(buffer, is_final=True)
            elif buffer is not None:
                self._evict(buffer)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _change(self, name: str, offset: int, change: Callable[[GradBuffer, int], None]) -> None:
        if name in self._ended:
            advice = "Give" if self._lanes is None else "Train with lanes=1, or give"
            raise SecondGradientError(
                f"{name} gets two gradients in one micro-batch. Where gradients leave the device in pieces and are "
                f"summed in several lanes, or rounded at the end, that would change bits. {advice} the job enough "
                "memory of the device, so that its gradients need not leave in pieces"
            )
        piece = self._piece_at(offset)
        buffer = self._open(piece)
        sums = GradBuffer(self._view(buffer, piece), self._open_sums.touched)
        change(sums, offset - self._bounds[piece])
        self._open_sums.touched.add(name)
        buffer.is_changed = True
        left = self._left[piece]
        left.discard(name)
        if not left and self._ends_lane:
            self._merge(buffer, is_over=True)
        elif not left:
            self._store(buffer, is_final=self._completes)
        elif self._ends_lane:
            self._bring(piece)
        if piece != len(self._names) - 1:
            self._bring(piece - 1)  # the backward pass goes from the end to the start

    @property
    def _open_sums(self) -> PieceSums:
        """The sums that gradients are added to: of a lane behind the first one, or the total."""
        return self._total if self._lane is None else self._lane

    def _names_of(self, piece: int) -> set[str]:
        return {name for name, *_ in self._names[piece]}

    def _piece_at(self, offset: int) -> int:
        return bisect_right(self._bounds, offset, hi=len(self._bounds) - 1) - 1

    def _buffers_for(self, piece: int) -> list[_Buffer]:
        return self._buffers.rests if piece == len(self._names) - 1 else self._buffers.pieces

    def _buffer_of(self, piece: int, *, is_lane: bool) -> _Buffer | None:
        return next((b for b in self._buffers_for(piece) if b.piece == piece and b.is_lane == is_lane), None)

    def _view(self, buffer: _Buffer, piece: int) -> torch.Tensor:
        start, stop = self._bounds[piece : piece + 2]
        # A GPU's kernels reduce rows of a misaligned piece in another order; see `NormInParts`.
        shift = start % NORM_ROW_NUMEL
        return buffer.flat[shift : shift + stop - start]

    def _open(self, piece: int) -> _Buffer:
        """Returns the buffer with a piece's sums so far, for work of the compute stream."""
        is_lane = self._lane is not None
        buffer = self._buffer_of(piece, is_lane=is_lane) or self._fill(piece, is_lane=is_lane)
        self._buffers.device.compute.wait(buffer.usable)
        return buffer

    def _fill(self, piece: int, *, is_lane: bool, beside: _Buffer | None = None) -> _Buffer:
        """Takes a buffer other than `beside`, and has the piece's sums copied to it if there are any.

        It takes one without contents, or with contents that are in host memory, or else the least recently used one.
        """
        buffers = self._buffers_for(piece)
        if is_lane and self._lane_home is None:
            # Lanes leave by being added to their total, which needs a buffer, too.
            of_lanes = [b for b in buffers if b.piece is not None and b.is_lane]
            if len(of_lanes) >= len(buffers) - 1:
                self._merge(of_lanes[0], is_over=False)
        buffer = min((b for b in buffers if b is not beside), key=lambda b: (b.piece is not None, b.is_changed))
        if buffer.piece is not None:
            self._evict(buffer)  # it comes back if it gets a further gradient
        buffers.remove(buffer)
        buffers.append(buffer)
        buffer.piece, buffer.is_lane, buffer.is_changed = piece, is_lane, False
        if is_lane == (self._lane is not None):
            self._left[piece] = self._names_of(piece)
        sums = self._lane if is_lane and self._lane is not None else self._total
        if piece in sums.stored:
            home, stored = sums.stored[piece]
            stream, target = self._buffers.h2d, self._view(buffer, piece)
            stream.wait(buffer.usable)
            if stored is not None:
                stream.wait(stored)
            buffer.usable = self._copy(stream, home, functools.partial(home.load, target), piece, is_out=False)
        return buffer

    def _bring(self, piece: int) -> None:
        """Has a piece's sums copied to free buffers, if there are any: also the total, where the lane ends."""
        if self._names_of(piece) <= self._ended:
            return
        wanted = [(self._open_sums, self._lane is not None)]
        if self._ends_lane:
            wanted.append((self._total, False))
        for sums, is_lane in wanted:
            is_free = any(buffer.piece is None for buffer in self._buffers.pieces)
            if piece in sums.stored and is_free and self._buffer_of(piece, is_lane=is_lane) is None:
                self._fill(piece, is_lane=is_lane)

    def _evict(self, buffer: _Buffer) -> None:
        """Frees a buffer, whose piece may come back."""
        assert buffer.piece is not None, "it has a piece"
        if not buffer.is_changed:
            if buffer.is_lane == (self._lane is not None):
                self._left.pop(buffer.piece, None)
            buffer.piece = None
        elif buffer.is_lane and self._lane_home is None:
            self._merge(buffer, is_over=False)
        else:
            self._store(buffer, is_final=False)

    def _merge(self, buffer: _Buffer, *, is_over: bool) -> None:
        """Adds a lane's sum of a piece to its total, and stores it. `is_over`: the lane adds no more to the piece."""
        piece, lane, total = buffer.piece, self._lane, self._total
        assert piece is not None, "the buffer has a piece"
        assert lane is not None, "a lane is open"
        compute, start, mine = self._buffers.device.compute, self._bounds[piece], self._view(buffer, piece)
        names = self._names_of(piece)
        if piece in total.stored and not names.isdisjoint(total.touched):
            other = self._buffer_of(piece, is_lane=False) or self._fill(piece, is_lane=False, beside=buffer)
            compute.wait(other.usable)
            theirs = self._view(other, piece)
            for name, offset, numel in self._names[piece]:
                place = slice(offset - start, offset - start + numel)
                if name in total.touched and name in lane.touched:
                    torch.add(theirs[place], mine[place], out=mine[place])
                elif name in total.touched:
                    mine[place].copy_(theirs[place])
            other.piece, other.usable = None, compute.record()
        added = names & lane.touched
        total.touched |= added
        lane.touched -= added
        self._ended |= added
        lane.stored.pop(piece, None)
        buffer.is_lane, buffer.is_changed = False, True
        is_final = is_over and self._is_last_lane and names <= total.touched
        is_final = is_final and (self.norms is None or self.norms.has_room(*self._bounds[piece : piece + 2]))
        self._left.pop(piece, None)
        self._store(buffer, is_final=is_final)

    def _store(self, buffer: _Buffer, *, is_final: bool) -> None:
        """Has an open piece copied to host memory, after all queued work of the compute stream."""
        piece, sums, home = buffer.piece, self._total, self._home
        assert piece is not None, "the buffer has a piece"
        if buffer.is_lane:
            assert self._lane is not None, "a lane is open"
            assert self._lane_home is not None, "else it is added to the total"
            sums, home = self._lane, self._lane_home
        elif self._rounding is not None and not is_final:
            home = self._rounding.between
        device, stream, view = self._buffers.device, self._buffers.d2h, self._view(buffer, piece)
        if view.dtype is not self._dtype and home is self._home:
            view = self._rounded(buffer, piece)
            self._ended |= self._names_of(piece)
        if self.norm is not None and home is self._home:
            self.norm.put(view, self._bounds[piece])
        if self.norms is not None and is_final:
            self.norms.put(view, self._bounds[piece])
            self._normed.add(piece)
        stream.wait(device.compute.record())
        stored = self._copy(stream, home, functools.partial(home.store, view), piece, is_out=True)
        device.poison(buffer.flat, stream)
        buffer.piece, buffer.is_changed, buffer.usable = None, False, stream.record()
        sums.stored[piece] = home, stored
        self._left.pop(piece, None)

    def _rounded(self, buffer: _Buffer, piece: int) -> torch.Tensor:
        """Rounds a complete piece where it lies. Its rows stay aligned."""
        view, start = self._view(buffer, piece), self._bounds[piece] % NORM_ROW_NUMEL
        target = buffer.flat.view(self._dtype)[start : start + view.numel()]
        round_in_place(view, target)
        return target

    def _copy(self, stream: Stream, home: GradHome, copy: Callable[[int], None], piece: int, *, is_out: bool) -> Event:
        start, stop = self._bounds[piece : piece + 2]
        begun = stream.record()
        stream.run(functools.partial(copy, start))
        ended = stream.record()
        dtype = self._dtype if home is self._home else self._buffers.dtype
        nbytes = (stop - start) * dtype.itemsize
        stream.then(functools.partial(home.moved, begun, ended, nbytes, is_out=is_out))
        return ended
