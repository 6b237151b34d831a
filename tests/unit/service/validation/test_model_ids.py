"""No model name from a request leads out of the models' directories."""

from pathlib import Path

import pytest

from windlass.service.validation.model_ids import (
    check_model_id,
    fine_tuned_model_id,
    is_fine_tuned_id,
    is_hub_id,
    model_dir,
)
from windlass.service.validation.request_errors import ApiError

MODELS, FINE_TUNED = Path("/h/models"), Path("/h/fine-tuned")


@pytest.mark.parametrize(
    "model",
    [
        "",
        ".",
        "..",
        "../secret",
        "a/../b",
        "a/..",
        "/etc",
        "a//b",
        "a/b/c",
        "a\\b",
        "C:\\x",
        "a/.hidden",
        ".hidden",
        "a\0b",
        "a b",
        "a\n",
        "~/x",
        "https://hub/x",
        "ft:../x:y:z",
        "ft:a/b:c:d",
        "ft:a:b",
        "x" * 201,
    ],
)
def test_invalid_model_names_are_refused(model: str) -> None:
    with pytest.raises(ApiError) as caught:
        model_dir(model, models_dir=MODELS, fine_tuned_dir=FINE_TUNED)
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("model", "folder"),
    [
        ("tiny", MODELS / "tiny"),
        ("Qwen/Qwen3-0.6B", MODELS / "Qwen/Qwen3-0.6B"),
        ("ft:tiny:run-1:ab12", FINE_TUNED / "ft:tiny:run-1:ab12"),
        ("ft:tiny::ab12-step-40", FINE_TUNED / "ft:tiny::ab12-step-40"),
    ],
)
def test_names_and_their_folders(model: str, folder: Path) -> None:
    assert model_dir(model, models_dir=MODELS, fine_tuned_dir=FINE_TUNED) == folder


@pytest.mark.parametrize("base", ["tiny", "Qwen/Qwen3-0.6B", "a/" + "b" * 96, "ft:tiny:first:ab12"])
@pytest.mark.parametrize("suffix", [None, "run-1", "s" * 64])
def test_a_job_s_model_has_a_name_that_can_be_used_again(base: str, suffix: str | None) -> None:
    made = fine_tuned_model_id(base, suffix, "ftjob-0123456789abcdef01234567")
    assert made.endswith(f":{suffix or ''}:0123456789ab")
    for model in (made, f"{made}-step-100000"):
        assert is_fine_tuned_id(model)
        check_model_id(model)
    assert "/" not in made


def test_hub_ids_have_an_organization() -> None:
    assert is_hub_id("Qwen/Qwen3-0.6B")
    assert not is_hub_id("tiny")
    assert not is_hub_id("../x")
