"""The calls of boxes: a box may say anything, and reaches no files and no rows but those of its own jobs."""

import json
import secrets
import time
from typing import Any

import pytest

from tests.support.service.cluster_stage import NAME, Cluster
from tests.unit.service.cluster.box.test_agent import write_model
from windlass.service.cluster.box.connection import HeadRefused
from windlass.service.machine.fleet.content import JobContent
from windlass.service.machine.fleet.messages import SyncReply, SyncRequest
from windlass.storage.sql.models import Job
from windlass.storage.sql.repositories.boxes import BoxRepository
from windlass.storage.sql.repositories.jobs import JobRepository
from windlass.storage.sql.repositories.mirror import JobReport, MirroredEvent, MirrorRepository

PRIVATE = "ft:tiny:secret:aaaaaaaaaaaa"


def tell(cluster: Cluster, *reports: JobReport) -> SyncReply:
    return cluster.link.sync(SyncRequest(held=tuple(report.id for report in reports), jobs=reports))


def event(ordinal: int = 1, **more: Any) -> MirroredEvent:
    values: dict[str, Any] = {"attempt": 0, "seq": None, "created_at": time.time(), "level": "info"}
    values |= {"message": "x", "type": "message", "data": {}}
    return MirroredEvent(ordinal=ordinal, **(values | more))


def given(cluster: Cluster) -> MirroredEvent:
    """An event like that of a job that was given to the box."""
    return event(data={"box": NAME, "box_id": cluster.row.id})


def unknown_row(cluster: Cluster, **changes: Any) -> dict[str, Any]:
    """The row of a job that the head does not know."""
    with cluster.head.database.read() as session:
        row = MirrorRepository(session).row_of(cluster.head.job(cluster.prepare()))
    return row | {"id": f"ftjob-{secrets.token_hex(12)}", "idempotency_key": None} | changes


def is_known(cluster: Cluster, job_id: str) -> bool:
    with cluster.head.database.read() as session:
        return JobRepository(session).find(job_id) is not None


def check_no_files(cluster: Cluster, job_id: str) -> None:
    with pytest.raises(HeadRefused) as refusal:
        cluster.link.job(job_id)
    assert refusal.value.code == "job_elsewhere"


def test_adopted_job_opens_no_files(cluster: Cluster) -> None:
    row = unknown_row(cluster)
    tell(cluster, JobReport(id=row["id"], fields={}, events=[given(cluster)], until=1, row=row))
    assert is_known(cluster, row["id"])
    check_no_files(cluster, row["id"])


def test_queued_job_that_a_box_says_it_holds_opens_no_files(cluster: Cluster) -> None:
    job_id = cluster.prepare()
    cluster.link.sync(SyncRequest(held=(job_id,)))
    tell(cluster, JobReport(id=job_id, fields={}, events=[given(cluster)], until=1))
    check_no_files(cluster, job_id)


def test_job_with_the_model_of_another_user_is_not_adopted(cluster: Cluster) -> None:
    write_model(cluster.head.settings.fine_tuned_dir / PRIVATE, b"private weights")
    with cluster.head.database.write() as session:
        other = session.get_one(Job, cluster.prepare())
        session.add(Job(**(_columns(other) | {"id": "ftjob-" + "a" * 24, "owner": "alice"})))
    row = unknown_row(cluster, model=PRIVATE, owner="mallory")
    tell(cluster, JobReport(id=row["id"], fields={}, row=row))
    assert not is_known(cluster, row["id"])
    row = unknown_row(cluster, model=PRIVATE, owner="alice")
    tell(cluster, JobReport(id=row["id"], fields={}, row=row))
    assert is_known(cluster, row["id"])


def _columns(job: Job) -> dict[str, Any]:
    return {column.key: getattr(job, column.key) for column in Job.__mapper__.column_attrs}


@pytest.mark.parametrize(
    "lie",
    [
        {"id": "ftjob-1"},
        {"id": "../../etc"},
        {"model": "../private"},
        {"model": 1},
        {"suffix": "a/../b"},
        {"owner": 7},
        {"owner": "x" * 65},
        {"step": "abc"},
        {"attempt": -1},
        {"created_at": "soon"},
        {"created_at": float("inf")},
        {"seed": 2**70},
        {"error": [1]},
        {"method": []},
        {"hyperparameters": {"x": float("nan")}},
        {"hyperparameters": {"batch_size": "many"}},
        {"job_metadata": {"a": {}}},
        {"result_files": None},
        {"status": "nonsense"},
        {"waiting_reason": {"a": 1}},
    ],
    ids=repr,
)
def test_row_of_other_types_is_not_adopted_and_other_jobs_go_on(cluster: Cluster, lie: dict[str, Any]) -> None:
    good, bad = unknown_row(cluster), unknown_row(cluster, **lie)
    content = SyncRequest(
        held=(bad["id"], good["id"]),
        jobs=tuple(JobReport(id=row["id"], fields={}, row=row) for row in (bad, good)),
    )
    # As a program of another kind may send it: with numbers that are not in JSON.
    body = json.dumps(content.model_dump(mode="python"), default=str)
    answer = cluster.client.post("/v1/node/sync", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200
    assert (is_known(cluster, bad["id"]), is_known(cluster, good["id"])) == (False, True)


def test_job_given_to_a_box_that_has_another_name_since_is_still_its(cluster: Cluster) -> None:
    job_id = cluster.prepare()
    cluster.give(job_id)
    with cluster.head.database.write() as session:
        BoxRepository(session).set(cluster.row.id, name="cellar")
    assert isinstance(cluster.link.job(job_id), JobContent)
