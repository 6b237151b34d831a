"""The scheduler with states resident in memory: not every step is committed."""

import json
from pathlib import Path

import pytest

from tests.support.actors.scheduler_stage import (
    FP16,
    NUM_TARGETS,
    TIERED,
    Stage,
    warnings_of,
)
from tests.support.training import journal_of, metrics_of
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import (
    CommitStore,
    ComputeBlock,
    FlushBlock,
    Message,
    Phase,
    RestoreStates,
    SkipStep,
)
from windlass.actors.scheduler.scheduler import ActorLostError
from windlass.engine.memory_plan.plan import Placement
from windlass.storage.ids import Attempt


def told_steps(spec: JobSpec, attempt: int = 2) -> list[int]:
    """The steps in the order in which an attempt reported their training."""
    records = [each for each in journal_of(spec) if each.attempt == attempt and "train_loss" in each.data]
    return [each.data["step"] for each in records]


def test_the_policy_knows_where_states_rest(tmp_path: Path) -> None:
    stage = Stage(tmp_path, **TIERED)
    shape = stage.scheduler.pipeline.config
    assert (shape.host_blocks, shape.device_blocks, shape.spilled_blocks) == ({0}, {2}, frozenset())
    assert shape.commit_every == 3
    assert stage.run()["status"] == "succeeded"
    assert {(to, message.block) for to, message in stage.received if isinstance(message, FlushBlock)} == {
        ("optimizer-0", 0),
        ("gpu-0", 2),
    }
    restored = [(to, message.step) for to, message in stage.received if isinstance(message, RestoreStates)]
    assert restored == [("gpu-0", 0), ("optimizer-0", 0)]
    spilled = Stage(tmp_path / "spilled", training=FP16, placement=Placement(num_host_grad_blocks=1))
    assert spilled.scheduler.pipeline.config.spilled_blocks == {1, 2}
    assert spilled.run()["status"] == "succeeded"


def test_steps_are_told_when_they_are_over_or_committed_where_that_is_due(tmp_path: Path) -> None:
    stage = Stage(tmp_path, **TIERED)
    told_when_committed: dict[int, list[int]] = {}

    def look(message: Message) -> None:
        if isinstance(message, CommitStore):
            told_when_committed[message.step] = told_steps(stage.spec)

    stage.before = look
    outcome = stage.run()
    assert outcome["trained_tokens"] == 7 * NUM_TARGETS
    assert told_when_committed == {0: [], 3: [1, 2], 6: [1, 2, 3, 4, 5], 7: [1, 2, 3, 4, 5, 6]}
    assert told_steps(stage.spec) == [1, 2, 3, 4, 5, 6, 7]
    assert metrics_of(stage.spec, "trained_tokens") == {step: step * NUM_TARGETS for step in range(1, 8)}
    assert min(metrics_of(stage.spec, "step_s").values()) > 0
    assert metrics_of(stage.spec, "compute_s") == pytest.approx(dict.fromkeys(range(1, 8), 0.5))


def test_bytes_between_commits_are_those_of_the_last_one(tmp_path: Path) -> None:
    """A step's written bytes are the mean since the previous commit, and are not reported earlier."""
    stage = Stage(tmp_path, **TIERED)
    stage.run()
    a_step, last = [50 // 3, 30 // 3], [50, 30]
    assert metrics_of(stage.spec, "ssd_bytes_written_step_by_ssd") == {
        3: a_step,
        4: a_step,
        5: a_step,
        6: a_step,
        7: last,
    }
    assert metrics_of(stage.spec, "ssd_bytes_written_step") == {3: 26, 4: 26, 5: 26, 6: 26, 7: 80}
    num_commits = {1: 1, 2: 1, 3: 2, 4: 2, 5: 2, 6: 3, 7: 4}
    assert metrics_of(stage.spec, "ssd_bytes_written") == {step: 80 * num for step, num in num_commits.items()}
    by_ssd = {step: [50 * num, 30 * num] for step, num in num_commits.items()}
    assert metrics_of(stage.spec, "ssd_bytes_written_by_ssd") == by_ssd

    Path(stage.spec.output_dir).rmdir()
    resumed = Stage(tmp_path, resume_from=stage.commit(3), attempt=Attempt(3), **TIERED)
    resumed.run()
    told = [each.data for each in journal_of(resumed.spec) if each.attempt == 3 and each.kind == "metrics"]
    assert [data["ssd_bytes_written"] for data in told] == [320, 320, 400, 480]
    assert [data["ssd_bytes_written_by_ssd"][0] for data in told] == [200, 200, 250, 300]
    assert [data.get("ssd_bytes_written_step_by_ssd") for data in told] == [None, None, a_step, last]


def test_steps_past_the_last_commit_are_trained_and_told_again(tmp_path: Path) -> None:
    first = Stage(tmp_path, **TIERED)

    def lose(message: Message) -> None:
        if isinstance(message, ComputeBlock) and message.step == 6 and message.phase is Phase.HEAD:
            raise ActorLostError("the process of ssd-1 died")

    first.before = lose
    outcome = first.run()
    assert (outcome["status"], outcome["trained_tokens"]) == ("interrupted", 5 * NUM_TARGETS)
    assert told_steps(first.spec) == [1, 2, 3, 4, 5]
    resumed = Stage(tmp_path, resume_from=first.commit(3), attempt=Attempt(3), **TIERED)
    assert resumed.run()["trained_tokens"] == 7 * NUM_TARGETS
    assert told_steps(resumed.spec, attempt=3) == [4, 5, 6, 7]
    told = [each.data["trained_tokens"] for each in journal_of(resumed.spec) if "train_loss" in each.data]
    assert told == [step * NUM_TARGETS for step in (1, 2, 3, 4, 5, 4, 5, 6, 7)]
    assert [message.step for message in resumed.sent(RestoreStates)] == [3, 3]


def test_cancelled_between_commits_it_commits_the_step_it_was_in(tmp_path: Path) -> None:
    stage = Stage(tmp_path, **TIERED)

    def cancel(message: Message) -> None:
        if isinstance(message, ComputeBlock) and message.step == 4:
            stage.stop.cancel()

    stage.before = cancel
    outcome = stage.run()
    assert (outcome["status"], outcome["trained_tokens"]) == ("cancelled", 4 * NUM_TARGETS)
    assert [message.step for message in stage.sent(CommitStore)] == [0, 0, 3, 3, 4, 4]
    assert told_steps(stage.spec) == [1, 2, 3, 4]
    state = json.loads(stage.commit(4).trainer_state)
    assert (state["trainer"]["optimizer_step"], state["trained_tokens"]) == (4, 4 * NUM_TARGETS)


def test_cancelled_when_a_step_was_told_already_it_is_committed_and_told_once(tmp_path: Path) -> None:
    """The evaluation after it has begun."""
    stage = Stage(tmp_path, **TIERED, num_validation_examples=9, evaluate_every=4)

    def cancel(message: Message) -> None:
        if isinstance(message, ComputeBlock) and message.phase is Phase.EVALUATE:
            stage.stop.cancel()

    stage.before = cancel
    outcome = stage.run()
    assert (outcome["status"], outcome["trained_tokens"]) == ("cancelled", 4 * NUM_TARGETS)
    assert [message.step for message in stage.sent(CommitStore)][-2:] == [4, 4]
    assert told_steps(stage.spec) == [1, 2, 3, 4]


def test_skipped_steps_between_commits_are_told_and_count_in_the_next_commit(tmp_path: Path) -> None:
    stage = Stage(tmp_path, **TIERED, training=FP16)
    for step in (2, 3, 4, 7):
        stage.bad_grads.add((step, 1))
    assert stage.run()["trained_tokens"] == 7 * NUM_TARGETS
    assert told_steps(stage.spec) == [1, 2, 3, 4, 5, 6, 7]
    assert metrics_of(stage.spec, "skipped_steps") == {1: 0, 2: 1, 3: 2, 4: 3, 5: 3, 6: 3, 7: 4}
    commits = {message.step: message.states_step for message in stage.sent(CommitStore)}
    assert commits == {0: 0, 3: 1, 6: 6, 7: 6}
    tokens = {step: json.loads(stage.commit(step).trainer_state)["trained_tokens"] for step in commits}
    assert tokens == {step: step * NUM_TARGETS for step in commits}
    assert {message.step for message in stage.sent(SkipStep)} == {2, 3, 4, 7}
    assert [message.split(":")[0] for message in warnings_of(stage.spec)] == [
        f"Step {step} skipped" for step in (2, 3, 4, 7)
    ]
