"""Records the formulas of the known families: `python -m windlass.planner.profiling.known.record`.

It traces one small model of each family, whose sizes are different primes. So each size of the trace shows of which
sizes of the model it is the product. Run it again after a change of the engine, of torch or of transformers, and commit
the files that it writes. After a change of the engine that cannot change formulas, `--unchanged` is enough.
"""

import argparse
import contextlib
import functools
import importlib
import itertools
import json
import math
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from transformers.utils import logging

from windlass.engine.device import TORCH_DTYPE
from windlass.engine.memory_estimate import DryRun, Passes
from windlass.engine.memory_plan import EVERY_OPERATOR, BlockActivations
from windlass.planner.cost import LayerProfile, OperatorProfile, by_benefit
from windlass.planner.hardware import ModelShape
from windlass.planner.profiling import TracedModel, config_of_shape, on_gpu
from windlass.planner.profiling.known.formulas import Factor, Formula, largest_of
from windlass.planner.profiling.known.known_model import (
    FLAGS,
    FOLDER,
    MOST_TURNS,
    PACKAGES,
    HeadLoops,
    KnownModel,
    choice_key,
    read_family,
    variant_of,
)
from windlass.planner.profiling.known.recorded_code import code_digest
from windlass.planner.profiling.known.recorded_sizes import RecordedSizes, SizedInt, formulas_of, operators_in, unit_of
from windlass.planner.profiling.known.sharing import SHARED, with_shared_parts
from windlass.storage.ids import BlockIndex, Precision

# The prime of each size in a trace, and the factor that makes a head dim even, so that it can be rotated in pairs.
_PRIMES = {
    "B": (11, 1),
    "T": (37, 1),
    "K": (13, 1),
    "G": (17, 1),
    "D": (19, 2),
    "I": (23, 1),
    "V": (29, 1),
    "P": (41, 1),
    "H": (31, 1),
}
_OF_SHAPE = "BT"
_SIZES = {"gpt2": "BTKDVP", "llama": "HBTKGDIVP", "qwen2": "HBTKGDIVP", "qwen3": "HBTKGDIVP"}
# Families whose head is recorded for another one, too. Their heads are compared for a few loops.
_HEADS = {"qwen2": "llama", "qwen3": "llama"}
_PRECISIONS = (Precision.BF16, Precision.FP32)  # fp16 needs the same memory as bf16
_LAYER = BlockIndex(1)
_COMPARED_VARIANT = "32+"
_NUM_SHAPES = 1000  # random shapes whose orders of operators by benefit are recorded


def passes_of(precision: Precision, *, num_examples: int, num_tokens: int) -> Iterator[Passes]:
    """Yields the passes that a job may have in this precision."""
    of_shape = functools.partial(Passes, num_examples=num_examples, num_tokens=num_tokens)
    for grad_precision, is_summed in dict.fromkeys(((precision, False), (precision, True), (Precision.FP32, True))):
        yield of_shape(grad_precision=grad_precision, is_summed=is_summed)
    yield of_shape(grad_precision=precision, is_summed=False, train=False)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A small model of a family. Its sizes are primes, but for those that are 1."""

    family: str
    is_tied: bool = False
    ones: str = ""  # sizes that are 1
    vocab_size: int | None = None  # a prime; None: the usual one

    @property
    def recorded(self) -> RecordedSizes:
        """The arithmetic of this model's traces."""
        return RecordedSizes(self.primes)

    @property
    def primes(self) -> dict[str, tuple[int, int]]:
        """The prime of each size, and the size's factor of it."""
        primes = {name: _PRIMES[name] for name in _SIZES[self.family] if name not in self.ones}
        if "H" in primes:  # a multiple of the number of heads, as transformers wants it
            primes["H"] = _PRIMES["H"][0], math.prod(primes[name][0] for name in "KG" if name in primes)
        if self.vocab_size is not None:
            primes["V"] = (self.vocab_size, 1)
        return primes

    @property
    def flags(self) -> str:
        """The sizes that are 1, of those that decide the operators."""
        return "".join(name for name in FLAGS if self.sizes[name] == 1)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by letter."""
        return dict.fromkeys(_PRIMES, 1) | self.recorded.sizes

    def model(self, precision: Precision, num_layers: int = 1) -> TracedModel:
        """Builds the model on the meta device."""
        sizes, num_heads = self.sizes, self.sizes["K"] * self.sizes["G"]
        fields: dict[str, Any] = {"hidden_size": num_heads * sizes["D"]}
        if self.family != "gpt2":
            fields = {"hidden_size": sizes["H"], "head_dim": sizes["D"]}
            fields |= {"num_kv_heads": sizes["K"], "intermediate_size": sizes["I"]}
        shape = ModelShape(
            num_layers=num_layers,
            num_heads=num_heads,
            vocab_size=sizes["V"],
            tied_embeddings=self.is_tied,
            qkv_bias=self.family == "qwen2",
            qk_norm=self.family == "qwen3",
            **fields,
        )
        return TracedModel(config_of_shape(shape, num_tokens=sizes["P"]), precision)


class _HeadRun(DryRun):
    """A dry run of the head alone."""

    def head_peak(self, num_tokens: int, hidden_size: int, *, train: bool) -> int:
        """Returns the peak of the head for so many tokens."""
        self._in_fp32 = self.summed_in_fp32(num_tokens)
        self._runner.model.train(train)
        with self._fake:
            dtype = next(self._runner.model.parameters()).dtype
            return self._head(torch.empty(1, num_tokens, hidden_size, dtype=dtype), train=train)


# --- layers and embedding ---------------------------------------------------------------------------------------------


def operators_of(sample: Sample, model: TracedModel) -> dict[str, Any]:
    """Records a layer's operators."""
    sizes, recorded = sample.sizes, sample.recorded
    layer = model.operators(_LAYER, sizes["B"], sizes["T"])
    return operators_in(recorded, layer)


def held_sets(family: str, operators: Mapping[str, Any], precision: Precision) -> list[frozenset[str]]:
    """Returns the sets of operators whose outputs a plan may hold, for shapes of all proportions."""
    draw, bits = random.Random(0), _bits(precision)
    alike = {"".join(ones): "" for number in range(4) for ones in itertools.combinations(FLAGS, number)}
    facts = {"classes": {"": {bits: operators}}, "alike": alike}
    found: dict[frozenset[str], None] = {}
    for _ in range(_NUM_SHAPES):
        sizes = dict.fromkeys("GPV", 1)
        sizes |= {"K": draw.choice((1, 2, 4, 8, 16, 32, 64, 128)), "D": draw.choice((16, 64, 80, 128, 256))}
        if family != "gpt2":
            sizes["G"] = draw.choice((1, 1, 2, 3, 4, 7, 8, 16))
            sizes["H"] = int(sizes["K"] * sizes["G"] * sizes["D"] * draw.choice((1, 1, 1, 0.5, 0.625, 1.25)))
            sizes["I"] = max(1, int(sizes["H"] * draw.uniform(0.3, 8)))
        known = KnownModel(layers=facts, outer={}, head={}, sizes=sizes, num_layers=1, precision=precision)
        num_examples, num_tokens = draw.choice((1, 2, 8, 32)), 2 ** draw.randint(3, 20)
        layer = known.operators(_LAYER, num_examples, num_tokens).operators
        for operators_there in (layer, tuple(on_gpu(operator, num_tokens) for operator in layer)):
            order = _order(operators_there)
            found.update(dict.fromkeys(frozenset(order[: number + 1]) for number in range(len(order))))
    return list(found)


def _order(operators: tuple[OperatorProfile, ...]) -> list[str]:
    num_flops = sum(operator.num_flops for operator in operators)
    profile = LayerProfile(numel=1, num_flops=num_flops, input_nbytes=1, operators=operators)
    return [operator.name for operator in by_benefit(profile)]


def choices_of(sets: Sequence[frozenset[str]]) -> list[BlockActivations]:
    """Returns choices that hold these sets, or everything, as in `planner/cost/activation_options.py`.

    Of those that swap the input and recompute, it has only a few. `_with_input_away` derives the others.
    """
    few = sets[-1:]
    choices = [BlockActivations(), BlockActivations(swap_input=True)]
    for away, held in [*((False, held) for held in sets), *((True, held) for held in few)]:
        choices += [BlockActivations(swap_input=away, kept=held), BlockActivations(swap_input=away, swapped=held)]
    for away in (False, True):
        choices.append(BlockActivations(swap_input=away, recompute=False))
        choices.append(BlockActivations(swap_input=away, recompute=False, swapped=frozenset({EVERY_OPERATOR})))
    return choices


def _with_input_away(units: dict[str, Any]) -> dict[str, Any]:
    """Adds the choices that swap the input and recompute. Only the input differs, which is as the output."""
    derived = {}
    for key, (output, held, swapped, *peaks) in units.items():
        if key.startswith("here ") and not key.endswith("all"):
            left = Formula.parse(held).plus(Formula.parse(output), -1)
            derived[f"away {key.removeprefix('here ')}"] = [output, str(left), [output, *swapped], *peaks]
    for key in derived.keys() & units.keys():
        assert derived[key] == units[key], f"{key} is as its input would let expect"
    return units | derived


def units_of(
    sample: Sample,
    precision: Precision,
    operators: Mapping[str, Any],
    choices: Sequence[BlockActivations],
    variants: Collection[str] | None = None,
) -> dict[str, dict[str, Any]]:
    """Records the needs of a layer, by variant and choice. `variants`: those to record; None: all."""
    names = {operator[0]: index for index, operator in enumerate(operators["operators"])}
    sizes, recorded = sample.sizes, sample.recorded
    # Apart, because fake tensors are slower where some are swapped.
    parts = [[choice for choice in choices if choice.swaps is swaps] for swaps in (False, True)]
    parts = [part for part in parts if part]
    models = [sample.model(precision, num_layers=len(part)) for part in parts]
    found: dict[str, dict[str, Any]] = {}
    for passes in passes_of(precision, num_examples=sizes["B"], num_tokens=sizes["T"]):
        if variants is not None and variant_of(passes) not in variants:
            continue
        units: dict[str, Any] = {}
        for model, part in zip(models, parts, strict=True):
            by_block = dict(enumerate(part, start=1)) if passes.train else {}
            run = _dry_run(model, passes, recorded, by_block)
            _, *layers = run.units(passes.num_examples, passes.num_tokens, train=passes.train)[0]
            for choice, layer in zip(part, layers, strict=True):
                units[choice_key(choice, names) if passes.train else "layer"] = unit_of(recorded, layer)
        found[variant_of(passes)] = _with_input_away(units)
    return found


def embeddings_of(sample: Sample, precision: Precision) -> dict[str, Any]:
    """Records the needs of the embedding, by variant."""
    model, sizes, recorded = sample.model(precision), sample.sizes, sample.recorded
    found = {}
    for passes in passes_of(precision, num_examples=sizes["B"], num_tokens=sizes["T"]):
        run = _dry_run(model, passes, recorded, {})
        units, _ = run.units(passes.num_examples, passes.num_tokens, train=passes.train)
        found[variant_of(passes)] = unit_of(recorded, units[0])
    return found


def _dry_run(
    model: TracedModel,
    passes: Passes,
    sizes: RecordedSizes,
    choices: Mapping[int, BlockActivations],
    kind: type[DryRun] = DryRun,
) -> Any:
    return kind(
        model.partition,
        {BlockIndex(block): choice for block, choice in choices.items()},
        grad_dtype=TORCH_DTYPE[passes.grad_precision],
        is_summed=passes.is_summed,
        sizes=sizes,
    )


# --- the head ---------------------------------------------------------------------------------------------------------


def all_loops() -> Iterator[HeadLoops]:
    """Yields the loops that are recorded."""
    for parts, pieces in itertools.product(range(1, MOST_TURNS + 1), repeat=2):
        yield HeadLoops(num_pieces=pieces, num_parts=parts)
        yield HeadLoops(num_pieces=pieces, num_second_pieces=pieces, is_full=True, num_parts=parts)
        for second in range(1, pieces + 1):
            yield HeadLoops(num_pieces=pieces, num_second_pieces=second, num_parts=parts)


def head_of(sample: Sample, precision: Precision, listed: Sequence[HeadLoops] | None = None) -> dict[str, Any]:
    """Records the head's peaks, by variant and loops. `listed`: the loops to record; None: all."""
    found: dict[str, dict[str, Any]] = {}
    models: dict[int, TracedModel] = {}
    for passes in passes_of(precision, num_examples=1, num_tokens=2):
        has_parts = passes.train and precision is not Precision.FP32
        recorded = found[variant_of(passes)] = {}
        for loops in listed or all_loops():
            if loops.num_parts == 1 or has_parts:
                recorded[loops.key] = _head(sample, precision, passes, loops, models)
    return found


def _head(
    sample: Sample, precision: Precision, passes: Passes, loops: HeadLoops, models: dict[int, TracedModel]
) -> list[list[Any]]:
    """Returns the formulas that may be the head's peak, with the bytes that each further piece of the loss adds."""

    def measured(num_pieces: int, num_second: int) -> dict[Formula, Factor]:
        turns = HeadLoops(
            num_pieces=num_pieces,
            num_second_pieces=num_second,
            is_full=loops.is_full,
            num_parts=loops.num_parts,
        )
        peak = _head_peak(sample, precision, passes, turns, models)
        constants: dict[Formula, Factor] = {}
        for formula in formulas_of(peak):
            constants[formula.growing] = max(constants.get(formula.growing, formula.constant), formula.constant)
        return constants

    first, second = loops.num_pieces, loops.num_second_pieces
    base = measured(first, second)
    slopes: list[dict[Formula, Factor]] = [dict.fromkeys(base, 0), dict.fromkeys(base, 0)]
    if first == MOST_TURNS:
        for more in (1, 2):
            longer = measured(first + more, second + more if loops.is_full else second)
            slopes[0] = _slopes(base, longer, more)
    if second == MOST_TURNS and not loops.is_full:
        wide, wider = measured(first + 1, second), measured(first + 1, second + 1)
        slopes[1] = _slopes(wide, wider, 1)
    rows = [(formula, constant, slopes[0][formula], slopes[1][formula]) for formula, constant in base.items()]
    # Alike for `largest_of`: a formula is left out if another one is never smaller, also with more pieces.
    texts = {
        Formula.of(dict(formula.terms) | {"": constant, "f": of_first, "s": of_second}): [
            str(Formula.of(dict(formula.terms) | {"": constant})),
            int(of_first),
            int(of_second),
        ]
        for formula, constant, of_first, of_second in rows
    }
    return [texts[formula] for formula in largest_of(texts)]


def _slopes(base: Mapping[Formula, Factor], longer: Mapping[Formula, Factor], more: int) -> dict[Formula, Factor]:
    assert base.keys() == longer.keys(), "another turn of a loop brings no other formula"
    added = {formula: longer[formula] - constant for formula, constant in base.items()}
    assert all(nbytes % more == 0 for nbytes in added.values()), "each turn adds as many bytes"
    return {formula: nbytes // more for formula, nbytes in added.items()}


def _head_peak(
    sample: Sample, precision: Precision, passes: Passes, loops: HeadLoops, models: dict[int, TracedModel]
) -> SizedInt:
    primes = _primes_of(loops)
    vocab_size = primes["V"][0]
    if vocab_size not in models:
        models[vocab_size] = replace(sample, vocab_size=vocab_size).model(precision)
    model = models[vocab_size]
    of_model = {name: prime for name, prime in sample.primes.items() if name not in _OF_SHAPE + "VP"}
    recorded = RecordedSizes(of_model | primes)
    sizes = recorded.sizes
    num_tokens = sizes["S"] + (sizes["S"] if loops.is_full else sizes.get("U", 0))
    with _patched_slices(sizes, vocab_size=vocab_size, hidden_size=model.hidden_size):
        run = _dry_run(model, passes, recorded, {}, kind=_HeadRun)
        peak = run.head_peak(num_tokens, model.hidden_size, train=passes.train)
    assert isinstance(peak, SizedInt)
    return peak


def _primes_of(loops: HeadLoops) -> dict[str, tuple[int, int]]:
    """Returns different primes for the sizes of the head's loops, and for the vocabulary, as in `_PRIMES`.

    A slice of several pieces has a prime number of tokens, and so has its last piece. The others have twice a prime.
    """
    primes = [number for number in range(43, 600) if all(number % other for other in range(2, 25))]
    numbers = {"V": (29, 1)}
    if loops.num_parts > 1:
        numbers = next(
            {"R": (rows, 2), "Z": (last, 1), "V": (vocab_size, 1)}
            for rows, last in itertools.permutations(primes, 2)
            if last < 2 * rows and (vocab_size := (loops.num_parts - 1) * 2 * rows + last) in primes
        )
    free = {prime for prime in primes if all(prime != number for number, _ in numbers.values())}
    pieces, second = loops.num_pieces, 0 if loops.is_full else loops.num_second_pieces
    for piece, last, other in itertools.permutations(sorted(free), 3):
        tokens = 2 * (pieces - 1) * piece + last
        others = 2 * (second - 1) * piece + other if second else 0
        # Half of both slices is a prime, too, or a third of it, as it is a multiple of 3 for some numbers of pieces.
        factor = 6 if (tokens + others) % 6 == 0 else 2
        both = (tokens + others) // factor
        found = {
            "Q": (piece, 2),
            "L": (last, 1),
            "M": (other, 1),
            "S": (tokens, 1),
            "U": (others, 1),
            "W": (both, factor),
        }
        if pieces == 1:
            del found["Q"], found["L"]
        if second < 2:
            del found["M"]
        if not second:
            del found["U"], found["W"]
        used = [number for number, _ in found.values()]
        is_ordered = max(last, other) < 2 * piece and others < tokens
        if is_ordered and len(set(used)) == len(used) and free.issuperset(used):
            return numbers | found
    raise AssertionError("there are enough primes")


@contextlib.contextmanager
def _patched_slices(sizes: Mapping[str, int], *, vocab_size: int, hidden_size: int) -> Iterator[None]:
    """Lets the head of a small model have the loops of a large one."""
    piece = sizes.get("Q", sizes["S"])
    rows = sizes.get("R", vocab_size)
    values = {
        "MIN_SLICE_TOKENS": sizes["S"],
        "MAX_SLICE_TOKENS": sizes["S"],
        "MAX_PIECE_NUMEL": piece * vocab_size,
        "MAX_PRODUCT_NUMEL": rows * hidden_size,
        "ROWS_UNIT": rows,
    }
    slice_sizes = importlib.import_module("windlass.engine.slices.slice_sizes")
    before = {name: getattr(slice_sizes, name) for name in values}
    for name, value in values.items():
        setattr(slice_sizes, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(slice_sizes, name, value)


# --- the family -------------------------------------------------------------------------------------------------------


def record(family: str) -> dict[str, Any]:
    """Records a family."""
    sample = Sample(family=family)
    general = class_of(sample)
    alike, classes = {}, {sample.flags: general}
    for ones in ones_of(family):
        special = replace(sample, ones=ones)
        alike[special.flags] = sample.flags if is_alike(special, general) else special.flags
        if alike[special.flags] == special.flags and ones:
            classes[special.flags] = class_of(special)
    return {
        "versions": {package: version(package).partition("+")[0] for package in PACKAGES},
        "code": code_digest(),
        "alike": alike,
        "classes": classes,
        "tied": _outer(replace(sample, is_tied=True)),
        "untied": _outer(sample),
    }


def _outer(sample: Sample) -> dict[str, Any]:
    """Records all but the layers, which differs if the head uses the embedding's matrix."""
    model, recorded = sample.model(Precision.BF16), sample.recorded
    return {
        "name": model.name,
        "hidden": str(recorded.formula(model.hidden_size)),
        "head_matrix_numel": str(recorded.formula(model.head_matrix_numel)),
        "buffers_nbytes": str(_sum(recorded.formula(buffer.nbytes) for buffer in model.partition.model.buffers())),
        "blocks": [
            {
                "name": block.name.replace(".0", ".*"),
                "params": [
                    [
                        param.name.replace(".0.", ".*."),
                        [str(recorded.formula(dim)) for dim in param.shape],
                        param.decay,
                        param.is_divisible,
                    ]
                    for param in block.params
                ],
            }
            for block in model.layout.blocks
        ],
        "tied": model.layout.tied,
        "embedding": {
            special.flags: {_bits(precision): embeddings_of(special, precision) for precision in _PRECISIONS}
            for special in (replace(sample, ones=ones) for ones in ones_of(sample.family))
        },
        "head": _shared_head(sample)
        if sample.family in _HEADS
        else {_bits(precision): head_of(sample, precision) for precision in _PRECISIONS},
    }


def _shared_head(sample: Sample) -> str:
    """Returns the family whose head is the same, after a comparison."""
    other = replace(sample, family=_HEADS[sample.family])
    listed = [HeadLoops(num_pieces=2, num_parts=2), HeadLoops(num_pieces=2, num_second_pieces=2, is_full=True)]
    for precision in _PRECISIONS:
        if head_of(sample, precision, listed) != head_of(other, precision, listed):
            raise AssertionError(f"the head of {sample.family} differs from that of {other.family}")
    return other.family


def ones_of(family: str) -> Iterator[str]:
    """Yields the combinations of sizes that may be 1."""
    names = [name for name in FLAGS if name in _SIZES[family]]
    for number in range(len(names) + 1):
        yield from map("".join, itertools.combinations(names, number))


def class_of(sample: Sample) -> dict[str, Any]:
    """Records the operators of a layer, and the needs of units for all choices, by bits of the precision."""
    classes = {}
    for precision in _PRECISIONS:
        model = sample.model(precision)
        operators = operators_of(sample, model)
        choices = choices_of(held_sets(sample.family, operators, precision))
        classes[_bits(precision)] = operators | {"units": units_of(sample, precision, operators, choices)}
    return classes


def is_alike(sample: Sample, general: Mapping[str, Any]) -> bool:
    """Returns whether the formulas of the general class hold for a sample some of whose sizes are 1."""
    if not sample.ones:
        return True
    for precision in _PRECISIONS:
        expected, model = general[_bits(precision)], sample.model(precision)
        operators = operators_of(sample, model)
        if operators != _without({key: expected[key] for key in operators}, sample.ones):
            return False
        names = [operator[0] for operator in operators["operators"]]
        # One variant is enough, because the others differ only in how gradients are added to their sums.
        found = units_of(sample, precision, operators, _some(expected["units"], names), (_COMPARED_VARIANT,))
        for variant, units in found.items():
            for key, unit in units.items():
                if unit != _without(expected["units"][variant][key], sample.ones):
                    return False
    return True


def _some(units: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> list[BlockActivations]:
    """Returns a few choices that hold little, much and everything."""
    keys = [key for variant in units.values() for key in variant if key.startswith("here keep ") and "all" not in key]
    most = frozenset(names[int(index)] for index in max(keys, key=len).removeprefix("here keep ").split(","))
    return choices_of([most])


def _without(recorded: Any, ones: str) -> Any:
    """Returns recorded values for sizes that are 1. Lists of peaks keep the formulas that may still be the largest."""
    match recorded:
        case {**items}:
            return {key: _without(value, ones) for key, value in items.items()}
        case [str(), str(), list(), list(), list()]:  # a unit
            output, held, swapped, *peaks = recorded
            peaks = [
                [str(formula) for formula in largest_of(Formula.parse(text).without(*ones) for text in peak)]
                for peak in peaks
            ]
            return [_without(output, ones), _without(held, ones), _without(swapped, ones), *peaks]
        case [str(name), list(outputs), str(num_flops), bool(is_saved), list(reads)]:  # an operator
            return [name, _without(outputs, ones), _without(num_flops, ones), is_saved, reads]
        case list():
            return [_without(value, ones) for value in recorded]
        case str():
            return str(Formula.parse(recorded).without(*ones))
    return recorded


def _bits(precision: Precision) -> str:
    return str(8 * precision.itemsize)


def _sum(formulas: Iterable[Formula]) -> Formula:
    total = Formula.of({})
    for formula in formulas:
        total = total.plus(formula)
    return total


def _as_text(recorded: Mapping[str, Any]) -> str:
    """Returns JSON with a line for each key and for each shared part, so that a difference is easy to see."""
    values = with_shared_parts(recorded)
    lines = [f"{json.dumps(key)}:{_short(value)}" for key, value in values.items() if key != SHARED]
    shared = ",\n".join(map(_short, values[SHARED]))
    return "{" + ",\n".join([*lines, f"{json.dumps(SHARED)}:[\n{shared}\n]"]) + "}\n"


def _short(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _marked(recorded: dict[str, Any]) -> dict[str, Any]:
    """Returns a family as if it was recorded with the present code."""
    return {"versions": recorded["versions"], "code": code_digest()} | {
        key: value for key, value in recorded.items() if key not in ("versions", "code")
    }


def main() -> None:
    """Writes the files of the families."""
    parser = argparse.ArgumentParser(description="Record what is known of models without tracing them.")
    parser.add_argument("families", nargs="*", help=f"{', '.join(_SIZES)}; without one: all")
    parser.add_argument(
        "--unchanged",
        action="store_true",
        help="record nothing: mark the files as those of the present code, whose change does not affect them",
    )
    options = parser.parse_args()
    logging.set_verbosity_error()  # small vocabularies lack special tokens
    for family in options.families or _SIZES:
        path = FOLDER / f"{family}.json"
        recorded = _marked(read_family(family)) if options.unchanged else record(family)
        path.write_text(_as_text(recorded), encoding="utf-8")


if __name__ == "__main__":
    main()
