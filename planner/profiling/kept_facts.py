"""Stores the facts of traced models, so that a model that was planned once needs no torch again.

A trace at a pair of primes gives formulas in the numbers of examples and tokens. They are stored if they give what a
trace at the asked shape gives. Otherwise its values are stored, for this shape only.
"""

import hashlib
import itertools
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


_MANY_EXAMPLES = 10  # examples of a trace at primes have more, so that the number is no usual factor of a size
_FAR = 1.6  # a trace at primes has at least so many times the asked tokens, or that share of them


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
        self._layout: ModelLayout | None = None

    @property
    def layout(self) -> ModelLayout:
        """See ModelFacts."""
        if self._layout is None:
            self._layout = ModelLayout.from_json(self._basics["layout"])
        return self._layout

    @property
    def vocab_size(self) -> int:
        """See ModelFacts."""
        return int(self._basics["vocab_size"])

    @property
    def buffers_nbytes(self) -> int:
        """See ModelFacts."""
        return int(self._basics["buffers_nbytes"])

    @property
    def name(self) -> str:
        """See ProfiledFacts."""
        return str(self._basics["name"])

    @property
    def hidden_size(self) -> int:
        """See ProfiledFacts."""
        return int(self._basics["hidden_size"])

    @property
    def head_matrix_numel(self) -> int:
        """See ProfiledFacts."""
        return int(self._basics["head_matrix_numel"])

    def operators(self, block: BlockIndex, num_examples: int, num_tokens: int) -> LayerOperators:
        """See ProfiledFacts."""
        entries = self._stored["operators"].setdefault(str(block), {})
        if (found := self._find(entries, num_examples, num_tokens)) is not None:
            return _operators(found, {"B": num_examples, "T": num_tokens})
        model = self._model
        layer = model.operators(block, num_examples, num_tokens)
        recorded = model.recorded_operators(block, *self._primes(num_examples, num_tokens))
        self._add(entries, num_examples, num_tokens, recorded, _json_of(layer), layer, _operators)
        self._keep()
        return layer

    def needs(self, choices: Mapping[BlockIndex, BlockActivations], passes: Passes) -> PassNeeds:
        """See ModelFacts."""
        if not passes.train:
            choices = {}
        return self._found_needs(choices, passes) or self._traced_needs(choices, passes)

    # --- private ----------------------------------------------------------------------------------------------------

    @property
    def _basics(self) -> dict[str, Any]:
        if "layout" not in self._stored["model"]:
            self._stored["model"] = self._model.basics()
            self._keep()
        basics: dict[str, Any] = self._stored["model"]
        return basics

    @property
    def _model(self) -> "RecordedModel":
        if self._traced is None:
            self._traced = self._trace()
        return self._traced

    def _keep(self) -> None:
        """Stores what is known now, with what another process has stored meanwhile."""
        self._stored = _merged(_valid(self._cache.find(self._key)), self._stored)
        self._cache.keep(self._key, self._stored)

    def _found_needs(self, choices: Mapping[BlockIndex, BlockActivations], passes: Passes) -> PassNeeds | None:
        shape = passes.num_examples, passes.num_tokens
        stored = self._stored["needs"].get(self._name_of(passes))
        kinds = None if stored is None else self._find(stored["kinds"], *shape)
        if stored is None or kinds is None:
            return None
        tokens, num_more = self._head_tokens(passes)
        head, found = stored["head"].get(str(tokens)), dict[str, UnitNeed]()
        keys = _keys(kinds, choices)
        for key in dict.fromkeys(keys):
            unit = self._find(stored["units"].get(key, {}), *shape)
            if head is None or unit is None or (need := _unit(unit, {"B": shape[0], "T": shape[1]})) is None:
                return None
            found[key] = need
        return PassNeeds(
            units=tuple(found[key] for key in keys),
            head_peak_nbytes=head + num_more * self.hidden_size * self.precision.itemsize,
        )

    def _traced_needs(self, choices: Mapping[BlockIndex, BlockActivations], passes: Passes) -> PassNeeds:
        model, shape = self._model, (passes.num_examples, passes.num_tokens)
        needs, kinds = model.needs_and_kinds(choices, passes)
        recorded = model.recorded_units(choices, passes, *self._primes(*shape))
        empty: dict[str, Any] = {"kinds": {}, "units": {}, "head": {}}
        stored = self._stored["needs"].setdefault(self._name_of(passes), empty)
        stored["kinds"].setdefault(self._general(*shape), kinds)
        if self._find(stored["kinds"], *shape) != kinds:
            stored["kinds"][_exact(*shape)] = kinds
        for key, need, unit in zip(_keys(kinds, choices), needs.units, recorded, strict=True):
            entries = stored["units"].setdefault(key, {})
            if self._find(entries, *shape) is None:
                self._add(entries, *shape, unit, _plain(need), need, _unit)
        tokens, num_more = self._head_tokens(passes)
        nbytes_of_more = num_more * self.hidden_size * self.precision.itemsize
        stored["head"][str(tokens)] = needs.head_peak_nbytes - nbytes_of_more
        self._keep()
        return needs

    def _add(
        self,
        entries: dict[str, Any],
        num_examples: int,
        num_tokens: int,
        recorded: Any,
        plain: Any,
        expected: Any,
        evaluate: Callable[[Any, Sizes], Any],
    ) -> None:
        """Adds the formulas if they give what is expected, else the plain values."""
        general = self._general(num_examples, num_tokens)
        if num_tokens > 1 and evaluate(recorded, {"B": num_examples, "T": num_tokens}) == expected:
            entries.setdefault(general, recorded)
            if num_tokens in self._limits or entries[general] != recorded:
                entries[_exact(num_examples, num_tokens)] = plain
        else:
            entries[_exact(num_examples, num_tokens)] = plain

    def _find(self, entries: Mapping[str, Any], num_examples: int, num_tokens: int) -> Any:
        found = entries.get(_exact(num_examples, num_tokens))
        if found is None and num_tokens > 1 and num_tokens not in self._limits:
            found = entries.get(self._general(num_examples, num_tokens))
        return found

    def _general(self, num_examples: int, num_tokens: int) -> str:
        """Returns the name of all shapes that are expected to run the same operators."""
        return f"{'one' if num_examples == 1 else 'several'} {bisect_left(self._limits, num_tokens)}"

    def _primes(self, num_examples: int, num_tokens: int) -> tuple[int, int]:
        """Returns a shape of primes for a trace, with which formulas are found.

        The number of tokens is far from the asked one. Else a size that is rounded up to chunks could be the same for
        both, and look like a constant.
        """
        dims = {dim for block in self.layout.blocks for param in block.params for dim in param.shape}
        sides = _FAR * num_tokens, num_tokens / _FAR
        alike = [side for side in sides if side > LEAST_SWAPPED_NBYTES and self._is_alike(num_tokens, side)]
        least = int(max(alike[0] if alike else sides[0], LEAST_SWAPPED_NBYTES))
        examples = 1 if num_examples == 1 else _next_prime(_MANY_EXAMPLES, dims)
        return examples, _next_prime(least, dims | {examples})

    def _is_alike(self, num_tokens: int, other: float) -> bool:
        return bisect_left(self._limits, num_tokens) == bisect_left(self._limits, other + _FAR)

    def _head_tokens(self, passes: Passes) -> tuple[int, int]:
        """Returns the tokens whose head is traced, and the number of those that only have a gradient."""
        num_tokens = passes.num_examples * passes.num_tokens
        traced = min(num_tokens, 2 * num_slice_tokens(passes.head_slices, self.vocab_size))
        return traced, num_tokens - traced if passes.train else 0

    def _name_of(self, passes: Passes) -> str:
        return f"{variant_of(passes)} {passes.head_slices}"


def _next_prime(least: int, dims: Collection[int]) -> int:
    """Returns the first larger prime that divides none of the sizes."""
    for number in itertools.count(least + 1):
        is_prime = all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
        if is_prime and all(dim % number for dim in dims):
            return number
    raise AssertionError("there are enough primes")


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
    """Returns stored facts, or none if they have another form."""
    parts = ("model", "operators", "needs")
    if isinstance(stored, dict) and all(isinstance(stored.get(part), dict) for part in parts):
        return stored
    return {part: {} for part in parts}


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
