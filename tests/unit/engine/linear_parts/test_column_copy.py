"""Columns of a matrix that lies in several parts of memory, none of which need begin at a row."""

import ctypes
from typing import Any

import pytest
import torch

from windlass.engine.device import registered_memory
from windlass.engine.linear_parts import column_copy
from windlass.engine.linear_parts.column_copy import (
    ColumnCopyError,
    Columns,
    blocks_within,
    copy_columns,
    require_column_copies,
)


def elements_of(blocks: Any, pitch: int) -> list[int]:
    return [
        row * pitch + column
        for top, bottom, left, right in blocks
        for row in range(top, bottom)
        for column in range(left, right)
    ]


def test_blocks_have_each_element_of_the_range_once() -> None:
    for num_rows, pitch, length in ((3, 7, 4), (1, 5, 5), (4, 3, 3), (5, 4, 1)):
        for first in range(-3, num_rows * pitch + 3):
            for last in range(first, num_rows * pitch + 6):
                blocks = list(blocks_within(num_rows, pitch, length, first, last))
                expected = [
                    row * pitch + column
                    for row in range(num_rows)
                    for column in range(length)
                    if first <= row * pitch + column < last
                ]
                assert elements_of(blocks, pitch) == expected
                assert len(blocks) <= 3
                assert all(top < bottom and left < right for top, bottom, left, right in blocks)


@pytest.mark.parametrize("chunk_numel", [1, 3, 7, 10, 11, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_are_gathered_from_chunks(chunk_numel: int, dtype: torch.dtype) -> None:
    flat = torch.arange(200).to(dtype)
    columns = Columns(offset=13, num_rows=11, width=10, start=3, stop=7)
    target = torch.full((columns.numel,), torch.nan, dtype=dtype)
    for first in range(0, 200, chunk_numel):
        columns.load(target, flat[first : first + chunk_numel].clone(), first)
    matrix = flat[13 : 13 + 110].view(11, 10)
    assert torch.equal(target.view(11, 4), matrix[:, 3:7])


class Runtime:
    """CUDA's copy of two dimensions, on host memory."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.copies: list[tuple[int, int]] = []  # rows, and bytes of each

    def cudaMemcpy2DAsync(
        self,
        target: Any,
        pitch: Any,
        source: Any,
        source_pitch: Any,
        nbytes: Any,
        num_rows: Any,
        kind: Any,
        stream: Any,
    ) -> int:
        assert (kind.value, stream.value) == (1, 77)
        if self.status == 0:
            self.copies.append((num_rows.value, nbytes.value))
            for row in range(num_rows.value):
                place = source.value + row * source_pitch.value
                ctypes.memmove(target.value + row * pitch.value, place, nbytes.value)
        return self.status


class OnGpu(torch.Tensor):
    """Host memory that says that it is a GPU's."""

    @property
    def device(self) -> Any:
        return torch.device("cuda", 0)


@pytest.fixture(name="runtime")
def fake_runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(column_copy, "_runtime", lambda: runtime)
    stream = type("Stream", (), {"cuda_stream": 77})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return runtime


def test_a_gpu_copies_rows_at_once_and_never_over_two_registrations(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = torch.randn(9, 10)
    source = matrix[1:8, 2:6]
    target = torch.zeros(7, 4).as_subclass(OnGpu)
    copy_columns(target, source)
    assert torch.equal(torch.Tensor(target), source)
    assert runtime.copies == [(7, 16)]
    runtime.copies.clear()
    # In the middle of a copied row, between two copied rows, and beyond the last one.
    cuts = [matrix.data_ptr() + 4 * element for element in (3, 34, 58, 99)]
    monkeypatch.setattr(registered_memory, "_cuts", tuple(cuts))
    target.zero_()
    copy_columns(target, source)
    assert torch.equal(torch.Tensor(target), source)
    assert runtime.copies == [(2, 16), (1, 8), (1, 8), (2, 16), (2, 16)]


def test_a_refused_copy_is_an_error(runtime: Runtime) -> None:
    runtime.status = 1
    with pytest.raises(ColumnCopyError, match=r"columns of a matrix \(3 x 2\) to the device: error 1;"):
        copy_columns(torch.zeros(3, 2).as_subclass(OnGpu), torch.zeros(3, 2))


def test_a_gpu_without_cudas_runtime_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "maps").write_text("7f00-7f01 r-xp 00000000 08:01 1  /usr/lib/libc.so.6\n")
    monkeypatch.setattr(column_copy, "Path", lambda _: tmp_path / "maps")
    column_copy._runtime.cache_clear()
    with pytest.raises(ColumnCopyError, match="libcudart"):
        require_column_copies(torch.device("cuda"))
    require_column_copies(torch.device("cpu"))
