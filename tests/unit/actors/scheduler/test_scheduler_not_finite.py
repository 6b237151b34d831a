"""Reports of losses and gradients that are not finite."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.actors.scheduler_stage import (
    FP16,
    NUM_TARGETS,
    Stage,
    warnings_of,
)
from tests.support.training import losses_of, metrics_of
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import (
    CommitStore,
    ComputeBlock,
    Message,
    Phase,
    StoreCommitted,
    UpdateStep,
)
from windlass.engine.memory_plan.plan import Placement
from windlass.storage.ids import Attempt, Step


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def strict_journal(spec: JobSpec) -> list[dict[str, Any]]:
    """Every line of the journal, read by a parser that accepts no NaN and no Infinity."""

    def refuse(name: str) -> float:
        pytest.fail(f"{name} is no JSON")

    lines = Path(spec.job_dir, "journal.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_a_skipped_step_is_told_with_its_first_block_and_its_scale(tmp_path: Path) -> None:
    stage = Stage(tmp_path, training=FP16)
    stage.break_step(2, block=1)
    stage.bad_grads.add((3, 0))
    assert stage.run()["status"] == "succeeded"
    assert warnings_of(stage.spec) == [
        "Step 2 skipped: the forward of block 1 was not finite; the loss was scaled by 65536",
        "Step 3 skipped: the gradient of block 0 was not finite; the loss was scaled by 32768",
    ]
    strict_journal(stage.spec)
    assert metrics_of(stage.spec, "train_loss") == {1: 3.0, 2: None, 3: 3.0, 4: 3.0}
    norm = math.sqrt(3 * 12.0)
    assert metrics_of(stage.spec, "grad_norm") == {1: norm, 2: None, 3: None, 4: norm}
    assert metrics_of(stage.spec, "loss_scale") == {1: 65536.0, 2: 65536.0, 3: 32768.0, 4: 16384.0}
    assert metrics_of(stage.spec, "skipped_steps") == {1: 0, 2: 1, 3: 2, 4: 2}
    told = [record["message"] for record in strict_journal(stage.spec) if record["kind"] == "metrics"]
    assert told[1] == "Step 2/4: training loss=not finite"
    assert told[2] == "Step 3/4: training loss=3.0000"
    commits = {message.step: message.states_step for message in stage.sent(CommitStore)}
    assert commits == {0: 0, 1: 1, 2: 1, 3: 2, 4: 4}
    assert {(m.step, m.optimizer_step, m.grad_scale) for m in stage.sent(UpdateStep)} == {
        (1, 1, 1 / 65536),
        (4, 2, 1 / 16384),
    }


def test_a_head_that_overflows_is_the_first_that_did(tmp_path: Path) -> None:
    """Its gradient does not come first, although the GPU worker reports it before the end of the operation."""
    stage = Stage(tmp_path, training=FP16)
    stage.break_step(2, block=2)
    stage.run()
    (told,) = warnings_of(stage.spec)
    assert told.startswith("Step 2 skipped: the head of block 2 was not finite")


def test_the_first_group_that_was_not_finite_is_told(tmp_path: Path) -> None:
    stage = Stage(tmp_path, training=FP16, placement=Placement(group_size=1))
    stage.break_step(2, block=2)

    def break_second_group(message: Message) -> None:
        if isinstance(message, ComputeBlock) and (message.step, message.group) == (2, 1):
            stage.break_step(2, block=1)

    stage.before = break_second_group
    assert stage.run()["status"] == "succeeded"
    (told,) = warnings_of(stage.spec)
    assert told.startswith("Step 2 skipped: the head of block 2 was not finite")


def test_skipped_step_without_loss_scaling_reports_no_scale(tmp_path: Path) -> None:
    stage = Stage(tmp_path, training={"clip_norm": 1.0})
    stage.break_step(3, block=0)
    assert stage.run()["status"] == "succeeded"
    assert warnings_of(stage.spec) == ["Step 3 skipped: the forward of block 0 was not finite"]
    assert metrics_of(stage.spec, "loss_scale") == dict.fromkeys(range(1, 5), 1.0)
    assert metrics_of(stage.spec, "skipped_steps") == {1: 0, 2: 0, 3: 1, 4: 1}


def test_evaluation_loss_not_finite_does_not_end_the_job(tmp_path: Path) -> None:
    stage = Stage(tmp_path, num_validation_examples=9, evaluate_every=4)
    stage.loss = math.inf
    stage.losses = dict.fromkeys(range(1, 4), 3.0)
    assert stage.run()["status"] == "succeeded"
    assert metrics_of(stage.spec, "valid_loss") == {4: None}
    told = [record["message"] for record in strict_journal(stage.spec)]
    assert "Step 4: validation loss=not finite" in told
    assert warnings_of(stage.spec) == []


def told_late(stage: Stage, step: int) -> None:
    """Lets the SSDs report a step as committed only when all gradients of the next one are known."""

    def look(message: Message) -> None:
        if isinstance(message, CommitStore) and message.step == step:
            stage.silent.add(CommitStore)
        is_backward = isinstance(message, ComputeBlock) and message.phase is Phase.BACKWARD
        if is_backward and (message.step, message.block) == (step + 1, 0):
            stage.silent.clear()
            for name in stage.scheduler.pipeline.config.ssd_servers:
                facts: dict[str, Any] = {"bytes_read": 100, "bytes_written": 100}
                stage.scheduler.post(StoreCommitted(job=message.job, step=Step(step), actor=name, **facts))

    stage.before = look


@pytest.mark.parametrize(
    ("training", "is_next_bad"),
    [({}, False), ({"clip_norm": 1.0}, False), ({"clip_norm": 1.0}, True), (FP16, False), (FP16, True)],
    ids=["active", "clipped", "clipped-next-skipped", "fp16", "fp16-next-skipped"],
)
def test_a_steps_metrics_are_its_own_though_the_next_one_has_begun(
    tmp_path: Path, training: dict[str, Any], is_next_bad: bool
) -> None:
    stage = Stage(tmp_path, training=training)
    if is_next_bad:
        stage.bad_grads.add((3, 1))
    told_late(stage, step=2)
    assert stage.run()["status"] == "succeeded"
    num_skipped = int(is_next_bad)
    assert metrics_of(stage.spec, "skipped_steps") == {1: 0, 2: 0, 3: num_skipped, 4: num_skipped}
    before, after = (65536.0, 65536.0 / 2**num_skipped) if training == FP16 else (1.0, 1.0)
    assert metrics_of(stage.spec, "loss_scale") == {1: before, 2: before, 3: before, 4: after}


def test_resumed_scheduler_restores_trainer_state_and_metrics(tmp_path: Path) -> None:
    first = Stage(tmp_path / "lost", training=FP16)
    first.break_step(2, block=0)
    first.run()
    state = json.loads(first.commit(2).trainer_state, parse_constant=pytest.fail)
    assert state["trainer"] == {"optimizer_step": 1, "bad_steps": 1, "loss_scale": 32768.0, "good_steps": 0}
    assert state["metrics"] == {"train_loss": None, "train_mean_token_accuracy": 0.4, "grad_norm": None}

    stage = Stage(tmp_path, resume_from=first.commit(2), attempt=Attempt(3), training=FP16)
    assert stage.run()["status"] == "succeeded"
    assert {(m.step, m.optimizer_step, m.grad_scale) for m in stage.sent(UpdateStep)} == {
        (3, 2, 1 / 32768),
        (4, 3, 1 / 32768),
    }
    scales = {(m.step, m.loss_scale) for m in stage.sent(ComputeBlock) if m.phase is Phase.HEAD}
    assert scales == {(3, 32768.0), (4, 32768.0)}
    # No attempt had reported step 2.
    records = strict_journal(stage.spec)
    assert "Step 2/4: training loss=not finite" in [record["message"] for record in records]
    assert metrics_of(stage.spec, "train_loss") == {2: None, 3: 3.0, 4: 3.0}
    assert metrics_of(stage.spec, "trained_tokens") == {step: step * NUM_TARGETS for step in (2, 3, 4)}
    assert json.loads(stage.commit(4).trainer_state) == json.loads(first.commit(4).trainer_state)


def test_too_many_skipped_steps_end_the_job_and_name_step_and_block(tmp_path: Path) -> None:
    stage = Stage(tmp_path, training={**FP16, "max_bad_steps": 1})
    stage.break_step(2, block=0)
    stage.break_step(3, block=1)
    outcome = stage.run()
    assert outcome["status"] == "failed"
    assert outcome["error"]["code"] == "training_failed"
    message = outcome["error"]["message"]
    assert "gradients of 2 steps in a row, up to step 3, were not finite" in message
    assert "; the forward of block 1 was the first: " in message
    assert "try a lower learning rate" in message
    strict_journal(stage.spec)


def test_skipped_steps_count_on_over_a_restart(tmp_path: Path) -> None:
    options: dict[str, Any] = {"training": {**FP16, "max_bad_steps": 1}}
    first = Stage(tmp_path / "lost", **options)
    first.break_step(2, block=0)
    first.run()
    stage = Stage(tmp_path, resume_from=first.commit(2), attempt=Attempt(3), **options)
    stage.break_step(3, block=0)
    message = stage.run()["error"]["message"]
    assert "gradients of 2 steps in a row, up to step 3" in message


@pytest.mark.parametrize("is_forward", [True, False])
def test_bad_gradient_after_updates_began_ends_the_job(tmp_path: Path, is_forward: bool) -> None:
    stage = Stage(tmp_path)
    if is_forward:
        stage.break_step(2, block=1)
    else:
        stage.bad_grads.add((2, 1))
    outcome = stage.run()
    assert (outcome["status"], outcome["model_dir"]) == ("failed", None)
    message = outcome["error"]["message"]
    assert "a gradient of step 2 is not finite" in message
    assert f"; the {'forward' if is_forward else 'gradient'} of block 1 was the first: " in message
    assert losses_of(stage.spec) == [3.0]
    strict_journal(stage.spec)
