"""The safetensors format: 8 bytes of header length, a JSON header, and the tensors' bytes, little-endian, in order.

Files are read by `pread` and not mapped, because mapped pages would count as this process's memory.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_ALIGNMENT_NBYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    path: Path
    name: str
    dtype: str  # as the format names it: "BF16"
    shape: tuple[int, ...]
    offset: int  # of its first byte, from the file's start
    nbytes: int


def list_tensors(path: Path) -> dict[str, StoredTensor]:
    """Lists the tensors of a file by name. Raises `SafetensorError` or `OSError` if it is no safetensors file."""
    # The library checks that offsets are in order, within the file, and match shapes and dtypes; the code below relies
    # on it. "np", because with "pt" the library maps the file a second time.
    with safe_open(str(path), framework="np"):
        pass
    with path.open("rb") as file:
        header_nbytes = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(header_nbytes))
    data_start = 8 + header_nbytes
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            tensors[name] = StoredTensor(
                path=path,
                name=name,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                offset=data_start + start,
                nbytes=stop - start,
            )
    return tensors


class TensorReader:
    """Reads elements of stored tensors. Keeps the last file open."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor = -1

    def read(self, tensor: StoredTensor, first: int, count: int) -> torch.Tensor:
        """Returns elements [first, first + count) of the flattened tensor. Its dtype must be one of `DTYPES`."""
        self._open(tensor.path)
        out = torch.empty(count, dtype=DTYPES[tensor.dtype])
        view = out.view(torch.uint8).numpy().data
        position = tensor.offset + first * out.itemsize
        done = 0
        while done < len(view):
            num_read = os.preadv(self._descriptor, [view[done:]], position + done)
            if num_read == 0:
                raise SafetensorError(f"{tensor.path} ends within tensor {tensor.name}: was it changed meanwhile?")
            done += num_read
        return out

    def close(self) -> None:
        """Closes the file. The reader may be used again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._path, self._descriptor = None, -1

    def _open(self, path: Path) -> None:
        if path != self._path:
            self.close()
            self._descriptor = os.open(path, os.O_RDONLY)
            self._path = path


def encode_header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> tuple[bytes, dict[str, int]]:
    """Returns a file's header for tensors of one dtype in this order, and the file offset of each tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    position = 0
    for name, shape in shapes.items():
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [position, position + nbytes]}
        starts[name] = position
        position += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT_NBYTES)
    data_start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: data_start + start for name, start in starts.items()}
