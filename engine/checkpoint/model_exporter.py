"""Writes a Hugging Face model folder from chunks in any order, without the whole model in memory."""

import copy
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from windlass.engine.checkpoint.atomic_folder import make_partial_folder, remove_partial_folders
from windlass.engine.checkpoint.name_mapping import NameRules
from windlass.engine.checkpoint.safetensors_file import encode_header
from windlass.engine.model import ModelLayout, ParamSlice, build_meta_model
from windlass.storage.files import sync_path, sync_tree
from windlass.storage.ids import ChunkKey, Precision
from windlass.storage.memory import is_out_of_space, require_disk_room

MAX_SHARD_NBYTES = 5 * 10**9
_MARGIN_NBYTES = 64 * 2**20  # disk space required for the small files beside the weights
# The files of all kinds of tokenizers. Code is never copied.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)


class ExportError(Exception):
    """A model folder cannot be written, or is incomplete."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a parameter's first element: file and byte offset."""

    shard: int
    offset: int


class ModelExporter:
    """Writes a model folder. The folder appears under its name only when `finish` returns, and is then complete.

    Until then the files are in a hidden folder beside it. `config` is not changed.

    Raises:
        ExportError: the target folder exists, or it cannot be written. Also if the library, on loading, would rename
            or convert a tensor that has its model's name.
        InsufficientSpaceError: the disk is too small.
    """

    def __init__(
        self,
        model_dir: str | Path,
        layout: ModelLayout,
        config: Any,
        path: str | Path,
        dtype: torch.dtype,
        max_shard_nbytes: int = MAX_SHARD_NBYTES,
    ) -> None:
        self._model_dir = Path(model_dir)
        self._layout = layout
        self._path = Path(path)
        self._dtype = dtype
        self._written: set[ChunkKey] = set()
        self._descriptors: list[int] = []
        model: Any = build_meta_model(config, Precision.FP32)
        self._check_names(model)
        self._config = copy.deepcopy(config)
        self._config.dtype = dtype
        self._config.architectures = [type(model).__name__]
        shards = self._cut_shards(max_shard_nbytes)
        self._file_names = _file_names(len(shards))
        self._places: dict[str, _Place] = {}
        self._make_folder()
        try:
            self._preallocate(shards)
        except OSError as error:
            self.abort()
            if is_out_of_space(error):
                raise  # the caller may retry: space may become free
            raise ExportError(f"cannot write the model to {self._path}: {error}") from error

    def write_chunk(self, key: ChunkKey, tensor: torch.Tensor) -> None:
        """Writes a chunk's elements from the front of `tensor` (1-D, floating point, on the CPU)."""
        for param, first, count, place in self._layout.params_in_chunk(key):
            part = tensor[place : place + count].to(self._dtype).contiguous()
            where = self._places[param.name]
            self._write(where.shard, where.offset + first * self._dtype.itemsize, part)
        self._written.add(key)

    def finish(self, on_synced: Callable[[], None] = lambda: None) -> None:
        """Completes the folder and renames it to its final path. Raises `ExportError` if chunks are missing.

        `on_synced` is called after each file that is on the disk.
        """
        keys = [key for block in self._layout.blocks for key in self._layout.chunk_keys(block.index)]
        missing = [key for key in keys if key not in self._written]
        if missing:
            raise ExportError(
                f"{len(missing)} of {len(keys)} chunks were not written to {self._path}; first {missing[0]}"
            )
        self._write_index()
        self._config.save_pretrained(self._partial)
        self._write_generation_config()
        self._copy_tokenizer()
        sync_tree(self._partial, on_synced)
        self._close()
        try:
            self._partial.rename(self._path)
        except OSError as error:
            raise ExportError(f"cannot put the finished model at {self._path}: {error.strerror}") from error
        sync_path(self._path.parent)

    def abort(self) -> None:
        """Removes the partial folder. Does nothing after `finish`."""
        self._close()
        shutil.rmtree(self._partial, ignore_errors=True)

    def _check_names(self, model: Any) -> None:
        rules = NameRules(model)
        names = [param.name for block in self._layout.blocks for param in block.params]
        odd = [name for name in names if not rules.loads_as_itself(name)]
        if odd:
            raise ExportError(
                f"{type(model).__name__} cannot be exported: the transformers library would convert {len(odd)} of its "
                f"tensors on loading, among them {', '.join(odd[:3])}"
            )

    def _cut_shards(self, max_shard_nbytes: int) -> list[list[ParamSlice]]:
        """Returns the parameters of each file, in the layout's order. One above the size limit has its own file."""
        shards: list[list[ParamSlice]] = [[]]
        nbytes = 0
        for block in self._layout.blocks:
            for param in block.params:
                size = param.numel * self._dtype.itemsize
                if shards[-1] and nbytes + size > max_shard_nbytes:
                    shards.append([])
                    nbytes = 0
                shards[-1].append(param)
                nbytes += size
        return shards

    def _make_folder(self) -> None:
        if self._path.exists():
            raise ExportError(f"{self._path} exists already; delete it first, or export under another name")
        needed = self._layout.numel * self._dtype.itemsize + _MARGIN_NBYTES
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            remove_partial_folders(self._path)  # left by a failed attempt
            require_disk_room("the exported model", self._path.parent, needed)
            self._partial = make_partial_folder(self._path)
        except OSError as error:
            raise ExportError(f"cannot write the model to {self._path}: {error}") from error

    def _preallocate(self, shards: list[list[ParamSlice]]) -> None:
        for index, (name, params) in enumerate(zip(self._file_names, shards, strict=True)):
            header, starts = encode_header({param.name: param.shape for param in params}, self._dtype)
            self._places |= {param_name: _Place(index, start) for param_name, start in starts.items()}
            descriptor = os.open(self._partial / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            self._descriptors.append(descriptor)
            data_nbytes = sum(param.numel for param in params) * self._dtype.itemsize
            os.posix_fallocate(descriptor, 0, len(header) + data_nbytes)
            _write_all(descriptor, memoryview(header), 0)

    def _write(self, shard: int, offset: int, part: torch.Tensor) -> None:
        _write_all(self._descriptors[shard], part.view(torch.uint8).numpy().data, offset)

    def _write_index(self) -> None:
        if len(self._file_names) == 1:
            return
        numel = self._layout.numel
        index = {
            "metadata": {"total_parameters": numel, "total_size": numel * self._dtype.itemsize},
            "weight_map": {name: self._file_names[place.shard] for name, place in sorted(self._places.items())},
        }
        (self._partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _write_generation_config(self) -> None:
        own = self._model_dir / "generation_config.json"
        if own.is_file():
            shutil.copyfile(own, self._partial / own.name)
        else:
            GenerationConfig.from_model_config(self._config).save_pretrained(self._partial)

    def _copy_tokenizer(self) -> None:
        for pattern in _TOKENIZER_FILES:
            for file in self._model_dir.glob(pattern):
                target = self._partial / file.relative_to(self._model_dir)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)

    def _close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


def _file_names(num_shards: int) -> list[str]:
    if num_shards == 1:
        return ["model.safetensors"]
    return [f"model-{i:05d}-of-{num_shards:05d}.safetensors" for i in range(1, num_shards + 1)]


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    """Writes all bytes. It loops, because one `pwrite` may write fewer bytes than requested."""
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)
