"""Known facts of a model equal those that a trace finds, byte for byte and flop for flop."""

import ast
import contextlib
import itertools
import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from windlass.engine.memory_estimate import Passes
from windlass.engine.memory_plan.activation_policy import LEAST_SWAPPED_NBYTES, BlockActivations
from windlass.planner.cost.activation_options import ways_of_layer
from windlass.planner.hardware.model_shape import ModelShape, published_models
from windlass.planner.hardware.yaml_files import load
from windlass.planner.profiling.facts_choice import facts_of
from windlass.planner.profiling.known import known_model, record, recorded_code
from windlass.planner.profiling.known.known_model import NotKnownError, known_facts
from windlass.planner.profiling.known.recorded_code import code_digest
from windlass.planner.profiling.model_config import ShapeConfig
from windlass.planner.profiling.model_profiler import TracedModel, config_of_shape
from windlass.planner.profiling.profiled_facts import profile_of
from windlass.storage.ids import BlockIndex, HeadSlices, Precision

RECORD = "python -m windlass.planner.profiling.known.record"
FAMILIES = ("gpt2", "llama", "qwen2", "qwen3")
POSITIONS = 4096
# Vocabularies with one and with many pieces of the loss in a slice, and with large and small slices.
VOCABULARIES = (50, 32000, 50257, 152064, 600_000)
SHAPES = ((1, 2), (1, 24), (2, 8), (3, 512), (1, 1664), (2, 1024), (8, 700), (4, 4096), (32, 8192))
KEPT_NAME = "aten.add.Tensor#0"


def file_of(family: str) -> dict[str, Any]:
    return known_model.read_family(family)


@st.composite
def shapes(draw: st.DrawFn, *, ordinary: bool = False) -> ModelShape:
    family = draw(st.sampled_from(FAMILIES))
    num_kv_heads = draw(st.sampled_from((1, 2, 3, 12, 96)))
    head_dim = draw(st.sampled_from((40, 64, 128) if ordinary else (2, 40, 64, 128)))
    fields: dict[str, Any] = {"hidden_size": num_kv_heads * head_dim, "num_heads": num_kv_heads}
    if family != "gpt2":
        num_heads = num_kv_heads * draw(st.sampled_from((1, 1, 2, 5, 8)))
        hidden_size = num_heads * (head_dim if ordinary else draw(st.sampled_from((head_dim, head_dim, 1, 96))))
        fields = {"hidden_size": hidden_size, "num_heads": num_heads, "head_dim": head_dim}
        usual = tuple(int(share * hidden_size) for share in (0.5, 1, 2.7, 4, 7))
        sizes = st.sampled_from(usual if ordinary else (8, 100, 11008, 28672))
        fields |= {"num_kv_heads": num_kv_heads, "intermediate_size": draw(sizes)}
    return ModelShape(
        num_layers=2,
        vocab_size=draw(st.sampled_from(VOCABULARIES)),
        tied_embeddings=draw(st.booleans()),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        **fields,
    )


@st.composite
def passes(draw: st.DrawFn, precision: Precision) -> Passes:
    num_examples, num_tokens = draw(st.sampled_from(SHAPES))
    is_summed = draw(st.booleans())
    sums = st.sampled_from((precision, Precision.FP32)) if is_summed else st.just(precision)
    return Passes(
        num_examples=num_examples,
        num_tokens=num_tokens,
        train=draw(st.integers(0, 3)) > 0,
        grad_precision=draw(sums),
        is_summed=is_summed,
    )


def is_ordinary(shape: ModelShape, each: Passes) -> bool:
    """Returns whether choices were recorded for such proportions, and all tensors are large enough to be swapped."""
    inner = shape.num_heads * shape.head_size
    intermediate = shape.intermediate_size or 4 * shape.hidden_size
    return (
        shape.head_size >= 16
        and 0.5 <= shape.hidden_size / inner <= 1.25
        and 0.3 <= intermediate / shape.hidden_size <= 8
        and each.num_tokens >= 8
        and 2 * each.num_examples * each.num_tokens >= LEAST_SWAPPED_NBYTES
    )


def check(shape: ModelShape, data: st.DataObject, *, num_passes: int) -> None:
    precision = data.draw(st.sampled_from(tuple(Precision)))
    traced = TracedModel(config_of_shape(shape, num_tokens=POSITIONS), precision)
    known = known_facts(shape, precision, num_tokens=POSITIONS)
    for name in ("layout", "name", "hidden_size", "head_matrix_numel", "vocab_size", "buffers_nbytes"):
        assert getattr(known, name) == getattr(traced, name), name
    for _ in range(num_passes):
        each = data.draw(passes(precision))
        for_gpu = data.draw(st.booleans())
        profile = profile_of(traced, each.num_examples, each.num_tokens, for_gpu=for_gpu)
        assert profile_of(known, each.num_examples, each.num_tokens, for_gpu=for_gpu) == profile
        ways = st.sampled_from([way.choice for way in ways_of_layer(profile.layers[0])])
        choices = {BlockIndex(block): data.draw(ways) for block in (1, 2)}
        # Choices that only a model of odd proportions has are not recorded.
        with contextlib.nullcontext() if is_ordinary(shape, each) else contextlib.suppress(NotKnownError):
            assert known.needs(choices, each) == traced.needs(choices, each)


@pytest.mark.parametrize(
    ("family", "is_tied"),
    [
        *((family, family == "gpt2") for family in FAMILIES),
        *(pytest.param(family, family != "gpt2", marks=pytest.mark.long) for family in FAMILIES),
    ],
)
def test_known_peaks_of_cut_matrices_are_at_least_those_of_a_trace_and_near_them(family: str, is_tied: bool) -> None:
    fields: dict[str, Any] = {} if family == "gpt2" else {"num_kv_heads": 4, "intermediate_size": 2304}
    shape = ModelShape(
        num_layers=1,
        hidden_size=768,
        num_heads=12,
        vocab_size=3000,
        tied_embeddings=is_tied,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        **fields,
    )
    traced = TracedModel(config_of_shape(shape, num_tokens=POSITIONS), Precision.BF16)
    known = known_facts(shape, Precision.BF16, num_tokens=POSITIONS)
    least: dict[int, int] = {}
    for num_tokens, cut in itertools.product((64, 1024), (2**20, 2**16)):
        each = Passes(
            num_examples=1,
            num_tokens=num_tokens,
            grad_precision=Precision.FP32,
            is_summed=True,
            cut_matrices=cut,
        )
        one, other = (facts.needs({}, each).units[1] for facts in (known, traced))
        assert (one.output_nbytes, one.held_nbytes, one.swapped) == (other.output_nbytes, other.held_nbytes, ())
        part_nbytes = 2 * max(numel for _, _, numel in known.layout.blocks[1].parts(cut))
        for mine, real in (
            (one.forward_peak_nbytes, other.forward_peak_nbytes),
            (one.backward_peak_nbytes, other.backward_peak_nbytes),
        ):
            assert 0 <= mine - real <= 2 * part_nbytes + 0.2 * real
        for mine, real in (
            (known.needs({}, each).head_peak_nbytes, traced.needs({}, each).head_peak_nbytes),
            *(
                (getattr(known.needs({}, each).units[0], name), getattr(traced.needs({}, each).units[0], name))
                for name in ("forward_peak_nbytes", "backward_peak_nbytes")
            ),
        ):
            assert mine >= real, "of the head, and of the embedding"
        embedding = known.needs({}, replace(each, cut_matrices=None)).units[0]
        if num_tokens == 64:  # the rows of more tokens are larger than the matrix's gradient
            assert known.needs({}, each).units[0].backward_peak_nbytes < 0.5 * embedding.backward_peak_nbytes
        whole = known.needs({}, replace(each, cut_matrices=None)).units[1]
        assert one.backward_peak_nbytes <= whole.backward_peak_nbytes
        least[cut] = one.backward_peak_nbytes
    assert least[2**16] <= least[2**20]


@hypothesis.settings(max_examples=2, deadline=None, derandomize=True, database=None, phases=[hypothesis.Phase.generate])
@hypothesis.given(shape=shapes(), data=st.data())
def test_known_model_equals_its_trace(shape: ModelShape, data: st.DataObject) -> None:
    check(shape, data, num_passes=1)


@pytest.mark.long
@hypothesis.settings(max_examples=150, deadline=None, database=None, phases=[hypothesis.Phase.generate])
@hypothesis.given(shape=shapes(), data=st.data())
def test_known_models_of_many_shapes_equal_their_traces(shape: ModelShape, data: st.DataObject) -> None:
    check(shape, data, num_passes=3)


@hypothesis.settings(
    max_examples=60, deadline=None, derandomize=True, database=None, phases=[hypothesis.Phase.generate]
)
@hypothesis.given(shape=shapes(ordinary=True), data=st.data())
def test_all_choices_of_ordinary_models_are_known(shape: ModelShape, data: st.DataObject) -> None:
    precision = data.draw(st.sampled_from(tuple(Precision)))
    each, for_gpu = data.draw(passes(precision)), data.draw(st.booleans())
    hypothesis.assume(is_ordinary(shape, each))
    known = known_facts(shape, precision, num_tokens=POSITIONS)
    layer = profile_of(known, each.num_examples, each.num_tokens, for_gpu=for_gpu).layers[0]
    for way in ways_of_layer(layer):
        known.needs({BlockIndex(1): way.choice}, each)


@pytest.mark.parametrize("name", sorted(published_models()))
def test_published_models_are_known_with_all_choices_of_a_plan(name: str) -> None:
    shape = load(ModelShape, published_models()[name])
    for precision, num_examples in ((Precision.BF16, 1), (Precision.FP32, 8)):
        known = known_facts(shape, precision, num_tokens=1024)
        layer = profile_of(known, num_examples, 1024, for_gpu=True).layers[0]
        of_job = Passes(num_examples=num_examples, num_tokens=1024, grad_precision=Precision.FP32, is_summed=True)
        for way in ways_of_layer(layer):
            needs = known.needs({BlockIndex(1): way.choice}, of_job)
            assert needs.units[1].held_nbytes + sum(needs.units[1].swapped) >= way.held_nbytes


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_families_are_of_the_installed_versions_and_the_present_code(family: str) -> None:
    versions = {package: version(package).partition("+")[0] for package in known_model.PACKAGES}
    assert file_of(family)["versions"] == versions, f"run `{RECORD}`, and commit the files"
    assert file_of(family)["code"] == code_digest(), (
        f"run `{RECORD}`, and commit the files; add `--unchanged` if the change of the code cannot change formulas"
    )


def test_the_digest_of_the_code_ignores_what_runs_nothing() -> None:
    def of(text: str) -> object:
        return recorded_code._plain(ast.parse(text))

    code = of("def f(a):\n    return a + 1\n")
    assert of('def f(a):\n    """Adds."""\n    # one\n    return (a +\n 1)\n') == code
    assert of("def f(a):\n    return a + 2\n") != code
    assert of("def f(b):\n    return b + 1\n") != code


def test_a_missing_or_broken_file_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_model, "FOLDER", tmp_path)
    shape = ModelShape(num_layers=2, hidden_size=64, num_heads=4, vocab_size=96, num_kv_heads=4, qkv_bias=True)
    whole = (Path(known_model.__file__).parent / "qwen2.json").read_text()
    try:
        for content in (None, "", whole[:1000], "[]", "{}", '{"versions": 5}', whole):  # the last: Llama's head misses
            known_model._family.cache_clear()
            known_facts.cache_clear()
            if content is not None:
                (tmp_path / "qwen2.json").write_text(content)
            with pytest.raises(NotKnownError):
                known_facts(shape, Precision.BF16, num_tokens=16)
        (tmp_path / "llama.json").mkdir()  # cannot be read, by any user
        known_model._family.cache_clear()
        with pytest.raises(NotKnownError):
            known_facts(shape, Precision.BF16, num_tokens=16)
    finally:
        known_model._family.cache_clear()
        known_facts.cache_clear()


@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt2", pytest.param("qwen3", marks=pytest.mark.long)])
def test_recording_again_gives_the_recorded_formulas(family: str) -> None:
    sample, stored = record.Sample(family=family), file_of(family)
    model = sample.model(Precision.BF16)
    layers = stored["classes"][sample.flags]["16"]
    operators = record.operators_of(sample, model)
    assert operators == {key: layers[key] for key in operators}
    choices = [BlockActivations(), BlockActivations(recompute=False)]
    units = record.units_of(sample, Precision.BF16, operators, choices, ("32+",))["32+"]
    assert units == {key: layers["units"]["32+"][key] for key in units}
    assert record.embeddings_of(sample, Precision.FP32) == stored["untied"]["embedding"][sample.flags]["32"]


def test_recording_the_head_again_gives_the_recorded_formulas() -> None:
    sample = record.Sample(family="gpt2", is_tied=True)
    loops = record.HeadLoops(num_pieces=2, num_second_pieces=2, is_full=True, num_parts=2)
    found = record.head_of(sample, Precision.BF16, [loops])["16"]
    assert found == {loops.key: file_of("gpt2")["tied"]["head"]["16"]["16"][loops.key]}


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.timeout(3600)
def test_recording_a_whole_family_again_gives_its_file(family: str) -> None:
    assert json.loads(json.dumps(record.record(family))) == file_of(family)


def test_what_is_not_known_is_traced() -> None:
    shape = ModelShape(num_layers=2, hidden_size=64, num_heads=4, vocab_size=96)
    of_job = Passes(num_examples=2, num_tokens=16, grad_precision=Precision.BF16, is_summed=False)
    unusual = {BlockIndex(1): BlockActivations(kept=frozenset({KEPT_NAME}))}
    traced_models: list[str] = []
    facts = facts_of(
        ShapeConfig(shape=shape, num_tokens=16), Precision.BF16, on_trace=lambda: traced_models.append("once")
    )
    facts.needs({}, of_job)
    assert not traced_models
    with pytest.raises(NotKnownError):
        known_facts(shape, Precision.BF16, num_tokens=16).needs(unusual, of_job)
    traced = TracedModel(config_of_shape(shape, num_tokens=16), Precision.BF16)
    assert facts.needs(unusual, of_job) == traced.needs(unusual, of_job)
    with pytest.raises(NotKnownError):
        known_facts(shape, Precision.BF16, num_tokens=16).needs({}, replace(of_job, head_slices=HeadSlices.SMALL))
    assert traced_models == ["once"]


def test_other_versions_of_the_traced_packages_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_model, "version", lambda _: "1.0")
    known_model._family.cache_clear()
    known_facts.cache_clear()
    shape = ModelShape(num_layers=2, hidden_size=64, num_heads=4, vocab_size=96)
    try:
        with pytest.raises(NotKnownError, match="other versions"):
            known_facts(shape, Precision.BF16, num_tokens=16)
    finally:
        known_model._family.cache_clear()
