"""The device that a process computes on: the GPU that it was given, or the CPU."""

import torch


class GpuUnusableError(ValueError):
    """PyTorch cannot use the GPU that a process was given; the text says why and what to do."""


def compute_device(*, uses_gpu: bool) -> torch.device:
    """Returns the first visible GPU for a process that was given one, else the CPU.

    Nothing falls back to the CPU: a job planned for a GPU would take days there.

    Raises:
        GpuUnusableError: the process was given a GPU, and PyTorch cannot use it.
    """
    if not uses_gpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise GpuUnusableError(
            f"the driver lists a GPU that PyTorch {torch.__version__} cannot use: {_reason()}; install a PyTorch for "
            "this driver's CUDA, or set CUDA_VISIBLE_DEVICES= (empty) before `windlass up` to train on the CPU"
        )
    return torch.device("cuda", 0)


def _reason() -> str:
    if torch.version.cuda is None:
        return "it was built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())
    return f"its CUDA {torch.version.cuda} finds no device"
