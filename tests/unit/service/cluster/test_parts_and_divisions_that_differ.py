"""A head and a box that know different things of a job: one is restored from a backup, older, or planned anew."""

import json
from dataclasses import replace

import pytest
from sqlalchemy import delete, update

from tests.support.service.cluster_stage import NAME
from tests.support.service.spread_stage import PLAN, Spread
from windlass.actors.scheduler.scheduler import INTERRUPTED
from windlass.service.jobs.stage_plans import keep_stages, stages_digest, stages_of
from windlass.service.machine.fleet.messages import SyncRequest
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Job, JobPart
from windlass.storage.sql.repositories.boxes import PartRepository


@pytest.mark.long
def test_box_that_has_lost_its_home_says_so(spread: Spread) -> None:
    job_id = spread.run()
    spread.end_attempt(job_id, INTERRUPTED)
    spread.go_on(lambda: spread.state(job_id) == "ready")
    spread.agent._takings.forget(job_id)
    with spread.box.database.write() as session:
        PartRepository(session).remove(job_id)
    spread.go_on(lambda: spread.state(job_id) == "lost")
    spread.head.now += 300
    spread.head.tick(2)
    assert "has lost its part" in (spread.head.job(job_id).waiting_reason or "")
    later = spread.prepare(box="head")
    spread.go_on(lambda: spread.head.status(later) is JobStatus.RUNNING)


def test_head_whose_database_is_older_than_the_division_does_not_make_boxes_remove_states(spread: Spread) -> None:
    job_id = spread.run()
    spread.end_attempt(job_id, INTERRUPTED)
    spread.go_on(lambda: (spread.part(job_id) or JobPart()).served == 1 and spread.state(job_id) == "ready")
    with spread.head.database.write() as session:
        PartRepository(session).remove(job_id)
    for _ in range(3):
        spread.agent.tick()
    part = spread.part(job_id)
    assert part is not None
    assert (part.position, part.state) == (1, "ready")
    assert part.served > 0
    assert spread.part(job_id, spread.box) is not None


def test_box_that_has_served_more_attempts_than_the_head_knows_serves_the_next(spread: Spread) -> None:
    job_id = spread.run()
    spread.end_attempt(job_id, INTERRUPTED)
    with spread.box.database.write() as session:
        session.execute(update(JobPart).values(served=5))
    spread.head.tick()
    spread.head.now += 300
    spread.go_on(lambda: spread.head.status(job_id) is JobStatus.RUNNING)
    assert spread.head.job(job_id).attempt == 6


def test_part_that_was_planned_anew_begins_with_the_new_plan(spread: Spread) -> None:
    job_id = spread.divide()
    spread.until(lambda: spread.state(job_id) == "ready")
    changed = replace(PLAN, step_s=3.0)
    keep_stages(spread.head.settings, job_id, changed)
    spread.agent.tick()
    assert spread.state(job_id) == "copying", "what the box has is not what it is to have"
    spread.go_on(lambda: spread.box.runners.alive)
    assert stages_of(spread.box.settings, job_id) == changed


def test_part_of_a_plan_with_fewer_fields_is_not_lost_when_a_restored_head_takes_it(spread: Spread) -> None:
    before = spread.head.job(job_id := spread.prepare(boxes=2)).hyperparameters
    spread.head.tick()
    spread.head.stage_planners[-1].answer = PLAN
    spread.go_on(lambda: spread.box.runners.alive)
    for stage in (spread.head, spread.box):  # as an older release has written it
        path = stage.settings.jobs_dir / job_id / "prepare" / "stages.json"
        values = json.loads(path.read_text())
        del values["layout_epoch"]
        path.write_text(json.dumps(values))
    spread.end_attempt(job_id, INTERRUPTED)
    spread.go_on(lambda: spread.state(job_id) == "ready" and spread.head.status(job_id) is JobStatus.QUEUED)
    spread.forget_division(job_id, before)
    spread.go_on(lambda: spread.head.runners.alive)
    assert spread.head.job(job_id).attempt == 2
    assert stages_digest(spread.head.settings, job_id) == stages_digest(spread.box.settings, job_id)


def test_head_that_is_older_than_the_division_takes_it_from_its_boxes(spread: Spread) -> None:
    before = spread.head.job(job_id := spread.prepare(boxes=2)).hyperparameters
    spread.head.tick()
    spread.head.stage_planners[-1].answer = replace(PLAN, num_microbatches=1)
    spread.go_on(lambda: spread.box.runners.alive)
    spread.end_attempt(job_id, INTERRUPTED)
    spread.go_on(lambda: spread.state(job_id) == "ready" and spread.head.status(job_id) is JobStatus.QUEUED)
    spread.forget_division(job_id, before)
    spread.go_on(lambda: spread.head.runners.alive)
    assert spread.head.job(job_id).attempt == 2
    assert spread.head.job(job_id).hyperparameters["num_microbatches"] == 1
    assert stages_of(spread.head.settings, job_id) == stages_of(spread.box.settings, job_id)
    assert any("the division that its boxes have" in message for message in spread.head.messages(job_id))


@pytest.mark.long
def test_part_of_another_division_is_not_used(spread: Spread) -> None:
    job_id = spread.run()
    spread.end_attempt(job_id, INTERRUPTED)
    spread.go_on(lambda: spread.state(job_id) == "ready")
    keep_stages(spread.head.settings, job_id, replace(PLAN, step_s=3.0))
    spread.go_on(lambda: spread.state(job_id) == "lost")
    spread.head.now += 300
    spread.head.tick(2)
    reason = spread.head.job(job_id).waiting_reason or ""
    assert f"box {NAME} has a part of another division of the job; `windlass restart`" in reason


def test_box_keeps_its_part_of_a_job_that_a_restored_head_does_not_know(spread: Spread) -> None:
    job_id = spread.run()
    spread.end_attempt(job_id, INTERRUPTED)
    spread.go_on(lambda: spread.state(job_id) == "ready" and spread.head.status(job_id) is JobStatus.QUEUED)
    with spread.head.database.write() as session:
        PartRepository(session).remove(job_id)
        session.execute(delete(Job).where(Job.id == job_id))
    for _ in range(4):
        spread.agent.tick()
    part = spread.part(job_id, spread.box)
    assert part is not None
    assert part.attempt == 0
    assert (spread.box.settings.jobs_dir / job_id).is_dir()


def test_part_on_a_box_of_the_version_before_is_not_called_lost(
    spread: Spread, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = spread.run()
    spread.end_attempt(job_id, INTERRUPTED)
    spread.go_on(lambda: spread.state(job_id) == "ready" and spread.head.status(job_id) is JobStatus.QUEUED)
    to_json = SyncRequest.model_dump_json

    def without_plans(request: SyncRequest) -> str:
        as_json = json.loads(to_json(request))
        for told in as_json["parts"].values():
            del told["plan"]
            del told["division"]
        return json.dumps(as_json)

    monkeypatch.setattr(SyncRequest, "model_dump_json", without_plans)
    for _ in range(3):
        spread.agent.tick()
    assert spread.state(job_id) in ("ready", "running")
