"""The facts of a model that the planner needs, and the profile that follows from them. It imports no torch."""

from dataclasses import dataclass, replace
from typing import Protocol

from windlass.engine.memory_estimate import ModelFacts, Passes
from windlass.engine.memory_plan import NUM_PIECE_BUFFERS, cut_layers
from windlass.engine.model import BlockLayout, ModelLayout
from windlass.planner.cost import BlockProfile, LayerProfile, ModelProfile, OperatorProfile
from windlass.storage.ids import BlockIndex, HeadSlices, Precision

# Tokens: the width to which an attention kernel on a GPU pads. Source: torch's memory-efficient attention, `kAlignLSE`.
_PADDED_TOKENS = 32
# Bytes that a backward pass reads and writes for the gradient of a param: to make it, to add it to a sum in its buffer,
# and to compute its norm.
_GRAD_NBYTES = 16
# Bytes of a logit and of its log-probability in the loss's precision. These and the logit itself are written and read
# in the forward pass, and in the backward pass twice.
_LOSS_NBYTES, _NUM_LOGIT_MOVES = 8, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOperators:
    """The operators of a layer's forward pass, in call order."""

    operators: tuple[OperatorProfile, ...]
    saves_input: bool  # autograd saves the layer's input


class ProfiledFacts(ModelFacts, Protocol):
    """The facts of a model, in one precision."""

    @property
    def name(self) -> str:
        """The name of the model's class."""

    @property
    def precision(self) -> Precision:
        """The precision of the params."""

    @property
    def hidden_size(self) -> int:
        """The elements of a token's hidden state."""

    @property
    def head_matrix_numel(self) -> int:
        """The elements of the matrices that the head multiplies each token with."""

    def operators(self, block: BlockIndex, num_examples: int, num_tokens: int) -> LayerOperators:
        """Returns the operators of a layer for one micro-batch, on a CPU."""


def kinds_of_layers(layout: ModelLayout) -> list[tuple[BlockIndex, ...]]:
    """Groups layers whose params have the same shapes."""
    kinds: dict[object, list[BlockIndex]] = {}
    for block in layout.blocks[1:-1]:
        prefix = len(block.name)
        kinds.setdefault(tuple((param.name[prefix:], param.shape) for param in block.params), []).append(block.index)
    return [tuple(blocks) for blocks in kinds.values()]


def profile_of(
    facts: ProfiledFacts,
    num_examples: int,
    num_tokens: int,
    *,
    for_gpu: bool = False,
    head_slices: HeadSlices = HeadSlices.LARGE,
    cut_matrices: int | None = None,
) -> ModelProfile:
    """Returns the profile for micro-batches of `num_examples` x `num_tokens` tokens.

    Layers whose params have the same shapes are profiled once. `for_gpu`: attention outputs are counted for a GPU.
    `cut_matrices`: see `TrainingConfig`.
    """
    passes = Passes(
        num_examples=num_examples,
        num_tokens=num_tokens,
        grad_precision=facts.precision,
        is_summed=False,
        head_slices=head_slices,
        cut_matrices=cut_matrices,
    )
    needs, layout = facts.needs({}, passes), facts.layout
    peaks = [max(unit.forward_peak_nbytes, unit.backward_peak_nbytes) for unit in needs.units]
    layers: dict[int, LayerProfile] = {}
    for blocks in kinds_of_layers(layout):
        layers.update(dict.fromkeys(blocks, _layer(facts, blocks[0], num_examples, num_tokens, peaks, for_gpu)))
    return ModelProfile(
        name=facts.name,
        num_examples=num_examples,
        num_tokens=num_tokens,
        embedding=BlockProfile(
            numel=layout.blocks[0].numel,
            num_flops=0,
            moved_nbytes=_GRAD_NBYTES * layout.blocks[0].numel,
            peak_nbytes=peaks[0],
        ),
        layers=tuple(layers[block] for block in sorted(layers)),
        head=BlockProfile(
            numel=layout.blocks[-1].numel,
            num_flops=2 * facts.head_matrix_numel * num_examples * num_tokens,
            moved_nbytes=_head_moved_nbytes(facts, num_examples * num_tokens),
            peak_nbytes=needs.head_peak_nbytes,
        ),
        shared=layout.shared,
        chunk_numel=layout.chunk_numel,
    )


def _layer(
    facts: ProfiledFacts, block: BlockIndex, num_examples: int, num_tokens: int, peaks: list[int], for_gpu: bool
) -> LayerProfile:
    layer, layout = facts.operators(block, num_examples, num_tokens), facts.layout.blocks[block]
    operators = layer.operators
    first, last = _staying_numels(layout)
    if for_gpu:
        operators = tuple(on_gpu(operator, num_tokens) for operator in operators)
    return LayerProfile(
        numel=layout.numel,
        num_flops=sum(operator.num_flops for operator in operators),
        moved_nbytes=_GRAD_NBYTES * layout.numel,
        peak_nbytes=peaks[block],
        saves_input=layer.saves_input,
        input_nbytes=num_examples * num_tokens * facts.hidden_size * facts.precision.itemsize,
        largest_param_numel=max(param.numel for param in layout.params),
        first_pieces_numel=first,
        last_pieces_numel=last,
        operators=operators,
    )


def _head_moved_nbytes(facts: ProfiledFacts, num_tokens: int) -> int:
    """Returns `moved_nbytes` of the head: the gradients of its matrices, which may be the embedding's, and logits."""
    num_logits = num_tokens * facts.head_matrix_numel // facts.hidden_size
    logit_nbytes = _NUM_LOGIT_MOVES * (facts.precision.itemsize + _LOSS_NBYTES)
    return _GRAD_NBYTES * facts.head_matrix_numel + logit_nbytes * num_logits


def _staying_numels(layout: BlockLayout) -> tuple[int, int]:
    """Returns `first_pieces_numel` and `last_pieces_numel` of a layer."""
    (bounds,) = cut_layers([layout.part_numels_by_module(None)])
    if len(bounds) <= NUM_PIECE_BUFFERS + 1:
        return layout.numel, layout.numel
    return bounds[NUM_PIECE_BUFFERS], bounds[-1] - bounds[-1 - NUM_PIECE_BUFFERS]


def on_gpu(operator: OperatorProfile, num_tokens: int) -> OperatorProfile:
    """Counts attention outputs for a GPU, where kernels pad the tokens of the second one: it has sums for each head."""
    if not operator.is_attention:
        return operator
    output, *others = operator.outputs_nbytes
    padded = -(-num_tokens // _PADDED_TOKENS) * _PADDED_TOKENS
    return replace(operator, outputs_nbytes=(output, *(-(-nbytes // num_tokens) * padded for nbytes in others)))
