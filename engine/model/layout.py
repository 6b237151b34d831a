"""The layout of a model's parameters: blocks, their flat vectors, and the chunks of these.

It imports no torch, because the scheduler and the planner's callers read layouts too.
"""

import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from windlass.engine.memory_plan import row_bounds
from windlass.storage.ids import BlockIndex, ChunkIndex, ChunkKey

# The base module of all models. transformers loads it when the first model is built, which takes a second or two.
MODELS_MODULE = "transformers.modeling_utils"
MIN_CHUNK_NUMEL = 8 * 2**20  # elements of a chunk, except in smaller layers
# Elements: chunk sizes are multiples of this, because O_DIRECT needs regions of 4096 bytes, and bf16 states are the
# smallest.
CHUNK_GRANULE = 2048


class UnsupportedArchitectureError(Exception):
    """The model cannot be trained exactly block by block. The message names the model and the reason."""


@dataclass(frozen=True, slots=True)
class ParamSlice:
    """One parameter tensor inside its block's flat vector."""

    name: str  # as in the model's state_dict: "model.layers.3.mlp.up_proj.weight"
    shape: tuple[int, ...]
    offset: int  # in elements
    numel: int
    decay: bool  # has weight decay; False for norms and biases
    is_divisible: bool = False  # the matrix of a linear layer or an embedding, which may be computed in parts

    def is_cut(self, cut_matrices: int | None) -> bool:
        """Returns whether the tensor is computed in parts. `cut_matrices`: as in the job's `TrainingConfig`."""
        return self.is_divisible and cut_matrices is not None and self.numel > cut_matrices

    def parts(self, cut_matrices: int | None) -> Iterator[tuple[str, int, int]]:
        """Yields the parts of rows in which the tensor is computed: (name, offset in the flat vector, elements).

        The only part of a whole tensor has the tensor's name.
        """
        if not self.is_cut(cut_matrices):
            yield self.name, self.offset, self.numel
            return
        width = self.shape[1]
        for start, stop in itertools.pairwise(row_bounds(self.shape, cut_matrices)):
            yield f"{self.name}[{start}:{stop}]", self.offset + start * width, (stop - start) * width


# Without slots, because its sums are kept: plans need them often.
@dataclass(frozen=True)
class BlockLayout:
    """A block's flat vector. Parameters with weight decay come first, so a chunk has at most one boundary of decay."""

    index: BlockIndex
    name: str  # "embedding", "model.layers.3", "head"
    params: tuple[ParamSlice, ...]

    @functools.cached_property
    def numel(self) -> int:
        """The elements of the flat vector."""
        return sum(param.numel for param in self.params)

    @property
    def decay_numel(self) -> int:
        """The elements with weight decay, which come first."""
        return sum(param.numel for param in self.params if param.decay)

    def part_numels_by_module(self, cut_matrices: int | None) -> tuple[tuple[int, ...], ...]:
        """Returns the elements of each part of parameters with weight decay, in order, grouped by module.

        Blocks that are alike return the same object. `cut_matrices`: as in the job's `TrainingConfig`.
        """
        if cut_matrices not in self._numels_by_cut:
            decaying = (param for param in self.params if param.decay)
            modules = itertools.groupby(decaying, key=lambda param: param.name.rpartition(".")[0])
            self._numels_by_cut[cut_matrices] = _one_object(
                tuple(
                    tuple(numel for param in params for *_, numel in param.parts(cut_matrices)) for _, params in modules
                )
            )
        return self._numels_by_cut[cut_matrices]

    @functools.cached_property
    def _numels_by_cut(self) -> dict[int | None, tuple[tuple[int, ...], ...]]:
        return {}

    def parts(self, cut_matrices: int | None) -> list[tuple[str, int, int]]:
        """Lists the parts of all parameters, each of which has a gradient of its own: (name, offset, elements)."""
        return [part for param in self.params for part in param.parts(cut_matrices)]


@functools.lru_cache(maxsize=256)
def _one_object(numels: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Returns the same object for equal values, so that what depends on them is computed once (see `cut_layers`)."""
    return numels


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """All blocks of a model in forward order, and the size of their chunks."""

    blocks: tuple[BlockLayout, ...]
    # Further names of tied parameters: {"lm_head.weight": "model.embed_tokens.weight"}. They are stored once.
    tied: dict[str, str]
    chunk_numel: int
    # Per block, the blocks whose params its computation reads: itself first, then those it shares tied tensors with.
    shared: tuple[tuple[BlockIndex, ...], ...] = ()
    hidden_size: int = 0  # elements of the hidden state of one token; 0: unknown
    vocab_size: int = 0  # logits of one token; 0: unknown
    own: frozenset[int] | None = None  # the blocks that have chunks here; None: all. See `of_blocks`
    lent: frozenset[int] = frozenset()  # of the own blocks: those whose params operations of other boxes use, too

    def grad_parts(self, block: int, cut_matrices: int | None) -> list[tuple[str, int, int]]:
        """Lists the tensors of a block that have a gradient of their own: (name, offset in the flat vector, elements).

        These are the parts of matrices that are cut, and all other tensors. `cut_matrices`: as in the job's
        `TrainingConfig`.
        """
        return self.blocks[block].parts(cut_matrices)

    @property
    def divisible_names(self) -> set[str]:
        """The names of the tensors that may be computed in parts."""
        return {param.name for block in self.blocks for param in block.params if param.is_divisible}

    def to_json(self) -> str:
        """Serializes the layout of a whole model for `from_json`."""
        facts = asdict(self)
        del facts["own"], facts["lent"]
        return json.dumps(facts)

    @classmethod
    def from_json(cls, text: str) -> "ModelLayout":
        """Reads a layout that `to_json` wrote."""
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
            hidden_size=raw.get("hidden_size", 0),  # layouts of earlier releases lack it, and the next one
            vocab_size=raw.get("vocab_size", 0),
        )

    def of_blocks(self, first: int, stop: int) -> "ModelLayout":
        """Returns the layout as a box with some blocks sees it. All other blocks have no chunks and no operations."""
        own = frozenset(range(first, stop))
        shared = tuple(blocks if block in own else () for block, blocks in enumerate(self.shared))
        elsewhere = {block for user, blocks in enumerate(self.shared) if user not in own for block in blocks}
        return replace(self, own=own, shared=shared, lent=own & elsewhere)

    @property
    def borrowed(self) -> frozenset[int]:
        """The blocks of other boxes whose params operations of own blocks use."""
        return frozenset(block for blocks in self.shared for block in blocks if not self.is_own(block))

    def is_own(self, block: int) -> bool:
        """Returns whether a block has chunks here."""
        return self.own is None or block in self.own

    @property
    def numel(self) -> int:
        """The number of parameters of the model, or of its own blocks. Tied ones count once."""
        return sum(block.numel for block in self.blocks if self.is_own(block.index))

    def num_chunks(self, block: BlockIndex) -> int:
        """Returns the number of chunks of a block."""
        if not self.is_own(block):
            return 0
        return max(1, -(-self.blocks[block].numel // self.chunk_numel))

    def chunk_keys(self, block: BlockIndex) -> list[ChunkKey]:
        """Lists a block's chunks in order."""
        return [ChunkKey(block, ChunkIndex(i)) for i in range(self.num_chunks(block))]

    def keys_of_sum(self, block: BlockIndex) -> list[ChunkKey]:
        """Lists the chunks of a block's gradient sum in order. The block may be another box's."""
        return [ChunkKey(block, ChunkIndex(i)) for i in range(max(1, len(self.chunk_ranges(block))))]

    def chunk_range(self, key: ChunkKey) -> tuple[int, int]:
        """Returns the first and past-last element of a chunk in its block's flat vector."""
        start = key.chunk * self.chunk_numel
        return start, min(start + self.chunk_numel, self.blocks[key.block].numel)

    def chunk_ranges(self, block: int) -> list[tuple[int, int]]:
        """Returns the first and past-last element of each chunk of a block, which may be another box's."""
        numel = self.blocks[block].numel
        return [(start, min(start + self.chunk_numel, numel)) for start in range(0, numel, self.chunk_numel)]

    def params_in_chunk(self, key: ChunkKey) -> Iterator[tuple[ParamSlice, int, int, int]]:
        """Yields the parts of parameters in a chunk: (param, its first element, number of elements, place in chunk)."""
        start, stop = self.chunk_range(key)
        for param in self.blocks[key.block].params:
            first = max(start, param.offset)
            last = min(stop, param.offset + param.numel)
            if first < last:
                yield param, first - param.offset, last - first, first - start


def choose_chunk_numel(block_numels: list[int]) -> int:
    """Returns a chunk size that divides layers evenly, so that little of a slot or an extent is unused.

    It is between 8 and 16 Mi elements if layers are that large. Small chunks need less memory, large ones fewer
    messages.
    """
    largest = max(block_numels)
    # Layers are nearly all of a model, so the most common size is theirs.
    common = max(set(block_numels), key=lambda numel: (block_numels.count(numel) * numel, numel))
    parts = max(1, common // MIN_CHUNK_NUMEL)
    chunk = -(-common // parts)
    chunk = min(chunk, largest)
    return -(-chunk // CHUNK_GRANULE) * CHUNK_GRANULE
