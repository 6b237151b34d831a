"""A model that was planned is known again, also for other numbers of examples and tokens, without a trace."""

import copy
import functools
import json
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from tests.support.engine.architectures import ARCHITECTURES
from windlass.engine.memory_estimate import Passes, PassNeeds
from windlass.planner.cost.activation_options import ways_of_layer
from windlass.planner.profiling import facts_choice
from windlass.planner.profiling.facts_choice import facts_of
from windlass.planner.profiling.kept_facts import KeptFacts
from windlass.planner.profiling.model_profiler import TracedModel
from windlass.planner.profiling.profiled_facts import LayerOperators, ProfiledFacts, profile_of
from windlass.planner.profiling.record_shapes import RecordedModel
from windlass.storage.ids import BlockIndex, Precision

BF16 = Precision.BF16
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 96,
}


def config_of(name: str) -> Any:
    return ARCHITECTURES[name].config(tied=False, dropout=0.0)


def everything(facts: ProfiledFacts, num_examples: int, num_tokens: int) -> list[object]:
    """All that a plan asks of a model."""
    profile = profile_of(facts, num_examples, num_tokens, for_gpu=True)
    of_job = Passes(num_examples=num_examples, num_tokens=num_tokens, grad_precision=Precision.FP32, is_summed=True)
    ways = [way.choice for way in ways_of_layer(profile.layers[0])]
    choices = [{}, {BlockIndex(1): ways[-1]}]
    return [facts.layout, facts.vocab_size, facts.buffers_nbytes, profile, *(facts.needs(c, of_job) for c in choices)]


def refuse(*_: object) -> Any:
    raise AssertionError("this was traced before")


@pytest.fixture
def no_trace(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def forbid() -> None:
        monkeypatch.setattr(facts_choice, "loaded", refuse)

    return forbid


def test_a_model_is_traced_once(tmp_path: Path, no_trace: Callable[[], None]) -> None:
    config = config_of("Llama")
    traced = TracedModel(config, BF16)
    expected = everything(traced, 4, 32)
    assert everything(facts_of(config, BF16, tmp_path), 4, 32) == expected
    no_trace()
    again = facts_of(config, BF16, tmp_path)
    assert everything(again, 4, 32) == expected
    # As many tokens in all, so that the head is known, too.
    assert everything(again, 8, 16) == everything(traced, 8, 16)


@pytest.mark.long
@pytest.mark.parametrize("name", ["Llama", "Mixtral", "Gemma-3", "GPT-NeoX"])
def test_facts_of_several_shapes_are_known_again(name: str, tmp_path: Path, no_trace: Callable[[], None]) -> None:
    config, shapes = config_of(name), [(4, 32), (1, 32), (2, 1), (1, 1), (3, 100)]
    traced = TracedModel(config, BF16)
    expected = [everything(traced, *shape) for shape in shapes]
    assert [everything(facts_of(config, BF16, tmp_path), *shape) for shape in shapes] == expected
    no_trace()
    assert [everything(facts_of(config, BF16, tmp_path), *shape) for shape in shapes] == expected


def test_another_config_or_precision_is_another_model(tmp_path: Path, no_trace: Callable[[], None]) -> None:
    config = config_of("Llama")
    assert facts_of(config, BF16, tmp_path).hidden_size == config.hidden_size
    no_trace()
    config.intermediate_size += 8
    for facts in (facts_of(config, BF16, tmp_path), facts_of(config_of("Llama"), Precision.FP32, tmp_path)):
        with pytest.raises(AssertionError, match="traced before"):
            _ = facts.hidden_size


@pytest.mark.long
def test_a_formula_that_does_not_hold_is_not_used_for_other_shapes(tmp_path: Path) -> None:
    """Sliding windows change the operators at some number of tokens."""
    config = config_of("Mistral")
    window = config.sliding_window
    assert window is not None
    traced, facts = TracedModel(config, BF16), facts_of(config, BF16, tmp_path)
    for num_tokens in (window - 1, window, window + 1):
        assert profile_of(facts, 2, num_tokens) == profile_of(traced, 2, num_tokens), num_tokens


@pytest.mark.long
def test_formulas_hold_at_more_shapes_than_those_that_found_them(tmp_path: Path) -> None:
    """Tokens that are rounded up to a chunk look like a constant where both shapes are in one chunk."""
    chunk = 256

    class Padding(RecordedModel):
        def operators(self, block: BlockIndex, num_examples: int, num_tokens: int) -> LayerOperators:
            layer = super().operators(block, num_examples, num_tokens)
            padded = -(-num_tokens // chunk) * chunk
            first = replace(layer.operators[0], outputs_nbytes=(4 * padded,))
            return replace(layer, operators=(first, *layer.operators[1:]))

    config, block = LlamaConfig(**SMALL, max_position_embeddings=8192), BlockIndex(1)
    model = Padding(config, BF16)
    facts = KeptFacts(config, BF16, tmp_path, lambda: model)
    for num_tokens in (100, 1250, 600, 32):
        expected = model.operators(block, 2, num_tokens)
        assert facts.operators(block, 2, num_tokens) == expected, num_tokens


@pytest.mark.parametrize("limit", [None, 390])
def test_formulas_are_checked_far_from_where_they_were_found(limit: int | None, tmp_path: Path) -> None:
    config = LlamaConfig(**SMALL, max_position_embeddings=limit or 8192)
    facts = facts_of(config, BF16, tmp_path)
    assert isinstance(facts, KeptFacts)
    (examples, found), *checks = facts._primes(2, 100)
    assert (examples, found) == (11, 163)
    if limit is None:
        assert checks == [(47, 653)]  # four times
    else:
        assert checks == [(47, 389), (47, 67)]  # between the fewest tokens and the limit
    assert facts._primes(1, 100)[0] == (1, 163)
    assert not facts._primes(2, 1)


@pytest.mark.long
def test_one_token_says_nothing_about_more(tmp_path: Path) -> None:
    """Also not which layers are alike, whichever is planned first."""

    class OneKind(RecordedModel):
        def needs_and_kinds(self, *args: Any) -> tuple[PassNeeds, list[int]]:
            needs, kinds = super().needs_and_kinds(*args)
            return needs, [1] * len(kinds) if args[1].num_tokens == 1 else kinds

    config = config_of("Gemma-3")
    model = OneKind(config, BF16)
    facts = KeptFacts(config, BF16, tmp_path, lambda: model)
    for num_tokens in (1, 32, 16):
        passes = Passes(num_examples=2, num_tokens=num_tokens, grad_precision=BF16, is_summed=False)
        assert facts.needs({}, passes) == model.needs({}, passes), num_tokens
        assert facts.operators(BlockIndex(1), 2, num_tokens) == model.operators(BlockIndex(1), 2, num_tokens)
    (stored,) = facts._stored["needs"].values()
    of_one, of_more = stored["kinds"]["2x1"], stored["kinds"][facts._general(2, 32)]
    assert of_one == [1] * len(of_more)
    assert "2x32" not in stored["kinds"]


@pytest.mark.long
def test_a_transformers_config_stays_the_same_model(tmp_path: Path, no_trace: Callable[[], None]) -> None:
    config = config_of("Llama")
    before = config.to_dict()
    expected = everything(facts_of(config, BF16, tmp_path), 4, 32)
    assert config.to_dict() == before
    assert len(list(tmp_path.glob("*.json"))) == 1
    no_trace()
    assert everything(facts_of(config, BF16, tmp_path), 4, 32) == expected


def paths_in(stored: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the paths to objects, and to the values in them."""
    if path:
        yield path
    if isinstance(stored, dict):
        for name, value in stored.items():
            yield from paths_in(value, (*path, name))


@pytest.mark.long
def test_facts_of_another_form_are_traced_again(tmp_path: Path) -> None:
    config = config_of("Llama")
    model = RecordedModel(copy.deepcopy(config), BF16)
    expected = everything(KeptFacts(config, BF16, tmp_path, lambda: model), 4, 32)
    (file,) = tmp_path.glob("*.json")
    content = file.read_text()
    # One path of each depth in each part of the facts.
    kinds = {
        (len(path), path[0], path[2:3] if path[0] == "needs" else ""): path for path in paths_in(json.loads(content))
    }
    most = {"model": 1, "operators": 3, "needs": 5}
    paths = [path for path in kinds.values() if len(path) <= most[path[0]]]
    assert len(paths) > 10
    for path in (*paths, ("model", "layout"), ("model", "name"), ("operators", "1")):
        changed = json.loads(content)
        *way, last = path
        functools.reduce(operator.getitem, way, changed)[last] = 5 if path[2:3] != ("head",) else "x"
        file.write_text(json.dumps(changed))
        # The second time, facts are traced that were read before others of their part were found to be broken.
        for trace in (lambda: model, lambda: model, refuse):
            assert everything(KeptFacts(config, BF16, tmp_path, trace), 4, 32) == expected, path


@pytest.mark.parametrize("content", ["", "[]", '{"model": [], "needs": {}}', '{"model"'])
def test_a_broken_file_is_ignored(content: str, tmp_path: Path) -> None:
    config = config_of("Llama")
    assert facts_of(config, BF16, tmp_path).hidden_size == config.hidden_size
    (file,) = tmp_path.glob("*.json")
    file.write_text(content)
    facts = facts_of(config, BF16, tmp_path)
    assert isinstance(facts, KeptFacts)
    assert facts.hidden_size == config.hidden_size
