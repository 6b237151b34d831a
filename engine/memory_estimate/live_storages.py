"""What operators put out and somebody still holds: bytes on a device, of real tensors or of fake ones."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.engine.activations import storage_ref, tensors_in

_aten = torch.ops.aten


class LiveStorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows each storage that an operator makes on a device while the mode is on, until nobody holds it any more.

    What operators only look into or write to is not counted, nor what a kernel takes for itself while it runs, but for
    the one thing that grows with its operands: on a CPU, pointwise kernels copy operands of another type than the one
    they compute in.
    Source: PyTorch, aten/src/ATen/TensorIterator.cpp.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._alive: dict[StorageWeakRef, int] = {}
        self._nbytes = self._peak_nbytes = 0

    @property
    def nbytes(self) -> int:
        """Of all that is alive now."""
        for ref in [ref for ref in self._alive if ref.expired()]:  # type: ignore[no-untyped-call]
            self._nbytes -= self._alive.pop(ref)
        return self._nbytes

    def begin(self) -> int:
        """The peak counts from here; returns what is alive."""
        self._peak_nbytes = self.nbytes
        return self._peak_nbytes

    @property
    def peak_nbytes(self) -> int:
        """The most that was alive at once since `begin`."""
        return max(self._peak_nbytes, self.nbytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._peak_nbytes = self.peak_nbytes
        result = func(*args, **kwargs)
        given = {StorageWeakRef(storage) for storage in _storages_in((args, kwargs))}  # type: ignore[no-untyped-call]
        # A constant of the program's: real ones are made without an operator.
        made = () if func is _aten.lift_fresh.default else tensors_in(result)
        for tensor in made:
            ref = storage_ref(tensor)
            if tensor.device.type == self._device.type and ref not in given and ref not in self._alive:
                self._alive[ref] = tensor.untyped_storage().nbytes()
                self._nbytes += self._alive[ref]
        # While no mode looks on, the engine adds gradients up in place where nobody else holds the first; under a mode
        # it does not (`can_accumulate_inplace`, torch/csrc/autograd/input_buffer.cpp). So a sum is not counted beside a
        # summand that dies at once.
        if not (func is _aten.add.Tensor and _is_in_node_of_torch()):
            self._peak_nbytes = max(self._peak_nbytes, self._nbytes + self._nbytes_of_casts(func, args, kwargs))
        return result

    def _nbytes_of_casts(self, func: Any, args: Any, kwargs: Any) -> int:
        if self._device.type != "cpu" or torch.Tag.pointwise not in func.tags:
            return 0
        operands = [tensor for tensor in tensors_in((args, kwargs)) if tensor.dim() and tensor.is_floating_point()]
        types = {tensor.dtype for tensor in operands}
        if len(types) < 2:
            return 0
        common = functools.reduce(torch.promote_types, types)
        return sum(tensor.numel() * common.itemsize for tensor in operands if tensor.dtype is not common)


def _is_in_node_of_torch() -> bool:
    """Whether a backward pass runs a node of torch's own, in which Python code calls no operators."""
    node = torch._C._current_autograd_node()
    return node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction)


def _storages_in(values: Any) -> Iterator[torch.UntypedStorage]:
    if isinstance(values, torch.UntypedStorage):
        yield values
    elif isinstance(values, torch.Tensor):
        yield values.untyped_storage()
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _storages_in(value)
    elif isinstance(values, dict):
        yield from _storages_in(list(values.values()))
