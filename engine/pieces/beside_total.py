"""The sum of a lane in one buffer, while the total of the lanes before it is in host memory."""

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from windlass.engine.device import Event
from windlass.engine.model import GradBuffer
from windlass.engine.pieces.grad_pieces import GradHome, GradPieceBuffers


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTotal:
    """The total of finished lanes, in host memory."""

    home: GradHome
    touched: Collection[str]  # names of the tensors that have a sum
    stored: Event | None = None  # after its copy; None: it is over
    on_read: Callable[[], None] | None = None  # is called when the total was read


class SumBesideTotal:
    """A sink for the gradient of a block whose buffer has room for one sum only.

    Micro-batches are added to the buffer, which has the sum of the open lane. The first lane is its own total. At the
    end of a later lane, the total comes back part by part and is added. If a further lane follows, the result goes to
    host memory as the new total. All methods except the constructor run as work of the compute stream.
    """

    def __init__(
        self,
        buffers: GradPieceBuffers,
        sums: GradBuffer,
        parts: Sequence[torch.Tensor],
        params: Sequence[tuple[str, int, int]],
        total: HostTotal | None,
        between: GradHome | None,
    ) -> None:
        """Begins a group of micro-batches with an empty lane.

        Args:
            buffers: their streams are used.
            sums: nothing is in it.
            parts: flat memory for parts of a total.
            params: (name, offset, numel) of all tensors.
            total: of the lanes of earlier groups.
            between: the place of the total between two lanes of this group; None: it has one lane.
        """
        self._device, self._h2d, self._d2h = buffers.device, buffers.h2d, buffers.d2h
        self.sums = sums
        self._params, self._total, self._between = params, total, between
        usable = self._device.compute.record()
        self._parts = [(part, usable) for part in parts]
        self._is_over = False  # the lane in the buffer

    def begin_microbatch(self, microbatch: int) -> None:
        """See LaneSink."""
        if self._is_over:
            self.finish()
            self._put_aside()
            self._is_over = False

    def end_lane(self) -> None:
        """See LaneSink."""
        self._is_over = True

    def add(self, name: str, offset: int, grad: torch.Tensor) -> None:
        """Adds one tensor's gradient at its place."""
        self.sums.add(name, offset, grad)

    def add_product(
        self, name: str, offset: int, left: torch.Tensor, right: torch.Tensor, *, in_fp32: bool = False
    ) -> None:
        """Adds `left.T @ right`, the gradient of a matrix; see `GradBuffer.add_product`."""
        self.sums.add_product(name, offset, left, right, in_fp32=in_fp32)

    def finish(self) -> None:
        """Adds the total to the lane in the buffer, which is the total afterwards."""
        total, self._total = self._total, None
        if total is None:
            return
        if total.stored is not None:
            self._h2d.wait(total.stored)
        numel, size = self.sums.flat.numel(), self._parts[0][0].numel()
        for start in range(0, numel, size):
            self._add_part(total, start, min(start + size, numel))
        self.sums.touched.update(total.touched)
        if total.on_read is not None:
            self._h2d.then(total.on_read)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _add_part(self, total: HostTotal, start: int, stop: int) -> None:
        buffer, usable = self._parts.pop(0)
        part = buffer[: stop - start]
        self._h2d.wait(usable)
        begun = self._h2d.record()
        self._h2d.run(functools.partial(total.home.load, part, start))
        ended = self._h2d.record()
        self._h2d.then(functools.partial(total.home.moved, begun, ended, part.nbytes, is_out=False))
        self._device.compute.wait(ended)
        for name, offset, numel in self._params:
            low, high = max(start, offset), min(stop, offset + numel)
            if low >= high or name not in total.touched:
                continue
            mine, theirs = self.sums.flat[low:high], part[low - start : high - start]
            if name in self.sums.touched:
                torch.add(theirs, mine, out=mine)
            else:
                mine.copy_(theirs)
        self._parts.append((buffer, self._device.compute.record()))

    def _put_aside(self) -> None:
        assert self._between is not None, "the group has several lanes"
        flat, home = self.sums.flat, self._between
        self._d2h.wait(self._device.compute.record())
        begun = self._d2h.record()
        self._d2h.run(functools.partial(home.store, flat, 0))
        ended = self._d2h.record()
        self._d2h.then(functools.partial(home.moved, begun, ended, flat.nbytes, is_out=True))
        self._device.compute.wait(ended)
        self._total = HostTotal(home=home, touched=frozenset(self.sums.touched), stored=ended)
        self.sums.touched.clear()
