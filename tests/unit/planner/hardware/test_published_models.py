"""The shapes of published models that ship with windlass."""

from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM

from windlass.planner.hardware.model_shape import (
    ModelShape,
    organization_of,
    published_model,
    published_models,
    published_shapes,
    similar_models,
)
from windlass.planner.hardware.yaml_files import load
from windlass.planner.profiling.model_profiler import config_of_shape

# Parameters that the models' pages on Hugging Face and the papers give. A matrix that head and embedding share counts
# once.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552,
    "mistral-small-24b": 23_572_403_200,
    "mistral-large-123b": 122_610_069_504,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}
# The shapes of a paper, which prints billions only.
OF_PAPER = {f"ratel-{billions}b": billions for billions in (6, 13, 30, 70, 135, 175, 276, 412)}


@dataclass(frozen=True)
class Count:
    """Parameters of a model: of a layer, and of all that is outside of the layers."""

    layer: int
    rest: int


def count(shape: ModelShape) -> Count:
    def numel(num_layers: int) -> int:
        config = config_of_shape(shape.model_copy(update={"num_layers": num_layers}), num_tokens=1024)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        return sum(param.numel() for param in model.parameters())  # a shared one once

    one = numel(1)
    layer = numel(2) - one
    return Count(layer=layer, rest=one - layer)


def test_each_model_that_ships_has_a_published_number() -> None:
    assert set(published_models()) == PUBLISHED.keys() | OF_PAPER.keys()


def test_list_of_models_has_each_version_by_size() -> None:
    names = list(published_shapes())
    assert set(names) == set(published_models())
    assert names[:7] == ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama-2-7b", "llama-2-13b", "llama-2-70b"]
    assert names[names.index("qwen2.5-72b") + 1] == "qwen3-0.6b"
    assert [name for name in names if name.startswith("mistral")] == [
        "mistral-7b",
        "mistral-small-24b",
        "mistral-large-123b",
    ]
    assert names[-8:] == [f"ratel-{billions}b" for billions in (6, 13, 30, 70, 135, 175, 276, 412)]


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_the_published_ones(name: str) -> None:
    shape = load(ModelShape, published_models()[name])
    found = count(shape)
    assert found.rest + shape.num_layers * found.layer == PUBLISHED[name]


@pytest.mark.parametrize("name", ["ratel-6b", "ratel-412b"])
def test_parameters_are_about_those_of_the_paper(name: str) -> None:
    shape = load(ModelShape, published_models()[name])
    found = count(shape)
    assert found.rest + shape.num_layers * found.layer == pytest.approx(OF_PAPER[name] * 1e9, rel=0.05)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("llama-3.1-71b", "llama-3.1-70b"),
        ("mistral", "mistral-7b"),
        ("gwen2.5-7b", "qwen2.5-7b"),
        ("qwen-2.5-7b", "qwen2.5-7b"),
        ("lama-3.1-8b", "llama-3.1-8b"),
    ],
)
def test_an_unknown_name_has_near_ones(name: str, near: str) -> None:
    assert near in similar_models(name)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_model_is_known_by_its_name_on_the_hub(name: str) -> None:
    """The file of each shape names its model's page."""
    path = published_models()[name]
    hub_id = path.read_text().partition("\n")[0].removeprefix("# https://huggingface.co/")
    assert hub_id.count("/") == 1
    assert organization_of(name) == hub_id.partition("/")[0]
    for written in (hub_id, hub_id.upper(), hub_id.rpartition("/")[2], name, name.upper()):
        assert published_model(written) == path


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.3-70b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-24b"),
        ("mistralai/Mistral-Large-Instruct-2407", "mistral-large-123b"),
    ],
)
def test_training_and_format_leave_a_models_shape(written: str, name: str) -> None:
    assert published_model(written) == published_models()[name]


@pytest.mark.parametrize(
    ("written", "near"),
    [
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),  # its vocabulary is smaller
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-Coder-7B", "qwen2.5-7b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3.1-8b"),
    ],
)
def test_another_model_of_a_family_is_no_published_shape(written: str, near: str) -> None:
    assert published_model(written) is None
    assert near in similar_models(written)


@pytest.mark.parametrize("path", ["/models/llama-3.1-8b", "./gpt2", "~/gpt2", "models/meta-llama/llama-3.1-8b"])
def test_a_path_is_no_name_of_a_published_model(path: str) -> None:
    assert published_model(path) is None


@pytest.mark.parametrize(
    "name", ["zzz", "7b", "gemma-2-9b", "google/gemma-7b", "mixtral-8x7b", "microsoft/phi-4", "deepseek-llama-8b"]
)
def test_a_model_of_another_family_has_no_near_one(name: str) -> None:
    assert similar_models(name) == []


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("meta-lama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("Qwn/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("mistral/Mistral-7B-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("meta-llama/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
    ],
)
def test_a_wrong_organization_is_refused_with_the_right_one(written: str, meant: str) -> None:
    assert published_model(written) is None
    assert similar_models(written) == [meant]
    assert published_model(meant) is not None


def test_a_copy_of_another_organization_has_the_same_shape() -> None:
    assert published_model("unsloth/Llama-3.1-8B-Instruct") == published_models()["llama-3.1-8b"]
