"""The folder in which an offloaded optimizer is saved: one safetensors file a layer, written and read part by part."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from windlass.actors.offload.engine import OffloadEngine
from windlass.actors.offload.layers import OffloadedBlock, WrappedParam
from windlass.engine.checkpoint import TensorReader, encode_header, list_tensors, make_partial_folder
from windlass.engine.optimizer import MOMENTS, SavedStates, saved_dtype, weight_kind
from windlass.storage.ids import StateKind

_SETTINGS, _OUTSIDE = "optimizer.pt", "outside.safetensors"


def save_folder(folder: Path, engine: OffloadEngine, settings: Mapping[str, Any]) -> None:
    """Writes the states of all parameters, and `settings`. The folder appears under its name when it is complete.

    Raises:
        FileExistsError: the folder exists.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists; save to a new folder, for example one for each step")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = make_partial_folder(folder)
    for block in engine.blocks:
        _write_block(partial / f"{block.name}.safetensors", engine, block)
    outside = {
        f"{name}.{kind}": state.cpu()
        for name, states in engine.outside_states().items()
        for kind, state in states.items()
    }
    save_file(outside, partial / _OUTSIDE)
    torch.save({**settings, "num_updates": engine.num_updates}, partial / _SETTINGS)
    for path in (*partial.iterdir(), partial):
        _sync(path)
    partial.rename(folder)
    _sync(folder.parent)


def read_settings(folder: Path) -> dict[str, Any]:
    """Returns the settings of a saved folder, and the number of updates of each parameter."""
    settings: dict[str, Any] = torch.load(folder / _SETTINGS, weights_only=True)
    return settings


def load_folder(
    folder: Path, engine: OffloadEngine, num_updates: Mapping[str, int], before: Callable[[], None]
) -> None:
    """Replaces the states and the weights of all parameters by those of a saved folder.

    `before` is called after the checks of all files, before the first change.

    Raises:
        ValueError: the folder is that of another model or of other formats.
    """
    reader = TensorReader()
    read_parts = {block.index: _block_reader(folder, engine, block, num_updates, reader) for block in engine.blocks}
    outside: dict[str, dict[StateKind, torch.Tensor]] = {}
    for name, state in load_file(folder / _OUTSIDE).items():
        param, _, kind = name.rpartition(".")
        outside.setdefault(param, {})[StateKind(kind)] = state
    before()
    try:
        engine.load_states(num_updates, lambda block, *part: read_parts[block.index](*part), outside)
    finally:
        reader.close()


# --- inside ----------------------------------------------------------------------------------------------------------


def _kinds(engine: OffloadEngine) -> tuple[StateKind, ...]:
    return (weight_kind(engine.formats), *MOMENTS)


def _write_block(path: Path, engine: OffloadEngine, block: OffloadedBlock) -> None:
    dtype = saved_dtype(engine.formats)
    updated = [param for param in block.params if engine.num_updates.get(param.name)]
    shapes = {f"{param.name}.{kind}": param.shape for param in updated for kind in _kinds(engine)}
    header, starts = encode_header(shapes, dtype)
    with path.open("wb") as file:
        file.write(header)

        def write(param: WrappedParam, first: int, states: SavedStates) -> None:
            for kind, state in states.items():
                file.seek(starts[f"{param.name}.{kind}"] + first * dtype.itemsize)
                file.write(state.contiguous().view(torch.uint8).numpy().data)

        engine.read_states(block, write)


def _block_reader(
    folder: Path, engine: OffloadEngine, block: OffloadedBlock, num_updates: Mapping[str, int], reader: TensorReader
) -> Callable[[WrappedParam, int, int], SavedStates | None]:
    """Returns a function that reads elements of a parameter's states, after a check of the layer's file."""
    path, kinds = folder / f"{block.name}.safetensors", _kinds(engine)
    tensors = list_tensors(path)
    updated = [param for param in block.params if num_updates.get(param.name)]
    expected = {f"{param.name}.{kind}": param.shape for param in updated for kind in kinds}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if found != expected:
        name = min(found.items() ^ expected.items())[0]
        raise ValueError(
            f"{path} does not fit this model: {name} is {found.get(name, 'missing')}, and should be "
            f"{expected.get(name, 'missing')}; was it saved with another model, or with another state_precision?"
        )

    def read(param: WrappedParam, first: int, count: int) -> SavedStates | None:
        if param not in updated:
            return None
        return {kind: reader.read(tensors[f"{param.name}.{kind}"], first, count) for kind in kinds}

    return read


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
