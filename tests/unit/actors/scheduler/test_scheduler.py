"""The scheduler around the policy: actors that answer at once or not at all, and the journal's records."""

import dataclasses
import errno
import itertools
import json
import math
import queue
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.schedules import System
from tests.support.actors.scheduler_stage import FP16, NUM_TARGETS, Clock, Stage, failure, warnings_of
from tests.support.training import journal_of, losses_of, metrics_of
from windlass.actors.job.journal import METRICS
from windlass.actors.job.pace import pace_of_metrics
from windlass.actors.messages import (
    CommitDecided,
    CommitStore,
    ComputeBlock,
    ComputeBlocks,
    ExportModel,
    KernelChosen,
    LoadModel,
    Message,
    Phase,
    UpdateStep,
)
from windlass.actors.scheduler import progress, scheduler
from windlass.actors.scheduler.scheduler import INTERRUPTED, PAUSED, ActorLostError
from windlass.actors.worker_policy.block_queue import Ordering, QueueOrder
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.engine.training_config.training_config import NUMERICS
from windlass.storage.ids import ActorName, Attempt, Kernel, Step
from windlass.storage.store.decisions import DECISIONS_FILE, Decision, DecisionLog, last_decision
from windlass.storage.store.format import CommitRecord


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_job_from_its_first_message_to_its_outcome(tmp_path: Path) -> None:
    stage = Stage(tmp_path, num_validation_examples=9, evaluate_every=2, checkpoint_every=2)
    assert stage.run() == {
        "status": "succeeded",
        "error": None,
        "trained_tokens": 4 * NUM_TARGETS,
        "model_dir": stage.spec.output_dir,
    }
    records = journal_of(stage.spec)
    assert {record.attempt for record in records} == {stage.spec.attempt}
    assert "Loaded 50% of 11,144 parameters" in [record.message for record in records]
    assert losses_of(stage.spec) == [3.0] * 4
    assert metrics_of(stage.spec, "train_mean_token_accuracy") == dict.fromkeys(range(1, 5), 0.4)
    assert metrics_of(stage.spec, "valid_loss") == {2: 3.0, 4: 3.0}
    shape = stage.scheduler.pipeline.config
    assert metrics_of(stage.spec, "learning_rate") == {step: shape.learning_rate(step) for step in range(1, 5)}
    assert metrics_of(stage.spec, "ssd_bytes_read") == dict.fromkeys(range(1, 5), 200)
    checkpoints = [record.data for record in records if record.kind == "checkpoint"]
    assert [each["fine_tuned_model_checkpoint"] for each in checkpoints] == ["out-step-2", "out"]
    metrics = {"train_loss": 3.0, "train_mean_token_accuracy": 0.4, "valid_mean_token_accuracy": 0.4}
    metrics |= {"valid_loss": 3.0, "full_valid_loss": 3.0}
    assert checkpoints[-1]["metrics"] == {"step": 4, **metrics}


@pytest.mark.parametrize("kind", [ComputeBlock, UpdateStep, CommitStore, ExportModel])
def test_scheduler_where_handling_raises_queue_empty_ends_with_it(kind: type[Message], tmp_path: Path) -> None:
    """Only the wait for an event may end with an empty queue. The same error from other code is a defect."""
    stage = Stage(tmp_path, deadline_s=0.2)

    def fail(message: Message) -> None:
        if isinstance(message, kind):
            raise queue.Empty

    stage.before = fail
    with pytest.raises(queue.Empty):
        stage.scheduler.run()


def test_scheduler_sends_export_before_it_reports_the_step(stage: Stage) -> None:
    told_before: list[dict[int, float]] = []

    def look(message: Message) -> None:
        if isinstance(message, ExportModel):
            told_before.append(metrics_of(stage.spec, "train_loss"))

    stage.before = look
    stage.run()
    # The event that commits the last step both sends the export and reports the step; sending comes first.
    assert [list(told) for told in told_before] == [[1, 2, 3]]
    assert list(metrics_of(stage.spec, "train_loss")) == [1, 2, 3, 4]


def test_scheduler_begins_the_next_step_before_it_records_the_one_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording a step writes its timeline, for which the device does not wait."""
    stage, order = Stage(tmp_path), list[tuple[str, int]]()
    end_step = progress.Progress.end_step

    def note_end(self: progress.Progress, step: int, end: Any) -> dict[str, Any]:
        order.append(("recorded", step))
        return end_step(self, step, end)

    send = stage.scheduler._send

    def note_begin(to: ActorName, message: Message) -> None:
        if isinstance(message, ComputeBlocks):
            begun = [each for each in message.operations if each.phase is Phase.FORWARD and each.block == 0]
            order.extend(("begun", each.step) for each in begun)
        send(to, message)

    monkeypatch.setattr(progress.Progress, "end_step", note_end)
    monkeypatch.setattr(stage.scheduler, "_send", note_begin)
    stage.run()
    assert order == [
        ("recorded", 0),
        ("begun", 1),
        *((what, n + (what == "begun")) for n in (1, 2, 3) for what in ("begun", "recorded")),
        ("recorded", 4),
    ]


def test_step_is_reported_before_the_next_commit_can_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that resumes from a commit can report only that step, for example after a full disk.

    So earlier steps must be reported first. A skipped step is over while the previous one is still being committed.
    """
    stage = Stage(tmp_path, training=FP16)
    stage.bad_grads = {(2, 1), (3, 1)}
    monkeypatch.setattr(scheduler, "_TICK_S", 0.01)
    pending: list[tuple[ActorName, Message]] = []
    told_before: dict[int, list[int]] = {}

    def look(message: Message) -> None:
        if isinstance(message, CommitStore):
            pending.append(stage.received[-1])
            told_before[message.step] = list(metrics_of(stage.spec, "train_loss"))

    def answer_late() -> None:
        """Answers once everything else is done: the next step is over, and waits for its commit."""
        while pending and stage.scheduler._events.empty():
            for event in [event for each in pending for event in stage._answers(*each)]:
                stage.scheduler.post(event)
            pending.clear()

    stage.before, stage.silent, stage.check_actors = look, {CommitStore}, answer_late
    assert stage.run()["status"] == "succeeded"
    assert told_before == {0: [], 1: [], 2: [1], 3: [1, 2], 4: [1, 2, 3]}


def test_each_actor_receives_only_its_messages(stage: Stage) -> None:
    stage.run()
    receivers: dict[type[Message], set[str]] = {}
    for to, message in stage.received:
        receivers.setdefault(type(message), set()).add(to)
    assert receivers[LoadModel] == receivers[ExportModel] == {"optimizer-0"}
    assert receivers[ComputeBlock] == {"gpu-0"}
    assert receivers[UpdateStep] == {"optimizer-0", "optimizer-1"}
    assert receivers[CommitStore] == {"ssd-0", "ssd-1"}


@pytest.mark.parametrize(
    ("order", "keeps_grads", "overlaps_steps"),
    [
        (UpdateOrder.ACTIVE, False, True),
        (UpdateOrder.NAIVE, False, True),
        (UpdateOrder.KEPT, True, True),
        (UpdateOrder.AFTER_BACKWARD, True, False),
    ],
)
def test_the_policy_knows_the_order_of_updates(
    tmp_path: Path, order: UpdateOrder, keeps_grads: bool, overlaps_steps: bool
) -> None:
    stage = Stage(tmp_path, training={"update_order": order, "max_bad_steps": 7})
    shape = stage.scheduler.pipeline.config
    assert (shape.keeps_grads, shape.max_bad_steps) == (keeps_grads, 7)
    assert shape.ordering == Ordering(overlaps_steps=overlaps_steps)
    assert stage.run()["status"] == "succeeded"


def test_the_policy_has_the_jobs_ordering(tmp_path: Path) -> None:
    ordering = Ordering(queues=QueueOrder.FIFO, overlaps_steps=False, max_updating=1, max_prefetched=3)
    stage = Stage(tmp_path, ordering=ordering)
    assert stage.scheduler.pipeline.config.ordering == ordering
    assert stage.run()["status"] == "succeeded"


@pytest.mark.parametrize(("system", "host_blocks"), [(System.ZERO_OFFLOAD, (0, 1, 2)), (System.ZERO_INFINITY, ())])
def test_a_job_in_another_systems_order(tmp_path: Path, system: System, host_blocks: tuple[int, ...]) -> None:
    """The same updates at other times: no message of a step is sent while updates of the previous one are in flight."""
    plain = Stage(tmp_path / "plain", total_steps=2)
    room = Placement(host_activation_nbytes=1 << 20)
    stage = Stage(tmp_path / "other", total_steps=2, system=system, placement=room)
    swaps = {choice.swaps for choice in stage.context.plan.layer_activations}
    assert swaps == {system is System.ZERO_INFINITY}
    assert stage.scheduler.pipeline.config.host_blocks == set(host_blocks)
    assert stage.scheduler.pipeline.config.ordering == Ordering(queues=QueueOrder.FIFO, overlaps_steps=False)
    assert plain.run()["status"] == stage.run()["status"] == "succeeded"
    assert updates_of(stage) == updates_of(plain)
    kinds = [type(m).__name__ for _, m in stage.received if isinstance(m, ComputeBlock | UpdateStep)]
    turns = [kind for kind, _ in itertools.groupby(kinds)]
    assert turns == ["ComputeBlock", "UpdateStep"] * 2


def updates_of(stage: Stage) -> set[tuple[object, ...]]:
    """The facts of all updates, in any order."""
    return {(m.step, m.optimizer_step, m.learning_rate, m.grad_scale) for m in stage.sent(UpdateStep)}


def test_a_step_of_several_groups_is_told_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path, training={"num_microbatches": 5}, placement=Placement(group_size=2))
    assert stage.run()["status"] == "succeeded"
    heads = [message.group for message in stage.sent(ComputeBlock) if message.phase is Phase.HEAD]
    assert heads == [0, 1, 2] * 4
    assert metrics_of(stage.spec, "train_loss") == dict.fromkeys(range(1, 5), 3 * stage.loss)
    compute_s = metrics_of(stage.spec, "compute_s")
    assert compute_s == pytest.approx(dict.fromkeys(range(1, 5), 3 * (2 * len(stage.context.layout.blocks) - 1) * 0.1))


def test_step_of_several_ranks_tells_the_compute_time_of_the_busiest_one(tmp_path: Path) -> None:
    """The first one computes two of the three groups, and completes all gradients."""
    stage = Stage(tmp_path, num_ranks=2, training={"num_microbatches": 3}, placement=Placement(group_size=1))
    assert stage.run()["status"] == "succeeded"
    workers = {(m.group, to) for to, m in stage.received if isinstance(m, ComputeBlock) and m.phase is Phase.HEAD}
    assert workers == {(0, "gpu-0"), (1, "gpu-1"), (2, "gpu-0")}
    assert metrics_of(stage.spec, "train_loss") == dict.fromkeys(range(1, 5), 3 * stage.loss)
    seconds = 2 * (2 * len(stage.context.layout.blocks) - 1) * 0.1
    assert metrics_of(stage.spec, "compute_s") == pytest.approx(dict.fromkeys(range(1, 5), seconds))


def test_clipping_tells_the_norm_and_scales_by_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path, training={"clip_norm": 0.5})
    stage.run()
    norm = math.sqrt(3 * 12.0)
    assert metrics_of(stage.spec, "grad_norm") == pytest.approx(dict.fromkeys(range(1, 5), norm))
    (scale,) = {message.grad_scale for _, message in stage.received if isinstance(message, UpdateStep)}
    assert scale == pytest.approx(0.5 / norm, rel=1e-5)


def test_cancelled_before_it_begins(stage: Stage) -> None:
    stage.silent = {LoadModel}
    stage.stop.cancel()
    outcome = stage.run()
    assert (outcome["status"], outcome["trained_tokens"], outcome["model_dir"]) == ("cancelled", 0, None)


def test_cancelled_in_a_step_it_ends_with_that_step(tmp_path: Path) -> None:
    stage = Stage(tmp_path, total_steps=100, checkpoint_every=1)

    def cancel(message: Message) -> None:
        if isinstance(message, ComputeBlock) and message.step == 3:
            stage.stop.cancel()

    stage.before = cancel
    assert stage.run()["status"] == "cancelled"
    assert len(losses_of(stage.spec)) == 3
    exports = [message.step for _, message in stage.received if isinstance(message, ExportModel)]
    assert exports == [1, 2]


def test_cancelled_when_the_model_is_written_it_has_succeeded(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    def cancel(message: Message) -> None:
        if isinstance(message, ExportModel):
            stage.stop.cancel()

    stage.before = cancel
    assert stage.run()["status"] == "succeeded"


def test_paused_in_a_step_it_ends_with_that_step_and_another_attempt_goes_on(tmp_path: Path) -> None:
    stage = Stage(tmp_path, checkpoint_every=2)

    def pause(message: Message) -> None:
        if isinstance(message, ComputeBlock) and message.step == 2:
            stage.stop.pause()

    stage.before = pause
    assert stage.run()["status"] == PAUSED
    assert len(losses_of(stage.spec)) == 2
    assert not any(isinstance(message, ExportModel) for _, message in stage.received)
    again = Stage(tmp_path, checkpoint_every=2, resume_from=stage.commit(2), attempt=Attempt(3))
    outcome = again.run()
    assert (outcome["status"], outcome["trained_tokens"]) == ("succeeded", 4 * NUM_TARGETS)
    assert [message.step for _, message in again.received if isinstance(message, ExportModel)] == [2, 4]
    assert len(losses_of(stage.spec)) == 4


def test_paused_in_its_last_step_it_is_finished(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    def pause(message: Message) -> None:
        if isinstance(message, ComputeBlock) and message.step == 4:
            stage.stop.pause()

    stage.before = pause
    assert stage.run()["status"] == "succeeded"


def test_paused_and_cancelled_it_is_cancelled(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.stop.pause()
    stage.stop.cancel()
    assert stage.run()["status"] == "cancelled"


def run_first_attempt(directory: Path) -> Stage:
    """A whole job, whose commits can be given to a later attempt."""
    first = Stage(directory)
    first.run()
    Path(first.spec.output_dir).rmdir()
    return first


def test_it_goes_on_after_a_committed_step(tmp_path: Path) -> None:
    first = run_first_attempt(tmp_path)
    stage = Stage(tmp_path, resume_from=first.commit(2), attempt=Attempt(3))
    outcome = stage.run()
    assert outcome["status"] == "succeeded"
    assert outcome["trained_tokens"] == 4 * NUM_TARGETS
    records = [record for record in journal_of(stage.spec) if record.attempt == 3]
    assert [record.data["step"] for record in records if record.kind == "metrics"] == [3, 4]
    assert records[0].message == "Resuming after step 2"
    assert not any(isinstance(message, LoadModel) for _, message in stage.received)


def test_unreported_committed_step_is_reported_by_next_attempt(tmp_path: Path) -> None:
    first = run_first_attempt(tmp_path / "lost")
    stage = Stage(tmp_path, resume_from=first.commit(2), attempt=Attempt(3))
    stage.run()
    assert metrics_of(stage.spec, "train_loss") == {2: 3.0, 3: 3.0, 4: 3.0}
    assert metrics_of(stage.spec, "trained_tokens") == {step: step * NUM_TARGETS for step in (2, 3, 4)}


def without_numerics(commit: CommitRecord) -> CommitRecord:
    """The commit as an older version wrote it."""
    state = json.loads(commit.trainer_state)
    assert state.pop("numerics") == NUMERICS
    return dataclasses.replace(commit, trainer_state=json.dumps(state))


def test_a_job_of_an_older_version_goes_on_under_its_numerics(tmp_path: Path) -> None:
    commit = without_numerics(run_first_attempt(tmp_path).commit(2))
    stage = Stage(tmp_path, resume_from=commit, attempt=Attempt(3), numerics=1)
    assert stage.run()["status"] == "succeeded"
    assert json.loads(stage.commit(4).trainer_state)["numerics"] == 1


def test_a_new_job_with_one_lane_goes_on_from_a_commit_of_an_older_version(tmp_path: Path) -> None:
    """With one lane both versions have the same bits."""
    commit = without_numerics(run_first_attempt(tmp_path).commit(2))
    stage = Stage(tmp_path, resume_from=commit, attempt=Attempt(3))
    assert stage.run()["status"] == "succeeded"
    assert json.loads(stage.commit(4).trainer_state)["numerics"] == NUMERICS


def test_a_job_does_not_go_on_under_other_numerics(tmp_path: Path) -> None:
    commit = without_numerics(run_first_attempt(tmp_path).commit(2))
    outcome = Stage(tmp_path, resume_from=commit, attempt=Attempt(3), num_microbatches=2, lanes=2).run()
    assert outcome["status"] == "failed"
    assert "step 2 was committed under version 1 of the numerics" in outcome["error"]["message"]


def test_a_job_whose_states_have_vanished_does_not_start_over(tmp_path: Path) -> None:
    run_first_attempt(tmp_path)
    outcome = Stage(tmp_path, attempt=Attempt(3)).run()
    assert outcome["status"] == "failed"
    assert (
        "the job had come to step 4, and none of its SSDs (/ssd0, /ssd1) holds its states"
        in outcome["error"]["message"]
    )


def test_a_lost_process_interrupts_the_attempt(stage: Stage) -> None:
    stage.silent = {ComputeBlock}

    def check_actors() -> None:
        raise ActorLostError("the process of ssd-1 died")

    stage.check_actors = check_actors
    outcome = stage.run()
    assert outcome["status"] == INTERRUPTED
    assert outcome["error"] == {"code": "process_lost", "message": "the process of ssd-1 died", "param": None}


def test_bytes_written_are_those_of_the_step_and_of_the_job_by_ssd(tmp_path: Path) -> None:
    """Bytes of loading count for the job and for no step.

    A resumed attempt continues from the bytes written by then.
    """
    first = run_first_attempt(tmp_path)
    stage = Stage(tmp_path, resume_from=first.commit(2), attempt=Attempt(3))
    stage.run()
    told = [record.data for record in journal_of(stage.spec) if record.kind == "metrics"]
    assert [data["step"] for data in told] == [1, 2, 3, 4, 3, 4]
    assert {data["ssd_bytes_written_step"] for data in told} == {80}
    assert all(data["ssd_bytes_written_step_by_ssd"] == [50, 30] for data in told)
    # Loading writes as much as a step; steps 3 and 4 were written twice.
    assert [data["ssd_bytes_written_by_ssd"] for data in told] == [[50 * n, 30 * n] for n in (2, 3, 4, 5, 6, 7)]
    assert [data["ssd_bytes_written"] for data in told] == [80 * n for n in (2, 3, 4, 5, 6, 7)]


def test_bytes_read_and_written_after_a_resume_go_on_from_those_of_earlier_attempts(tmp_path: Path) -> None:
    """Attempts 2 and 3 read 200 bytes each as of every commit; steps 3 and 4 were read and written twice."""
    first = run_first_attempt(tmp_path)
    last = Stage(tmp_path, resume_from=first.commit(2), attempt=Attempt(3))
    last.run()
    Path(last.spec.output_dir).rmdir()
    Stage(tmp_path, resume_from=last.commit(3), attempt=Attempt(4)).run()
    told = [record for record in journal_of(last.spec) if record.kind == "metrics"]
    assert [(record.attempt, record.data["step"]) for record in told] == [
        *((2, step) for step in (1, 2, 3, 4)),
        *((3, step) for step in (3, 4)),
        (4, 4),
    ]
    assert [record.data["ssd_bytes_read"] for record in told] == [200] * 4 + [400] * 2 + [600]
    assert [record.data["ssd_bytes_written"] for record in told] == [80 * n for n in (2, 3, 4, 5, 6, 7, 8)]
    assert [sum(record.data["ssd_bytes_written_by_ssd"]) for record in told] == [80 * n for n in (2, 3, 4, 5, 6, 7, 8)]


def test_bytes_read_of_a_step_that_the_next_attempt_tells_of_are_those_of_earlier_attempts(tmp_path: Path) -> None:
    """Attempt 3 died after its commit of step 3, before it could report the step."""
    first = run_first_attempt(tmp_path)
    journal = Path(first.spec.job_dir) / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[: next(i for i, line in enumerate(lines) if '"step":3' in line)]))
    stage = Stage(tmp_path, resume_from=first.commit(3), attempt=Attempt(3))
    stage.run()
    told = {record.data["step"]: record.data for record in journal_of(stage.spec) if record.kind == "metrics"}
    assert {step: data["ssd_bytes_read"] for step, data in told.items()} == {1: 200, 2: 200, 3: 200, 4: 400}
    assert {step: data["ssd_bytes_written"] for step, data in told.items()} == {1: 160, 2: 240, 3: 240, 4: 320}


def test_bytes_that_an_earlier_release_counted_from_the_start_of_its_attempts_are_added_up(tmp_path: Path) -> None:
    first = run_first_attempt(tmp_path)
    second = Stage(tmp_path, resume_from=first.commit(2), attempt=Attempt(3))
    second.run()
    journal = Path(first.spec.job_dir) / "journal.jsonl"
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    for record in records:
        if record["kind"] == "metrics" and record["attempt"] == 3:
            record["data"]["ssd_bytes_read"] -= 200
            record["data"]["ssd_bytes_written"] -= 80 * 5
    journal.write_text("".join(json.dumps(record) + "\n" for record in records))
    Path(second.spec.output_dir).rmdir()
    Stage(tmp_path, resume_from=second.commit(3), attempt=Attempt(4)).run()
    last = [record.data for record in journal_of(second.spec) if record.kind == "metrics"][-1]
    assert (last["ssd_bytes_read"], last["ssd_bytes_written"]) == (600, 80 * 8)


def test_bytes_of_a_job_whose_number_of_ssds_changed_are_those_of_all_its_ssds(tmp_path: Path) -> None:
    first = run_first_attempt(tmp_path)
    stage = Stage(tmp_path, resume_from=first.commit(3), attempt=Attempt(3), ssd_dirs=("/ssd0",))
    stage.run()
    last = [record.data for record in journal_of(stage.spec) if record.kind == "metrics"][-1]
    assert (last["ssd_bytes_read"], last["ssd_bytes_written"]) == (300, 450)


def test_bytes_written_to_other_ssds_are_not_carried_over(tmp_path: Path) -> None:
    first = run_first_attempt(tmp_path)
    stage = Stage(tmp_path, resume_from=first.commit(3), attempt=Attempt(3), ssd_dirs=("/ssd0",))
    stage.run()
    told = [record.data["ssd_bytes_written_by_ssd"] for record in journal_of(stage.spec) if record.kind == "metrics"]
    assert told[-2:] == [[250, 150], [50]]


def test_a_later_attempt_appends_to_the_journal(tmp_path: Path) -> None:
    first = Stage(tmp_path)
    first.silent = {ComputeBlock}
    first.scheduler.post(failure("ssd-1", "no room"))
    assert first.run()["status"] == "failed"
    second = Stage(tmp_path, attempt=Attempt(3))
    second.run()
    attempts = [(record.attempt, record.seq) for record in journal_of(second.spec)]
    assert attempts == sorted(attempts)
    assert {attempt for attempt, _ in attempts} == {2, 3}


def kernel_chosen(stage: Stage, *kernels: Kernel) -> None:
    """Each optimizer reports its kernel, as in its set-up."""
    for name, kernel in zip(stage.scheduler.pipeline.config.optimizers, kernels, strict=True):
        stage.scheduler.post(KernelChosen(job=stage.spec.job, step=Step(0), actor=name, kernel=kernel))


def test_another_kernel_than_before_is_told(tmp_path: Path) -> None:
    first = Stage(tmp_path / "lost")
    kernel_chosen(first, Kernel.COMPILED, Kernel.COMPILED)
    first.run()
    assert warnings_of(first.spec) == []
    assert "The actor optimizer-1 updates with the compiled kernel" in [
        record.message for record in journal_of(first.spec)
    ]
    for kernel, num_warnings in ((Kernel.COMPILED, 0), (Kernel.FUSED, 1)):
        stage = Stage(tmp_path / kernel, resume_from=first.commit(2), attempt=Attempt(3))
        kernel_chosen(stage, Kernel.COMPILED, kernel)
        assert stage.run()["status"] == "succeeded"
        warnings = warnings_of(stage.spec)
        assert len(warnings) == num_warnings
        assert all("updated with the compiled kernel: the results may differ" in each for each in warnings)


def test_time_left_is_that_of_the_last_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading takes 1000 s, the first two steps 50 s each, later ones 10 s."""
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    stage = Stage(tmp_path, total_steps=6)
    took = {ComputeBlock: {1: 50.0, 2: 50.0}, LoadModel: {0: 1000.0}}

    def look(message: Message) -> None:
        is_first = not isinstance(message, ComputeBlock) or (message.phase is Phase.FORWARD and message.block == 0)
        if type(message) in took and is_first:
            clock.now += took[type(message)].get(message.step, 10.0)

    stage.before = look
    stage.run()
    left = metrics_of(stage.spec, "remaining_s")
    is_estimate = metrics_of(stage.spec, "remaining_is_estimate")
    assert [step for step, estimate in is_estimate.items() if estimate] == [1, 2, 3, 4]
    assert left[1] <= 5 * 100.0  # a step may be reported when the next has begun
    assert left[6] == 0.0
    assert left[5] == pytest.approx(10.0, rel=0.01)


def test_time_left_has_the_evaluations_after_a_restart_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 10 s, and an evaluation 50 s more. The first one is after step 6."""
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    jobs = {"total_steps": 18, "num_validation_examples": 8, "evaluate_every": 6}

    def look(message: Message) -> None:
        if isinstance(message, ComputeBlock) and message.block == 0:
            clock.now += {Phase.FORWARD: 10.0, Phase.EVALUATE: 50.0}.get(message.phase, 0.0)

    def told_by(stage: Stage) -> dict[int, tuple[float, bool]]:
        stage.before = look
        assert stage.run()["status"] == "succeeded"
        left = metrics_of(stage.spec, "remaining_s")
        is_estimate = metrics_of(stage.spec, "remaining_is_estimate")
        return {step: (left[step], is_estimate[step]) for step in left}

    first = Stage(tmp_path / "first", **jobs)
    told = told_by(first)
    assert told[5] == (pytest.approx(130.0, rel=0.2), True), "evaluations are due, and none was measured"
    assert told[9] == (pytest.approx(90.0 + 100.0, rel=0.1), False)
    (last,) = (each.data for each in journal_of(first.spec) if each.data.get("step") == 9 and "pace_s" in each.data)
    assert (last["pace_s"], last["evaluation_s"]) == (pytest.approx(10.0), pytest.approx(50.0))
    pace = pace_of_metrics(last)
    told = told_by(
        Stage(tmp_path / "second", resume_from=first.commit(9), expected_pace=pace, attempt=Attempt(2), **jobs)
    )
    assert told[10] == (pytest.approx(80.0 + 100.0, rel=0.1), False)
    assert told[11] == (pytest.approx(70.0 + 100.0, rel=0.1), False)


def test_commit_is_in_the_log_before_an_ssd_server_hears_that_it_is_decided(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    log, found = tmp_path / DECISIONS_FILE, []

    def look(message: Message) -> None:
        if isinstance(message, CommitDecided):
            found.append((message.step, last_decision(log)))

    stage.before = look
    assert stage.run()["status"] == "succeeded"
    decisions = {step: Decision.of(stage.commit(step)) for step in range(5)}
    assert found == [(step, decisions[step]) for step in range(5) for _ in stage.spec.ssd_dirs]


def test_commit_that_cannot_be_decided_is_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, append = Stage(tmp_path), DecisionLog.append

    def append_two(log: DecisionLog, decision: Decision) -> None:
        if decision.step == 2:
            raise OSError(errno.EIO, "the disk fails")
        append(log, decision)

    monkeypatch.setattr(DecisionLog, "append", append_two)
    with pytest.raises(OSError, match="the disk fails"):
        stage.run()
    assert {message.step for message in stage.sent(CommitDecided)} == {0, 1}
    assert {message.step for message in stage.sent(UpdateStep)} == {1, 2}
    assert max(record.data["step"] for record in journal_of(stage.spec) if record.kind == METRICS) == 1
