"""Finds what would make the host wait for a GPU, on a machine without one.

Code runs on PyTorch's meta device, whose tensors have no values, as a GPU's have none that the host knows. Or it runs
on the CPU, and operators are compared with those that make a GPU's host wait.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("meta")
# Operators for which a GPU's host waits: their result is a number, or a tensor whose shape depends on the data.
_SYNCHRONIZING = frozenset(
    {"aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal", "aten.is_nonzero"}
    | {"aten._unique", "aten._unique2", "aten.unique_dim", "aten.unique_consecutive", "aten.bincount"}
)
# Operators that call nonzero below a dispatch mode if an index is a mask.
_INDEXING = frozenset(
    {"aten.index", "aten._unsafe_index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_"}
    | {"aten._unsafe_index_put"}
)


def host_wait_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> str | None:
    """Returns the name of an operator that makes a GPU's host wait, whatever its device is here; None for others.

    Copies to host memory are not among them, because they depend on the device. Sources: PyTorch, the operators'
    implementations in aten/src/ATen/native, such as TensorAdvancedIndexing.cpp and IndexingUtils.h.
    """
    name = str(getattr(func, "overloadpacket", func))
    if name in _SYNCHRONIZING:
        return name
    if str(func) == "aten.repeat_interleave.Tensor" and (kwargs or {}).get("output_size") is None:
        return name  # the number of results is the sum of the repeats
    return name if name in _INDEXING and _has_mask(args) else None


def _has_mask(args: Sequence[Any]) -> bool:
    """Checks the arguments (self, indices, values) of an operator that indexes for a mask."""
    is_number = len(args) > 2 and isinstance(args[2], torch.Tensor) and args[2].numel() == 1
    masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    return bool(masks) and not is_number  # a number is filled in without the mask's positions


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
        given = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if any(tensor.device.type == GPU.type for tensor in given) and host_wait_of(func, args, kwargs) is not None:
            raise HostWaitError(f"{func} needs values of the GPU on the host")
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
