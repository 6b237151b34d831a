"""The device a rank computes on: its streams, and copies between it and host memory.

On a machine without a GPU the device is the CPU; "device memory" is then ordinary memory, and everything else is the
same.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from windlass.amounts import bytes_text
from windlass.engine.device.streams import StartThreads, Stream, open_streams


class PinError(RuntimeError):
    """Host memory could not be registered with CUDA, or is not registered."""


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Between host and device, or within one of them; same type. Work for a stream: it may return before it is done."""
    if target.device.type == source.device.type == "cpu":
        # NumPy's copy lets other threads run and starts none of its own.
        np.copyto(_bytes_of(target), _bytes_of(source))
    else:
        target.copy_(source, non_blocking=True)


def _start_daemons(targets: Iterable[Callable[[], None]]) -> None:
    for target in targets:
        threading.Thread(target=target, daemon=True).start()


class Device:
    """Its streams, flat buffers on it, and host memory that it reaches."""

    def __init__(
        self,
        device: torch.device,
        *,
        poison_released: bool = False,
        deadline_s: float = 120.0,
        start_threads: StartThreads = _start_daemons,
    ) -> None:
        """`poison_released` fills buffers with NaN as they are released: reading one too late shows at once.

        `deadline_s`: of waits for what was given to a stream. `start_threads`: for streams that need one.
        """
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.poisons_released = poison_released
        self._deadline_s = deadline_s
        self._streams = open_streams(device, deadline_s, start_threads)
        self.compute, self.h2d, self.d2h = self._streams.compute, self._streams.h2d, self._streams.d2h
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._pinned: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def open_stream(self) -> Stream:
        """A stream beside the three, with a thread of its own on a CPU; its caller closes it."""
        return self._streams.open()

    def close(self) -> None:
        """Ends the threads of the three streams."""
        self._streams.close()

    def empty(self, nbytes: int) -> torch.Tensor:
        """Flat bytes of torch's allocator for the compute stream, with undefined contents.

        Another stream must wait for the compute stream before it writes there: queued work may still read what the
        memory held before.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def after_now(self) -> Callable[[], None]:
        """A function that waits, in any thread, for all that the compute stream was given until now."""
        event = self.compute.record()
        return lambda: event.wait(self._deadline_s)

    def poison(self, buffer: torch.Tensor, stream: Stream) -> None:
        """Fills a buffer that is being released, if that was asked for, after what the stream was given before."""
        if self.poisons_released:
            stream.run(lambda: buffer.fill_(float("nan")))

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A small tensor of the host's on the device. Work for the compute stream."""
        if not self.is_cuda:
            return tensor
        # Torch keeps pinned memory until it has been copied, and then for the next time.
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def download(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Numbers, each a 0-dim tensor, in host memory as fp64. Work for the compute stream, and there when it is done.

        On a CPU a tensor of the values; on a GPU pinned memory that torch keeps for the next time.
        """
        found = torch.stack([value.double() for value in values])
        if not self.is_cuda:
            return found
        host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        return host.copy_(found, non_blocking=True)

    # --- for who waits for each thing -------------------------------------------------------------------------------

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat buffer with undefined contents, for the compute stream or for `copy_in`: a used one, or a new one."""
        with self._lock:
            free = self._free[(numel, dtype)]
            if free:
                return free.pop()
        fresh = torch.empty(numel, dtype=dtype, device=self.device)
        # Its memory may be that of a tensor which queued kernels still read.
        self.h2d.wait(self.compute.record())
        return fresh

    def give(self, buffer: torch.Tensor) -> None:
        """Takes a buffer back that no work reads or writes any more; it may be handed out again at once."""
        if self.poisons_released:
            self.poison(buffer, self.compute)
            self.synchronize()
        with self._lock:
            self._free[(buffer.numel(), buffer.dtype)].append(buffer)

    def copy_in(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Host to device, same type; when it returns, the source may be reused."""
        self._copy_now(self.h2d, target, source)

    def copy_out(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Device to host, same type; when it returns, the source may be reused."""
        self._copy_now(self.d2h, target, source)

    def _copy_now(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        stream.run(lambda: copy(target, source))
        stream.record().wait(self._deadline_s)

    def synchronize(self) -> None:
        """Waits for the compute stream."""
        self.compute.record().wait(self._deadline_s)

    # --- pinned memory ----------------------------------------------------------------------------------------------

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
                    f"CUDA did not register {bytes_text(memory.nbytes)} of host memory: error {int(result)}, "
                    f"{runtime.cudaGetErrorString(result)}; lower the job's host memory budget"
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
