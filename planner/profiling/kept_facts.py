"""Stores the facts of traced models, so that a model that was planned once needs no torch again.

A trace at a pair of primes gives formulas in the numbers of examples and tokens. They are stored if they give what
traces at the asked shape and at larger primes give. Otherwise the values at the asked shape are stored, for it only.
"""

import hashlib
import itertools
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from windlass.engine.fingerprint import code_fingerprint
from windlass.engine.memory_estimate import Passes, PassNeeds
from windlass.engine.memory_plan import LEAST_SWAPPED_NBYTES, RECOMPUTE_ALL, BlockActivations, UnitNeed
from windlass.engine.model import ModelLayout
from windlass.engine.slices import num_slice_tokens
from windlass.planner.cost import OperatorProfile
from windlass.planner.profiling.known import Formula, Sizes, largest_value, variant_of
from windlass.planner.profiling.model_config import content_of
from windlass.planner.profiling.profiled_facts import LayerOperators
from windlass.storage.files import ResultCache
from windlass.storage.ids import BlockIndex, Precision

if TYPE_CHECKING:
    from windlass.planner.profiling.record_shapes import RecordedModel

_MOST_KEPT = 64  # models in the folder; the oldest are deleted
# Parts of the names of config fields at whose number of tokens a model may change its operators.
_LIMITS = ("window", "position", "chunk", "length", "block", "context", "ctx", "seq", "span", "local", "sparse")

_MANY_EXAMPLES = 10  # a trace at primes has more, so that the number is no usual factor of a size
# A trace at primes has more tokens. A tensor with one byte for each token is then large enough to be swapped.
_MANY_TOKENS = LEAST_SWAPPED_NBYTES
_FAR = 1.6  # a trace at primes has at least so many times the asked tokens, or that share of them
_FARTHER = 4  # the next trace at primes has so many times the examples and tokens of the others
_BROKEN = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # of stored facts of another form

_Shape = tuple[int, int]  # examples and tokens
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Basics:
    """The facts that depend on no shape."""

    name: str
    hidden_size: int
    head_matrix_numel: int
    vocab_size: int
    buffers_nbytes: int
    layout: ModelLayout

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "_Basics":
        """Reads what `RecordedModel.basics` gives."""
        match stored:
            case {
                "name": str(name),
                "hidden_size": int(hidden_size),
                "head_matrix_numel": int(head_matrix_numel),
                "vocab_size": int(vocab_size),
                "buffers_nbytes": int(buffers_nbytes),
                "layout": layout,
            }:
                return cls(
                    name=name,
                    hidden_size=hidden_size,
                    head_matrix_numel=head_matrix_numel,
                    vocab_size=vocab_size,
                    buffers_nbytes=buffers_nbytes,
                    layout=ModelLayout.from_json(layout),
                )
        raise ValueError("a fact is missing, or has another type")


class KeptFacts:
    """Implements `ProfiledFacts` for any model. It traces the model only for what was not stored yet."""

    def __init__(self, config: Any, precision: Precision, folder: Path, trace: Callable[[], "RecordedModel"]) -> None:
        """`config`: a transformers config, or one that is not loaded yet. `trace`: loads torch and builds the model."""
        content = content_of(config)
        self.precision = precision
        self._cache = ResultCache(folder=folder, max_results=_MOST_KEPT)
        hashed = [content, precision, code_fingerprint(Path(__file__).parent)]
        self._key = hashlib.sha256(json.dumps(hashed, sort_keys=True, default=str).encode()).hexdigest()
        self._limits = sorted(set(_limits_in(content)))
        self._trace = trace
        self._traced: RecordedModel | None = None
        self._stored = _valid(self._cache.find(self._key))
        self._known_basics: _Basics | None = None

    @property
    def layout(self) -> ModelLayout:
        """See ModelFacts."""
        return self._basics.layout

    @property
    def vocab_size(self) -> int:
        """See ModelFacts."""
        return self._basics.vocab_size

    @property
    def buffers_nbytes(self) -> int:
        """See ModelFacts."""
        return self._basics.buffers_nbytes

    @property
    def name(self) -> str:
        """See ProfiledFacts."""
        return self._basics.name

    @property
    def hidden_size(self) -> int:
        """See ProfiledFacts."""
        return self._basics.hidden_size

    @property
    def head_matrix_numel(self) -> int:
        """See ProfiledFacts."""
        return self._basics.head_matrix_numel

    def operators(self, block: BlockIndex, num_examples: int, num_tokens: int) -> LayerOperators:
        """See ProfiledFacts."""
        shape = num_examples, num_tokens
        if (found := self._read("operators", lambda: self._found_operators(block, shape))) is not None:
            return found
        model = self._model
        layer = model.operators(block, *shape)
        recorded = {primes: model.recorded_operators(block, *primes) for primes in self._primes(*shape)}
        entries = self._stored["operators"].setdefault(str(block), {})
        self._add(entries, shape, recorded, _json_of(layer), layer, _operators)
        self._keep()
        return layer

    def needs(self, choices: Mapping[BlockIndex, BlockActivations], passes: Passes) -> PassNeeds:
        """See ModelFacts."""
        if not passes.train:
            choices = {}
        found = self._read("needs", lambda: self._found_needs(choices, passes))
        return found or self._traced_needs(choices, passes)

    # --- private ----------------------------------------------------------------------------------------------------

    @property
    def _basics(self) -> _Basics:
        if self._known_basics is None and self._stored["model"]:
            self._known_basics = self._read("model", lambda: _Basics.from_json(self._stored["model"]))
        if self._known_basics is None:
            self._stored["model"] = self._model.basics()
            self._known_basics = _Basics.from_json(self._stored["model"])
            self._keep()
        return self._known_basics

    @property
    def _model(self) -> "RecordedModel":
        if self._traced is None:
            self._traced = self._trace()
        return self._traced

    def _keep(self) -> None:
        """Stores what is known now, with what another process has stored meanwhile."""
        self._stored = _merged(_valid(self._cache.find(self._key)), self._stored)
        self._cache.keep(self._key, self._stored)

    def _read(self, part: str, read: Callable[[], _Found | None]) -> _Found | None:
        """Returns what is read from a part of the stored facts. If that is broken, the part is dropped."""
        try:
            return read()
        except _BROKEN:
            self._stored[part] = {}
            self._cache.keep(self._key, self._stored)
            return None

    def _found_operators(self, block: BlockIndex, shape: _Shape) -> LayerOperators | None:
        found = self._find(self._stored["operators"].get(str(block), {}), *shape)
        return None if found is None else _operators(found, _sizes(shape))

    def _found_needs(self, choices: Mapping[BlockIndex, BlockActivations], passes: Passes) -> PassNeeds | None:
        shape = passes.num_examples, passes.num_tokens
        stored = self._stored["needs"].get(self._name_of(passes))
        kinds = None if stored is None else self._find(stored["kinds"], *shape)
        if stored is None or kinds is None:
            return None
        if len(kinds) != len(self.layout.blocks) - 2:
            raise ValueError("a kind for each layer")
        tokens, num_more = self._head_tokens(passes)
        head, found = stored["head"].get(str(tokens)), dict[str, UnitNeed]()
        keys = _keys(kinds, choices)
        for key in dict.fromkeys(keys):
            unit = self._find(stored["units"].get(key, {}), *shape)
            if head is None or unit is None or (need := _unit(unit, _sizes(shape))) is None:
                return None
            found[key] = need
        return PassNeeds(
            units=tuple(found[key] for key in keys),
            head_peak_nbytes=head + num_more * self.hidden_size * self.precision.itemsize,
        )

    def _traced_needs(self, choices: Mapping[BlockIndex, BlockActivations], passes: Passes) -> PassNeeds:
        model, shape = self._model, (passes.num_examples, passes.num_tokens)
        needs, kinds = model.needs_and_kinds(choices, passes)
        recorded = {primes: model.recorded_units(choices, passes, *primes) for primes in self._primes(*shape)}
        empty: dict[str, Any] = {"kinds": {}, "units": {}, "head": {}}
        stored = self._stored["needs"].setdefault(self._name_of(passes), empty)
        if self._find(stored["kinds"], *shape) != kinds:
            of_primes = {primes: found for primes, (found, _) in recorded.items()}
            self._add(stored["kinds"], shape, of_primes, kinds, kinds, lambda found, _: found)
        for number, (key, need) in enumerate(zip(_keys(kinds, choices), needs.units, strict=True)):
            entries = stored["units"].setdefault(key, {})
            if self._find(entries, *shape) is None:
                units = {primes: found[number] for primes, (_, found) in recorded.items()}
                self._add(entries, shape, units, _plain(need), need, _unit)
        tokens, num_more = self._head_tokens(passes)
        nbytes_of_more = num_more * self.hidden_size * self.precision.itemsize
        stored["head"][str(tokens)] = needs.head_peak_nbytes - nbytes_of_more
        self._keep()
        return needs

    def _add(
        self,
        entries: dict[str, Any],
        shape: _Shape,
        recorded: Mapping[_Shape, Any],
        plain: Any,
        expected: Any,
        evaluate: Callable[[Any, Sizes], Any],
    ) -> None:
        """Adds the formulas found at the first primes if they give what is expected, else the plain values.

        They must also give what was found at the other primes. A size that is rounded up to chunks may be the same for
        the asked tokens and the first primes. Then it looks like a constant.
        """
        formulas = next(iter(recorded.values()), None)
        holds = formulas is not None and evaluate(formulas, _sizes(shape)) == expected
        others = ((formulas, found, _sizes(primes)) for primes, found in recorded.items())
        if holds and all(evaluate(one, sizes) == evaluate(other, sizes) for one, other, sizes in others):
            general = self._general(*shape)
            entries.setdefault(general, formulas)
            if shape[1] in self._limits or entries[general] != formulas:
                entries[_exact(*shape)] = plain
        else:
            entries[_exact(*shape)] = plain

    def _find(self, entries: Mapping[str, Any], num_examples: int, num_tokens: int) -> Any:
        found = entries.get(_exact(num_examples, num_tokens))
        if found is None and num_tokens > 1 and num_tokens not in self._limits:
            found = entries.get(self._general(num_examples, num_tokens))
        return found

    def _general(self, num_examples: int, num_tokens: int) -> str:
        """Returns the name of all shapes that are expected to run the same operators."""
        return f"{'one' if num_examples == 1 else 'several'} {bisect_left(self._limits, num_tokens)}"

    def _primes(self, num_examples: int, num_tokens: int) -> list[_Shape]:
        """Returns shapes of primes for traces. The first finds formulas, the others check them.

        Formulas serve all tokens between two limits. If the larger tokens of a check are beyond a limit, the tokens
        nearest to it are checked instead, and so are few tokens. There are none for one token, whose operators differ
        from those of several.
        """
        if num_tokens < 2:
            return []
        dims = {dim for block in self.layout.blocks for param in block.params for dim in param.shape}
        examples = 1 if num_examples == 1 else _prime(itertools.count(_MANY_EXAMPLES + 1), dims)
        more_examples = 1 if num_examples == 1 else _prime(itertools.count(_FARTHER * examples), dims)
        dims |= {examples, more_examples}
        sides = _FAR * num_tokens, num_tokens / _FAR
        alike = [side for side in sides if side > _MANY_TOKENS and self._is_alike(num_tokens, side)]
        least = int(max(alike[0] if alike else sides[0], _MANY_TOKENS))
        first = _prime(itertools.count(least + 1), dims)
        checked = self._checked_tokens(num_tokens, first, dims)
        return [(examples, first), *((more_examples, tokens) for tokens in checked if tokens != first)]

    def _is_alike(self, num_tokens: int, other: float) -> bool:
        return bisect_left(self._limits, num_tokens) == bisect_left(self._limits, other + _FAR)

    def _checked_tokens(self, num_tokens: int, first: int, dims: Collection[int]) -> list[int]:
        """Returns primes well above and below both numbers of tokens, within the limits around `num_tokens`."""
        low, high = min(num_tokens, first), max(num_tokens, first)
        above = _prime(itertools.count(_FARTHER * high), dims)
        place = bisect_left(self._limits, num_tokens)
        if place == bisect_left(self._limits, above):
            return [above]
        start = max(_MANY_TOKENS, self._limits[place - 1] if place else 0, low // _FARTHER)
        end = self._limits[place]
        lowest, highest = (_prime(numbers, dims) for numbers in (range(start + 1, end), range(end - 1, start, -1)))
        # Between close limits there may be no prime.
        return [highest, lowest] if lowest and highest else [above]

    def _head_tokens(self, passes: Passes) -> tuple[int, int]:
        """Returns the tokens whose head is traced, and the number of those that only have a gradient."""
        num_tokens = passes.num_examples * passes.num_tokens
        traced = min(num_tokens, 2 * num_slice_tokens(passes.head_slices, self.vocab_size))
        return traced, num_tokens - traced if passes.train else 0

    def _name_of(self, passes: Passes) -> str:
        cut = "" if passes.cut_matrices is None else f" {passes.cut_matrices}"
        return f"{variant_of(passes)} {passes.head_slices}{cut}"


def _sizes(shape: _Shape) -> dict[str, int]:
    return dict(zip("BT", shape, strict=True))


def _prime(numbers: Iterable[int], dims: Collection[int]) -> int:
    """Returns the first prime that divides none of the sizes, or 0."""
    for number in numbers:
        is_prime = all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
        if is_prime and all(dim % number for dim in dims):
            return number
    return 0


def _limits_in(content: Any) -> Iterator[int]:
    """Yields the numbers of a config at which the tokens of an example may change the operators."""
    if isinstance(content, Mapping):
        for name, value in content.items():
            if isinstance(value, int) and any(part in name for part in _LIMITS):
                yield value
            yield from _limits_in(value)
    elif isinstance(content, list):
        for value in content:
            yield from _limits_in(value)


def _valid(stored: Any) -> dict[str, Any]:
    """Returns stored facts, or none if they have another form. Formulas and values are checked when they are read."""
    match stored:
        case {"model": dict(model), "operators": dict(operators), "needs": dict(needs)}:
            if all(isinstance(each, dict) for each in operators.values()) and all(map(_are_needs, needs.values())):
                return {"model": model, "operators": operators, "needs": needs}
    return {part: {} for part in ("model", "operators", "needs")}


def _are_needs(stored: Any) -> bool:
    match stored:
        case {"kinds": dict(), "units": dict(units), "head": dict(head)}:
            return all(isinstance(each, dict) for each in units.values()) and all(
                isinstance(each, int) for each in head.values()
            )
    return False


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Returns the union of two nested objects; `other` wins."""
    merged = dict(one)
    for name, value in other.items():
        before = merged.get(name)
        merged[name] = _merged(before, value) if isinstance(value, dict) and isinstance(before, dict) else value
    return merged


def _exact(num_examples: int, num_tokens: int) -> str:
    return f"{num_examples}x{num_tokens}"


def _keys(kinds: Sequence[int], choices: Mapping[BlockIndex, BlockActivations]) -> list[str]:
    """Returns the name of the embedding's need, and of each layer's."""
    keys = ["embedding"]
    for block, kind in enumerate(kinds, start=1):
        choice = choices.get(BlockIndex(block), RECOMPUTE_ALL)
        kept, swapped = (",".join(sorted(names)) for names in (choice.kept, choice.swapped))
        keys.append(f"{kind} {'away' if choice.swap_input else 'here'} {choice.recompute} {kept} {swapped}")
    return keys


def _value(text: str, sizes: Sizes) -> int:
    return Formula.parse(text).value(sizes)


def _unit(stored: Any, sizes: Sizes) -> UnitNeed | None:
    """Returns the need of a unit. None: some tensors are too small to be swapped, so formulas do not hold."""
    output, held, swapped, forward, backward = stored
    swapped_nbytes = tuple(_value(nbytes, sizes) for nbytes in swapped)
    if min(swapped_nbytes, default=LEAST_SWAPPED_NBYTES) < LEAST_SWAPPED_NBYTES:
        return None
    return UnitNeed(
        output_nbytes=_value(output, sizes),
        held_nbytes=_value(held, sizes),
        swapped=swapped_nbytes,
        forward_peak_nbytes=largest_value(map(Formula.parse, forward), sizes),
        backward_peak_nbytes=largest_value(map(Formula.parse, backward), sizes),
    )


def _plain(need: UnitNeed) -> list[Any]:
    return [
        str(need.output_nbytes),
        str(need.held_nbytes),
        list(map(str, need.swapped)),
        [str(need.forward_peak_nbytes)],
        [str(need.backward_peak_nbytes)],
    ]


def _operators(stored: Any, sizes: Sizes) -> LayerOperators:
    return LayerOperators(
        operators=tuple(
            OperatorProfile(
                name=name,
                outputs_nbytes=tuple(_value(nbytes, sizes) for nbytes in outputs),
                num_flops=_value(num_flops, sizes),
                is_saved=is_saved,
                reads=tuple(reads),
            )
            for name, outputs, num_flops, is_saved, reads in stored["operators"]
        ),
        saves_input=stored["saves_input"],
    )


def _json_of(layer: LayerOperators) -> dict[str, Any]:
    operators = [
        [each.name, list(map(str, each.outputs_nbytes)), str(each.num_flops), each.is_saved, list(each.reads)]
        for each in layer.operators
    ]
    return {"operators": operators, "saves_input": layer.saves_input}
