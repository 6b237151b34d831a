"""Chooses the device that a process computes on: its assigned GPU, or the CPU."""

from typing import Any

import torch

from windlass.storage.memory import has_several_nodes, node_near


class GpuUnusableError(ValueError):
    """PyTorch cannot use the GPU that a process was assigned. The message says why and what to do."""


def compute_device(*, uses_gpu: bool) -> torch.device:
    """Returns the first visible GPU if the process was assigned one, else the CPU.

    There is no fallback to the CPU, because a job planned for a GPU would take days there.

    Raises:
        GpuUnusableError: the process was assigned a GPU, and PyTorch cannot use it.
    """
    if not uses_gpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise GpuUnusableError(
            f"the driver lists a GPU that PyTorch {torch.__version__} cannot use: {_reason()}; install a PyTorch for "
            "this driver's CUDA, or set CUDA_VISIBLE_DEVICES= (empty) before `windlass up` to train on the CPU"
        )
    return torch.device("cuda", 0)


def with_index(device: torch.device) -> torch.device:
    """Returns the device with its number, which some functions of torch need: of the current GPU if it has none."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def memory_node(device: torch.device) -> int | None:
    """Returns the NUMA node whose memory is nearest to a GPU.

    Returns None for a CPU, on a machine with one node, or if the kernel does not know the node.
    """
    if device.type != "cuda" or not has_several_nodes():
        return None
    gpu: Any = torch.cuda.get_device_properties(device)
    return node_near(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")


def _reason() -> str:
    if torch.version.cuda is None:
        return "it was built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())
    return f"its CUDA {torch.version.cuda} finds no device"
