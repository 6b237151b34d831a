"""A pool of flat buffers on a device, allocated once.

For reuse of a buffer no thread waits for the device: the next stream waits for the last one that used the buffer.
"""

import threading
from collections.abc import Hashable, Mapping

import torch

from windlass.engine.device.device import Device
from windlass.engine.device.streams import Event, Stream
from windlass.engine.memory_plan import ROUNDING_NUMEL, BlockBuffers

# The number of elements and their dtype.
BufferClass = tuple[int, torch.dtype]


def narrowed(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns as many elements of a smaller dtype, in the memory of a buffer's start."""
    return flat.view(dtype)[: flat.numel()]


def round_in_place(flat: torch.Tensor, target: torch.Tensor) -> None:
    """Rounds all elements of a buffer to `narrowed(flat, dtype)`. Takes `rounding_nbytes` beside the buffer."""
    stop = min(flat.numel(), ROUNDING_NUMEL)
    target[:stop].copy_(flat[:stop].to(target.dtype))
    while stop < flat.numel():
        # Elements have half the bytes when they are rounded. So a part ends in memory that was read, before itself.
        start, stop = stop, min(flat.numel(), 2 * stop)
        target[start:stop].copy_(flat[start:stop])


class DeviceBuffers:
    """The planned number of buffers of each class. All methods are thread-safe."""

    def __init__(self, device: Device, planned: Mapping[BufferClass, int], *, name: str) -> None:
        """Allocates all buffers. `name`: their purpose, for errors. The device's token ends waits for a buffer."""
        self._device = device
        self._name = name
        self._changed = threading.Condition()
        self._uses: BlockBuffers[BufferClass, Hashable] = BlockBuffers(planned)
        self._flats = [torch.empty(numel, dtype=dtype, device=device.device) for numel, dtype in self._uses.sizes]
        self._views: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # of a buffer's start, by index and dtype
        self._index = {id(flat): index for index, flat in enumerate(self._flats)}  # of buffers and views
        for flat in self._flats:
            device.poison(flat, device.compute)
        self._unused: list[Event] = [device.compute.record() for _ in self._flats]  # the end of each buffer's last use

    def take(self, numel: int, dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        """Acquires a buffer with undefined contents, for work that is queued on `stream` from now on.

        Where no buffer of this class is planned, it is the start of an fp32 buffer.

        Raises the errors of `CancelToken.wait_for`.
        """
        if (numel, dtype) not in self._uses.sizes and (numel, torch.float32) in self._uses.sizes:
            return self.narrow(self.take(numel, torch.float32, stream), dtype)
        return self.take_with(None, numel, dtype, stream)[0]

    def take_with(
        self, contents: Hashable, numel: int, dtype: torch.dtype, stream: Stream
    ) -> tuple[torch.Tensor, bool]:
        """Acquires a buffer for contents, and returns whether an earlier user has queued the work that fills it.

        If not, the caller queues that work on `stream`, and later users find the contents. None names contents that are
        not used again. All users of the same contents must release them for the same stream.

        Raises the errors of `take`.
        """
        with self._changed:
            what = f"a buffer of {numel} elements in {dtype} for {self._name}; the computation or the copies are stuck"
            acquired = self._device.token.wait_for(
                self._changed, lambda: self._uses.acquire((numel, dtype), contents), what
            )
            unused = self._unused[acquired.buffer]
        flat = self._flats[acquired.buffer]
        if not acquired.has_contents:
            stream.wait(unused)
        if acquired.evicted is not None:  # else the buffer was filled with NaN at its release
            self._device.poison(flat, stream)
        return flat, acquired.has_contents

    def narrow(self, buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the start of an acquired buffer in a smaller dtype. It is released instead of the buffer."""
        with self._changed:
            index = self._index[id(buffer)]
            if (index, dtype) not in self._views:
                view = self._views[index, dtype] = narrowed(self._flats[index], dtype)
                self._index[id(view)] = index
            return self._views[index, dtype]

    def give(self, buffer: torch.Tensor, stream: Stream) -> None:
        """Releases a buffer. Only work that is already queued on `stream` may still use it."""
        with self._changed:
            index = self._index[id(buffer)]
        buffer = self._flats[index]
        with self._changed:
            is_reusable = self._uses.contents(index) is not None
        if not is_reusable:
            self._device.poison(buffer, stream)
        unused = stream.record()
        with self._changed:
            self._unused[index] = unused
            self._uses.release(index)
            self._changed.notify_all()
