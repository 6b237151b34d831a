"""Finds what would make the host wait for a GPU, on a machine without one: code runs on PyTorch's meta device.

Its tensors have no values, as a GPU's have none that the host knows.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("meta")


class HostWaitError(AssertionError):
    """An operator needs a value of the GPU on the host, or copies between them while the host waits."""


class Launches(TorchDispatchMode):
    """Counts the operators that launch work, and refuses those for which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.num_launches = 0
        self.max_nbytes = 0  # of the largest new tensor

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
        except (NotImplementedError, RuntimeError) as error:
            raise HostWaitError(f"{func} needs values of the GPU on the host") from error
        results = result if isinstance(result, tuple | list) else (result,)
        devices = {tensor.device.type for tensor in (*args, *results) if isinstance(tensor, torch.Tensor)}
        if devices == {"cpu", GPU.type}:
            raise HostWaitError(f"{func} copies between host and GPU")
        if not func.is_view and GPU.type in devices:
            self.num_launches += 1
            new = [tensor for tensor in results if not any(tensor is arg for arg in args)]
            self.max_nbytes = max([self.max_nbytes, *(t.nbytes for t in new if isinstance(t, torch.Tensor))])
        return result


class _Numbers(TorchFunctionMode):
    """Refuses tensors made of Python numbers: they are copied from pageable memory. Operators do not show that."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and result.device.type == GPU.type:
            raise HostWaitError(f"{func.__name__} copies numbers to the GPU")
        return result


@contextmanager
def no_host_waits() -> Iterator[Launches]:
    """Yields the number of launches so far and the size of the largest new tensor.

    Raises:
        HostWaitError: the block makes the host wait.
    """
    with _Numbers(), Launches() as launches:
        yield launches
