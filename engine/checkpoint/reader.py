"""Streams a model folder's weights into chunks. It never loads the whole model and never opens a pickle.

For a parameter that is one tensor of the checkpoint, only the elements of the chunk are read. Parameters that the
library makes from several tensors, such as merged experts, are made one group at a time. The last group is cached.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from windlass.engine.checkpoint.name_mapping import ConvertedGroup, NameRules
from windlass.engine.checkpoint.safetensors_file import DTYPES, StoredTensor, TensorReader, list_tensors
from windlass.engine.model import ModelLayout, ParamSlice
from windlass.storage.ids import ChunkKey

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_COMPARE_NUMEL = 4 * 2**20  # elements of two tied tensors that are compared at a time


class CheckpointError(Exception):
    """A model folder's weights are missing, damaged, or not those of its architecture."""


class CheckpointReader:
    """Reads the weights of a model folder as chunks of a layout.

    `model` is the architecture with its parameters on the meta device. The constructor checks names, shapes and dtypes,
    and that tied tensors are equal. It raises `CheckpointError` with the names of the tensors at fault.
    """

    def __init__(self, model_dir: str | Path, layout: ModelLayout, model: Any) -> None:
        self._layout = layout
        self._model = model
        self._folder = Path(model_dir).name
        self._reader = TensorReader()
        self._direct: dict[str, StoredTensor] = {}
        self._group_of: dict[str, ConvertedGroup] = {}
        self._made: tuple[ConvertedGroup, dict[str, torch.Tensor]] | None = None
        self._stored = self._find_tensors(Path(model_dir))
        shapes = self._match()
        self._alias = self._resolve_tied()
        self._check(shapes)
        self._check_tied_copies()

    def fill_chunk(self, key: ChunkKey, out: torch.Tensor) -> None:
        """Writes the chunk's weights to the front of `out` (1-D, fp32) and zeros behind them."""
        start, stop = self._layout.chunk_range(key)
        for param, first, count, place in self._layout.params_in_chunk(key):
            out[place : place + count].copy_(self._read(self._alias.get(param.name, param.name), first, count))
        out[stop - start :].zero_()

    def close(self) -> None:
        """Closes the files and frees the cached group."""
        self._reader.close()
        self._made = None

    def _find_tensors(self, directory: Path) -> dict[str, StoredTensor]:
        if (directory / WEIGHTS_NAME).is_file():
            return self._open(directory / WEIGHTS_NAME)
        if (directory / INDEX_NAME).is_file():
            return self._find_sharded(directory)
        pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
        if pickles:
            raise CheckpointError(
                f"{self._folder}: the weights are pickles ({_some(pickles)}), which can run code when opened; convert "
                "them to safetensors"
            )
        raise CheckpointError(f"{self._folder}: no weights; expected {WEIGHTS_NAME} or {INDEX_NAME}")

    def _find_sharded(self, directory: Path) -> dict[str, StoredTensor]:
        try:
            weight_map = json.loads((directory / INDEX_NAME).read_text())["weight_map"]
            files = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self._folder}: {INDEX_NAME} cannot be read: {error}") from error
        outside = [name for name in files if not isinstance(name, str) or Path(name).name != name]
        if outside:
            raise CheckpointError(
                f"{self._folder}: {INDEX_NAME} names what is no file of the folder: {_some([*map(str, outside)])}"
            )
        missing = [name for name in files if not (directory / name).is_file()]
        if missing:
            raise CheckpointError(f"{self._folder}: {INDEX_NAME} names missing files: {_some(missing)}")
        shards = {name: self._open(directory / name) for name in files}
        absent = [name for name, file in weight_map.items() if name not in shards[file]]
        if absent:
            raise CheckpointError(f"{self._folder}: tensors of {INDEX_NAME} are not in their files: {_some(absent)}")
        return {name: shards[file][name] for name, file in weight_map.items()}

    def _open(self, path: Path) -> dict[str, StoredTensor]:
        try:
            return list_tensors(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._folder}: {path.name} is not a readable safetensors file: {error}") from error

    def _match(self) -> dict[str, tuple[int, ...]]:
        """Finds each parameter's source in the checkpoint and returns the parameters' shapes there."""
        match = NameRules(self._model).match(self._stored)
        self._refuse(match.unused, "the architecture has no place for the tensors")
        doubled = [" and ".join(names) for names in match.direct.values() if len(names) > 1]
        self._refuse(doubled, "more than one tensor for the same parameter")
        used = [names[0] for names in match.direct.values()] + [n for g in match.groups for _, n in g.sources]
        odd = [f"{n} ({self._stored[n].dtype})" for n in used if self._stored[n].dtype not in DTYPES]
        self._refuse(odd, f"only {', '.join(DTYPES)} weights can be trained; not the tensors")
        self._direct = {target: self._stored[names[0]] for target, names in match.direct.items()}
        shapes = {target: tensor.shape for target, tensor in self._direct.items()}
        for group in match.groups:
            for name, made in self._convert_shapes(group).items():
                self._group_of[name] = group
                shapes[name] = tuple(made.shape)
        return shapes

    def _convert_shapes(self, group: ConvertedGroup) -> dict[str, torch.Tensor]:
        sources = {
            name: torch.empty(self._stored[name].shape, dtype=DTYPES[self._stored[name].dtype], device="meta")
            for _, name in group.sources
        }
        try:
            return group.convert(sources, self._model)
        # The library's conversions raise various errors if tensors do not fit together.
        except Exception as error:
            names = [name for _, name in group.sources]
            raise CheckpointError(
                f"{self._folder}: {_some(names)} cannot be made into {group.target}: {type(error).__name__}: {error}"
            ) from error

    def _resolve_tied(self) -> dict[str, str]:
        """Maps the name of each tied parameter that the checkpoint lacks to the tied name that it has instead."""
        alias = {}
        for further, name in self._layout.tied.items():
            if not self._has(name) and self._has(further):
                alias[name] = further
        return alias

    def _check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        params = [param for block in self._layout.blocks for param in block.params]
        sources = {param.name: self._alias.get(param.name, param.name) for param in params}
        self._refuse(
            [name for name, source in sources.items() if not self._has(source)], "no tensor for the parameters"
        )
        wrong = [
            f"{sources[param.name]} {list(shapes[sources[param.name]])} instead of {list(param.shape)}"
            for param in params
            if shapes[sources[param.name]] != param.shape
        ]
        self._refuse(wrong, "tensors of the wrong shape")
        unused = shapes.keys() - set(sources.values()) - self._layout.tied.keys()
        self._refuse(sorted(unused), "the architecture has no place for the tensors")

    def _check_tied_copies(self) -> None:
        """Checks that the copies of a tied parameter are equal. Else the config does not belong to the checkpoint."""
        params: dict[str, ParamSlice] = {param.name: param for block in self._layout.blocks for param in block.params}
        for further, name in self._layout.tied.items():
            source = self._alias.get(name, name)
            if further == source or not self._has(further):
                continue
            for first in range(0, params[name].numel, _COMPARE_NUMEL):
                count = min(_COMPARE_NUMEL, params[name].numel - first)
                if not torch.equal(self._read(further, first, count).float(), self._read(source, first, count).float()):
                    raise CheckpointError(
                        f"{self._folder}: the config ties {further} to {name}, but the checkpoint holds two different "
                        "tensors; set tie_word_embeddings to false in config.json"
                    )

    def _has(self, name: str) -> bool:
        return name in self._direct or name in self._group_of

    def _read(self, name: str, first: int, count: int) -> torch.Tensor:
        if name in self._direct:
            return self._reader.read(self._direct[name], first, count)
        group = self._group_of[name]
        if self._made is None or self._made[0] is not group:
            self._made = None  # freed first: else two groups would be in memory at once
            tensors = {}
            for _, source in group.sources:
                stored = self._stored[source]
                numel = torch.Size(stored.shape).numel()
                tensors[source] = self._reader.read(stored, 0, numel).view(stored.shape)
            self._made = (group, group.convert(tensors, self._model))
        return self._made[1][name].reshape(-1)[first : first + count]

    def _refuse(self, names: Iterable[str], problem: str) -> None:
        listed = list(names)
        if listed:
            raise CheckpointError(f"{self._folder}: {problem}: {_some(listed)}")


def _some(names: list[str], limit: int = 5) -> str:
    """Lists the first few names and the number of further ones."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
