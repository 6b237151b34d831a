"""The checkpoints that are made and kept, and early ends of jobs; a restart makes the same decisions."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.actors.scheduler_stage import Clock, Stage
from tests.support.actors.specs import make_spec
from tests.support.training import journal_of
from windlass.actors.messages import ComputeBlock, ComputeProgressed, ExportModel, LoadModel, Message, Phase
from windlass.actors.scheduler import scheduler
from windlass.actors.scheduler.checkpoint_policy import Checkpoints
from windlass.actors.scheduler.scheduler import PAUSED
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.training_config.training_config import EarlyStopping, FinalModel
from windlass.storage.ids import Attempt

EVALUATED: dict[str, Any] = {"num_validation_examples": 9, "evaluate_every": 1}


def make(**changes: Any) -> Checkpoints:
    return Checkpoints(make_spec(**(EVALUATED | {"total_steps": 100} | changes)))


# --- decisions ------------------------------------------------------------------------------------------------------


def test_the_best_is_the_lowest_loss_so_far_and_one_that_is_not_finite_is_none() -> None:
    checkpoints = make(keep_best=True)
    losses = [None, 3.0, 3.0, 2.5, None, 2.6, 2.4]
    verdicts = [checkpoints.evaluated(step, loss) for step, loss in enumerate(losses, start=1)]
    assert [verdict.is_best for verdict in verdicts] == [False, True, False, True, False, False, True]
    assert checkpoints.best == (7, 2.4)


def test_without_keeping_it_the_best_is_no_checkpoint() -> None:
    assert not make(early_stopping=EarlyStopping(patience=1)).evaluated(1, 3.0).is_best


@pytest.mark.parametrize(
    ("patience", "min_delta", "losses", "ends_at"),
    [
        (1, 0.0, [3.0, 2.0, 2.0], 3),
        (2, 0.0, [3.0, 3.1, 2.9, 2.9, 3.0], 5),
        (2, 0.0, [None, None], 2),
        # Small improvements count once they add up.
        (3, 0.5, [3.0, 2.8, 2.6, 2.4, 2.3, 2.2, 2.1], 7),
        (2, 0.5, [3.0, 2.8, 2.6], 3),
    ],
)
def test_a_job_ends_after_so_many_evaluations_without_an_improvement(
    patience: int, min_delta: float, losses: list[float | None], ends_at: int
) -> None:
    checkpoints = make(early_stopping=EarlyStopping(patience=patience, min_delta=min_delta))
    verdicts = [checkpoints.evaluated(step, loss) for step, loss in enumerate(losses, start=1)]
    assert [step for step, verdict in enumerate(verdicts, start=1) if verdict.ends_job] == [ends_at]


def test_the_last_step_is_no_early_end() -> None:
    checkpoints = make(early_stopping=EarlyStopping(patience=1), total_steps=2)
    assert not checkpoints.evaluated(1, 3.0).ends_job
    assert not checkpoints.evaluated(2, 3.0).ends_job


def exported(checkpoints: Checkpoints, *steps: int) -> list[int]:
    return [gone for step in steps for gone in checkpoints.exported(step, 0.0, is_last=step == 100)]


def test_the_previous_best_goes_unless_an_interval_made_it_too() -> None:
    checkpoints = make(keep_best=True, checkpoint_every=4)
    removed = []
    for step, loss in [(3, 3.0), (4, 2.0), (6, 1.0), (8, 1.5)]:
        checkpoints.evaluated(step, loss)
        if step % 4 == 0 or checkpoints.best == (step, loss):
            removed.append((step, exported(checkpoints, step)))
    assert removed == [(3, []), (4, [3]), (6, []), (8, [])]
    assert checkpoints.kept == [(4, ["interval"]), (6, ["best"]), (8, ["interval"])]


def test_old_interval_checkpoints_are_deleted_except_the_best() -> None:
    checkpoints = make(keep_best=True, checkpoint_every=2, keep_checkpoints=2)
    checkpoints.evaluated(2, 1.0)
    assert exported(checkpoints, 2, 4, 6, 8, 100) == [4]
    assert checkpoints.kept == [(2, ["best"]), (6, ["interval"]), (8, ["interval"]), (100, ["last"])]
    checkpoints.evaluated(9, 0.5)
    assert exported(checkpoints, 9) == [2]


def test_checkpoint_interval_counts_from_last_kept_checkpoint() -> None:
    checkpoints = make(checkpoint_minutes=2.0, checkpoint_every=10, keep_best=True)
    assert not checkpoints.is_time(1e6)  # loading is not training
    checkpoints.begin(1000.0)
    assert not checkpoints.is_time(1119.0)
    assert checkpoints.is_time(1120.0)
    checkpoints.time_has_come(5)
    assert not checkpoints.is_time(2000.0)  # it is in progress
    checkpoints.exported(5, 2000.0, is_last=False)
    assert checkpoints.reasons(5) == ["minutes"]
    checkpoints.evaluated(6, 1.0)
    checkpoints.exported(6, 2060.0, is_last=False)
    assert checkpoints.is_time(2120.0)
    checkpoints.exported(10, 2119.0, is_last=False)
    assert not checkpoints.is_time(2238.0)


def test_checkpoint_time_continues_in_next_attempt() -> None:
    checkpoints = make(checkpoint_minutes=1.0)
    checkpoints.begin(100.0)
    again = Checkpoints(make_spec(checkpoint_minutes=1.0), checkpoints.to_json(140.0))
    again.begin(9000.0)
    assert not again.is_time(9019.0)
    assert again.is_time(9020.0)


@given(
    losses=st.lists(st.one_of(st.none(), st.sampled_from([1.0, 1.5, 2.0, 2.5])), min_size=1, max_size=20),
    cuts=st.sets(st.integers(1, 20)),
    limit=st.one_of(st.none(), st.integers(1, 3)),
    patience=st.integers(1, 4),
)
def test_restored_policy_repeats_its_decisions(
    losses: list[float | None], cuts: set[int], limit: int | None, patience: int
) -> None:
    """An attempt is lost after the evaluation and the export of each of `cuts`; the next one repeats both."""
    spec = make_spec(
        **EVALUATED,
        total_steps=100,
        keep_best=True,
        checkpoint_every=3,
        keep_checkpoints=limit,
        early_stopping=EarlyStopping(patience=patience),
    )

    def step_through(checkpoints: Checkpoints, step: int, loss: float | None) -> tuple[object, ...]:
        verdict = checkpoints.evaluated(step, loss)
        removed = exported(checkpoints, step) if verdict.is_best or step % 3 == 0 else []
        return verdict, removed, checkpoints.kept

    undisturbed, lost = Checkpoints(spec), Checkpoints(spec)
    for step, loss in enumerate(losses, start=1):
        commit = json.dumps(lost.to_json(0.0))
        if step in cuts:
            step_through(lost, step, loss)
            lost = Checkpoints(spec, json.loads(commit))
        assert step_through(lost, step, loss) == step_through(undisturbed, step, loss)


# --- the runner -----------------------------------------------------------------------------------------------------


class Evaluated(Stage):
    """A stage whose validation losses are given by step."""

    def __init__(self, directory: Path, valid: dict[int, float], **changes: Any) -> None:
        super().__init__(directory, **(EVALUATED | changes))
        self.valid = valid

    def _computed(self, message: ComputeBlock) -> ComputeProgressed:
        self.loss = self.valid.get(message.step, 3.0) if message.phase is Phase.EVALUATE_HEAD else 3.0
        return super()._computed(message)

    @property
    def folders(self) -> list[str]:
        return sorted(path.name for path in Path(self.spec.job_dir).glob("*out*"))

    @property
    def told(self) -> list[tuple[int, list[str]]]:
        records = [record.data for record in journal_of(self.spec) if record.kind == "checkpoint"]
        return [(data["step_number"], data["reasons"]) for data in records]


def test_the_best_stays_and_the_job_ends_early(tmp_path: Path) -> None:
    stage = Evaluated(
        tmp_path,
        {1: 3.0, 2: 2.0, 3: 1.0, 4: 1.5, 5: 1.2},
        total_steps=9,
        keep_best=True,
        early_stopping=EarlyStopping(patience=2),
    )
    outcome = stage.run()
    remark = "Ended early, after step 5 of 9: no improvement in the last 2 evaluations; "
    remark += "the lowest validation loss was 1.0000, at step 3"
    assert (outcome["status"], outcome["total_steps"], outcome["remarks"]) == ("succeeded", 5, [remark])
    assert stage.folders == ["out", "out-step-3"]
    assert stage.told == [(1, ["best"]), (2, ["best"]), (3, ["best"]), (5, ["last"])]
    kept = [record.data["kept"] for record in journal_of(stage.spec) if record.kind == "checkpoint"]
    assert kept[-1] == [[3, ["best"]], [5, ["last"]]]
    assert {message.step for message in stage.sent(ComputeBlock)} == set(range(1, 6))
    metrics = [record.data["metrics"] for record in journal_of(stage.spec) if record.kind == "checkpoint"]
    assert [each["valid_loss"] for each in metrics] == [3.0, 2.0, 1.0, 1.2]


def test_the_jobs_model_can_be_the_best(tmp_path: Path) -> None:
    stage = Evaluated(tmp_path, {1: 2.0, 2: 1.0}, final_model=FinalModel.BEST)
    outcome = stage.run()
    assert outcome["remarks"] == ["The model is that of step 2, which had the lowest validation loss"]
    assert outcome["total_steps"] == 4
    copies = [(message.step, message.copy_of) for message in stage.sent(ExportModel)]
    assert copies == [(1, None), (2, None), (4, f"{stage.spec.output_dir}-step-2")]
    assert stage.told == [(1, ["best"]), (2, ["best"])]


def test_job_without_its_best_checkpoint_exports_last_with_warning(tmp_path: Path) -> None:
    stage = Evaluated(tmp_path, {1: 1.0}, final_model=FinalModel.BEST)

    def remove(message: Message) -> None:
        if isinstance(message, ComputeBlock) and message.step == 3:
            Path(f"{stage.spec.output_dir}-step-1").rename(tmp_path / "elsewhere")
            stage.before = lambda message: None

    stage.before = remove
    outcome = stage.run()
    assert outcome["status"] == "succeeded"
    assert "no longer exists: the model is that of the last step" in outcome["remarks"][0]
    assert stage.sent(ExportModel)[-1].copy_of is None
    assert stage.told[-1] == (4, ["last"])


def test_the_last_step_can_be_the_best(tmp_path: Path) -> None:
    stage = Evaluated(tmp_path, {1: 2.0, 4: 1.0}, final_model=FinalModel.BEST)
    assert "remarks" not in stage.run()
    assert stage.told == [(1, ["best"]), (4, ["best", "last"])]
    assert stage.folders == ["out"]


def test_metrics_of_a_checkpoint_are_those_of_its_step(tmp_path: Path) -> None:
    stage = Evaluated(tmp_path, {2: 2.0}, evaluate_every=2, checkpoint_every=3)
    stage.run()
    first, last = (record.data["metrics"] for record in journal_of(stage.spec) if record.kind == "checkpoint")
    assert first == {"step": 3, "train_loss": 3.0, "train_mean_token_accuracy": 0.4}
    assert last.keys() > first.keys()


@pytest.mark.parametrize("lost_at", [ComputeBlock, ExportModel])
@pytest.mark.parametrize("step", [2, 3, 4, 5])
def test_an_attempt_that_is_lost_is_followed_by_one_that_decides_the_same(
    tmp_path: Path, step: int, lost_at: type[Message]
) -> None:
    valid = {1: 3.0, 2: 1.0, 3: 2.0, 4: 0.5, 5: 1.5, 6: 1.4, 7: 1.3}
    options: dict[str, Any] = {"total_steps": 9, "keep_best": True, "early_stopping": EarlyStopping(patience=3)}
    options |= {"checkpoint_every": 3, "final_model": FinalModel.BEST}
    undisturbed = Evaluated(tmp_path / "undisturbed", valid, **options)
    expected = undisturbed.run()
    assert expected["total_steps"] == 7

    class Lost(BaseException):
        pass

    def lose(message: Message) -> None:
        is_evaluation = not isinstance(message, ComputeBlock) or message.phase is Phase.EVALUATE_HEAD
        if isinstance(message, lost_at) and message.step == step and is_evaluation:
            raise Lost

    first = Evaluated(tmp_path, valid, **options)
    first.before = lose
    if lost_at is ComputeBlock or step in (2, 3, 4):
        with pytest.raises(Lost):
            first.run()
    else:
        first.run()
        return
    again = Evaluated(tmp_path, valid, resume_from=first.commit(step), attempt=Attempt(3), **options)
    outcome = again.run()
    assert {**outcome, "model_dir": None} == {**expected, "model_dir": None}
    assert again.folders == undisturbed.folders == ["out", "out-step-3", "out-step-4", "out-step-6"]
    assert dict(again.told) == dict(undisturbed.told)


def test_a_checkpoint_every_so_many_minutes_is_of_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 25 s and loading 1000 s; every third step is committed."""
    clock = Clock()
    monkeypatch.setattr(scheduler, "time", clock)
    placement = Placement(host_blocks=(0,), device_blocks=(2,), commit_every=3)
    stage = Stage(tmp_path, total_steps=12, checkpoint_minutes=1.0, placement=placement, deadline_s=1e9)

    def look(message: Message) -> None:
        if isinstance(message, ComputeBlock) and message.phase is Phase.HEAD:
            clock.now += 25.0
        elif isinstance(message, LoadModel):
            clock.now += 1000.0

    stage.before = look
    stage.run()
    records = [record.data for record in journal_of(stage.spec) if record.kind == "checkpoint"]
    # A checkpoint is due after 3 steps, when the third has its losses. It is exported at the next commit, and the next
    # one is due 3 steps later.
    assert [(data["step_number"], data["reasons"]) for data in records][-1] == (12, ["last"])
    assert all(data["reasons"] == ["minutes"] and data["step_number"] % 3 == 0 for data in records[:-1])
    assert len(records) > 1


@pytest.mark.parametrize("how", ["lost", "paused"])
def test_a_checkpoint_that_was_due_is_made_by_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    clock = Clock()
    monkeypatch.setattr(scheduler, "time", clock)
    first = Stage(tmp_path, checkpoint_minutes=1.0, deadline_s=1e9)

    class Lost(BaseException):
        pass

    def look(message: Message) -> None:
        if isinstance(message, ComputeBlock) and message.step == 2 and message.phase is Phase.FORWARD:
            clock.now += 50.0
            if how == "paused":
                first.stop.pause()
        if isinstance(message, ExportModel):
            raise Lost

    first.before = look
    if how == "lost":
        with pytest.raises(Lost):
            first.run()
    else:
        assert first.run()["status"] == PAUSED
    kept = json.loads(first.commit(2).trainer_state)["checkpoints"]
    assert kept["timed"] == 2
    assert kept["elapsed_s"] >= 60.0
    clock.now = 0.0
    again = Stage(tmp_path, checkpoint_minutes=1.0, resume_from=first.commit(2), attempt=Attempt(3))
    again.run()
    assert [message.step for message in again.sent(ExportModel)] == [2, 4]
    records = [record.data for record in journal_of(again.spec) if record.kind == "checkpoint"]
    assert [data["reasons"] for data in records] == [["minutes"], ["last"]]


def test_a_pause_that_comes_after_the_decision_to_end_lets_the_job_finish(tmp_path: Path) -> None:
    stage = Evaluated(tmp_path, {}, total_steps=9, early_stopping=EarlyStopping(patience=1))

    def pause(message: Message) -> None:
        if isinstance(message, ExportModel):
            stage.stop.pause()

    stage.before = pause
    assert stage.run()["status"] == "succeeded"
    assert stage.folders == ["out"]


def test_a_cancelled_job_does_not_end_early(tmp_path: Path) -> None:
    stage = Evaluated(tmp_path, {}, total_steps=9, early_stopping=EarlyStopping(patience=1))

    def cancel(message: Message) -> None:
        if isinstance(message, ComputeBlock) and message.phase is Phase.EVALUATE_HEAD and message.step == 2:
            stage.stop.cancel()

    stage.before = cancel
    assert stage.run()["status"] == "cancelled"
    assert stage.folders == []
