"""The facts of a model of a known family, from recorded formulas. It imports no torch.

Sizes of a model and of a micro-batch:

    B  examples                     H  hidden size (in GPT-2 it is K times D)
    T  tokens of an example         I  intermediate size
    K  heads of keys                V  vocabulary
    G  heads of queries for each    P  positions
    D  head dim

Sizes of the head's loops:

    S  tokens of its first slice    L  tokens of the last piece of the first slice
    U  tokens of its second slice   M  tokens of the last piece of the second slice
    W  tokens of both slices        R  rows of a part of the projection's gradient
    Q  tokens of a piece of the loss
    Z  rows of the last part
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.engine.memory_estimate import Passes, PassNeeds
from windlass.engine.memory_plan import EVERY_OPERATOR, LEAST_SWAPPED_NBYTES, RECOMPUTE_ALL, BlockActivations, UnitNeed
from windlass.engine.model import BlockLayout, ModelLayout, ParamSlice, choose_chunk_numel
from windlass.engine.slices import num_piece_tokens, num_product_rows, num_slice_tokens
from windlass.planner.cost import OperatorProfile
from windlass.planner.profiling import LayerOperators
from windlass.planner.profiling.known.formulas import Formula, Sizes, largest_value
from windlass.planner.profiling.known.sharing import without_shared_parts
from windlass.storage.ids import BlockIndex, HeadSlices, Precision

if TYPE_CHECKING:  # it needs pydantic, which the GPU check does without
    from windlass.planner.hardware import ModelShape

FOLDER = Path(__file__).parent  # of the families' files
PACKAGES = ("torch", "transformers")
# Sizes for which another sequence of operators runs if they are 1.
FLAGS = "BGK"
# A loop that runs more often needs as much memory as with so many turns, but for the sums that it keeps.
MOST_TURNS = 3
# Parts of a matrix on the device at once, beside those in buffers: one is made while the one before is still there.
_NUM_PARTS = 2
# A cut embedding has the rows of so many parts at once, each token's place in a part, and in the backward pass some
# more bytes of each token.
_NUM_ROWS, _PLACE_NBYTES, _MORE_NBYTES = 3, 8, 17


class NotKnownError(Exception):
    """The facts are not among the recorded ones. They must be traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLoops:
    """The loops of the head over slices, over pieces of the loss, and over parts of the projection's gradient."""

    num_pieces: int  # of the first slice
    num_second_pieces: int = 0  # of the second slice; 0: there is one slice
    is_full: bool = False  # the second slice has as many tokens as the first
    num_parts: int = 1

    @property
    def key(self) -> str:
        """The name of the recorded loops that serve for these."""
        pieces, second = min(self.num_pieces, MOST_TURNS), min(self.num_second_pieces, MOST_TURNS)
        return f"{pieces}.{'full' if self.is_full else second}.{min(self.num_parts, MOST_TURNS)}"

    @property
    def more_pieces(self) -> tuple[int, int]:
        """The pieces of the first and of the second slice beyond those of the recorded loops."""
        second = 0 if self.is_full else self.num_second_pieces
        return max(0, self.num_pieces - MOST_TURNS), max(0, second - MOST_TURNS)


def _flags(sizes: Sizes) -> str:
    return "".join(name for name in FLAGS if sizes[name] == 1)


def variant_of(passes: Passes) -> str:
    """Returns the name of recorded passes: what decides their operators, beside shapes and the model's precision."""
    if not passes.train:
        return "evaluate"
    return f"{8 * passes.grad_precision.itemsize}{'+' if passes.is_summed else ''}"


def choice_key(choice: BlockActivations, names: Mapping[str, int]) -> str:
    """Returns the name of a recorded choice of activations. `names`: the index of each operator in the layer.

    Raises:
        NotKnownError: it names another operator.
    """
    held = choice.kept | choice.swapped
    if choice.recompute:
        is_known = held <= names.keys() and not (choice.kept and choice.swapped)
    else:
        is_known = held <= {EVERY_OPERATOR}
    if not is_known:
        raise NotKnownError(f"choice {choice}")
    what = ",".join(map(str, sorted(names[name] for name in held))) if choice.recompute else "all"
    return f"{'away' if choice.swap_input else 'here'} {'swap' if choice.swapped else 'keep'} {what}".rstrip()


@functools.cache
def _family(name: str) -> dict[str, Any] | None:
    """Reads a family's file.

    Returns None if there is none that can be read, or if it was recorded with other versions of the traced packages.
    """
    try:
        stored = read_family(name)
        same = all(version(package).partition("+")[0] == stored["versions"][package] for package in PACKAGES)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return stored if same else None


def read_family(name: str) -> dict[str, Any]:
    """Returns what was recorded of a family. Raises an error of any kind if its file is missing or broken."""
    return without_shared_parts(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))


def _known_family(name: str) -> dict[str, Any]:
    if (family := _family(name)) is None:
        raise NotKnownError(f"no file of {name}, or other versions of torch or transformers")
    return family


@functools.cache
def _formula(text: str) -> Formula:
    return Formula.parse(text)


def _sizes_of(dims: Sequence[str]) -> str:
    """Returns the letters of the sizes that multiply to a matrix's elements, as in a formula's term."""
    return "".join(sorted("".join(name for dim in dims for name, _ in _formula(dim).terms)))


def family_of(shape: "ModelShape") -> str:
    """Returns the name of the family that a shape belongs to."""
    if shape.is_gpt:
        return "gpt2"
    return "qwen2" if shape.qkv_bias else "qwen3" if shape.qk_norm else "llama"


def sizes_of(shape: "ModelShape", *, num_tokens: int) -> dict[str, int]:
    """Returns a model's sizes by letter. `num_tokens`: the model's positions."""
    num_kv_heads = shape.num_kv_heads or shape.num_heads
    return {
        "K": num_kv_heads,
        "G": shape.num_heads // num_kv_heads,
        "H": shape.hidden_size,
        "D": shape.head_size,
        "I": shape.intermediate_size or 4 * shape.hidden_size,
        "V": shape.vocab_size,
        "P": shape.max_tokens or num_tokens,
    }


@functools.lru_cache(maxsize=16)
def known_facts(shape: "ModelShape", precision: Precision, *, num_tokens: int) -> "KnownModel":
    """Returns the facts of a model with these sizes.

    Raises:
        NotKnownError: the family's file is missing or broken, or was recorded with other versions of torch or
            transformers.
    """
    family = _known_family(family_of(shape))
    outer = family["tied" if shape.is_tied else "untied"]
    head = outer["head"]
    if isinstance(head, str):
        head = _known_family(head)["tied" if shape.is_tied else "untied"]["head"]
    return KnownModel(
        layers=family,
        outer=outer,
        head=head,
        sizes=sizes_of(shape, num_tokens=num_tokens),
        num_layers=shape.num_layers,
        precision=precision,
        is_of_columns=shape.is_gpt,
    )


@dataclass(eq=False, kw_only=True)
class KnownModel:
    """Implements `ProfiledFacts` for a model of a known family. What was not recorded raises NotKnownError."""

    layers: Mapping[str, Any]  # what was recorded of layers
    outer: Mapping[str, Any]  # ... of the layout and the embedding
    head: Mapping[str, Any]
    sizes: Sizes
    num_layers: int
    precision: Precision
    is_of_columns: bool = False  # matrices lie with a column for each output
    _units: dict[tuple[Passes, str], UnitNeed] = field(default_factory=dict)
    _parts: dict[int, dict[str, int]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """See ProfiledFacts."""
        return str(self.outer["name"])

    @property
    def hidden_size(self) -> int:
        """See ProfiledFacts."""
        return self._value(self.outer["hidden"])

    @property
    def head_matrix_numel(self) -> int:
        """See ProfiledFacts."""
        return self._value(self.outer["head_matrix_numel"])

    @property
    def vocab_size(self) -> int:
        """See ModelFacts."""
        return self.sizes["V"]

    @property
    def buffers_nbytes(self) -> int:
        """See ModelFacts."""
        return self._value(self.outer["buffers_nbytes"])

    @functools.cached_property
    def layout(self) -> ModelLayout:
        """See ModelFacts."""
        embedding, layer, head = self.outer["blocks"]
        last = BlockIndex(self.num_layers + 1)
        blocks = [self._block(BlockIndex(0), embedding)]
        blocks += [self._block(BlockIndex(block), layer) for block in range(1, last)]
        blocks.append(self._block(last, head))
        tied: dict[str, str] = self.outer["tied"]
        shared = tuple((BlockIndex(block),) for block in range(last))
        return ModelLayout(
            blocks=tuple(blocks),
            tied=dict(tied),
            chunk_numel=choose_chunk_numel([block.numel for block in blocks]),
            shared=(*shared, (last, BlockIndex(0)) if tied else (last,)),
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
        )

    def operators(self, block: BlockIndex, num_examples: int, num_tokens: int) -> LayerOperators:
        """See ProfiledFacts."""
        sizes = self._with_shape(num_examples, num_tokens)
        recorded = self._recorded(sizes)
        return LayerOperators(
            operators=tuple(
                OperatorProfile(
                    name=name,
                    outputs_nbytes=tuple(_formula(nbytes).value(sizes) for nbytes in outputs),
                    num_flops=_formula(num_flops).value(sizes),
                    is_saved=is_saved,
                    reads=tuple(reads),
                )
                for name, outputs, num_flops, is_saved, reads in recorded["operators"]
            ),
            saves_input=recorded["saves_input"],
        )

    def needs(self, choices: Mapping[BlockIndex, BlockActivations], passes: Passes) -> PassNeeds:
        """See ModelFacts."""
        if passes.head_slices is not HeadSlices.LARGE:
            raise NotKnownError("the head's slices of earlier releases")
        layers = [choices.get(BlockIndex(block), RECOMPUTE_ALL) for block in range(1, self.num_layers + 1)]
        by_choice = {choice: self._unit(passes, self._key(passes, choice)) for choice in dict.fromkeys(layers)}
        embedding = self._unit(passes, "embedding")
        units = (embedding, *(by_choice[choice] for choice in layers))
        return PassNeeds(units=units, head_peak_nbytes=self._head_peak_nbytes(passes))

    # --- private ----------------------------------------------------------------------------------------------------

    def _value(self, text: str) -> int:
        return _formula(text).value(self.sizes)

    def _block(self, index: BlockIndex, recorded: Mapping[str, Any]) -> BlockLayout:
        number, offset, params = str(index - 1), 0, []
        for name, dims, decay, is_divisible in recorded["params"]:
            shape = tuple(self._value(dim) for dim in dims)
            numel = 1
            for dim in shape:
                numel *= dim
            params.append(
                ParamSlice(
                    name=name.replace("*", number),
                    shape=shape,
                    offset=offset,
                    numel=numel,
                    decay=decay,
                    is_divisible=is_divisible,
                )
            )
            offset += numel
        return BlockLayout(index=index, name=recorded["name"].replace("*", number), params=tuple(params))

    def _with_shape(self, num_examples: int, num_tokens: int) -> dict[str, int]:
        if num_tokens < 2:
            raise NotKnownError("one token")
        return {**self.sizes, "B": num_examples, "T": num_tokens}

    def _recorded(self, sizes: Sizes) -> Mapping[str, Any]:
        """Returns what was recorded for the sizes that are 1 here."""
        alike = self.layers["alike"][_flags(sizes)]
        recorded: Mapping[str, Any] = self.layers["classes"][alike][self._bits]
        return recorded

    @property
    def _bits(self) -> str:
        return str(8 * self.precision.itemsize)

    def _key(self, passes: Passes, choice: BlockActivations) -> str:
        if not passes.train:
            return "layer"
        recorded = self._recorded(self._with_shape(passes.num_examples, passes.num_tokens))
        names = {operator[0]: index for index, operator in enumerate(recorded["operators"])}
        return choice_key(choice, names)

    def _unit(self, passes: Passes, key: str) -> UnitNeed:
        if (passes, key) not in self._units:
            self._units[passes, key] = self._evaluated(passes, key)
        return self._units[passes, key]

    def _evaluated(self, passes: Passes, key: str) -> UnitNeed:
        sizes = self._with_shape(passes.num_examples, passes.num_tokens)
        if key == "embedding":
            unit = self.outer["embedding"][_flags(sizes)][self._bits].get(variant_of(passes))
        else:
            unit = self._recorded(sizes)["units"].get(variant_of(passes), {}).get(key)
        if unit is None:
            raise NotKnownError(f"{variant_of(passes)}: {key}")
        output, held, swapped, forward, backward = unit
        sizes_out = tuple(_formula(nbytes).value(sizes) for nbytes in swapped)
        if min(sizes_out, default=LEAST_SWAPPED_NBYTES) < LEAST_SWAPPED_NBYTES:
            raise NotKnownError("tensors too small to be swapped")
        columns = 0
        if passes.cut_matrices is not None and key != "embedding" and self.is_of_columns:
            largest = max(self._largest_parts(passes.cut_matrices).values())
            columns = _NUM_PARTS * largest * self.precision.itemsize
        output_nbytes = _formula(output).value(sizes)
        forward_nbytes = largest_value(map(_formula, forward), sizes) + columns
        if key == "embedding" and (parts := self._cut_parts(0, passes.cut_matrices)):
            num_tokens = passes.num_examples * passes.num_tokens
            # Of each token the rows of as many parts, and its place in a part.
            rows_nbytes = min(len(parts), _NUM_ROWS) * output_nbytes + _PLACE_NBYTES * num_tokens
            of_part = max(parts) * self.precision.itemsize + _MORE_NBYTES * num_tokens
            peaks = []
            for formula in map(_formula, backward):
                # At most one matrix has its gradient, in place of which there is that of a part.
                cut = self._cut_matrix_in(formula, passes.cut_matrices)
                peaks.append(formula.value(sizes) if cut is None else formula.without_term(cut).value(sizes) + of_part)
            before_nbytes = forward_nbytes if len(self.layout.blocks[0].params) > 1 else 0  # of another matrix
            forward_nbytes = max(forward_nbytes, before_nbytes + rows_nbytes)
            backward_nbytes = max(before_nbytes + rows_nbytes, *peaks) if peaks else 0
        else:
            backward_nbytes = max(
                (self._with_parts(_formula(nbytes), sizes, passes.cut_matrices) for nbytes in backward), default=0
            )
        return UnitNeed(
            output_nbytes=output_nbytes,
            held_nbytes=_formula(held).value(sizes),
            swapped=sizes_out,
            forward_peak_nbytes=forward_nbytes,
            backward_peak_nbytes=backward_nbytes,
        )

    def _cut_parts(self, block: int, cut_matrices: int | None) -> list[int]:
        """Returns the elements of each part of the matrices of embedding or head that are cut."""
        params = self.layout.blocks[block].params
        return [numel for param in params if param.is_cut(cut_matrices) for *_, numel in param.parts(cut_matrices)]

    def _cut_matrix_in(self, peak: Formula, cut_matrices: int | None) -> str | None:
        """Returns the sizes of the embedding's cut matrix whose elements a peak has; None: it has none."""
        listed = self.outer["blocks"][0]["params"]
        for param, (_, dims, *_) in zip(self.layout.blocks[0].params, listed, strict=True):
            if param.is_cut(cut_matrices) and (sizes := _sizes_of(dims)) in dict(peak.terms):
                return sizes
        return None

    def _with_parts(self, peak: Formula, sizes: Sizes, cut_matrices: int | None) -> int:
        """Returns the bytes of a layer's peak, at most.

        Of a matrix that is cut there are parts in place of its gradient: one of the gradient, or two of the matrix.
        """
        nbytes = peak.value(sizes)
        if cut_matrices is None:
            return nbytes
        parts = self._largest_parts(cut_matrices)
        for monomial, factor in peak.terms:
            if monomial in parts:
                whole_nbytes = Formula.of({monomial: factor}).value(sizes)
                nbytes -= max(0, whole_nbytes - _NUM_PARTS * parts[monomial] * self.precision.itemsize)
        return nbytes

    def _largest_parts(self, cut_matrices: int) -> dict[str, int]:
        """Returns the elements of the largest part of a layer's matrices, by the sizes that multiply to a matrix."""
        if cut_matrices not in self._parts:
            found = self._parts[cut_matrices] = {}
            of_layer = self.outer["blocks"][1]["params"]
            for param, (_, dims, *_) in zip(self.layout.blocks[1].params, of_layer, strict=True):
                if param.is_divisible:
                    monomial = _sizes_of(dims)
                    largest = max(numel for *_, numel in param.parts(cut_matrices))
                    found[monomial] = max(found.get(monomial, 0), largest)
        return self._parts[cut_matrices]

    def _head_peak_nbytes(self, passes: Passes) -> int:
        loops, sizes = self.head_loops(passes)
        recorded = self.head[self._bits].get(variant_of(passes), {}).get(loops.key)
        if recorded is None:
            raise NotKnownError(f"{variant_of(passes)}: head {loops.key}")
        first, second = loops.more_pieces
        peak: int = max(
            _formula(nbytes).value(sizes) + first * of_first + second * of_second
            for nbytes, of_first, of_second in recorded
        )
        # The gradient of the hidden state exists for all tokens, not only for the measured slices.
        num_more = passes.num_examples * passes.num_tokens - sizes["W"] if passes.train else 0
        # A tied head has the embedding's matrix.
        largest = max(self._cut_parts(0 if self.outer["tied"] else -1, passes.cut_matrices), default=0)
        return peak + (num_more * self.hidden_size + _NUM_PARTS * largest) * self.precision.itemsize

    def head_loops(self, passes: Passes) -> tuple[HeadLoops, dict[str, int]]:
        """Returns the loops of the head for a micro-batch, and their sizes. All slices after the second equal it."""
        num_tokens, vocab_size = passes.num_examples * passes.num_tokens, self.vocab_size
        first = min(num_tokens, num_slice_tokens(passes.head_slices, vocab_size))
        second = min(num_tokens - first, first)
        piece = num_piece_tokens(passes.head_slices, vocab_size)
        rows = num_product_rows(self.hidden_size)
        num_first, num_second = -(-first // piece), -(-second // piece)
        sums_in_parts = self.precision is not Precision.FP32 and (
            bool(second) or bool(self.outer["tied"]) or passes.grad_precision is Precision.FP32
        )
        num_parts = -(-vocab_size // rows) if passes.train and sums_in_parts else 1
        loops = HeadLoops(
            num_pieces=num_first, num_second_pieces=num_second, is_full=second == first, num_parts=num_parts
        )
        sizes = {
            **self.sizes,
            "S": first,
            "U": second,
            "W": first + second,
            "Q": piece,
            "L": first - (num_first - 1) * piece,
            "M": second - (num_second - 1) * piece if second else 0,
            "R": rows,
            "Z": vocab_size - (num_parts - 1) * rows,
        }
        return loops, sizes
