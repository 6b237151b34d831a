"""A pool of flat buffers on a device, allocated once.

For reuse of a buffer no thread waits for the device: the next stream waits for the last one that used the buffer.
"""

import threading
from collections import defaultdict
from collections.abc import Mapping

import torch

from windlass.engine.device.device import Device
from windlass.engine.device.streams import Event, Stream

# The number of elements and their dtype.
BufferClass = tuple[int, torch.dtype]


class DeviceBuffers:
    """The planned number of buffers of each class. All methods are thread-safe."""

    def __init__(self, device: Device, planned: Mapping[BufferClass, int], *, name: str) -> None:
        """Allocates all buffers. `name`: their purpose, for errors. The device's token ends waits for a buffer."""
        self._device = device
        self._name = name
        self._changed = threading.Condition()
        # Each buffer with the event that ends its last use.
        self._free: dict[BufferClass, list[tuple[torch.Tensor, Event]]] = defaultdict(list)
        for (numel, dtype), num_buffers in planned.items():
            for _ in range(num_buffers):
                self.give(torch.empty(numel, dtype=dtype, device=device.device), device.compute)

    def take(self, numel: int, dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        """Acquires a buffer with undefined contents, for work that is queued on `stream` from now on.

        Raises the errors of `CancelToken.wait_for`.
        """
        with self._changed:
            free = self._free[numel, dtype]
            what = f"a buffer of {numel} elements in {dtype} for {self._name}; the computation or the copies are stuck"
            self._device.token.wait_for(self._changed, lambda: bool(free), what)
            buffer, unused = free.pop(0)  # the one that has been free longest: its last use most likely has ended
        stream.wait(unused)
        return buffer

    def give(self, buffer: torch.Tensor, stream: Stream) -> None:
        """Releases a buffer. Only work that is already queued on `stream` may still use it."""
        self._device.poison(buffer, stream)
        unused = stream.record()
        with self._changed:
            self._free[buffer.numel(), buffer.dtype].append((buffer, unused))
            self._changed.notify_all()
