"""The scheduler around the policy: failures, and actors that answer late or not at all."""

import errno
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.actors.scheduler_stage import TIERED, Clock, Stage, failure
from tests.support.training import journal_of
from windlass.actors.messages import (
    ActorFailed,
    CommitStore,
    ComputeBlock,
    DescribeStatus,
    ExportModel,
    ExportProgressed,
    FailureKind,
    FlushBlock,
    GradReady,
    LoadModel,
    Message,
    ModelExported,
    ModelKernelsChosen,
    Phase,
    RestoreStates,
    UpdateStep,
)
from windlass.actors.scheduler import scheduler
from windlass.actors.scheduler.scheduler import INTERRUPTED, ROOM, JobFailedError
from windlass.storage.ids import ActorName, ModelKernel, Step
from windlass.storage.memory.capacity import DiskFull, require_disk_room


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_failure_ends_the_job_and_names_the_actor(stage: Stage) -> None:
    def fail(message: Message) -> None:
        if isinstance(message, UpdateStep) and message.step == 2:
            stage.scheduler.post(failure("optimizer-1", "no room"))

    stage.before = fail
    outcome = stage.run()
    assert outcome["status"] == "failed"
    assert outcome["error"] == {"code": "training_failed", "message": "optimizer-1: no room", "param": None}
    assert outcome["model_dir"] is None
    assert Path(stage.spec.job_dir, "error.txt").read_text() == "attempt 2: optimizer-1\nTraceback\n"


@pytest.mark.parametrize("others", [(), (ModelKernel.FLASH_ATTENTION_2,)])
def test_gpu_workers_with_other_kernels_end_the_job(stage: Stage, others: tuple[ModelKernel, ...]) -> None:
    def choose(message: Message) -> None:
        if isinstance(message, LoadModel):
            for actor, kernels in (("gpu-1", others), ("gpu-0", (ModelKernel.LIGER,))):
                stage.scheduler.post(
                    ModelKernelsChosen(job=stage.spec.job, step=Step(0), actor=ActorName(actor), kernels=kernels)
                )

    stage.before = choose
    outcome = stage.run()
    assert outcome["status"] == "failed"
    found = " and ".join(others) or "torch's own"
    assert outcome["error"]["message"].startswith(f"gpu-0 computes with other kernels (liger) than gpu-1 ({found}): ")


def test_an_actor_that_is_gone_ends_the_job(stage: Stage) -> None:
    def gone() -> None:
        raise JobFailedError("the process of gpu-0 died")

    stage.silent = {ComputeBlock}
    stage.check_actors = gone
    assert stage.run()["error"]["message"] == "the process of gpu-0 died"


@pytest.mark.parametrize(
    ("silent", "late"),
    [
        (LoadModel, ("optimizer-0", "loading the model")),
        (ComputeBlock, ("gpu-0", "the forward of block 0 in step 1")),
        (GradReady, ("gpu-0", "the gradient of block 2 in step 1")),
        (CommitStore, ("ssd-0", "the commit of step 0")),
        (ExportModel, ("optimizer-0", "the export of step 4")),
        (RestoreStates, ("gpu-0", "reading the states of step 0 into memory")),
        (FlushBlock, ("optimizer-0", "the flush of block 0, as step 3 left it")),
    ],
)
def test_a_wait_that_is_too_long_names_step_block_and_actor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: type[Message], late: tuple[str, str]
) -> None:
    monkeypatch.setattr(scheduler, "_TICK_S", 0.05)
    tiers = TIERED | {"total_steps": 4} if silent in (RestoreStates, FlushBlock) else {}
    stage = Stage(tmp_path, deadline_s=0.5, **tiers)
    stage.silent = {silent}
    outcome = stage.run()
    assert outcome["status"] == INTERRUPTED
    assert outcome["error"]["code"] == "training_stalled"
    actor, what = late
    assert re.match(rf"{actor} has been silent for 0\.\d s; its oldest pending reply is {what}; ", error_text(outcome))


def test_export_that_takes_longer_than_the_timeout_and_tells_its_progress_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_TICK_S", 0.05)
    stage = Stage(tmp_path, deadline_s=0.5)
    stage.silent = {ExportModel}
    told: list[float] = []

    def export_slowly() -> None:
        to, message = stage.received[-1]
        if not isinstance(message, ExportModel):
            return
        if len(told) == 20:
            for event in stage._answers(to, message):
                stage.scheduler.post(event)
            return
        told.append(len(told) / 20)
        stage.scheduler.post(ExportProgressed(job=message.job, step=message.step, actor=to, share=told[-1]))

    stage.check_actors = export_slowly
    assert stage.run()["status"] == "succeeded"
    assert len(told) == 20


def test_old_checkpoints_are_removed_before_the_timeouts_of_the_next_instructions_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal of large folders may take longer than a timeout."""
    pending: list[set[type[Message]]] = []

    def remove(_: Path) -> None:
        pending.append({key.event for key in stage.scheduler.pipeline.waits.outstanding})

    monkeypatch.setattr(scheduler, "remove_model_folder", remove)
    stage = Stage(tmp_path, training={"checkpoint_every": 1, "keep_checkpoints": 1})
    assert stage.run()["status"] == "succeeded"
    assert pending == [{ModelExported}] * 2


def test_replies_that_have_arrived_are_handled_before_timeouts_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, stage = Clock(), Stage(tmp_path, deadline_s=60.0)
    monkeypatch.setattr(scheduler, "time", clock)

    def be_busy(message: Message) -> None:
        """Lets time pass in the scheduler's thread, between the requests to two SSD servers and their replies."""
        if isinstance(message, CommitStore):
            clock.now += 100.0

    stage.before = be_busy
    assert stage.run()["status"] == "succeeded"


def error_text(outcome: dict[str, Any]) -> str:
    return str(outcome["error"]["message"])


def stalled_by(stage: Stage, *failures: ActorFailed) -> dict[str, Any]:
    """The outcome if these failures are reported during the first update, which never ends."""
    told: list[Message] = []

    def fail(message: Message) -> None:
        if isinstance(message, ComputeBlock) and message.phase is Phase.BACKWARD and not told:
            told.append(message)
            for failed in failures:
                stage.scheduler.post(failed)

    stage.silent = {UpdateStep}
    stage.before = fail
    return stage.run()


def stalled_stage(directory: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Stage:
    """A stage whose first update never ends, and whose actors answer when they are asked for their status."""
    monkeypatch.setattr(scheduler, "_TICK_S", 0.05)
    stage = Stage(directory, deadline_s=0.5, **changes)
    stage.silent = {UpdateStep}
    shape = stage.scheduler.pipeline.config
    stage.statuses = dict.fromkeys((*shape.gpu_workers, *shape.optimizers, *shape.ssd_servers), "")
    return stage


def test_error_of_a_stalled_attempt_tells_what_the_threads_of_all_actors_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The late actors often wait for another one, which has no pending reply."""
    stage = stalled_stage(tmp_path, monkeypatch)
    stage.statuses[ActorName("gpu-0")] = "a thread has waited 0.6 s for a slot"
    stage.statuses[ActorName("optimizer-1")] = "ssd-1 has not finished a read"
    del stage.statuses[ActorName("ssd-1")]
    outcome = stage.run()
    assert (outcome["status"], outcome["error"]["code"]) == (INTERRUPTED, "training_stalled")
    what = "the update of block 2 in step 1"
    late = [f"optimizer-{i} has been silent for 0.5 s; its oldest pending reply is {what}" for i in (0, 1)]
    assert re.sub(r"for 0\.[5-9] s; its", "for 0.5 s; its", error_text(outcome)) == "; ".join(
        (
            "ssd-1 gives no answer, its process may hang",
            *late,
            "see its log, and the health of the device it uses",
            "gpu-0: a thread has waited 0.6 s for a slot",
            "optimizer-0: has no work: a message to it or its reply was lost",
            "optimizer-1: ssd-1 has not finished a read",
        )
    )
    asked = [to for to, message in stage.received if isinstance(message, DescribeStatus)]
    assert asked == ["gpu-0", "optimizer-0", "optimizer-1", "ssd-0", "ssd-1"]


def test_statuses_of_all_gpu_workers_and_their_param_server_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stalled_stage(tmp_path, monkeypatch, num_ranks=2, training={"num_microbatches": 2})
    stage.statuses[ActorName("gpu-1")] = "a thread has waited 0.6 s for a slot"
    outcome = stage.run()
    assert "gpu-1: a thread has waited 0.6 s for a slot" in error_text(outcome)
    asked = [to for to, message in stage.received if isinstance(message, DescribeStatus)]
    assert asked == ["gpu-0", "gpu-1", "params-0", "optimizer-0", "optimizer-1", "ssd-0", "ssd-1"]


def test_timeout_in_an_actor_ends_the_attempt(stage: Stage) -> None:
    outcome = stalled_by(stage, failure("gpu-0", "TimeoutError: a lock is held", FailureKind.STALLED))
    assert (outcome["status"], outcome["error"]["code"]) == (INTERRUPTED, "training_stalled")
    assert outcome["error"]["message"] == "gpu-0: TimeoutError: a lock is held"
    assert Path(stage.spec.job_dir, "error.txt").read_text() == "attempt 2: gpu-0\nTraceback\n"


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (FailureKind.LASTING, "failed", "training_failed"),
        (FailureKind.NO_ROOM, INTERRUPTED, "process_lost"),
        (FailureKind.UNFORESEEN, INTERRUPTED, "process_lost"),
    ],
)
def test_broken_actor_is_named_instead_of_late_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: FailureKind, status: str, code: str
) -> None:
    stage = stalled_stage(tmp_path, monkeypatch)
    broken = failure("ssd-1", "the disk is broken", kind)
    stage.before = lambda message: stage.scheduler.post(broken) if isinstance(message, DescribeStatus) else None
    outcome = stage.run()
    assert outcome["status"] == status
    assert outcome["error"] == {"code": code, "message": "ssd-1: the disk is broken", "param": None}


def test_the_outcome_of_an_attempt_that_found_too_little_room_names_disk_and_bytes(
    stage: Stage, tmp_path: Path
) -> None:
    with pytest.raises(DiskFull) as raised:
        require_disk_room("the exported model", tmp_path, 1 << 60)
    told = failure("gpu-0", "")
    outcome = stalled_by(stage, ActorFailed.of(raised.value, actor=told.actor, about=told))
    assert (outcome["status"], outcome[ROOM]) == (INTERRUPTED, [str(tmp_path), 1 << 60])
    last = journal_of(stage.spec)[-1]
    assert (last.kind, last.data[ROOM]) == ("outcome", [str(tmp_path), 1 << 60])


def test_a_scheduler_that_waits_for_nothing_ends(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_TICK_S", 0.05)
    stage.silent = {LoadModel}
    stage.check_actors = stage.scheduler.pipeline.waits.outstanding.clear
    outcome = stage.run()
    assert outcome["status"] == INTERRUPTED
    assert "no request is pending" in outcome["error"]["message"]


def test_unexpected_answer_ends_the_attempt(stage: Stage) -> None:
    def stray(message: Message) -> None:
        if isinstance(message, LoadModel):
            stage.scheduler.post(
                ModelExported(job=message.job, step=Step(3), actor=ActorName("optimizer-0"), path="/elsewhere")
            )

    stage.before = stray
    outcome = stage.run()
    assert outcome["status"] == INTERRUPTED
    assert "was not requested" in outcome["error"]["message"]


def test_a_reason_is_told_though_its_details_have_no_room(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refuse)
    outcome = stalled_by(stage, failure("ssd-1", "the disk is broken"))
    assert outcome["error"]["message"] == "ssd-1: the disk is broken"
