"""The memory that a job may have on its device, and the most that it has had: by torch's allocator or, where the device
is the CPU, by the kernel.
"""

from pathlib import Path

import torch

from windlass.actors.messages import MemoryKind

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def limit_device_memory(device: torch.device, limit_nbytes: int) -> None:
    """Has torch's allocator refuse this process more of a GPU. Where the device is the CPU nothing is limited."""
    if device.type == "cuda":
        total_nbytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_nbytes / total_nbytes), device)


class DeviceMemory:
    """Counts from when it is made, but for the time from `pause` to `begin`. One thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._private = None if device.type == "cuda" else _PrivateMemory()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def pause(self) -> None:
        """What comes is not the device's: the model is checked, and loaded. On a GPU it counts all the same."""
        if self._private is not None:
            self._private.pause()

    def begin(self) -> None:
        """Operations begin. From the second time on nothing happens."""
        if self._private is not None:
            self._private.begin()

    def peaks(self) -> dict[MemoryKind, int]:
        """In bytes; nothing where the kernel does not tell."""
        if self._private is None:
            return {
                MemoryKind.DEVICE: torch.cuda.max_memory_allocated(self._device),
                MemoryKind.DEVICE_RESERVED: torch.cuda.max_memory_reserved(self._device),
            }
        nbytes = self._private.peak_nbytes()
        return {} if nbytes is None else {MemoryKind.DEVICE: nbytes}


class _PrivateMemory:
    """How much this process's private memory grows, at the most.

    The kernel keeps the peak of all resident memory, and lets it be set back to what is held (Source: proc(5),
    clear_refs: 5). What of it is no private memory, the arena and mapped files, hardly changes within a step.
    """

    def __init__(self) -> None:
        self._grown_nbytes = 0  # in stretches that count and are over
        self._is_paused = False
        self._is_told = True
        self._peak_nbytes = 0
        self._from_nbytes = 0  # private memory when counting began
        self._others_nbytes = 0  # what was not private when it was looked last
        self._start()

    def pause(self) -> None:
        self._grown_nbytes += _status()["RssAnon"] - self._from_nbytes
        self._is_paused = True

    def begin(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._start()

    def peak_nbytes(self) -> int | None:
        """Since it was made; None where the kernel does not tell."""
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
        except OSError:  # a kernel without it
            self._is_told = False


def _status() -> dict[str, int]:
    """Of this process, in bytes."""
    lines = (line.split() for line in _STATUS.read_text().splitlines() if line.startswith(("Rss", "VmHWM")))
    return {name.removesuffix(":"): int(kib) * 1024 for name, kib, _ in lines}
