"""Initialises weights by the architecture's own rules, with one block in memory at a time."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from windlass.engine.model import BlockLayout, ModelLayout
from windlass.storage.ids import BlockIndex, ChunkKey

# The transformers library sets this attribute on modules that need no initialisation.
_DONE_MARK = "_is_hf_initialized"


class InitializationError(Exception):
    """The architecture's own initialisation leaves a parameter without a value."""


class BlockInitializer:
    """Makes the initial weights of a transformers model, chunk by chunk.

    `model` has its parameters on the meta device and is unchanged afterwards. A block depends only on (seed, block
    index), so chunks may be requested in any order. In the layout's order each block is initialised once.
    """

    def __init__(self, model: Any, layout: ModelLayout, seed: int) -> None:
        self._model = model
        self._layout = layout
        self._seed = seed
        self._made: tuple[BlockIndex, torch.Tensor] | None = None

    def fill_chunk(self, key: ChunkKey, out: torch.Tensor) -> None:
        """Writes the chunk's weights to the front of `out` (1-D, fp32) and zeros behind them."""
        if self._made is None or self._made[0] != key.block:
            self._made = None  # freed first: else two blocks would be in memory at once
            self._made = (key.block, self._initialize(self._layout.blocks[key.block]))
        start, stop = self._layout.chunk_range(key)
        out[: stop - start].copy_(self._made[1][start:stop])
        out[stop - start :].zero_()

    def close(self) -> None:
        """Frees the last block."""
        self._made = None

    def _initialize(self, block: BlockLayout) -> torch.Tensor:
        """Returns the block's flat vector, fp32."""
        # NaNs mark the parameters that the architecture does not initialise.
        flat = torch.full((block.numel,), math.nan, dtype=torch.float32)
        with self._materialized(block, flat), self._only_modules_with(block):
            state = np.random.SeedSequence([self._seed, block.index]).generate_state(1, np.uint64)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(state[0]) >> 1)  # PyTorch wants a seed of 63 bits
                self._model.initialize_weights()
        self._check(block, flat)
        return flat

    @contextlib.contextmanager
    def _materialized(self, block: BlockLayout, flat: torch.Tensor) -> Iterator[None]:
        """Replaces the block's parameters by views of `flat` for the duration of the context."""
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for param in block.params:
                module, attribute = self._site(param.name)
                original = module._parameters[attribute]
                assert original is not None
                replaced.append((module, attribute, original))
                view = flat[param.offset : param.offset + param.numel].view(param.shape)
                module._parameters[attribute] = nn.Parameter(view, requires_grad=original.requires_grad)
            yield
        finally:
            for module, attribute, original in replaced:
                module._parameters[attribute] = original

    @contextlib.contextmanager
    def _only_modules_with(self, block: BlockLayout) -> Iterator[None]:
        """Makes the library skip modules without parameters of the block, for the duration of the context.

        Ancestors of the block's modules are initialised too, because a parent may set its children's weights, as in
        GPT-2. They may also set parameters of other blocks; these are on the meta device, where this has no effect.
        """
        sites = [self._site(param.name) for param in block.params]
        own = {id(module._parameters[attribute]) for module, attribute in sites}
        modules = list(self._model.modules())
        marks = [module.__dict__.pop(_DONE_MARK, None) for module in modules]
        for module in modules:
            if not any(id(param) in own for param in module.parameters()):
                setattr(module, _DONE_MARK, True)
        try:
            yield
        finally:
            for module, mark in zip(modules, marks, strict=True):
                module.__dict__.pop(_DONE_MARK, None)
                if mark is not None:
                    setattr(module, _DONE_MARK, mark)

    def _site(self, name: str) -> tuple[nn.Module, str]:
        module_name, _, attribute = name.rpartition(".")
        return self._model.get_submodule(module_name), attribute

    def _check(self, block: BlockLayout, flat: torch.Tensor) -> None:
        missed = [p.name for p in block.params if flat[p.offset : p.offset + p.numel].isnan().any()]
        if missed:
            raise InitializationError(
                f"{type(self._model).__name__} cannot be trained from scratch: its own initialisation leaves "
                f"{', '.join(missed[:5])} without values; start from a model with weights"
            )
