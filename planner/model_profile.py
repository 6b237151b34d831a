"""A model as it costs time and memory: for one micro-batch, what each block computes and what it leaves for backward.

Bytes and FLOPs are exact and come from shapes alone; seconds are measured, where there is something to measure on.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProfile:
    """One call of an operator in a layer's forward pass."""

    name: str  # as the choices of activations name it: "aten.mm.default#2"
    nbytes: int  # of its output, as it would be kept or swapped; 0 if it only looks
    num_flops: int  # to compute it (again); a multiplication and an addition are two
    is_saved: bool  # backward reads its output


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProfile:
    """A block and one micro-batch."""

    numel: int
    num_flops: int  # of the forward pass; backward takes twice as many
    forward_s: float | None = None  # measured; None: by FLOPs and the device's rate
    backward_s: float | None = None  # ... without computing anything again


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile(BlockProfile):
    """A layer. Inter-block activations are what enters it, intra-block ones what its operators put out."""

    input_nbytes: int
    operators: tuple[OperatorProfile, ...]

    @property
    def saved(self) -> Iterator[OperatorProfile]:
        """Operators whose output is there for backward, if nothing is computed again."""
        return (operator for operator in self.operators if operator.is_saved and operator.nbytes)

    @property
    def saved_nbytes(self) -> int:
        """What the layer leaves for backward besides its input, if nothing is computed again."""
        return sum(operator.nbytes for operator in self.saved)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """All blocks, for micro-batches of so many examples and tokens each."""

    name: str
    num_examples: int
    num_tokens: int  # of an example
    embedding: BlockProfile
    layers: tuple[LayerProfile, ...]
    head: BlockProfile
    shared_blocks: tuple[int, ...] = ()  # whose params other blocks' operations use as well
    chunk_numel: int

    @property
    def blocks(self) -> tuple[BlockProfile, ...]:
        """Embedding first, head last."""
        return (self.embedding, *self.layers, self.head)

    @property
    def numel(self) -> int:
        """Parameters."""
        return sum(block.numel for block in self.blocks)

    @property
    def num_flops(self) -> int:
        """Of a forward pass of one micro-batch."""
        return sum(block.num_flops for block in self.blocks)

    @property
    def interblock_nbytes(self) -> int:
        """What enters all layers."""
        return sum(layer.input_nbytes for layer in self.layers)

    @property
    def activation_nbytes(self) -> int:
        """All that backward reads, if nothing is computed again."""
        return self.interblock_nbytes + sum(layer.saved_nbytes for layer in self.layers)

    def with_num_layers(self, number: int) -> "ModelProfile":
        """As if it had so many layers, all like the first."""
        return replace(self, layers=self.layers[:1] * number)
