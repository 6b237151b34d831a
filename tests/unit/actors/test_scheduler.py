"""The shell around the policy: actors that answer at once, or not at all, and what the journal tells of them."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.training import journal_of, losses_of, metrics_of
from tests.unit.actors.specs import make_layout, make_spec
from windlass.actors import scheduler
from windlass.actors.context import make_context, optimizer_name
from windlass.actors.job_spec import JobSpec, UpdateOrder
from windlass.actors.messages import (
    ActorFailed,
    BlockBackwardDone,
    BlockComputed,
    BlockFlushed,
    BlockUpdated,
    CommitStore,
    ComputeBlock,
    ExportModel,
    FlushBlock,
    GradChunk,
    GradDropped,
    GradOffloaded,
    KernelChosen,
    LoadModel,
    LoadProgressed,
    LossComputed,
    Message,
    ModelExported,
    ModelLoaded,
    OffloadGrad,
    Phase,
    RestoreStates,
    StatesRestored,
    StoreCommitted,
    UpdateBlock,
)
from windlass.actors.scheduler import ActorLostError, JobFailedError, Scheduler
from windlass.planner.plan import Placement
from windlass.storage.ids import ActorName, Attempt, JobId, Kernel, Precision, Rank, Span, Step
from windlass.storage.store_format import CommitRecord

LAYOUT = make_layout(2048, 5000, 4096)
NUM_TARGETS = 10
AnyMessage = TypeVar("AnyMessage", bound=Message)
NBYTES_A_STEP = {"ssd-0": 50, "ssd-1": 30}


class Stage:
    """A scheduler whose actors answer each message inside the call that brings it."""

    def __init__(self, directory: Path, *, resume_from: CommitRecord | None = None, **changes: Any) -> None:
        options: dict[str, Any] = {"total_steps": 4, "deadline_s": 60.0, **changes}
        self.spec: JobSpec = make_spec(job_dir=str(directory), output_dir=str(directory / "out"), **options)
        self.context = make_context(self.spec, LAYOUT, str(directory / "arena"))
        self.received: list[tuple[ActorName, Message]] = []
        self.silent: set[type[Message]] = set()  # what no actor answers
        self.loss = 3.0
        self.losses: dict[int, float] = {}  # of steps in which it is another
        self.bad_outputs: set[tuple[int, Phase, int]] = set()  # step, phase and block that put out what is not finite
        self.bad_grads: set[tuple[int, int]] = set()  # step and block whose gradient is not finite
        self.loss_scale = 1.0  # of the step at hand
        self.bytes_written: Counter[str] = Counter()
        self.before: Callable[[Message], None] = lambda message: None
        self.check_actors: Callable[[], None] = lambda: None
        self.scheduler = Scheduler(
            self.context, self._send, resume_from=resume_from, check_actors=lambda: self.check_actors()
        )

    def commit(self, step: int) -> CommitRecord:
        """What the stores keep of a step that was committed."""
        (state,) = {
            each.trainer_state for _, each in self.received if isinstance(each, CommitStore) and each.step == step
        }
        return CommitRecord(
            sequence=step,
            step=Step(step),
            attempt=self.spec.attempt,
            rank=Rank(0),
            manifest=0,
            manifest_digest=0,
            pins=(),
            trainer_state=state,
        )

    def _send(self, to: ActorName, message: Message) -> None:
        self.received.append((to, message))
        self.before(message)
        if type(message) not in self.silent:
            for event in self._answers(to, message):
                self.scheduler.post(event)

    def _answers(self, to: ActorName, message: Message) -> list[Message]:
        facts: dict[str, Any] = {"job": message.job, "step": message.step}
        match message:
            case LoadModel():
                progress = LoadProgressed(
                    **facts, actor=optimizer_name(0), num_params=LAYOUT.numel // 2, total_params=LAYOUT.numel
                )
                return [progress, ModelLoaded(**facts)]
            case ComputeBlock():
                return self._computed(message, facts)
            case OffloadGrad():
                keys = LAYOUT.chunk_keys(message.block)
                chunks = tuple(GradChunk(key, Span(0, 4096)) for key in keys)
                return [GradOffloaded(**facts, block=message.block, chunks=chunks)]
            case UpdateBlock():
                return [BlockUpdated(**facts, block=message.block, actor=to)]
            case FlushBlock():
                return [BlockFlushed(**facts, block=message.block, actor=to)]
            case RestoreStates():
                return [StatesRestored(**facts, actor=to)]
            case CommitStore():
                self.bytes_written[to] += NBYTES_A_STEP[to]
                return [StoreCommitted(**facts, actor=to, bytes_read=100, bytes_written=self.bytes_written[to])]
            case ExportModel():
                Path(message.path).mkdir()
                return [ModelExported(**facts, path=message.path)]
        return []

    def _computed(self, message: ComputeBlock, facts: dict[str, Any]) -> list[Message]:
        events: list[Message] = []
        if message.phase is Phase.HEAD:
            self.loss_scale = message.loss_scale
        if message.phase in (Phase.HEAD, Phase.EVALUATE_HEAD):
            counts: dict[str, Any] = {"num_targets": NUM_TARGETS, "num_correct": 4, "group": message.group}
            loss_sum = self.losses.get(message.step, self.loss) * NUM_TARGETS
            events.append(LossComputed(**facts, phase=message.phase, loss_sum=loss_sum, **counts))
        if message.phase in (Phase.HEAD, Phase.BACKWARD):
            is_bad = (message.step, message.block) in self.bad_grads
            sq_sum = math.inf if is_bad else 12.0 * self.loss_scale**2
            events.append(BlockBackwardDone(**facts, block=message.block, grad_sq_sum=sq_sum))
        is_finite = (message.step, message.phase, message.block) not in self.bad_outputs
        work: dict[str, Any] = {"op": message.op, "phase": message.phase, "block": message.block, "compute_s": 0.1}
        return [*events, BlockComputed(**facts, **work, is_finite=is_finite)]

    def break_step(self, step: int, block: int) -> None:
        """The forward pass of a block overflows, and with it all that follows, as the GPU worker tells it."""
        head = len(LAYOUT.blocks) - 1
        self.bad_outputs |= {(step, Phase.FORWARD, each) for each in range(block, head)} | {(step, Phase.HEAD, head)}
        self.bad_grads |= {(step, each) for each in range(head + 1)}
        self.losses[step] = math.nan

    def sent(self, kind: type[AnyMessage]) -> list[AnyMessage]:
        """What was sent of one kind, in order."""
        return [message for _, message in self.received if isinstance(message, kind)]

    def run(self) -> dict[str, Any]:
        outcome = self.scheduler.run()
        last = journal_of(self.spec)[-1]
        assert (last.kind, last.data) == ("outcome", outcome)
        assert last.level == ("error" if outcome["status"] == "failed" else "info")
        return outcome


def failure(actor: str, error: str) -> ActorFailed:
    return ActorFailed(job=JobId("ftjob-1"), step=Step(1), actor=ActorName(actor), error=error, detail="Traceback")


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
    shape = stage.scheduler.pipeline.shape
    assert metrics_of(stage.spec, "learning_rate") == {step: shape.learning_rate(step) for step in range(1, 5)}
    assert metrics_of(stage.spec, "ssd_bytes_read") == dict.fromkeys(range(1, 5), 200)
    checkpoints = [record.data for record in records if record.kind == "checkpoint"]
    assert [each["fine_tuned_model_checkpoint"] for each in checkpoints] == ["out-step-2", "out"]
    metrics = {"train_loss": 3.0, "train_mean_token_accuracy": 0.4, "valid_mean_token_accuracy": 0.4}
    metrics |= {"valid_loss": 3.0, "full_valid_loss": 3.0}
    assert checkpoints[-1]["metrics"] == {"step": 4, **metrics}


def test_each_actor_is_told_what_is_its_own(stage: Stage) -> None:
    stage.run()
    receivers: dict[type[Message], set[str]] = {}
    for to, message in stage.received:
        receivers.setdefault(type(message), set()).add(to)
    assert receivers[LoadModel] == receivers[ExportModel] == {"optimizer-0"}
    assert receivers[ComputeBlock] == receivers[OffloadGrad] == {"gpu-0"}
    assert receivers[UpdateBlock] == {"optimizer-0", "optimizer-1"}
    assert receivers[CommitStore] == {"ssd-0", "ssd-1"}


@pytest.mark.parametrize(
    ("order", "keeps_grads", "updates_alone"),
    [
        (UpdateOrder.ACTIVE, False, False),
        (UpdateOrder.NAIVE, False, False),
        (UpdateOrder.KEPT, True, False),
        (UpdateOrder.AFTER_BACKWARD, True, True),
    ],
)
def test_the_policy_knows_the_order_of_updates(
    tmp_path: Path, order: UpdateOrder, keeps_grads: bool, updates_alone: bool
) -> None:
    stage = Stage(tmp_path, hyperparameters={"update_order": order, "max_bad_steps": 7})
    shape = stage.scheduler.pipeline.shape
    assert (shape.keeps_grads, shape.updates_alone, shape.max_bad_steps) == (keeps_grads, updates_alone, 7)
    assert stage.run()["status"] == "succeeded"


def test_clipping_tells_the_norm_and_scales_by_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path, hyperparameters={"clip_norm": 0.5})
    stage.run()
    norm = math.sqrt(3 * 12.0)
    assert metrics_of(stage.spec, "grad_norm") == pytest.approx(dict.fromkeys(range(1, 5), norm))
    (scale,) = {message.grad_scale for _, message in stage.received if isinstance(message, UpdateBlock)}
    assert scale == pytest.approx(0.5 / norm, rel=1e-5)


def test_a_failure_ends_the_job_and_names_the_actor(stage: Stage) -> None:
    def fail(message: Message) -> None:
        if isinstance(message, UpdateBlock) and message.step == 2:
            stage.scheduler.post(failure("optimizer-1", "no room"))

    stage.before = fail
    outcome = stage.run()
    assert outcome["status"] == "failed"
    assert outcome["error"] == {"code": "training_failed", "message": "optimizer-1: no room", "param": None}
    assert outcome["model_dir"] is None
    assert Path(stage.spec.job_dir, "error.txt").read_text() == "optimizer-1\nTraceback"


def test_an_actor_that_is_gone_ends_the_job(stage: Stage) -> None:
    def gone() -> None:
        raise JobFailedError("the process of gpu-0 died")

    stage.silent = {ComputeBlock}
    stage.check_actors = gone
    assert stage.run()["error"]["message"] == "the process of gpu-0 died"


@pytest.mark.parametrize(
    ("silent", "message"),
    [
        (LoadModel, "optimizer-0 did not finish loading the model within 0.5 s"),
        (ComputeBlock, "gpu-0 did not finish the forward of block 0 in step 1 within 0.5 s"),
        (OffloadGrad, "gpu-0 did not finish the gradient offload of block 2 in step 1 within 0.5 s"),
        (CommitStore, "ssd-0 did not finish the commit of step 0 within 0.5 s"),
        (ExportModel, "optimizer-0 did not finish the export of step 4 within 0.5 s"),
        (RestoreStates, "gpu-0 did not finish reading the states of step 0 into memory within 0.5 s"),
        (FlushBlock, "gpu-0 did not finish the flush of block 2, as step 3 left it within 0.5 s"),
    ],
)
def test_a_wait_that_is_too_long_names_step_block_and_actor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: type[Message], message: str
) -> None:
    monkeypatch.setattr(scheduler, "_TICK_S", 0.05)
    tiers = TIERED | {"total_steps": 4} if silent in (RestoreStates, FlushBlock) else {}
    stage = Stage(tmp_path, deadline_s=0.5, **tiers)
    stage.silent = {silent}
    outcome = stage.run()
    assert outcome["status"] == "failed"
    assert outcome["error"]["code"] == "training_stalled"
    assert outcome["error"]["message"].startswith(message)


def test_an_answer_that_nobody_asked_for_ends_the_job(stage: Stage) -> None:
    def stray(message: Message) -> None:
        if isinstance(message, LoadModel):
            stage.scheduler.post(ModelExported(job=message.job, step=Step(3), path="/elsewhere"))

    stage.before = stray
    assert "nobody asked for" in stage.run()["error"]["message"]


def test_cancelled_before_it_begins(stage: Stage) -> None:
    stage.silent = {LoadModel}
    stage.scheduler.cancel()
    outcome = stage.run()
    assert (outcome["status"], outcome["trained_tokens"], outcome["model_dir"]) == ("cancelled", 0, None)


def test_cancelled_in_a_step_it_ends_with_that_step(tmp_path: Path) -> None:
    stage = Stage(tmp_path, total_steps=100, checkpoint_every=1)

    def cancel(message: Message) -> None:
        if isinstance(message, ComputeBlock) and message.step == 3:
            stage.scheduler.cancel()

    stage.before = cancel
    assert stage.run()["status"] == "cancelled"
    assert len(losses_of(stage.spec)) == 3
    exports = [message.step for _, message in stage.received if isinstance(message, ExportModel)]
    assert exports == [1, 2]


def test_cancelled_when_the_model_is_written_it_has_succeeded(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    def cancel(message: Message) -> None:
        if isinstance(message, ExportModel):
            stage.scheduler.cancel()

    stage.before = cancel
    assert stage.run()["status"] == "succeeded"


def run_first_attempt(directory: Path) -> Stage:
    """A whole job, whose commits a later attempt can be given."""
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


def test_a_committed_step_that_nobody_told_of_is_told_by_the_next_attempt(tmp_path: Path) -> None:
    first = run_first_attempt(tmp_path / "lost")
    stage = Stage(tmp_path, resume_from=first.commit(2), attempt=Attempt(3))
    stage.run()
    assert metrics_of(stage.spec, "train_loss") == {2: 3.0, 3: 3.0, 4: 3.0}
    assert metrics_of(stage.spec, "trained_tokens") == {step: step * NUM_TARGETS for step in (2, 3, 4)}


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
    assert outcome["status"] == "interrupted"
    assert outcome["error"] == {"code": "process_lost", "message": "the process of ssd-1 died", "param": None}


def test_bytes_written_are_those_of_the_step_and_of_the_job_by_ssd(tmp_path: Path) -> None:
    """Those of loading count for the job and for no step; a resumed attempt goes on from what is written by then."""
    first = run_first_attempt(tmp_path)
    stage = Stage(tmp_path, resume_from=first.commit(2), attempt=Attempt(3))
    stage.run()
    told = [record.data for record in journal_of(stage.spec) if record.kind == "metrics"]
    assert [data["step"] for data in told] == [1, 2, 3, 4, 3, 4]
    assert {data["ssd_bytes_written_step"] for data in told} == {80}
    assert all(data["ssd_bytes_written_step_by_ssd"] == [50, 30] for data in told)
    # Loading is written as a step is; steps 3 and 4 were written twice.
    assert [data["ssd_bytes_written_by_ssd"] for data in told] == [[50 * n, 30 * n] for n in (2, 3, 4, 5, 6, 7)]
    assert [data["ssd_bytes_written"] for data in told] == [80 * n for n in (2, 3, 4, 5, 1, 2)]  # of the attempt


def test_bytes_written_to_other_ssds_are_not_carried_over(tmp_path: Path) -> None:
    first = run_first_attempt(tmp_path)
    stage = Stage(tmp_path, resume_from=first.commit(3), attempt=Attempt(3), ssd_dirs=("/ssd0",))
    stage.run()
    told = [record.data["ssd_bytes_written_by_ssd"] for record in journal_of(stage.spec) if record.kind == "metrics"]
    assert told[-2:] == [[250, 150], [50]]


# --- states in memory: not every step is committed -------------------------------------------------------------------

TIERED: dict[str, Any] = {
    "total_steps": 7,
    "placement": Placement(host_blocks=(0,), device_blocks=(2,), commit_every=3),
}


def told_steps(spec: JobSpec, attempt: int = 2) -> list[int]:
    """Steps in the order in which an attempt told of their training."""
    records = [each for each in journal_of(spec) if each.attempt == attempt and "train_loss" in each.data]
    return [each.data["step"] for each in records]


def test_the_policy_knows_where_states_rest(tmp_path: Path) -> None:
    stage = Stage(tmp_path, **TIERED)
    shape = stage.scheduler.pipeline.shape
    assert (shape.host_blocks, shape.device_blocks, shape.spilled_blocks) == ({0}, {2}, frozenset())
    assert shape.commit_every == 3
    assert stage.run()["status"] == "succeeded"
    assert {(to, message.block) for to, message in stage.received if isinstance(message, FlushBlock)} == {
        ("optimizer-0", 0),
        ("gpu-0", 2),
    }
    restored = [(to, message.step) for to, message in stage.received if isinstance(message, RestoreStates)]
    assert restored == [("gpu-0", 0), ("optimizer-0", 0)]
    spilled = Stage(tmp_path / "spilled", hyperparameters=FP16, placement=Placement(num_host_grad_blocks=1))
    assert spilled.scheduler.pipeline.shape.spilled_blocks == {1, 2}
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
    """What a step writes is the mean since the commit before, and not told before that is known."""
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
    assert [data["ssd_bytes_written"] for data in told] == [0, 0, 80, 160]
    assert [data["ssd_bytes_written_by_ssd"][0] for data in told] == [200, 200, 250, 300]
    assert [data.get("ssd_bytes_written_step_by_ssd") for data in told] == [None, None, a_step, last]


def test_steps_past_the_last_commit_are_trained_and_told_again(tmp_path: Path) -> None:
    first = Stage(tmp_path, **TIERED)

    def lose(message: Message) -> None:
        if isinstance(message, ComputeBlock) and message.step == 6:
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
            stage.scheduler.cancel()

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
            stage.scheduler.cancel()

    stage.before = cancel
    outcome = stage.run()
    assert (outcome["status"], outcome["trained_tokens"]) == ("cancelled", 4 * NUM_TARGETS)
    assert [message.step for message in stage.sent(CommitStore)][-2:] == [4, 4]
    assert told_steps(stage.spec) == [1, 2, 3, 4]


def test_skipped_steps_between_commits_are_told_and_count_in_the_next_commit(tmp_path: Path) -> None:
    stage = Stage(tmp_path, **TIERED, hyperparameters=FP16)
    for step in (2, 3, 4, 7):
        stage.bad_grads.add((step, 1))
    assert stage.run()["trained_tokens"] == 7 * NUM_TARGETS
    assert told_steps(stage.spec) == [1, 2, 3, 4, 5, 6, 7]
    assert metrics_of(stage.spec, "skipped_steps") == {1: 0, 2: 1, 3: 2, 4: 3, 5: 3, 6: 3, 7: 4}
    commits = {message.step: message.states_step for message in stage.sent(CommitStore)}
    assert commits == {0: 0, 3: 1, 6: 6, 7: 6}
    tokens = {step: json.loads(stage.commit(step).trainer_state)["trained_tokens"] for step in commits}
    assert tokens == {step: step * NUM_TARGETS for step in commits}
    dropped = {(message.step, message.block) for message in stage.sent(GradDropped)}
    assert dropped == {(step, block) for step in (2, 3, 4, 7) for block in range(3)}
    assert [message.split(":")[0] for message in warnings_of(stage.spec)] == [
        f"Step {step} skipped" for step in (2, 3, 4, 7)
    ]


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
    """Each optimizer says what it runs, as it does when it is set up."""
    for name, kernel in zip(stage.scheduler.pipeline.shape.optimizers, kernels, strict=True):
        stage.scheduler.post(KernelChosen(job=stage.spec.job, step=Step(0), actor=name, kernel=kernel))


def test_another_kernel_than_before_is_told(tmp_path: Path) -> None:
    first = Stage(tmp_path / "lost")
    kernel_chosen(first, Kernel.COMPILED, Kernel.COMPILED)
    first.run()
    assert warnings_of(first.spec) == []
    assert "optimizer-1 updates with the compiled kernel" in [record.message for record in journal_of(first.spec)]
    for kernel, num_warnings in ((Kernel.COMPILED, 0), (Kernel.FUSED, 1)):
        stage = Stage(tmp_path / kernel, resume_from=first.commit(2), attempt=Attempt(3))
        kernel_chosen(stage, Kernel.COMPILED, kernel)
        assert stage.run()["status"] == "succeeded"
        warnings = warnings_of(stage.spec)
        assert len(warnings) == num_warnings
        assert all("updated with the compiled kernel: the results may differ" in each for each in warnings)


# --- what is not finite ---------------------------------------------------------------------------------------------

FP16 = {"precision": Precision.FP16}


def strict_journal(spec: JobSpec) -> list[dict[str, Any]]:
    """Every line of the journal, read by a parser that takes no NaN and no Infinity."""

    def refuse(name: str) -> float:
        pytest.fail(f"{name} is no JSON")

    lines = Path(spec.job_dir, "journal.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def warnings_of(spec: JobSpec) -> list[str]:
    return [record.message for record in journal_of(spec) if record.level == "warn"]


def test_a_skipped_step_is_told_with_its_first_block_and_its_scale(tmp_path: Path) -> None:
    stage = Stage(tmp_path, hyperparameters=FP16)
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
    assert {(m.step, m.optimizer_step, m.grad_scale) for m in stage.sent(UpdateBlock)} == {
        (1, 1, 1 / 65536),
        (4, 2, 1 / 16384),
    }


def test_a_head_that_overflows_is_the_first_that_did(tmp_path: Path) -> None:
    """Not its gradient, which the GPU worker tells of before it says that the operation is done."""
    stage = Stage(tmp_path, hyperparameters=FP16)
    stage.break_step(2, block=2)
    stage.run()
    (told,) = warnings_of(stage.spec)
    assert told.startswith("Step 2 skipped: the head of block 2 was not finite")


def test_without_loss_scaling_nothing_is_told_of_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path, hyperparameters={"clip_norm": 1.0})
    stage.break_step(3, block=0)
    assert stage.run()["status"] == "succeeded"
    assert warnings_of(stage.spec) == ["Step 3 skipped: the forward of block 0 was not finite"]
    assert metrics_of(stage.spec, "loss_scale") == dict.fromkeys(range(1, 5), 1.0)
    assert metrics_of(stage.spec, "skipped_steps") == {1: 0, 2: 0, 3: 1, 4: 1}


def test_what_is_not_finite_in_an_evaluation_ends_nothing(tmp_path: Path) -> None:
    stage = Stage(tmp_path, num_validation_examples=9, evaluate_every=4)
    stage.loss = math.inf
    stage.losses = dict.fromkeys(range(1, 4), 3.0)
    assert stage.run()["status"] == "succeeded"
    assert metrics_of(stage.spec, "valid_loss") == {4: None}
    told = [record["message"] for record in strict_journal(stage.spec)]
    assert "Step 4: validation loss=not finite" in told
    assert warnings_of(stage.spec) == []


def told_late(stage: Stage, step: int) -> None:
    """Lets the SSDs say that a step is committed only when the next one's gradients are all known."""

    def look(message: Message) -> None:
        if isinstance(message, CommitStore) and message.step == step:
            stage.silent.add(CommitStore)
        if isinstance(message, OffloadGrad) and (message.step, message.block) == (step + 1, 0):
            stage.silent.clear()
            for name in stage.scheduler.pipeline.shape.ssd_servers:
                facts: dict[str, Any] = {"bytes_read": 100, "bytes_written": 100}
                stage.scheduler.post(StoreCommitted(job=message.job, step=Step(step), actor=name, **facts))

    stage.before = look


@pytest.mark.parametrize(
    ("hyperparameters", "is_next_bad"),
    [({}, False), ({"clip_norm": 1.0}, False), ({"clip_norm": 1.0}, True), (FP16, False), (FP16, True)],
    ids=["active", "clipped", "clipped-next-skipped", "fp16", "fp16-next-skipped"],
)
def test_a_steps_metrics_are_its_own_though_the_next_one_has_begun(
    tmp_path: Path, hyperparameters: dict[str, Any], is_next_bad: bool
) -> None:
    stage = Stage(tmp_path, hyperparameters=hyperparameters)
    if is_next_bad:
        stage.bad_grads.add((3, 1))
    told_late(stage, step=2)
    assert stage.run()["status"] == "succeeded"
    num_skipped = int(is_next_bad)
    assert metrics_of(stage.spec, "skipped_steps") == {1: 0, 2: 0, 3: num_skipped, 4: num_skipped}
    before, after = (65536.0, 65536.0 / 2**num_skipped) if hyperparameters == FP16 else (1.0, 1.0)
    assert metrics_of(stage.spec, "loss_scale") == {1: before, 2: before, 3: before, 4: after}


def test_what_a_commit_keeps_is_taken_up(tmp_path: Path) -> None:
    first = Stage(tmp_path / "lost", hyperparameters=FP16)
    first.break_step(2, block=0)
    first.run()
    state = json.loads(first.commit(2).trainer_state, parse_constant=pytest.fail)
    assert state["trainer"] == {"optimizer_step": 1, "bad_steps": 1, "loss_scale": 32768.0, "good_steps": 0}
    assert state["metrics"] == {"train_loss": None, "train_mean_token_accuracy": 0.4, "grad_norm": None}

    stage = Stage(tmp_path, resume_from=first.commit(2), attempt=Attempt(3), hyperparameters=FP16)
    assert stage.run()["status"] == "succeeded"
    assert {(m.step, m.optimizer_step, m.grad_scale) for m in stage.sent(UpdateBlock)} == {
        (3, 2, 1 / 32768),
        (4, 3, 1 / 32768),
    }
    scales = {(m.step, m.loss_scale) for m in stage.sent(ComputeBlock) if m.phase is Phase.HEAD}
    assert scales == {(3, 32768.0), (4, 32768.0)}
    # Nobody had told of step 2.
    records = strict_journal(stage.spec)
    assert "Step 2/4: training loss=not finite" in [record["message"] for record in records]
    assert metrics_of(stage.spec, "train_loss") == {2: None, 3: 3.0, 4: 3.0}
    assert metrics_of(stage.spec, "trained_tokens") == {step: step * NUM_TARGETS for step in (2, 3, 4)}
    assert json.loads(stage.commit(4).trainer_state) == json.loads(first.commit(4).trainer_state)


def test_too_many_skipped_steps_end_the_job_and_name_step_and_block(tmp_path: Path) -> None:
    stage = Stage(tmp_path, hyperparameters={**FP16, "max_bad_steps": 1})
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
    options: dict[str, Any] = {"hyperparameters": {**FP16, "max_bad_steps": 1}}
    first = Stage(tmp_path / "lost", **options)
    first.break_step(2, block=0)
    first.run()
    stage = Stage(tmp_path, resume_from=first.commit(2), attempt=Attempt(3), **options)
    stage.break_step(3, block=0)
    message = stage.run()["error"]["message"]
    assert "gradients of 2 steps in a row, up to step 3" in message


@pytest.mark.parametrize("is_forward", [True, False])
def test_where_updates_have_begun_what_is_not_finite_ends_the_job(tmp_path: Path, is_forward: bool) -> None:
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
