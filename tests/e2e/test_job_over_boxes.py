"""A job over several boxes, from the command to the model, over links that are cut and boxes that are killed."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.box_service import HEAD, BoxService, box_service
from tests.e2e.installation import make_tiny_model, write_examples
from windlass.planner.stages.stages_plan import StagesPlan

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

_NUM_STEPS = 60
_JOB = ("--epochs", "1", "--batch-size", "2", "--sequence-length", "32", "--precision", "bf16", "--set", "seed=7")
_TWO_GROUPS = ("--set", "num_microbatches=2")


@pytest.fixture
def boxes(tmp_path: Path) -> Iterator[BoxService]:
    """A head and a box that has joined."""
    with box_service(tmp_path, "left", "right") as boxes:
        boxes.start_head()
        boxes.join("left")
        yield boxes


@pytest.fixture
def training_file(tmp_path: Path) -> Path:
    path = tmp_path / HEAD / "train.jsonl"
    path.parent.mkdir(exist_ok=True)
    write_examples(path, 2 * _NUM_STEPS)
    return path


def model_of(boxes: BoxService, job_id: str, name: str) -> bytes:
    job = boxes.await_success(job_id)
    folder = boxes.network[HEAD].folder / name
    boxes.head.ok("export", job["fine_tuned_model"], str(folder))
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))


def test_job_over_two_boxes_has_the_losses_of_one_and_its_model_is_on_the_head(
    boxes: BoxService, training_file: Path
) -> None:
    alone = boxes.submit(training_file, *_JOB, *_TWO_GROUPS, box=HEAD)
    boxes.await_success(alone)
    job_id = boxes.submit(training_file, *_JOB, *_TWO_GROUPS, "--boxes", "2")
    boxes.await_step(job_id, 1)
    assert boxes.head.await_job(job_id, lambda _: True, "there")["windlass"]["boxes"] == [HEAD, "left"]
    job = boxes.await_success(job_id)
    assert job["windlass"]["attempt"] == 1
    assert boxes.losses(job_id) == boxes.losses(alone)
    home = boxes["left"].home
    deadline = time.monotonic() + 60
    while found := list(home.rglob(f"{job_id}*")):
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


@pytest.mark.parametrize("gpus", [{HEAD: 2, "left": 1}, {HEAD: 1, "left": 2}], ids=["2-1", "1-2"])
def test_job_over_boxes_with_other_numbers_of_gpus_has_the_losses_of_one(
    tmp_path: Path, training_file: Path, gpus: dict[str, int]
) -> None:
    with box_service(tmp_path, "left") as boxes:
        for name, number in gpus.items():
            boxes.declare_gpus(name, number)
        # So many that a box with two GPUs gets more than one with one.
        make_tiny_model(boxes.head.home / "models" / "tiny", num_layers=6)
        boxes.start_head()
        boxes.join("left")
        same = (*_JOB, "--batch-size", "4", "--epochs", "1", "--set", "num_microbatches=4", "--set", "lanes=2")
        job_id = boxes.submit(training_file, *same, "--gpus", "auto", "--boxes", "2")
        boxes.await_step(job_id, 1)
        folder = boxes[HEAD].home / "jobs" / job_id / "prepare"
        plan = StagesPlan.from_json(json.loads((folder / "stages.json").read_text()))
        assert plan.ranks == tuple(gpus.values()), plan
        boxes.await_success(job_id)
        alone = boxes.submit(training_file, *same, "--gpus", "1", box=HEAD)
        boxes.await_success(alone)
        assert boxes.losses(job_id) == boxes.losses(alone)
        assert model_of(boxes, job_id, "over") == model_of(boxes, alone, "alone")


def test_job_goes_on_after_a_box_is_killed_and_after_its_link_is_cut(boxes: BoxService, training_file: Path) -> None:
    alone = boxes.submit(training_file, *_JOB, *_TWO_GROUPS, box=HEAD)
    boxes.await_success(alone)
    job_id = boxes.submit(training_file, *_JOB, *_TWO_GROUPS, "--boxes", f"{HEAD},left")
    step = boxes.await_step(job_id, 3)
    boxes["left"].kill("ray::BoxRunner")
    step = boxes.await_step(job_id, step + 3)
    boxes.network["left"].cut()
    time.sleep(5.0)
    boxes.network["left"].restore()
    job = boxes.await_success(job_id)
    assert job["windlass"]["attempt"] == 2, "a short cut costs no attempt"
    assert boxes.losses(job_id) == boxes.losses(alone)


def test_job_that_resumes_over_other_boxes_has_the_losses_of_one(boxes: BoxService, training_file: Path) -> None:
    boxes.join("right")
    alone = boxes.submit(training_file, *_JOB, *_TWO_GROUPS, box=HEAD)
    boxes.await_success(alone)
    job_id = boxes.submit(training_file, *_JOB, *_TWO_GROUPS, "--boxes", "head,left")
    boxes.await_step(job_id, 2)
    boxes.head.ok("pause", job_id)
    boxes.head.await_job(job_id, lambda job: job["status"] == "paused", "paused")
    boxes.head.ok("resume", job_id, "--boxes", "head,right")
    job = boxes.await_success(job_id)
    assert job["windlass"]["attempt"] == 3, "one moved the states"
    assert boxes.losses(job_id) == boxes.losses(alone)
    told = boxes.head.ok("logs", job_id)
    assert " from left to right" in told
    assert "Goes on over the boxes head, right" in told


def test_job_on_one_box_goes_on_over_two_and_then_on_one_with_the_same_losses(
    boxes: BoxService, training_file: Path
) -> None:
    alone = boxes.submit(training_file, *_JOB, *_TWO_GROUPS, box=HEAD)
    boxes.await_success(alone)
    job_id = boxes.submit(training_file, *_JOB, *_TWO_GROUPS, box=HEAD)
    boxes.await_step(job_id, 2)
    first = boxes.pause(job_id)
    boxes.head.ok("resume", job_id, "--boxes", "2")
    boxes.await_step(job_id, first + 2)
    second = boxes.pause(job_id)
    assert boxes.await_job(job_id, lambda _: True, "there")["windlass"]["boxes"] == [HEAD, "left"]
    boxes.head.ok("resume", job_id, "--boxes", "1")
    job = boxes.await_success(job_id)
    assert first < second < _NUM_STEPS
    assert (job["windlass"]["attempt"], job["windlass"]["boxes"]) == (5, None), "two attempts moved the states"
    assert boxes.losses(job_id) == boxes.losses(alone)
    assert model_of(boxes, job_id, "moved") == model_of(boxes, alone, "alone")
    told = boxes.head.ok("logs", job_id)
    assert "Goes on over the boxes head, left" in told
    assert "Goes on on box head" in told
