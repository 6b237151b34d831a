"""Where each parameter of a model lies: blocks, their flat vectors, and the chunks those are cut into.

No torch here: the scheduler and the planner's callers read layouts too.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from windlass.storage.ids import BlockIndex, ChunkIndex, ChunkKey


@dataclass(frozen=True, slots=True)
class ParamSlice:
    """One parameter tensor inside its block's flat vector."""

    name: str  # as in the model's state_dict: "model.layers.3.mlp.up_proj.weight"
    shape: tuple[int, ...]
    offset: int  # in elements
    numel: int
    decay: bool  # False for norms and biases: no weight decay


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """A block's flat vector: parameters with weight decay first, so that a chunk holds at most two runs."""

    index: BlockIndex
    name: str  # "embedding", "model.layers.3", "head"
    params: tuple[ParamSlice, ...]

    @property
    def numel(self) -> int:
        """Elements of the flat vector."""
        return sum(param.numel for param in self.params)

    @property
    def decay_numel(self) -> int:
        """Elements with weight decay; they come first."""
        return sum(param.numel for param in self.params if param.decay)

    @property
    def decay_numels_by_module(self) -> list[list[int]]:
        """Elements of each parameter with weight decay, in order, by the module that holds it."""
        decaying = (param for param in self.params if param.decay)
        modules = itertools.groupby(decaying, key=lambda param: param.name.rpartition(".")[0])
        return [[param.numel for param in params] for _, params in modules]


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """All blocks of a model, in forward order, and the chunk size they are cut by."""

    blocks: tuple[BlockLayout, ...]
    # Further names of a parameter: {"lm_head.weight": "model.embed_tokens.weight"}. Stored and exported once.
    tied: dict[str, str]
    chunk_numel: int
    # Per block, the blocks whose params its computation reads: itself first, then those it shares tied tensors with.
    shared: tuple[tuple[BlockIndex, ...], ...] = ()

    def to_json(self) -> str:
        """All of it, for `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "ModelLayout":
        """What `to_json` wrote."""
        raw = json.loads(text)
        blocks = []
        for block in raw["blocks"]:
            params = tuple(ParamSlice(**{**param, "shape": tuple(param["shape"])}) for param in block["params"])
            blocks.append(BlockLayout(index=BlockIndex(block["index"]), name=block["name"], params=params))
        return cls(
            blocks=tuple(blocks),
            tied=raw["tied"],
            chunk_numel=raw["chunk_numel"],
            shared=tuple(tuple(BlockIndex(b) for b in shared) for shared in raw["shared"]),
        )

    @property
    def numel(self) -> int:
        """Parameters of the model, tied ones once."""
        return sum(block.numel for block in self.blocks)

    def num_chunks(self, block: BlockIndex) -> int:
        """Chunks of a block."""
        return max(1, -(-self.blocks[block].numel // self.chunk_numel))

    def chunk_keys(self, block: BlockIndex) -> list[ChunkKey]:
        """A block's chunks in order."""
        return [ChunkKey(block, ChunkIndex(i)) for i in range(self.num_chunks(block))]

    def chunk_range(self, key: ChunkKey) -> tuple[int, int]:
        """First and past-last element of a chunk in its block's flat vector."""
        start = key.chunk * self.chunk_numel
        return start, min(start + self.chunk_numel, self.blocks[key.block].numel)

    def params_in_chunk(self, key: ChunkKey) -> Iterator[tuple[ParamSlice, int, int, int]]:
        """Parameters that a chunk holds a part of: (param, first element of it, number of elements, place in chunk)."""
        start, stop = self.chunk_range(key)
        for param in self.blocks[key.block].params:
            first = max(start, param.offset)
            last = min(stop, param.offset + param.numel)
            if first < last:
                yield param, first - param.offset, last - first, first - start
