"""Copies columns of a matrix in host memory to the device.

PyTorch would first gather them in other host memory, and wait for the copy. CUDA's own copy of two dimensions does
neither, so it is called directly.
"""

import ctypes
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from windlass.engine.device import copy, registration_cuts

_HOST_TO_DEVICE = 1  # of `cudaMemcpyKind`


class ColumnCopyError(RuntimeError):
    """CUDA's copy of two dimensions cannot be called, or has failed."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a matrix in a block's flat vector."""

    offset: int  # the matrix's first element in the flat vector
    num_rows: int
    width: int  # columns of the whole matrix
    start: int  # the first column
    stop: int

    @property
    def numel(self) -> int:
        """The elements of the columns."""
        return self.num_rows * (self.stop - self.start)

    def load(self, target: torch.Tensor, source: torch.Tensor, first: int) -> None:
        """Copies what a part of the flat vector has of the columns, with `copy_columns`.

        `target`: flat, for all columns, row by row. `source`: the part, which begins at element `first` and need not
        begin at a row.
        """
        length = self.stop - self.start
        begin = self.offset + self.start  # the columns' first element
        matrix = target.view(self.num_rows, length)
        for top, bottom, left, right in blocks_within(
            self.num_rows, self.width, length, first - begin, first + source.numel() - begin
        ):
            place = int(source.storage_offset()) + begin + top * self.width + left - first
            part = source.as_strided((bottom - top, right - left), (self.width, 1), place)
            copy_columns(matrix[top:bottom, left:right], part)


def blocks_within(num_rows: int, pitch: int, length: int, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
    """Divides rows, of which a range of memory has some elements, into blocks: (top, bottom, left, right).

    Row r has the elements from `r * pitch` to `r * pitch + length`, the range those from `first` to `last`. Only the
    first and the last row of a range can be incomplete, and are then blocks of their own.
    """
    if first >= last:
        return
    top = max(0, (first - length) // pitch + 1)
    bottom = min(num_rows, -(-last // pitch))
    if top < bottom and top * pitch < first:
        yield top, top + 1, first - top * pitch, min(length, last - top * pitch)
        top += 1
    end = bottom - 1 if top < bottom and (bottom - 1) * pitch + length > last else bottom
    if top < end:
        yield top, end, 0, length
    if top <= end < bottom:
        yield end, bottom, 0, last - end * pitch


def copy_columns(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies a matrix whose rows are contiguous, and may be apart. For use as a stream's work: may be async.

    `source` is in host memory, `target` on the device. On a GPU, host memory must be registered with CUDA.

    Raises:
        ColumnCopyError: CUDA refuses.
    """
    if target.device.type == "cpu":
        copy(target, source)
        return
    (num_rows, length), (pitch, _) = source.shape, source.stride()
    begin, itemsize = source.data_ptr(), source.itemsize
    # CUDA refuses a copy that touches two registrations.
    cuts = registration_cuts(begin, begin + ((num_rows - 1) * pitch + length) * itemsize)
    bounds = [0, *((cut - begin) // itemsize for cut in cuts), num_rows * pitch]
    for first, last in itertools.pairwise(bounds):
        for top, bottom, left, right in blocks_within(num_rows, pitch, length, first, last):
            _copy_block(target[top:bottom, left:right], source[top:bottom, left:right])


def require_column_copies(device: torch.device) -> None:
    """Raises ColumnCopyError if a GPU cannot copy columns. A CPU can."""
    if device.type != "cpu":
        _runtime()


def _copy_block(target: torch.Tensor, source: torch.Tensor) -> None:
    itemsize = source.itemsize
    status = _runtime().cudaMemcpy2DAsync(
        ctypes.c_void_p(target.data_ptr()),
        ctypes.c_size_t(target.stride(0) * itemsize),
        ctypes.c_void_p(source.data_ptr()),
        ctypes.c_size_t(source.stride(0) * itemsize),
        ctypes.c_size_t(source.shape[1] * itemsize),
        ctypes.c_size_t(source.shape[0]),
        ctypes.c_int(_HOST_TO_DEVICE),
        ctypes.c_void_p(torch.cuda.current_stream(target.device).cuda_stream),
    )
    if status != 0:
        raise ColumnCopyError(
            f"CUDA did not copy columns of a matrix ({source.shape[0]} x {source.shape[1]}) to the device: error "
            f"{status}; see the driver's log, or train without cut_matrices"
        )


@functools.cache
def _runtime() -> ctypes.CDLL:
    """Returns CUDA's runtime as PyTorch has loaded it. Another copy of it would have streams of its own."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    found = sorted({line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/libcudart" in line})
    # PyTorch's own, or that of a package of NVIDIA's beside it, before another package's copy.
    packages = str(Path(torch.__file__).parent.parent)
    for path in sorted(found, key=lambda path: not path.startswith((f"{packages}/torch/", f"{packages}/nvidia/"))):
        return ctypes.CDLL(path)
    raise ColumnCopyError(
        "CUDA's runtime (libcudart) is not among the libraries that PyTorch has loaded, so columns of matrices cannot "
        "be copied to the GPU; install PyTorch's own wheel for CUDA, or train without cut_matrices"
    )
