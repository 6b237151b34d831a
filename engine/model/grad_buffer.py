"""The buffers in which a block's gradient is summed."""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch

from windlass.engine.memory_plan import ADDED_NUMEL
from windlass.engine.slices import num_product_rows


class GradBuffer:
    """The gradient of one block on the device, flat, accumulated over micro-batches in the buffer's dtype."""

    def __init__(self, flat: torch.Tensor, touched: Iterable[str] = (), lane: "GradBuffer | None" = None) -> None:
        """`touched`: names of the tensors whose sums are already in the buffer; the rest of it is undefined.

        `lane`: the sum of a lane that is not added to the buffer yet; see `LaneSums`.
        """
        self.flat = flat
        self.touched = set(touched)
        self.lane = lane

    def add(self, name: str, offset: int, grad: torch.Tensor) -> None:
        """Adds one tensor's gradient at its place."""
        view = self.flat[offset : offset + grad.numel()]
        if name in self.touched:
            _add(view, grad.reshape(-1))
        else:
            view.copy_(grad.reshape(-1))
            self.touched.add(name)

    def add_product(
        self, name: str, offset: int, left: torch.Tensor, right: torch.Tensor, *, in_fp32: bool = False
    ) -> None:
        """Adds `left.T @ right`, the gradient of a matrix, at the matrix's place.

        A buffer of the factors' dtype takes the product in place. With `in_fp32`, an fp32 buffer takes products of
        16-bit factors in place, too. Otherwise parts of the product are made in the factors' dtype and then added.
        """
        num_rows, width = left.shape[1], right.shape[1]
        sums = self.flat[offset : offset + num_rows * width].view(num_rows, width)
        is_touched = name in self.touched
        self.touched.add(name)
        if sums.dtype is left.dtype:
            if is_touched:
                sums.addmm_(left.t(), right)
            else:
                torch.mm(left.t(), right, out=sums)
            return
        if in_fp32 and sums.dtype is torch.float32:
            if is_touched:
                torch.addmm(sums, left.t(), right, out_dtype=torch.float32, out=sums)
            else:
                torch.mm(left.t(), right, out_dtype=torch.float32, out=sums)
            return
        num_rows_at_once = num_product_rows(width)
        factors = torch.split(left, num_rows_at_once, dim=1)
        for part, factor in zip(torch.split(sums, num_rows_at_once), factors, strict=True):
            if is_touched:
                part.add_(factor.t() @ right)
            else:
                part.copy_(factor.t() @ right)

    def merge(self, other: "GradBuffer", params: Sequence[tuple[str, int, int]]) -> None:
        """Adds the sums of another buffer of the same block. `params`: (name, offset, numel)."""
        for name, offset, numel in params:
            if name in other.touched:
                self.add(name, offset, other.flat[offset : offset + numel])

    def finish(self, params: Sequence[tuple[str, int, int]]) -> None:
        """Zeroes tensors without a gradient, such as an expert without tokens. `params`: (name, offset, numel)."""
        unknown = self.touched.difference(name for name, *_ in params)
        assert not unknown, f"gradients of {sorted(unknown)[:3]}, which the job's layout does not have"
        for name, offset, numel in params:
            if name not in self.touched:
                self.flat[offset : offset + numel].zero_()


def _add(sums: torch.Tensor, grad: torch.Tensor) -> None:
    """Adds to flat sums, on a CPU with at most `ADDED_NUMEL` elements of memory in the wider one of both dtypes."""
    if sums.dtype is grad.dtype or sums.device.type != "cpu":  # a GPU's kernel converts each element that it reads
        sums.add_(grad)
        return
    for target, part in zip(torch.split(sums, ADDED_NUMEL), torch.split(grad, ADDED_NUMEL), strict=True):
        target.add_(part)


class LaneSums:
    """The gradient of one block, to which micro-batches are added in lanes.

    The first lane is summed in the total. A later lane has a sum of its own, which is added to the total at its end.
    """

    def __init__(self, total: GradBuffer, params: Sequence[tuple[str, int, int]], *, is_first_lane: bool) -> None:
        """`total.lane` is the sum of a later lane so far. It may be None if only the first lane is computed.

        `params`: (name, offset, numel). `is_first_lane`: the next micro-batch belongs to the first lane.
        """
        self._total = total
        self._lane = total.lane
        self._params = params
        self._open = total if is_first_lane or total.lane is None else total.lane

    def add(self, name: str, offset: int, grad: torch.Tensor) -> None:
        """Adds one tensor's gradient to its lane."""
        self._open.add(name, offset, grad)

    def add_product(
        self, name: str, offset: int, left: torch.Tensor, right: torch.Tensor, *, in_fp32: bool = False
    ) -> None:
        """Adds `left.T @ right` to its lane; see `GradBuffer.add_product`."""
        self._open.add_product(name, offset, left, right, in_fp32=in_fp32)

    def begin_microbatch(self, microbatch: int) -> None:
        """See LaneSink. The sum that is open goes on."""

    def end_lane(self) -> None:
        """Adds a lane to the total. Tensors that the lane has not reached stay as they are in the total."""
        if self._lane is not None:
            self._total.merge(self._lane, self._params)
            self._lane.touched.clear()
            self._open = self._lane


def adds_products_in_fp32(dtype: torch.dtype, device: torch.device) -> bool:
    """Checks whether this PyTorch adds products of 16-bit factors to fp32 sums on a device. The host waits for it.

    Source: PyTorch, aten/src/ATen/native/cuda/Blas.cpp (`_addmm_dtype_out_cuda`), for CUDA only.
    """
    num, factors, expected = 16, (65.0, 63.0), 2 * 16 * 65.0 * 63.0  # half of it is no number of 16 bits
    try:
        left, right = (torch.full((num, num), factor, dtype=dtype, device=device) for factor in factors)
        buffer = GradBuffer(torch.full((num * num,), torch.nan, device=device))
        for _ in range(2):
            buffer.add_product("", 0, left, right, in_fp32=True)
        return bool((buffer.flat == expected).all())
    except (RuntimeError, TypeError, AssertionError):  # AssertionError: PyTorch was built without CUDA
        return False


class GradSink(Protocol):
    """A place to which a block's gradients are added."""

    def add(self, name: str, offset: int, grad: torch.Tensor) -> None:
        """See GradBuffer."""

    def add_product(
        self, name: str, offset: int, left: torch.Tensor, right: torch.Tensor, *, in_fp32: bool = False
    ) -> None:
        """See GradBuffer."""


@runtime_checkable
class LaneSink(GradSink, Protocol):
    """A sink that is told of micro-batches and lanes, because its sums depend on them or move between them."""

    def begin_microbatch(self, microbatch: int) -> None:
        """Begins a micro-batch, an index in the step."""

    def end_lane(self) -> None:
        """Ends the lane of the micro-batch before, in a job with several lanes."""


@runtime_checkable
class SliceSink(LaneSink, Protocol):
    """A sink that is told of the head's slices, because its sums move between them."""

    def begin_slice(self, *, is_last: bool) -> None:
        """Begins a slice of a micro-batch, which may reach all tensors again. `is_last`: none follows in it."""
