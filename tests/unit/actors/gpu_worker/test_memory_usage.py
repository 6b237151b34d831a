"""The peak of device memory on a CPU, by the kernel's count."""

import mmap
from pathlib import Path

import pytest
import torch

from windlass.actors.gpu_worker import memory_usage as device_memory
from windlass.actors.gpu_worker.memory_usage import DeviceMemory, release_device_memory
from windlass.actors.messages import MemoryKind

MIB = 1 << 20
_NUMEL = 64 * MIB // 4
# Bytes: other allocations of the process, and the error of the kernel's counters.
_SLACK_NBYTES = 6 * MIB


def take() -> torch.Tensor:
    """Allocates and writes 64 MiB."""
    return torch.ones(_NUMEL)


def peak_of(memory: DeviceMemory) -> int:
    return memory.peaks()[MemoryKind.DEVICE]


def test_memory_freed_before_the_measurement_counts() -> None:
    memory = DeviceMemory(torch.device("cpu"))
    held = take()
    more = [take(), take()]
    more.clear()
    assert peak_of(memory) == pytest.approx(3 * held.nbytes, abs=_SLACK_NBYTES)
    assert peak_of(memory) == pytest.approx(3 * held.nbytes, abs=_SLACK_NBYTES)  # it stays allocated
    more.append(take())
    assert peak_of(memory) == pytest.approx(3 * held.nbytes, abs=_SLACK_NBYTES)


def test_memory_allocated_in_a_pause_is_not_counted() -> None:
    memory = DeviceMemory(torch.device("cpu"))
    held = [take()]  # the model's
    memory.pause()
    held += [take(), take()]  # not part of the model
    memory.begin()
    passing = take()
    del passing
    assert peak_of(memory) == pytest.approx(2 * held[0].nbytes, abs=_SLACK_NBYTES)
    memory.begin()
    held.append(take())
    assert peak_of(memory) == pytest.approx(2 * held[0].nbytes, abs=_SLACK_NBYTES)


def test_shared_memory_is_not_counted() -> None:
    memory = DeviceMemory(torch.device("cpu"))
    with mmap.mmap(-1, 64 * MIB) as shared:
        for _ in range(64):
            shared.write(b"x" * MIB)
        assert peak_of(memory) <= _SLACK_NBYTES


def test_kernel_without_the_counter_gives_no_peak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_memory, "_CLEAR_REFS", tmp_path / "nothing" / "clear_refs")
    memory = DeviceMemory(torch.device("cpu"))
    memory.pause()
    memory.begin()
    assert memory.peaks() == {}


def test_memory_of_earlier_work_returns_to_the_gpu_with_the_workspaces_of_cublas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cache is emptied last, because the workspaces are freed into it."""
    calls: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: calls.append("workspaces"), raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("cache"))
    release_device_memory(torch.device("cpu"))
    assert calls == []
    release_device_memory(torch.device("cuda", 0))
    assert calls == ["workspaces", "cache"]
