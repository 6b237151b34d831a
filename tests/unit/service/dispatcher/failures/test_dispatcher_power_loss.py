"""Files that the dispatcher has written for a job survive a power loss, as its rows do."""

import json
from pathlib import Path

import pytest

from tests.support.power_cut import PowerCut
from tests.support.service.dispatcher_stage import PREPARED, Stage
from windlass.planner.question.job_plan import JobPlan
from windlass.planner.question.report import PlanReport
from windlass.service.installation.settings import Settings
from windlass.service.jobs.plan_files import keep_plan
from windlass.storage.sql.database import Database
from windlass.storage.sql.job_status import JobStatus


@pytest.fixture
def stage(tmp_path: Path, settings: Settings, database: Database) -> Stage:
    return Stage(tmp_path, database)


def test_dispatcher_power_loss_once_a_job_is_queued_leaves_what_was_prepared(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = PowerCut(stage.settings.jobs_dir, monkeypatch)
    job_id = stage.submit()
    stage.tick()
    order = stage.preparations[-1].order
    order.dataset_dir.mkdir(parents=True)
    (order.dataset_dir / "train.tokens").write_bytes(b"tokens")
    assert cut.left() == {}
    stage.preparations[-1].ending = PREPARED
    stage.tick()
    assert stage.job(job_id).status is JobStatus.RUNNING
    left = cut.left()
    assert left[f"{order.dataset_dir.relative_to(stage.settings.jobs_dir)}/train.tokens"] == b"tokens"
    plan = left[f"{order.work_dir.relative_to(stage.settings.jobs_dir)}/prepare_data.json"]
    assert json.loads(plan) == PREPARED["prepare_data"]


def test_dispatcher_power_loss_once_a_job_has_succeeded_leaves_its_result_file(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = PowerCut(stage.settings.files_dir, monkeypatch)
    job_id, journal = stage.run()
    journal.append("metrics", "Step 1", step=1, total_steps=4, train_loss=2.5, train_mean_token_accuracy=0.25)
    stage.export_model()
    journal.append_outcome("succeeded", "The model is ready")
    journal.close()
    stage.tick()
    (result,) = stage.job(job_id).result_files
    assert cut.left()[result].endswith(b"\n1,2.5,0.25,,\n")


def test_keep_plan_power_loss_afterwards_leaves_the_plan(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = stage.queue()
    cut = PowerCut(stage.settings.jobs_dir, monkeypatch)
    plan = JobPlan(report=PlanReport(feasible=True, reasons=("it fits",)))
    number = keep_plan(stage.settings, stage.job(job_id), plan)
    assert json.loads(cut.left()[f"{job_id}/plans/{number}.json"]) == plan.to_json()
