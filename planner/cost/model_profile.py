"""A model as it costs time and memory: for one micro-batch, what each block computes and what it leaves for backward.

Bytes and FLOPs are exact and come from shapes alone; seconds are measured, where there is something to measure on.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from windlass.engine.memory_plan import ExampleLengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What operators compute, and the bytes that they put out."""

    num_flops: int
    nbytes: int


NO_WORK = Work(num_flops=0, nbytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProfile:
    """One call of an operator in a layer's forward pass."""

    name: str  # as the choices of activations name it: "aten.mm.default#2"
    outputs_nbytes: tuple[int, ...]  # of each of its outputs, as it would be kept or swapped; none if it only looks
    num_flops: int  # to compute it (again); a multiplication and an addition are two
    is_saved: bool  # backward reads its output
    reads: tuple[int, ...]  # the layer's operators before it whose outputs it reads

    @property
    def nbytes(self) -> int:
        """Of all outputs."""
        return sum(self.outputs_nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProfile:
    """A block and one micro-batch."""

    numel: int
    num_flops: int  # of the forward pass; backward takes twice as many
    peak_nbytes: int = 0  # the most that one of its operations has on the device, beside what was there before
    forward_s: float | None = None  # measured; None: by FLOPs and the device's rate
    backward_s: float | None = None  # ... without computing anything again

    def sped_up(self, factor: float) -> Self:
        """With times that are so many times less."""
        forward_s, backward_s = (
            None if seconds is None else seconds / factor for seconds in (self.forward_s, self.backward_s)
        )
        return replace(self, forward_s=forward_s, backward_s=backward_s)

    @property
    def work(self) -> Work:
        """Of the forward pass."""
        return Work(num_flops=self.num_flops, nbytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgainTimes:
    """Measured: seconds by which a layer takes longer, both passes together, than where nothing is computed again."""

    all_s: float  # where all is
    # Where outputs of operators are held: of one, and of as many as spare anything. All goes through Python then.
    one_held_s: float
    most_held_s: float

    def sped_up(self, factor: float) -> "AgainTimes":
        """So many times less."""
        return AgainTimes(
            all_s=self.all_s / factor,
            one_held_s=self.one_held_s / factor,
            most_held_s=self.most_held_s / factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile(BlockProfile):
    """A layer. Inter-block activations are what enters it, intra-block ones what its operators put out."""

    input_nbytes: int
    saves_input: bool = True  # backward reads it, if nothing is computed again
    largest_param_numel: int = 0
    again: AgainTimes | None = None  # None: as `work_again` and the forward pass's time have it
    operators: tuple[OperatorProfile, ...]

    def sped_up(self, factor: float) -> Self:
        """With times that are so many times less."""
        found = super(LayerProfile, self).sped_up(factor)
        return replace(found, again=None if self.again is None else self.again.sped_up(factor))

    @property
    def saved(self) -> Iterator[OperatorProfile]:
        """Operators whose output is there for backward, if nothing is computed again."""
        return (operator for operator in self.operators if operator.is_saved and operator.nbytes)

    @property
    def work(self) -> Work:
        """Of the forward pass."""
        return Work(num_flops=self.num_flops, nbytes=sum(operator.nbytes for operator in self.operators))

    def work_again(self, held: Collection[str]) -> Work:
        """What backward computes a second time, where it has the outputs of the operators of these names.

        Only what leads to something that it reads and has not. With nothing held all of the layer is computed again.
        """
        if not held:
            return self.work
        num_flops = nbytes = 0
        needed: set[int] = set()
        for index in reversed(range(len(self.operators))):
            operator = self.operators[index]
            if (index in needed or operator.is_saved) and operator.name not in held:
                num_flops += operator.num_flops
                nbytes += operator.nbytes
                needed.update(operator.reads)
        return Work(num_flops=num_flops, nbytes=nbytes)

    @property
    def saved_nbytes(self) -> int:
        """What the layer leaves for backward besides its input, if nothing is computed again."""
        return sum(operator.nbytes for operator in self.saved)


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """All blocks, for micro-batches of so many examples and tokens each."""

    name: str
    num_examples: int
    num_tokens: int  # of an example
    embedding: BlockProfile
    layers: tuple[LayerProfile, ...]
    head: BlockProfile
    shared: tuple[tuple[int, ...], ...]  # per block: whose params its operations use, its own first
    chunk_numel: int
    # Tokens of a row on average, with padding, where micro-batches differ: of what takes time. `num_tokens` is then the
    # widest one's, as all sizes are.
    mean_tokens: float | None = None

    @property
    def size_share(self) -> float:
        """The mean micro-batch's share of the tokens, and so of the bytes, of the widest one."""
        return 1.0 if self.mean_tokens is None else self.mean_tokens / self.num_tokens

    def sped_up(self, factor: float) -> "ModelProfile":
        """On a device that takes so many times less for what was measured."""
        return replace(
            self,
            embedding=self.embedding.sped_up(factor),
            layers=tuple(layer.sped_up(factor) for layer in self.layers),
            head=self.head.sped_up(factor),
        )

    @property
    def blocks(self) -> tuple[BlockProfile, ...]:
        """Embedding first, head last."""
        return (self.embedding, *self.layers, self.head)

    @cached_property
    def blocks_of_layers(self) -> Mapping[LayerProfile, tuple[int, ...]]:
        """By layer, the blocks that are like it. To compare layers takes long: plans ask a thousand times."""
        found: dict[LayerProfile, list[int]] = {}
        for block, layer in enumerate(self.layers, start=1):
            found.setdefault(layer, []).append(block)
        return {layer: tuple(blocks) for layer, blocks in found.items()}

    @property
    def shared_blocks(self) -> tuple[int, ...]:
        """Whose params other blocks' operations use as well: named once for each of these."""
        return tuple(block for blocks in self.shared for block in blocks[1:])

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
        """What enters all layers, and all that backward reads besides, if nothing is computed again."""
        return self.interblock_nbytes + sum(layer.saved_nbytes for layer in self.layers)

    def with_num_layers(self, number: int) -> "ModelProfile":
        """As if it had so many layers, all like the first."""
        shared = shared_of(number, is_tied=bool(self.shared_blocks))
        return replace(self, layers=self.layers[:1] * number, shared=shared)


def shared_of(num_layers: int, *, is_tied: bool) -> tuple[tuple[int, ...], ...]:
    """Of a model whose layers share nothing; tied, its head reads the embedding's params."""
    head = num_layers + 1
    return (*((block,) for block in range(head)), (head, 0) if is_tied else (head,))


def for_lengths(widest: ModelProfile, near_mean: ModelProfile, lengths: ExampleLengths) -> ModelProfile:
    """A profile with the bytes of the widest micro-batch, and with what the mean one computes and takes.

    `near_mean`: for rows about as wide as the mean, with times if any were measured. The operations and times of its
    layers are scaled from its width to the mean; attention's part, which grows with the square, by the mean square.
    """

    def timed(found: BlockProfile, measured: BlockProfile, num_flops: int, factor: float) -> Any:
        faster = measured.sped_up(1 / factor)
        times: dict[str, Any] = {"forward_s": faster.forward_s, "backward_s": faster.backward_s}
        if isinstance(faster, LayerProfile):
            times["again"] = faster.again
        return replace(found, num_flops=num_flops, **times)

    def layer_of(found: LayerProfile, measured: LayerProfile) -> LayerProfile:
        operators = _operators_of_mean(found.operators, measured.operators, widths, lengths)
        num_flops = sum(operator.num_flops for operator in operators)
        factor = num_flops / measured.num_flops if measured.num_flops else rows
        layer: LayerProfile = replace(timed(found, measured, num_flops, factor), operators=operators)
        return layer

    widths, rows = (widest.num_tokens, near_mean.num_tokens), lengths.mean / near_mean.num_tokens
    pairs = list(zip(widest.layers, near_mean.layers, strict=True))
    merged = {pair: layer_of(*pair) for pair in dict.fromkeys(pairs)}
    return replace(
        widest,
        embedding=timed(widest.embedding, near_mean.embedding, round(rows * near_mean.embedding.num_flops), rows),
        layers=tuple(merged[pair] for pair in pairs),
        head=timed(widest.head, near_mean.head, round(rows * near_mean.head.num_flops), rows),
        mean_tokens=lengths.mean,
    )


def _operators_of_mean(
    widest: Sequence[OperatorProfile],
    near_mean: Sequence[OperatorProfile],
    widths: tuple[int, int],
    lengths: ExampleLengths,
) -> tuple[OperatorProfile, ...]:
    """The widest micro-batch's operators, with the FLOPs of the mean one. `widths`: of `widest` and `near_mean`."""
    (wide, narrow), alike = widths, [each.name for each in widest] == [each.name for each in near_mean]
    found = []
    for operator, other in zip(widest, near_mean if alike else widest, strict=True):
        per_token = operator.num_flops / wide
        # FLOPs at a width are `linear * width + square * width**2`; two widths tell both numbers.
        square = (per_token - other.num_flops / narrow) / (wide - narrow) if alike and wide > narrow else 0.0
        linear = per_token - square * wide
        num_flops = max(0, round(linear * lengths.mean + square * lengths.mean_square))
        found.append(replace(operator, num_flops=num_flops))
    return tuple(found)
