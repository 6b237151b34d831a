"""The device a rank computes on, and copies between it and the arena.

On a machine without a GPU the device is the CPU; "device memory" is then ordinary memory, and everything else is the
same. Copies are synchronous: when they return, the source may be reused.
"""

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class PinError(RuntimeError):
    """Host memory could not be registered with CUDA, or is not registered."""


class Device:
    """Buffers on the device, reused by size, and the streams that fill and drain them."""

    def __init__(self, device: torch.device, *, poison_released: bool = False) -> None:
        """`poison_released` fills buffers with NaN as they are released: reading one too late shows at once."""
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._poison = poison_released
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._pinned: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()
        self._h2d = torch.cuda.Stream(device) if self.is_cuda else None  # type: ignore[no-untyped-call]
        self._d2h = torch.cuda.Stream(device) if self.is_cuda else None  # type: ignore[no-untyped-call]

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat buffer with undefined contents."""
        with self._lock:
            free = self._free[(numel, dtype)]
            if free:
                return free.pop()
        fresh = torch.empty(numel, dtype=dtype, device=self.device)
        if self._h2d is not None:
            # Its memory may be that of a tensor which queued kernels still read.
            self._h2d.wait_stream(torch.cuda.current_stream(self.device))
        return fresh

    def give(self, buffer: torch.Tensor) -> None:
        """Takes a buffer back; it may be handed out again at once."""
        if self._poison:
            buffer.fill_(float("nan"))
            self.synchronize()
        with self._lock:
            self._free[(buffer.numel(), buffer.dtype)].append(buffer)

    def copy_in(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Host to device, same type."""
        if self._h2d is None:
            # NumPy's copy lets other threads run and starts none of its own.
            np.copyto(_bytes_of(target), _bytes_of(source))
            return
        with torch.cuda.stream(self._h2d):
            target.copy_(source, non_blocking=True)
        self._h2d.synchronize()

    def copy_out(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Device to host, same type."""
        if self._d2h is None:
            np.copyto(_bytes_of(target), _bytes_of(source))
            return
        with torch.cuda.stream(self._d2h):
            target.copy_(source, non_blocking=True)
        self._d2h.synchronize()

    def after_now(self) -> Callable[[], None]:
        """A function that waits, in any thread, for all that the compute stream was given until now."""
        if not self.is_cuda:
            return lambda: None
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event.synchronize

    def synchronize(self) -> None:
        """Waits for the compute stream."""
        if self.is_cuda:
            torch.cuda.current_stream(self.device).synchronize()

    def pin(self, memory: torch.Tensor) -> None:
        """Registers host memory with CUDA, at its exact size: no rounding, unlike torch's pinned allocator.

        The tensor is kept until `unpin`, so that its memory cannot be unmapped while CUDA knows it. Without a GPU
        nothing is registered, and everything else is the same.

        Raises:
            PinError: CUDA refuses, or the memory is registered already.
        """
        address = memory.data_ptr()
        if address in self._pinned:
            raise PinError(f"host memory at {address:#x} is registered already; unpin it first")
        if self.is_cuda:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            result = runtime.cudaHostRegister(address, memory.nbytes, 0)
            if int(result) != 0:
                raise PinError(
                    f"CUDA did not register {memory.nbytes} bytes of host memory: error {int(result)}, "
                    f"{runtime.cudaGetErrorString(result)}; lower the job's host memory budget, or raise the limit of "
                    "locked memory (ulimit -l)"
                )
        self._pinned[address] = memory

    def unpin(self, memory: torch.Tensor) -> None:
        """Undoes `pin`; copies to and from the memory must have ended.

        Where CUDA cannot, because an earlier error broke it, the memory stays mapped until the process ends.

        Raises:
            PinError: the memory is not registered.
        """
        address = memory.data_ptr()
        if address not in self._pinned:
            raise PinError(f"host memory at {address:#x} is not registered; it was never pinned, or unpinned before")
        if self.is_cuda:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if int(runtime.cudaHostUnregister(address)) != 0:
                return
        del self._pinned[address]


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The bytes of a contiguous CPU tensor, without a copy; NumPy knows no bf16."""
    array: np.ndarray[tuple[int], np.dtype[np.uint8]] = tensor.view(torch.uint8).numpy()
    return array
