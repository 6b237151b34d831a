"""Flat buffers on a device that are handed from stream to stream: made once, and no thread waits for a device to reuse
one, only streams do.
"""

import threading
from collections import defaultdict
from collections.abc import Mapping

import torch

from windlass.engine.device.device import Device
from windlass.engine.device.streams import Event, Stream

# Elements and their type.
BufferClass = tuple[int, torch.dtype]


class DeviceBuffers:
    """So many buffers of each class as were planned. Safe from many threads."""

    def __init__(self, device: Device, planned: Mapping[BufferClass, int], *, name: str, deadline_s: float) -> None:
        """Makes all of them. `name`: what they are for, in errors. `deadline_s`: of a wait for one."""
        self._device = device
        self._name = name
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._closed = False
        # Each with the event after which nobody uses it.
        self._free: dict[BufferClass, list[tuple[torch.Tensor, Event]]] = defaultdict(list)
        for (numel, dtype), num_buffers in planned.items():
            for _ in range(num_buffers):
                self.give(torch.empty(numel, dtype=dtype, device=device.device), device.compute)

    def take(self, numel: int, dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        """A buffer with undefined contents, for what `stream` is given from now on.

        Raises:
            TimeoutError: none was given back in time.
            InterruptedError: `close` was called.
        """
        with self._changed:
            free = self._free[numel, dtype]
            if not self._changed.wait_for(lambda: self._closed or free, self._deadline_s):
                raise TimeoutError(
                    f"no buffer of {numel} elements in {dtype} came free for {self._name} within {self._deadline_s:g} "
                    "s; the computation or the copies from the device are stuck"
                )
            if self._closed:
                raise InterruptedError("the job was stopped")
            buffer, unused = free.pop(0)  # the one that has been free for longest
        stream.wait(unused)
        return buffer

    def give(self, buffer: torch.Tensor, stream: Stream) -> None:
        """Takes a buffer back; what `stream` was given so far is all that uses it."""
        self._device.poison(buffer, stream)
        unused = stream.record()
        with self._changed:
            self._free[buffer.numel(), buffer.dtype].append((buffer, unused))
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
