"""The device that a rank computes on: its streams, and copies between it and host memory.

On a machine without a GPU the device is the CPU, and "device memory" is ordinary memory.
"""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from windlass.engine.device.registered_memory import PinError, register, unregister, within_parts
from windlass.engine.device.streams import Event, StartThreads, Stream, open_streams
from windlass.storage.cancellation import CancelToken

_DEADLINE_S = 120.0  # timeout of waits for a device without an owner's token


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies between tensors of the same dtype on the host or the device. For use as a stream's work: may be async."""
    if target.device.type == source.device.type == "cpu":
        # NumPy's copy releases the GIL and starts no threads.
        np.copyto(_bytes_of(target), _bytes_of(source))
    else:
        for to, from_ in within_parts(target, source):
            to.copy_(from_, non_blocking=True)


def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies between the tensors of pairs, each a target and its source; see `copy`."""
    for target, source in pairs:
        copy(target, source)


def _start_daemons(targets: Iterable[Callable[[], None]]) -> None:
    for target in targets:
        threading.Thread(target=_run_until_stopped, args=(target,), daemon=True).start()


def _run_until_stopped(target: Callable[[], None]) -> None:
    """Runs a thread's function, which a cancelled token may end in the middle of a wait."""
    with contextlib.suppress(InterruptedError):
        target()


class Device:
    """A device with its streams, its flat buffers, and the host memory that is pinned for it."""

    def __init__(
        self,
        device: torch.device,
        *,
        poison_released: bool = False,
        token: CancelToken | None = None,
        start_threads: StartThreads = _start_daemons,
    ) -> None:
        """Opens the three streams.

        Args:
            device: the GPU or the CPU.
            poison_released: fill buffers with NaN at their release, so that a late read shows at once.
            token: of the owner. It ends the streams' threads, and waits for their work and for buffers.
            start_threads: starts the threads of streams that need one.
        """
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.poisons_released = poison_released
        self.token = token or CancelToken(_DEADLINE_S)
        self._streams = open_streams(device, self.token, start_threads)
        self.compute, self.h2d, self.d2h = self._streams.compute, self._streams.h2d, self._streams.d2h
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._pinned: dict[int, torch.Tensor] = {}
        self._opened: list[Stream] = []  # beside the three
        self._lock = threading.Lock()

    def open_stream(self) -> Stream:
        """Opens a further stream, which has its own thread on a CPU."""
        stream = self._streams.open()
        self._opened.append(stream)
        return stream

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocates flat uint8 memory for the compute stream, with undefined contents.

        Another stream must wait for the compute stream before it writes there, because queued work may still read
        the memory's previous contents.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def record_current(self) -> Event:
        """Returns an event after all work that the calling thread has queued on torch's current stream."""
        return self._streams.record_current()

    def poison(self, buffer: torch.Tensor, stream: Stream) -> None:
        """Fills a released buffer with NaN if `poison_released` is set, after the stream's queued work."""
        if self.poisons_released:
            stream.run(lambda: buffer.fill_(float("nan")))

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a small host tensor on the device. For use as work of the compute stream."""
        if not self.is_cuda:
            return tensor
        # PyTorch keeps the pinned memory until the copy is over, and caches it for the next one.
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def download(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copies 0-dim tensors to the host, as one fp64 tensor. For use as work of the compute stream.

        On a GPU the result is pinned memory, and its values are valid once the stream has reached this point.
        """
        stacked = torch.stack([value.double() for value in values])
        if not self.is_cuda:
            return stacked
        host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
        return host.copy_(stacked, non_blocking=True)

    # --- blocking calls -----------------------------------------------------------------------------------------------

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Acquires a flat buffer, reused or new, with undefined contents, for the compute stream or for `copy_in`."""
        with self._lock:
            free = self._free[(numel, dtype)]
            if free:
                return free.pop()
        fresh = torch.empty(numel, dtype=dtype, device=self.device)
        # Queued kernels may still read the tensor that had this memory.
        self.h2d.wait(self.compute.record())
        return fresh

    def give(self, buffer: torch.Tensor) -> None:
        """Releases a buffer that no queued work reads or writes. It may be reused at once."""
        if self.poisons_released:
            self.poison(buffer, self.compute)
            self.synchronize()
        with self._lock:
            self._free[(buffer.numel(), buffer.dtype)].append(buffer)

    def copy_in(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies from host to device, same dtype. Returns when the source may be reused."""
        self._copy_now(self.h2d, target, source)

    def copy_out(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies from device to host, same dtype. Returns when the source may be reused."""
        self._copy_now(self.d2h, target, source)

    def _copy_now(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        stream.run(lambda: copy(target, source))
        stream.record().wait()

    def synchronize(self) -> None:
        """Waits for the compute stream."""
        self.compute.record().wait()

    # --- pinned memory ----------------------------------------------------------------------------------------------

    def pin(self, memory: torch.Tensor) -> None:
        """Registers host memory with CUDA (see `register`), so that copies from and to it do not make the host wait.

        The device keeps the tensor until `unpin`, so that its memory is not unmapped while it is registered. Without
        a GPU the call only keeps the tensor.

        Raises:
            PinError: CUDA refuses, or the memory is registered already.
        """
        address = memory.data_ptr()
        if address in self._pinned:
            raise PinError(f"host memory at {address:#x} is registered already; unpin it first")
        if self.is_cuda:
            register(memory)
        self._pinned[address] = memory

    def unpin(self, memory: torch.Tensor) -> None:
        """Undoes `pin`, after all queued copies. No thread may queue more of them.

        If CUDA fails because of an earlier error, the memory stays mapped until the process ends.

        Raises:
            PinError: the memory is not registered.
        """
        address = memory.data_ptr()
        if address not in self._pinned:
            raise PinError(f"host memory at {address:#x} is not registered; it was never pinned, or unpinned before")
        if self.is_cuda:
            self._await_copies()
            if not unregister(self._pinned[address]):
                return
        del self._pinned[address]

    def _await_copies(self) -> None:
        """Waits for the streams that copy, because no thread has waited for copies without a callback."""
        for stream in (self.h2d, self.d2h, *self._opened):
            with contextlib.suppress(RuntimeError):  # a device that has failed copies nothing
                stream.record().wait()


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Returns the bytes of a contiguous CPU tensor without a copy. Bytes, because NumPy has no bf16."""
    array: np.ndarray[tuple[int], np.dtype[np.uint8]] = tensor.view(torch.uint8).numpy()
    return array
