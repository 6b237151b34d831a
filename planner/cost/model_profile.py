"""A model's costs in time and memory for one micro-batch: each block's work, and what it keeps for backward.

Bytes and FLOPs are exact, because they follow from shapes alone. Seconds are measured, if there is a device to measure.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from windlass.engine.memory_plan import ATTENTION, ExampleLengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The FLOPs of operators, and the bytes of their outputs."""

    num_flops: int
    nbytes: int
    num_attention_flops: int = 0  # those of attention among them
    num_operators: int = 0  # that have outputs


NO_WORK = Work(num_flops=0, nbytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProfile:
    """One call of an operator in a layer's forward pass."""

    name: str  # as in the choices of activations: "aten.mm.default#2"
    outputs_nbytes: tuple[int, ...]  # bytes of each output that can be kept or swapped; () for a view
    num_flops: int  # to compute it (again); a multiplication and an addition count as two
    is_saved: bool  # backward reads its output
    reads: tuple[int, ...]  # indices of the layer's earlier operators whose outputs it reads

    @property
    def nbytes(self) -> int:
        """The bytes of all outputs."""
        return sum(self.outputs_nbytes)

    @property
    def is_attention(self) -> bool:
        """True for PyTorch's attention, whose kernels are slower than matrix products."""
        return self.name.startswith(f"{ATTENTION}#")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProfile:
    """The costs of a block for one micro-batch."""

    numel: int
    num_flops: int  # of the forward pass; backward needs twice as many
    # Read and written on a CPU by both passes, beside operators' outputs: gradients of params, and logits.
    moved_nbytes: int = 0
    peak_nbytes: int = 0  # maximum that one of its operations allocates on the device
    forward_s: float | None = None  # measured; None: computed from FLOPs and the device's rate
    backward_s: float | None = None  # ... without recomputation
    # Measured, once a step: the norms of the gradient's chunks in a job with several lanes. `backward_s` includes the
    # norm of a job with one lane.
    norms_s: float | None = None

    def sped_up(self, factor: float) -> Self:
        """Returns the profile with times divided by `factor`."""
        forward_s, backward_s, norms_s = (
            None if seconds is None else seconds / factor for seconds in (self.forward_s, self.backward_s, self.norms_s)
        )
        return replace(self, forward_s=forward_s, backward_s=backward_s, norms_s=norms_s)

    @property
    def work(self) -> Work:
        """The work of the forward pass."""
        return Work(num_flops=self.num_flops, nbytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgainTimes:
    """Measured additional seconds of a layer, both passes together, compared with no recomputation."""

    all_s: float  # with full recomputation
    # With the outputs of one operator kept, and of all operators that save work. Both run every operator through
    # Python.
    one_held_s: float
    most_held_s: float

    def sped_up(self, factor: float) -> "AgainTimes":
        """Returns the times divided by `factor`."""
        return AgainTimes(
            all_s=self.all_s / factor,
            one_held_s=self.one_held_s / factor,
            most_held_s=self.most_held_s / factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile(BlockProfile):
    """The costs of a layer. Inter-block activations are its input; intra-block ones are its operators' outputs."""

    input_nbytes: int
    saves_input: bool = True  # backward reads the input, even without recomputation
    largest_param_numel: int = 0
    # If the layer comes to the device in pieces, and no matrix is cut: the elements of the first pieces that all piece
    # buffers hold, and of the last ones. They are those of the layer if all its pieces stay. 0: pieces never stay.
    first_pieces_numel: int = 0
    last_pieces_numel: int = 0
    again: AgainTimes | None = None  # None: estimated from `work_again` and the forward time
    operators: tuple[OperatorProfile, ...]
    work: Work = field(init=False, repr=False, compare=False)  # of the forward pass; kept, because plans need it often

    def __post_init__(self) -> None:
        """Adds up the operators' outputs."""
        object.__setattr__(self, "work", replace(_work_of(self.operators), num_flops=self.num_flops))

    def sped_up(self, factor: float) -> Self:
        """Returns the profile with times divided by `factor`."""
        faster = super(LayerProfile, self).sped_up(factor)
        return replace(faster, again=None if self.again is None else self.again.sped_up(factor))

    @property
    def saved(self) -> Iterator[OperatorProfile]:
        """The operators whose output backward reads, if nothing is recomputed."""
        return (operator for operator in self.operators if operator.is_saved and operator.nbytes)

    def work_again(self, held: Collection[str]) -> Work:
        """Returns the work of recomputation in backward, if the outputs of the named operators are kept.

        An operator is recomputed only if backward needs its output and does not have it. If `held` is empty, the whole
        layer is recomputed.
        """
        if not held:
            return self.work
        recomputed: list[OperatorProfile] = []
        needed: set[int] = set()
        for index in reversed(range(len(self.operators))):
            operator = self.operators[index]
            if (index in needed or operator.is_saved) and operator.name not in held:
                recomputed.append(operator)
                needed.update(operator.reads)
        return _work_of(recomputed)

    @property
    def saved_nbytes(self) -> int:
        """The bytes that a layer keeps for backward beside its input, if nothing is recomputed."""
        return sum(operator.nbytes for operator in self.saved)


def _work_of(operators: Sequence[OperatorProfile]) -> Work:
    return Work(
        num_flops=sum(operator.num_flops for operator in operators),
        nbytes=sum(operator.nbytes for operator in operators),
        num_attention_flops=sum(operator.num_flops for operator in operators if operator.is_attention),
        num_operators=sum(operator.nbytes > 0 for operator in operators),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesFacts:
    """Tells how reliable measured times are."""

    standard_error: float  # of the sum over all blocks, relative
    pace_s: float | None = None  # the machine's pace when they were measured; None: unknown
    # The share of the cores' time that other processes took meanwhile, if that made the machine a busy one; else 0.
    others: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """The costs of all blocks for micro-batches of one shape."""

    name: str
    num_examples: int
    num_tokens: int  # of an example
    embedding: BlockProfile
    layers: tuple[LayerProfile, ...]
    head: BlockProfile
    shared: tuple[tuple[int, ...], ...]  # by block: the blocks whose params its operations use, itself first
    chunk_numel: int
    # Mean tokens of a row, with padding, if micro-batches differ in width. It scales times. `num_tokens` is then that
    # of the widest micro-batch, which decides all sizes.
    mean_tokens: float | None = None
    times: TimesFacts | None = None  # about the blocks' times; None: none were measured
    own: frozenset[int] | None = None  # the blocks that a box computes; None: all. See `of_blocks`

    @property
    def size_share(self) -> float:
        """The mean micro-batch's tokens, and so its bytes, as a share of the widest one's."""
        return 1.0 if self.mean_tokens is None else self.mean_tokens / self.num_tokens

    def sped_up(self, factor: float) -> "ModelProfile":
        """Returns the profile with measured times divided by `factor`."""
        return replace(
            self,
            embedding=self.embedding.sped_up(factor),
            layers=tuple(layer.sped_up(factor) for layer in self.layers),
            head=self.head.sped_up(factor),
        )

    def with_bytes_of(self, other: "ModelProfile") -> "ModelProfile":
        """Returns the profile with the device memory of another one's operations, for the same micro-batches.

        `other` may have other layers than this one if all of them are alike.
        """
        alike = len(other.layers) == len(self.layers)
        pairs = [(layer, other.layers[index if alike else 0]) for index, layer in enumerate(self.layers)]
        # Equal layers are one object, and stay one.
        different = {(id(layer), id(like)): (layer, like) for layer, like in pairs}
        known = {key: replace(layer, peak_nbytes=like.peak_nbytes) for key, (layer, like) in different.items()}
        return replace(
            self,
            embedding=replace(self.embedding, peak_nbytes=other.embedding.peak_nbytes),
            layers=tuple(known[id(layer), id(like)] for layer, like in pairs),
            head=replace(self.head, peak_nbytes=other.head.peak_nbytes),
        )

    def of_blocks(self, first: int, stop: int) -> "ModelProfile":
        """Returns the profile as a box with a run of blocks sees it. All other blocks have no params and no work."""
        own = frozenset(range(first, stop))
        nothing = BlockProfile(numel=0, num_flops=0)
        no_layer = LayerProfile(numel=0, num_flops=0, input_nbytes=0, operators=())
        head = len(self.layers) + 1
        return replace(
            self,
            embedding=self.embedding if 0 in own else nothing,
            layers=tuple(layer if block in own else no_layer for block, layer in enumerate(self.layers, start=1)),
            head=self.head if head in own else nothing,
            shared=tuple(blocks if block in own else () for block, blocks in enumerate(self.shared)),
            own=own,
        )

    def is_own(self, block: int) -> bool:
        """Returns whether the box computes a block."""
        return self.own is None or block in self.own

    @property
    def num_own_blocks(self) -> int:
        """The number of blocks that the box computes."""
        return len(self.blocks) if self.own is None else len(self.own)

    @property
    def num_own_layers(self) -> int:
        """The number of layers that the box computes."""
        return len(self.own_layers)

    @cached_property
    def own_layers(self) -> tuple[int, ...]:
        """The block indices of the layers that the box computes."""
        return tuple(filter(self.is_own, range(1, len(self.layers) + 1)))

    @cached_property
    def unshared_layers(self) -> tuple[int, ...]:
        """The block indices of those layers whose params no other block uses."""
        return tuple(set(self.own_layers).difference(self.shared_blocks))

    @property
    def blocks(self) -> tuple[BlockProfile, ...]:
        """All blocks: the embedding, the layers, the head."""
        return (self.embedding, *self.layers, self.head)

    @cached_property
    def blocks_of_layers(self) -> Mapping[LayerProfile, tuple[int, ...]]:
        """The block indices of each distinct layer that the box computes.

        Cached, because comparing layers is slow and a plan needs it often.
        """
        blocks_by_layer: dict[LayerProfile, list[int]] = {}
        for block, layer in enumerate(self.layers, start=1):
            if self.is_own(block):
                blocks_by_layer.setdefault(layer, []).append(block)
        return {layer: tuple(blocks) for layer, blocks in blocks_by_layer.items()}

    @cached_property
    def shared_blocks(self) -> tuple[int, ...]:
        """The blocks whose params other blocks use as well, once for each such use."""
        return tuple(block for blocks in self.shared for block in blocks[1:])

    @property
    def numel(self) -> int:
        """The number of parameters."""
        return sum(block.numel for block in self.blocks)

    @property
    def num_flops(self) -> int:
        """The FLOPs of one micro-batch's forward pass."""
        return sum(block.num_flops for block in self.blocks)

    @property
    def interblock_nbytes(self) -> int:
        """The bytes of all layers' inputs."""
        return sum(layer.input_nbytes for layer in self.layers)

    @property
    def activation_nbytes(self) -> int:
        """The bytes of all layers' inputs and of all else that backward reads, if nothing is recomputed."""
        return self.interblock_nbytes + sum(layer.saved_nbytes for layer in self.layers)

    def with_num_layers(self, number: int) -> "ModelProfile":
        """Returns the profile of a model with another number of layers, all like the first."""
        shared = shared_of(number, is_tied=bool(self.shared_blocks))
        return replace(self, layers=self.layers[:1] * number, shared=shared)


def shared_of(num_layers: int, *, is_tied: bool) -> tuple[tuple[int, ...], ...]:
    """Returns `shared` for a model whose layers share no params.

    If it is tied, the head uses the embedding's params.
    """
    head = num_layers + 1
    return (*((block,) for block in range(head)), (head, 0) if is_tied else (head,))


def for_lengths(widest: ModelProfile, near_mean: ModelProfile, lengths: ExampleLengths) -> ModelProfile:
    """Combines the bytes of the widest micro-batch with the work and times of the mean one.

    `near_mean`: a profile for rows about as wide as the mean, with times if any were measured. Its layers' operations
    and times are scaled to the mean width. Attention grows with the square of the width, so it is scaled by the mean
    square.
    """

    def timed(profile: BlockProfile, measured: BlockProfile, num_flops: int, factor: float) -> Any:
        faster = measured.sped_up(1 / factor)
        times: dict[str, Any] = {"forward_s": faster.forward_s, "backward_s": faster.backward_s}
        times["norms_s"] = measured.norms_s  # of all params, whatever the width
        times["moved_nbytes"] = measured.moved_nbytes  # most of it, too
        if isinstance(faster, LayerProfile):
            times["again"] = faster.again
        return replace(profile, num_flops=num_flops, **times)

    def layer_of(wide: LayerProfile, measured: LayerProfile) -> LayerProfile:
        operators = _operators_of_mean(wide.operators, measured.operators, widths, lengths)
        num_flops = sum(operator.num_flops for operator in operators)
        factor = num_flops / measured.num_flops if measured.num_flops else rows
        layer: LayerProfile = replace(timed(wide, measured, num_flops, factor), operators=operators)
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
        times=near_mean.times,
    )


def _operators_of_mean(
    widest: Sequence[OperatorProfile],
    near_mean: Sequence[OperatorProfile],
    widths: tuple[int, int],
    lengths: ExampleLengths,
) -> tuple[OperatorProfile, ...]:
    """Returns the widest micro-batch's operators with the mean one's FLOPs. `widths`: of `widest` and `near_mean`."""
    (wide, narrow), alike = widths, [profile.name for profile in widest] == [profile.name for profile in near_mean]
    operators = []
    for operator, other in zip(widest, near_mean if alike else widest, strict=True):
        per_token = operator.num_flops / wide
        # FLOPs at a width are `linear * width + square * width**2`. Two widths determine both coefficients.
        square = (per_token - other.num_flops / narrow) / (wide - narrow) if alike and wide > narrow else 0.0
        linear = per_token - square * wide
        num_flops = max(0, round(linear * lengths.mean + square * lengths.mean_square))
        operators.append(replace(operator, num_flops=num_flops))
    return tuple(operators)
