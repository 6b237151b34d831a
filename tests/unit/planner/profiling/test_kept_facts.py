"""A model that was planned is known again, also for other numbers of examples and tokens, without a trace."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.architectures import ARCHITECTURES
from windlass.engine.memory_estimate import Passes
from windlass.planner.cost.activation_options import ways_of_layer
from windlass.planner.profiling import facts_choice
from windlass.planner.profiling.facts_choice import facts_of
from windlass.planner.profiling.kept_facts import KeptFacts
from windlass.planner.profiling.model_profiler import TracedModel
from windlass.planner.profiling.profiled_facts import ProfiledFacts, profile_of
from windlass.storage.ids import BlockIndex, Precision

BF16 = Precision.BF16


def config_of(name: str) -> Any:
    return ARCHITECTURES[name].config(tied=False, dropout=0.0)


def everything(facts: ProfiledFacts, num_examples: int, num_tokens: int) -> list[object]:
    """All that a plan asks of a model."""
    profile = profile_of(facts, num_examples, num_tokens, for_gpu=True)
    of_job = Passes(num_examples=num_examples, num_tokens=num_tokens, grad_precision=Precision.FP32, is_summed=True)
    ways = [way.choice for way in ways_of_layer(profile.layers[0])]
    choices = [{}, {BlockIndex(1): ways[-1]}]
    return [facts.layout, facts.vocab_size, facts.buffers_nbytes, profile, *(facts.needs(c, of_job) for c in choices)]


@pytest.fixture
def no_trace(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def forbid() -> None:
        def refuse(*_: object) -> None:
            raise AssertionError("this was traced before")

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


def test_a_formula_that_does_not_hold_is_not_used_for_other_shapes(tmp_path: Path) -> None:
    """Sliding windows change the operators at some number of tokens."""
    config = config_of("Mistral")
    window = config.sliding_window
    assert window is not None
    traced, facts = TracedModel(config, BF16), facts_of(config, BF16, tmp_path)
    for num_tokens in (window - 1, window, window + 1):
        assert profile_of(facts, 2, num_tokens) == profile_of(traced, 2, num_tokens), num_tokens


@pytest.mark.parametrize("content", ["", "[]", '{"model": [], "needs": {}}', '{"model"'])
def test_a_broken_file_is_ignored(content: str, tmp_path: Path) -> None:
    config = config_of("Llama")
    assert facts_of(config, BF16, tmp_path).hidden_size == config.hidden_size
    (file,) = tmp_path.glob("*.json")
    file.write_text(content)
    facts = facts_of(config, BF16, tmp_path)
    assert isinstance(facts, KeptFacts)
    assert facts.hidden_size == config.hidden_size
