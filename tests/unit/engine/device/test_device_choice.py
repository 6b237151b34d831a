"""The device of a process, and the refusal of a GPU that PyTorch cannot use."""

from types import SimpleNamespace

import pytest
import torch

from windlass.engine.device import device_choice
from windlass.engine.device.device_choice import GpuUnusableError, compute_device, memory_node, with_index


def test_compute_device_of_a_process_without_a_gpu_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # there is one, and it was given to another process
    assert compute_device(uses_gpu=False) == torch.device("cpu")


def test_compute_device_of_a_process_with_a_gpu_is_the_first_visible_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert compute_device(uses_gpu=True) == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("built_for", "init_error", "reason"),
    [
        (None, None, "it was built without CUDA"),
        (
            "13.0",
            RuntimeError("The NVIDIA driver on your system\nis too old"),
            "The NVIDIA driver on your system is too",
        ),
        ("13.0", None, "its CUDA 13.0 finds no device"),
    ],
)
def test_compute_device_of_a_gpu_that_pytorch_cannot_use_says_why_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, built_for: str | None, init_error: Exception | None, reason: str
) -> None:
    def init() -> None:
        if init_error is not None:
            raise init_error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(GpuUnusableError, match=reason) as caught:
        compute_device(uses_gpu=True)
    assert "CUDA_VISIBLE_DEVICES= (empty)" in str(caught.value)


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert with_index(torch.device("cuda")) == torch.device("cuda", 3)
    assert with_index(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert with_index(torch.device("cpu")) == torch.device("cpu")


def test_memory_node_of_a_gpu_is_that_of_its_pci_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(device_choice, "has_several_nodes", lambda: True)
    monkeypatch.setattr(device_choice, "node_near", lambda address: asked.append(address) or 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert memory_node(torch.device("cuda", 0)) == 1
    assert asked == ["0000:c1:00.0"]
    assert memory_node(torch.device("cpu")) is None


def test_memory_node_of_a_gpu_beside_a_single_node_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_choice, "has_several_nodes", lambda: False)
    assert memory_node(torch.device("cuda", 0)) is None
