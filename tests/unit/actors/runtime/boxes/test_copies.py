"""Settings and copies of files that the boxes of a job must have alike."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.support.training import make_partition, make_spec
from windlass.actors.job.spec import JobSpec
from windlass.actors.runtime.boxes.copies import digests_of, require_alike
from windlass.actors.worker_policy.stages import Stage
from windlass.engine.training_config.training_config import Initialization
from windlass.storage.integrity import GRANULE_NBYTES


def change_byte(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def in_weights(home: Path) -> None:
    change_byte(home / "model" / "model.safetensors", -1 + (home / "model" / "model.safetensors").stat().st_size)


def in_config(home: Path) -> None:
    (home / "model" / "config.json").write_text("{}")


def of_more_files(home: Path) -> None:
    for path in (home / "data").iterdir():
        change_byte(path, 0)


CHANGES: list[tuple[Callable[[Path], None], str]] = [
    (in_weights, "the model's model.safetensors:"),
    (in_config, "the model's config.json:"),
    (of_more_files, "the dataset's meta.json, the dataset's train.offsets, the dataset's train.targets and 4 more:"),
]


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    return make_spec(tmp_path / "first")


@pytest.fixture
def other(spec: JobSpec, tmp_path: Path) -> JobSpec:
    shutil.copytree(spec.model_dir, tmp_path / "other" / "model")
    shutil.copytree(spec.dataset_dir, tmp_path / "other" / "data")
    return replace(
        spec, model_dir=str(tmp_path / "other" / "model"), dataset_dir=str(tmp_path / "other" / "data"), box=1
    )


def test_boxes_with_equal_copies_are_alike(spec: JobSpec, other: JobSpec) -> None:
    """Also if one box sees a part of the layout."""
    layout = make_partition(spec).layout
    first = digests_of(spec, layout.of_blocks(0, 2))
    require_alike("east", first, digests_of(other, layout.of_blocks(2, 5)))
    assert len(first) > 8


@pytest.mark.parametrize(("change", "named"), CHANGES)
def test_a_copy_that_differs_is_named(
    spec: JobSpec, other: JobSpec, tmp_path: Path, change: Callable[[Path], None], named: str
) -> None:
    layout = make_partition(spec).layout
    change(tmp_path / "other")
    with pytest.raises(ValueError, match=f"box 'east' and the first box differ in {named}"):
        require_alike("east", digests_of(spec, layout), digests_of(other, layout))


def test_a_box_may_lack_files(spec: JobSpec, other: JobSpec) -> None:
    """A job that goes on does not read the base model's weights."""
    layout = make_partition(spec).layout
    Path(other.model_dir, "model.safetensors").unlink()
    for here, there in ((spec, other), (other, spec)):
        require_alike("east", digests_of(here, layout), digests_of(there, layout))


def test_settings_and_layouts_that_differ_are_named(spec: JobSpec) -> None:
    layout = make_partition(spec).layout
    first = digests_of(spec, layout)
    for changed in (
        spec.with_training(seed=6),
        replace(spec, stages=(Stage(0, 2), Stage(2, 5))),
        replace(spec, num_ranks=2),
    ):
        with pytest.raises(ValueError, match="differ in the settings:"):
            require_alike("east", first, digests_of(changed, layout))
    with pytest.raises(ValueError, match="differ in the model's layout:"):
        require_alike("east", first, digests_of(spec, replace(layout, chunk_numel=4096)))


def test_a_job_with_random_weights_needs_no_copies_of_weights(spec: JobSpec, other: JobSpec, tmp_path: Path) -> None:
    layout = make_partition(spec).layout
    in_weights(tmp_path / "other")
    here, there = (each.with_training(initialization=Initialization.RANDOM) for each in (spec, other))
    require_alike("east", digests_of(here, layout), digests_of(there, layout))


@pytest.mark.parametrize("nbytes", [1, GRANULE_NBYTES, 2 * GRANULE_NBYTES + 7, 100 * GRANULE_NBYTES])
def test_the_ends_and_the_length_of_large_files_count(spec: JobSpec, nbytes: int) -> None:
    layout, path = make_partition(spec).layout, Path(spec.dataset_dir, "extra.tokens")
    found = []
    path.touch()
    for change in (
        partial(os.truncate, path, nbytes),
        partial(change_byte, path, 0),
        partial(change_byte, path, nbytes - 1),
        partial(os.truncate, path, nbytes + 1),
    ):
        change()
        found.append(digests_of(spec, layout)["the dataset's extra.tokens"])
    assert len(set(found)) == (4 if nbytes > 1 else 3)
