"""Tracks the bytes of operators' outputs that are still alive on a device, for real or fake tensors."""

import functools
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.engine.activations import storage_ref, tensors_in

_aten = torch.ops.aten


class SizeArithmetic(Protocol):
    """The numbers in which a tracker counts. A recorder counts in numbers that know the formula they came from."""

    def of(self, nbytes: int) -> int:
        """Returns the size of one storage."""

    def larger(self, one: int, other: int) -> int:
        """Returns the larger one of two sums of sizes."""


class PlainSizes:
    """Counts in plain integers."""

    def of(self, nbytes: int) -> int:
        """See SizeArithmetic."""
        return nbytes

    def larger(self, one: int, other: int) -> int:
        """See SizeArithmetic."""
        return max(one, other)


class LiveStorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks each storage that an operator makes on a device while the mode is on, until the storage is freed.

    Storages that operators only read or write are not counted. A kernel's temporary memory is not counted either, with
    one exception, because it grows with the operands: on a CPU, pointwise kernels convert operands of other dtypes.
    Source: PyTorch, aten/src/ATen/TensorIterator.cpp.
    """

    def __init__(self, device: torch.device, sizes: SizeArithmetic | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._sizes = PlainSizes() if sizes is None else sizes
        self._alive: dict[StorageWeakRef, int] = {}
        self._nbytes = self._peak_nbytes = 0

    def size_of(self, tensor: torch.Tensor) -> int:
        """Returns the bytes of a tensor's storage."""
        return self._sizes.of(tensor.untyped_storage().nbytes())

    @property
    def nbytes(self) -> int:
        """The bytes of all tracked storages that are alive now."""
        for ref in [ref for ref in self._alive if ref.expired()]:  # type: ignore[no-untyped-call]
            self._nbytes -= self._alive.pop(ref)
        return self._nbytes

    def begin(self) -> int:
        """Restarts the peak and returns the bytes that are alive now."""
        self._peak_nbytes = self.nbytes
        return self._peak_nbytes

    @property
    def peak_nbytes(self) -> int:
        """The largest number of bytes alive at once since `begin`."""
        return self._sizes.larger(self._peak_nbytes, self.nbytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._peak_nbytes = self.peak_nbytes
        result = func(*args, **kwargs)
        given = {StorageWeakRef(storage) for storage in _storages_in((args, kwargs))}  # type: ignore[no-untyped-call]
        # `lift_fresh` is excluded: it makes a constant of the program, and real constants are made without an operator.
        made = () if func is _aten.lift_fresh.default else tensors_in(result)
        for tensor in made:
            ref = storage_ref(tensor)
            if tensor.device.type == self._device.type and ref not in given and ref not in self._alive:
                self._alive[ref] = self.size_of(tensor)
                self._nbytes += self._alive[ref]
        # Without a dispatch mode the autograd engine adds gradients in place if it holds the only reference to the
        # first one. Under a mode it does not (`can_accumulate_inplace`, torch/csrc/autograd/input_buffer.cpp). So such
        # a sum does not count in addition to its summand.
        if not (func is _aten.add.Tensor and _is_in_node_of_torch()):
            nbytes = self._nbytes + self._nbytes_of_casts(func, args, kwargs)
            self._peak_nbytes = self._sizes.larger(self._peak_nbytes, nbytes)
        return result

    def _nbytes_of_casts(self, func: Any, args: Any, kwargs: Any) -> int:
        if self._device.type != "cpu" or torch.Tag.pointwise not in func.tags:
            return 0
        operands = [tensor for tensor in tensors_in((args, kwargs)) if tensor.dim() and tensor.is_floating_point()]
        types = {tensor.dtype for tensor in operands}
        if len(types) < 2:
            return 0
        common = functools.reduce(torch.promote_types, types)
        return sum(
            self._sizes.of(tensor.numel() * common.itemsize) for tensor in operands if tensor.dtype is not common
        )


def _is_in_node_of_torch() -> bool:
    """Checks whether the backward pass now runs a node of PyTorch's own, and not a Python function."""
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
