"""Limits a job's device memory and measures its peak, with torch's allocator or, on a CPU, with the kernel's counts."""

from pathlib import Path

import torch

from windlass.actors.messages import MemoryKind

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def gpu_memory_nbytes(device: torch.device) -> int | None:
    """Returns the bytes of a GPU's memory; None for a CPU."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def limit_device_memory(device: torch.device, limit_nbytes: int) -> None:
    """Limits the GPU memory of this process in torch's allocator. On a CPU nothing is limited."""
    if (total_nbytes := gpu_memory_nbytes(device)) is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_nbytes / total_nbytes), device)


def release_device_memory(device: torch.device) -> None:
    """Returns what earlier work has left on a GPU: cached memory, and cuBLAS's workspaces, which each thread has."""
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


class DeviceMemory:
    """Measures peak device memory from its creation on, except between `pause` and `begin`. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._private = None if device.type == "cuda" else _PrivateMemory()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def pause(self) -> None:
        """Stops counting on a CPU while the model is checked and loaded. On a GPU nothing happens."""
        if self._private is not None:
            self._private.pause()

    def begin(self) -> None:
        """Continues counting when operations begin. Further calls do nothing."""
        if self._private is not None:
            self._private.begin()

    def peaks(self) -> dict[MemoryKind, int]:
        """Returns the peaks in bytes; empty if the kernel does not report them."""
        if self._private is None:
            return {
                MemoryKind.DEVICE: torch.cuda.max_memory_allocated(self._device),
                MemoryKind.DEVICE_RESERVED: torch.cuda.max_memory_reserved(self._device),
            }
        nbytes = self._private.peak_nbytes()
        return {} if nbytes is None else {MemoryKind.DEVICE: nbytes}


class _PrivateMemory:
    """Measures the largest growth of this process's private memory.

    The kernel records the peak of all resident memory and can reset it to the present value. The part that is not
    private, the arena and mapped files, hardly changes within a step and is subtracted.
    Source: proc(5), clear_refs: 5.
    """

    def __init__(self) -> None:
        self._grown_nbytes = 0  # growth in earlier periods of counting
        self._is_paused = False
        self._is_told = True  # the kernel supports resetting the peak
        self._peak_nbytes = 0
        self._from_nbytes = 0  # private memory when counting began
        self._others_nbytes = 0  # resident memory that was not private, at the last reading
        self._start()

    def pause(self) -> None:
        self._grown_nbytes += _status()["RssAnon"] - self._from_nbytes
        self._is_paused = True

    def begin(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._start()

    def peak_nbytes(self) -> int | None:
        """Returns the peak since the creation of this object; None if the kernel does not report it."""
        if not self._is_told:
            return None
        if not self._is_paused:
            now = _status()
            others = now["RssShmem"] + now["RssFile"]
            peak = max(now["RssAnon"], now["VmHWM"] - max(others, self._others_nbytes))
            self._others_nbytes = others
            self._peak_nbytes = max(self._peak_nbytes, self._grown_nbytes + peak - self._from_nbytes)
            self._set_back()
        return self._peak_nbytes

    def _start(self) -> None:
        now = _status()
        self._from_nbytes, self._others_nbytes = now["RssAnon"], now["RssShmem"] + now["RssFile"]
        self._set_back()

    def _set_back(self) -> None:
        try:
            _CLEAR_REFS.write_text("5")
        except OSError:  # the kernel has no such file
            self._is_told = False


def _status() -> dict[str, int]:
    """Returns the memory counts of this process, in bytes, by their names in /proc/self/status."""
    lines = (line.split() for line in _STATUS.read_text().splitlines() if line.startswith(("Rss", "VmHWM")))
    return {name.removesuffix(":"): int(kib) * 1024 for name, kib, _ in lines}
