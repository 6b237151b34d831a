"""Jobs over several boxes, and jobs that ask for one, over HTTP."""

import time
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from tests.support.service.api_client import context_of
from tests.support.service.boxes import add_box
from tests.support.service.cluster_stage import LAYOUT
from tests.support.service.dispatcher_stage import PREPARED
from tests.support.service.job_requests import JOBS, create
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.planner.stages.stages_plan import StagePlan, StagesPlan
from windlass.service.installation.home import node_of
from windlass.service.jobs.spec_builder import job_dir, resolve_job
from windlass.service.jobs.stage_plans import keep_stages
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Job
from windlass.storage.sql.repositories.boxes import BoxRepository, MirrorRepository, PartRepository, PartState
from windlass.storage.sql.repositories.jobs import JobRepository

BOX_FACTS: dict[str, Any] = {
    "windlass": "1",
    "python": "3",
    "torch": "2",
    "ray": "2",
    "num_cores": 8,
    "num_gpus": 5,
    "memory_nbytes": 1 << 36,
    "gpus": [{"name": "card", "memory_nbytes": 1 << 34}] * 5,
}


@pytest.mark.parametrize(
    ("windlass", "message"),
    [
        ({"boxes": 3}, "windlass.boxes: it asks for 3 boxes, and this service has 2: head, attic"),
        ({"boxes": ["head", "attik"]}, "windlass.boxes: there is no box 'attik'; there are head, attic"),
        (
            {"boxes": ["attic", "cellar"]},
            "windlass.boxes: there is no box 'cellar'; there are head, attic",
        ),
        ({"boxes": 1}, "windlass.boxes: a new job over several boxes has 2 at least; one on one box"),
        ({"boxes": 0}, "windlass.boxes: must be a number of boxes from 1 to 16, or a list of their names"),
        ({"boxes": True}, "windlass.boxes: must be a number of boxes from 1 to 16, or a list of their names"),
        (
            {"boxes": ["head"]},
            "windlass.boxes: a new job over several boxes has 2 at least; one on one box names it in",
        ),
        ({"boxes": ["head", "head"]}, "windlass.boxes: must name each box once"),
        ({"boxes": 2, "box": "attic"}, "windlass: give box (attic) for one box or boxes for several, not both"),
    ],
)
def test_boxes_of_a_job_are_checked(client: TestClient, file_id: str, windlass: dict[str, Any], message: str) -> None:
    add_box(context_of(client), "attic")
    error = create(client, file_id, windlass=windlass).json()["error"]
    assert error["message"].startswith(message)
    assert create(client, file_id, windlass={"boxes": ["head", "attic"]}).status_code == 200


def test_job_over_several_boxes_names_them_and_keeps_its_number_of_gpus(client: TestClient, file_id: str) -> None:
    box = add_box(context_of(client), "attic")
    job = create(client, file_id, windlass={"boxes": 2}).json()
    assert (job["windlass"]["settings"]["boxes"], job["windlass"]["boxes"]) == (2, None)
    with context_of(client).database.write() as session:
        PartRepository(session).add(job["id"], box.node, position=1, state=PartState.READY)
    assert client.get(f"{JOBS}/{job['id']}").json()["windlass"]["boxes"] == ["head", "attic"]
    alone = create(client, file_id).json()
    listed = {each["id"]: each["windlass"]["boxes"] for each in client.get(JOBS).json()["data"]}
    assert listed == {job["id"]: ["head", "attic"], alone["id"]: None}
    with context_of(client).database.read() as session:
        assert PartRepository(session).by_job([alone["id"]]) == {}, "only parts of the jobs that are shown are read"
        assert PartRepository(session).by_job([job["id"]]).keys() == {job["id"]}
        assert JobRepository(session).find_all([job["id"], "ftjob-none"]).keys() == {job["id"]}
    error = client.post(f"{JOBS}/{job['id']}/resume", json={"windlass": {"gpus": 1}}).json()["error"]
    assert (error["param"], error["code"]) == ("windlass.gpus", "invalid_value")
    named = create(client, file_id, windlass={"boxes": ["attic", "head"]}).json()
    assert named["windlass"]["boxes"] == ["head", "attic"], "also before it is divided"


def test_job_is_resumed_over_other_boxes_if_those_with_its_states_are_there(client: TestClient, file_id: str) -> None:
    context = context_of(client)
    add_box(context, "attic")
    away = add_box(context, "cellar", seen_s_ago=3600)
    alone, job_id = (create(client, file_id, windlass=each).json()["id"] for each in ({}, {"boxes": 2}))
    stages = tuple(
        StagePlan(
            box=box,
            first_block=first,
            stop_block=stop,
            placement=Placement(group_size=1),
            num_optimizers=1,
            peak_gib={},
        )
        for box, first, stop in (("head", 0, 2), (away.name, 2, 4))
    )
    (job_dir(context.settings, job_id) / "prepare").mkdir(parents=True)
    plan = StagesPlan(num_ranks=1, num_microbatches=2, update_order=UpdateOrder.KEPT, step_s=None, stages=stages)
    keep_stages(context.settings, job_id, plan)

    def resume(job: str, boxes: Any) -> Any:
        return client.post(f"{JOBS}/{job}/resume", json={"windlass": {"boxes": boxes}}).json()

    assert "expected to be paused but is validating_files" in resume(job_id, ["head", "attic"])["error"]["message"]
    for each in (alone, job_id):
        client.post(f"{JOBS}/{each}/pause")
    with context.database.write() as session:
        session.execute(update(Job).where(Job.id == job_id).values(attempt=1))
    assert "there is no box 'attik'" in resume(job_id, ["head", "attik"])["error"]["message"]
    assert "the head's own box must be among them" in resume(job_id, ["attic", "cellar"])["error"]["message"]
    assert "the model has 2 layers, and each box needs one: give at most 2" in resume(job_id, 3)["error"]["message"]
    error = resume(job_id, ["head", "attic"])["error"]
    assert (error["param"], error["code"]) == ("windlass.boxes", "invalid_value")
    told = "box cellar has the states of layer 2 and the head, which no other box has, and is away: start it again"
    assert told in error["message"]
    with context.database.write() as session:
        BoxRepository(session).set(away.id, seen_at=time.time())
    resumed = resume(job_id, ["head", "attic"])
    assert resumed["windlass"]["settings"]["boxes"] == ["head", "attic"]
    messages = [event["message"] for event in client.get(f"{JOBS}/{job_id}/events").json()["data"]]
    assert "Resumed over the boxes head, attic" in messages


def test_job_on_the_head_is_resumed_over_several_boxes_and_one_on_another_box_is_not(
    client: TestClient, file_id: str
) -> None:
    context = context_of(client)
    box = add_box(context, "attic")
    job_id = create(client, file_id, windlass={"box": "head"}).json()["id"]
    client.post(f"{JOBS}/{job_id}/pause")
    (job_dir(context.settings, job_id)).mkdir(parents=True, exist_ok=True)
    (job_dir(context.settings, job_id) / "layout.json").write_text(LAYOUT.to_json())

    def change(**values: Any) -> None:
        with context.database.write() as session:
            session.execute(update(Job).where(Job.id == job_id).values(**values))

    def resume(**windlass: Any) -> Any:
        return client.post(f"{JOBS}/{job_id}/resume", json={"windlass": windlass}).json()

    here = node_of(context.settings.home)
    with context.database.read() as session:
        resolved = resolve_job(JobRepository(session).get(job_id), dict(PREPARED))
    change(attempt=1, node=box.node, hyperparameters=resolved.hyperparameters, total_steps=resolved.total_steps)
    error = resume(boxes=2)["error"]
    assert error["message"].startswith("windlass.boxes: the job is on box attic, and stays there: only a job on the")
    change(node=here)
    assert "the head's own box must be among them" in resume(boxes=["attic"])["error"]["message"]
    assert "the number of GPUs of a job over several boxes" in resume(boxes=2, gpus=1)["error"]["message"]
    resumed = resume(boxes=["head", "attic"])["windlass"]["settings"]
    assert (resumed["boxes"], resumed["box"]) == (["head", "attic"], None)
    client.post(f"{JOBS}/{job_id}/pause")
    assert resume(boxes=1)["windlass"]["settings"]["boxes"] == 1
    messages = [event["message"] for event in client.get(f"{JOBS}/{job_id}/events").json()["data"]]
    assert messages[0] == "Resumed on one box"


@pytest.mark.parametrize("is_taken", [False, True])
def test_job_that_a_box_has_not_taken_yet_is_resumed_over_several(
    client: TestClient, file_id: str, *, is_taken: bool
) -> None:
    context = context_of(client)
    box = add_box(context, "attic")
    job_id = create(client, file_id).json()["id"]
    with context.database.write() as session:
        session.execute(update(Job).where(Job.id == job_id).values(status=JobStatus.QUEUED))
        jobs, boxes = JobRepository(session), BoxRepository(session)
        MirrorRepository(session).give_away(jobs.get(job_id), boxes.get(box.id), message="is copied")
        if is_taken:
            [take] = boxes.instructions(box.id)
            boxes.withdraw(take.ordinal)
            session.execute(update(Job).where(Job.id == job_id).values(status=JobStatus.PAUSED))
        else:
            jobs.request_pause(job_id)
    answer = client.post(f"{JOBS}/{job_id}/resume", json={"windlass": {"boxes": 2}}).json()
    if is_taken:
        assert "the job is on box attic, and stays there" in answer["error"]["message"]
        return
    assert answer["windlass"]["settings"]["boxes"] == 2
    with context.database.read() as session:
        assert JobRepository(session).get(job_id).node == node_of(context.settings.home)
        assert BoxRepository(session).instructions(box.id) == []


def test_job_on_one_box_that_is_resumed_on_one_keeps_its_box(client: TestClient, file_id: str) -> None:
    add_box(context_of(client), "attic")
    job_id = create(client, file_id, windlass={"box": "attic"}).json()["id"]
    client.post(f"{JOBS}/{job_id}/pause")
    resumed = client.post(f"{JOBS}/{job_id}/resume", json={"windlass": {"boxes": 1}}).json()["windlass"]["settings"]
    assert (resumed["boxes"], resumed["box"]) == (None, "attic")


def test_gpus_are_those_of_the_box_that_a_job_asks_for(client: TestClient, file_id: str) -> None:
    with context_of(client).database.write() as session:
        for number, name in enumerate(("attic", "cellar")):
            facts = {**BOX_FACTS, "num_gpus": 4 + number}
            here = node_of(context_of(client).settings.home)
            BoxRepository(session).add(
                name=name, node=f"node-{name}", head=here, certificate=name, address="", facts=facts
            )
    error = create(client, file_id, windlass={"box": "attik"}).json()["error"]
    assert (error["param"], error["message"]) == (
        "windlass.box",
        "windlass.box: there is no box 'attik'; there are head, attic, cellar",
    )
    assert create(client, file_id, windlass={"gpus": 5, "lanes": 1}).status_code == 200
    error = create(client, file_id, windlass={"box": "attic", "gpus": 5, "lanes": 1}).json()["error"]
    assert (error["param"], error["message"]) == (
        "windlass.gpus",
        "box attic: windlass.gpus is 5, and the machine has 4 GPUs",
    )
    assert create(client, file_id, windlass={"box": "head", "gpus": 5, "lanes": 1}).status_code == 400
    job = create(client, file_id, windlass={"box": "cellar", "gpus": 5, "lanes": 1}).json()
    assert job["windlass"]["settings"]["box"] == "cellar"
    with context_of(client).database.write() as session:
        session.execute(update(Job).where(Job.id == job["id"]).values(node="node-cellar"))
    assert client.get(f"{JOBS}/{job['id']}").json()["windlass"]["box"] == "cellar"
