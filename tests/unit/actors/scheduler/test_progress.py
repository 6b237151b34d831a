"""The numbers of a step and of an evaluation do not depend on the order in which their parts arrive."""

import itertools
from pathlib import Path

import pytest

from tests.support.actors.scheduler_stage import LAYOUT, Stage
from tests.support.training import journal_of, metrics_of
from windlass.actors.messages import (
    BlockComputed,
    ComputeProgressed,
    ExportProgressed,
    KernelChosen,
    LoadProgressed,
    Loss,
    ModelKernelsChosen,
    Phase,
)
from windlass.actors.policy.actions import StepEnd
from windlass.actors.policy.pending_replies import UnexpectedEventError
from windlass.engine.memory_plan.plan import Placement
from windlass.storage.ids import ActorName, BlockIndex, JobId, Step

# Added in another order these give other bits.
LOSSES = [0.1, 1000.3, 0.7, 3e-5]
NUM_TARGETS = [3, 1, 4, 2]


def loss(phase: Phase, step: int, group: int, num_targets: int | None = None) -> ComputeProgressed:
    head = BlockComputed(
        job=JobId("ftjob-1"),
        step=Step(step),
        op=1,
        phase=phase,
        block=BlockIndex(2),
        group=group,
        compute_s=0.1,
        is_finite=True,
        loss=Loss((LOSSES[group],), num_targets or NUM_TARGETS[group], group),
    )
    return ComputeProgressed(job=head.job, step=head.step, actor=ActorName("gpu-0"), computed=(head,), grads=())


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, total_steps=30, num_validation_examples=32, evaluate_every=1)


def test_progress_with_groups_in_any_order_tells_the_evaluation_loss_of_one_worker(stage: Stage) -> None:
    progress, expected = stage.scheduler._progress, 0.0
    assert stage.scheduler.pipeline.config.num_evaluation_groups == 4
    for each in LOSSES:
        expected += each
    assert len({((a + b) + c) + d for a, b, c, d in itertools.permutations(LOSSES)}) > 1
    orders = list(itertools.permutations(range(4)))
    for step, order in enumerate(orders):
        for group in order:
            progress.note(loss(Phase.EVALUATE_HEAD, step, group))
    assert metrics_of(stage.spec, "valid_loss") == dict.fromkeys(range(len(orders)), expected / 10)
    assert metrics_of(stage.spec, "valid_mean_token_accuracy") == dict.fromkeys(range(len(orders)), 0.6)


def test_progress_told_an_evaluation_group_twice_refuses_it(stage: Stage) -> None:
    stage.scheduler._progress.note(loss(Phase.EVALUATE_HEAD, 1, 2))
    with pytest.raises(
        UnexpectedEventError, match="gpu-0 reported the loss of group 2 in the evaluation of step 1 a second time"
    ):
        stage.scheduler._progress.note(loss(Phase.EVALUATE_HEAD, 1, 2))


def test_progress_with_groups_in_any_order_tells_the_training_loss_of_one_worker(tmp_path: Path) -> None:
    stage = Stage(tmp_path, total_steps=30, training={"num_microbatches": 3}, placement=Placement(group_size=1))
    progress = stage.scheduler._progress
    for step, order in enumerate(itertools.permutations(range(3)), start=1):
        for group in order:
            progress.note(loss(Phase.HEAD, step, group, num_targets=8))
        kept = progress.end_step(step, StepEnd(grad_norm=1.0, loss_scale=1.0, num_skipped=0))
        assert kept["metrics"]["train_loss"] == ((LOSSES[0] + LOSSES[1]) + LOSSES[2]) / 8


def test_kernel_message_of_gpu_worker_says_device(stage: Stage) -> None:
    for actor in ("gpu-0", "optimizer-0"):
        stage.scheduler._progress.note(
            KernelChosen(job=stage.spec.job, step=Step(0), actor=ActorName(actor), kernel="compiled")
        )
    told = [record.message for record in journal_of(stage.spec) if "updates" in record.message]
    assert told == [
        "The device updates with the compiled kernel",
        "The actor optimizer-0 updates with the compiled kernel",
    ]


def test_kernel_message_of_one_of_several_gpu_workers_says_which(tmp_path: Path) -> None:
    stage = Stage(tmp_path, num_ranks=2, training={"num_microbatches": 2})
    for actor in ("gpu-0", "gpu-1"):
        kernels = ModelKernelsChosen(job=stage.spec.job, step=Step(0), actor=ActorName(actor), kernels=("a", "b"))
        stage.scheduler._progress.note(kernels)
    told = [record.message for record in journal_of(stage.spec) if "computes" in record.message]
    assert told == ["GPU 0 computes with a and b", "GPU 1 computes with a and b"]


def test_load_progress_is_reported_at_intervals(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("windlass.actors.scheduler.progress.time.monotonic", lambda: now[0])
    total = LAYOUT.numel
    for percent in range(1, 101):
        stage.scheduler._progress.note(load_progress(stage, "optimizer-0", -(-percent * total // 100), total))
        now[0] += 0.1
    told = [record.message for record in journal_of(stage.spec)]
    assert told == [f"Loaded 1% of {total:,} parameters", f"Loaded 51% of {total:,} parameters"]


def test_states_that_are_read_into_memory_are_not_told_as_loaded_weights(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress, total = stage.scheduler._progress, LAYOUT.numel
    progress.model_loaded()
    progress.note(load_progress(stage, "optimizer-0", total // 2, total))
    assert journal_of(stage.spec)[-1].message == f"Read 50% of the states of {total:,} parameters into memory"


def load_progress(stage: Stage, actor: str, num_params: int, total_params: int) -> LoadProgressed:
    return LoadProgressed(
        job=stage.spec.job, step=Step(0), actor=ActorName(actor), num_params=num_params, total_params=total_params
    )


@pytest.mark.parametrize(("actor", "name"), [("gpu-0", "The device"), ("optimizer-1", "The actor optimizer-1")])
def test_load_progress_of_one_of_several_actors_is_told_as_its_own(stage: Stage, actor: str, name: str) -> None:
    stage.scheduler._progress.note(load_progress(stage, actor, 500, 1000))
    assert [record.message for record in journal_of(stage.spec)] == [f"{name} has loaded 50% of its 1,000 parameters"]


def test_load_progress_of_blocks_without_params_is_not_told(stage: Stage) -> None:
    stage.scheduler._progress.note(load_progress(stage, "gpu-0", 0, 0))
    assert journal_of(stage.spec) == []


def test_export_progress_is_reported_at_intervals_from_its_beginning(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("windlass.actors.scheduler.progress.time.monotonic", lambda: now[0])
    for step, shares in ((2, (0.1, 1.0)), (4, (0.1, 0.2, 0.304, 1.0, 1.0))):
        for share in shares:
            stage.scheduler._progress.note(
                ExportProgressed(job=stage.spec.job, step=Step(step), actor=ActorName("optimizer-0"), share=share)
            )
            now[0] += 2.5
    told = [record.message for record in journal_of(stage.spec)]
    assert told == [
        "Exporting the model of step 4: 30% written",
        "Exporting the model of step 4: syncing its files to the disk",
    ]
