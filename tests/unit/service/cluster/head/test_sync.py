"""The calls of boxes: a box may say anything, and reaches no files and no rows but those of its own jobs."""

import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.service.api_client import serve
from tests.support.service.cluster_stage import NAME, Cluster
from tests.unit.service.cluster.box.test_agent import run, write_model
from windlass.service.cluster.box.connection import HeadRefused
from windlass.service.machine.fleet.content import JobContent, model_name
from windlass.service.machine.fleet.messages import SyncReply, SyncRequest
from windlass.storage.sql.models import Checkpoint, Job
from windlass.storage.sql.repositories.boxes import (
    BoxRepository,
    JobReport,
    MirroredCheckpoint,
    MirroredEvent,
    MirrorRepository,
)
from windlass.storage.sql.repositories.jobs import JobRepository

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
    post(cluster, *(JobReport(id=row["id"], fields={}, row=row) for row in (bad, good)))
    assert (is_known(cluster, bad["id"]), is_known(cluster, good["id"])) == (False, True)


def test_job_given_to_a_box_that_has_another_name_since_is_still_its(cluster: Cluster) -> None:
    job_id = cluster.prepare()
    cluster.give(job_id)
    with cluster.head.database.write() as session:
        BoxRepository(session).set(cluster.row.id, name="cellar")
    assert isinstance(cluster.link.job(job_id), JobContent)


def report_of(cluster: Cluster, job_id: str) -> JobReport:
    """The report that the box's agent would send next, of all columns."""
    with cluster.box.database.read() as session:
        return MirrorRepository(session).report(cluster.box.job(job_id), after=cluster.head.job(job_id).box_cursor)


@pytest.fixture
def users_see_all(cluster: Cluster, tmp_path: Path) -> Iterator[None]:
    """Afterwards the API still answers, and the job runs as before."""
    yield
    settings = cluster.head.settings.model_copy(update={"database_url": f"sqlite:///{tmp_path / 'head.db'}"})
    with serve(settings) as client:
        jobs = client.get("/v1/fine_tuning/jobs").json()["data"]
        for path in ("", *(f"/{job['id']}/{part}" for job in jobs for part in ("events", "checkpoints", "metrics"))):
            assert client.get(f"/v1/fine_tuning/jobs{path}").status_code == 200
        assert client.get("/v1/boxes").status_code == 200


@pytest.mark.usefixtures("users_see_all")
def test_fields_of_other_types_are_left_out_and_other_jobs_go_on(cluster: Cluster) -> None:
    job_id, other = run(cluster), cluster.prepare()
    cluster.give(other)
    cluster.until(lambda: cluster.has(other) and cluster.box.job(other).node == cluster.box.node)
    good = report_of(cluster, other)
    for lie in (
        {"step": "abc"},
        {"attempt": "x"},
        {"attempt": None},
        {"error": [1]},
        {"error": {"code": 1}},
        {"status": "nonsense"},
        {"status": None},
        {"waiting_reason": {"a": 1}},
        {"preparation": "x"},
        {"preparation": {"step": "plan_job", "elapsed_s": 1.0, "percent": 1}},
        {"preparation": {"step": "plan_job", "elapsed_s": 1.0, "summary": "x"}},
        {"estimated_finish": "soon"},
        {"estimated_finish": 1e300},
        {"started_at": float("nan")},
        {"trained_tokens": 2**70},
        {"result_files": "file-1"},
    ):
        report = report_of(cluster, job_id)
        report.fields.update({"step": 3} | lie)
        good.fields["total_steps"] = (good.fields["total_steps"] or 0) + 1
        post(cluster, report, good)
        assert cluster.head.job(job_id).step == 0, lie
        assert cluster.head.job(other).total_steps == good.fields["total_steps"], lie
    report = report_of(cluster, job_id)
    report.fields.update(step=3)
    tell(cluster, report)
    assert cluster.head.job(job_id).step == 3


@pytest.mark.usefixtures("users_see_all")
def test_events_of_other_types_are_replaced_and_those_after_them_are_stored(cluster: Cluster) -> None:
    job_id = run(cluster)
    cursor = cluster.head.job(job_id).box_cursor
    lies: list[dict[str, Any]] = [
        {"created_at": float("inf")},
        {"attempt": 2**40},
        {"level": "loud and long"},
        {"type": "other"},
        {"data": {"a": float("nan")}},
        {"type": "metrics"},
        {"type": "metrics", "data": {"step": "one"}},
        {"type": "metrics", "data": {"step": 1, "train_loss": "low"}},
        {"type": "metrics", "data": {"step": 1, "remaining_s": "x"}},
        {"type": "metrics", "data": {"step": 1, "ssd_bytes_written_by_ssd": [1], "ssd_bytes_written_step_by_ssd": []}},
    ]
    events = [event(cursor + 1 + index, **lie) for index, lie in enumerate(lies)]
    end = event(cursor + 1 + len(lies), message="the last")
    post(cluster, JobReport(id=job_id, fields={}, events=[*events, end], after=cursor))
    told = cluster.head.messages(job_id)[-len(lies) - 1 :]
    assert told == ["The box reported an event that cannot be read"] * len(lies) + ["the last"]
    assert cluster.head.job(job_id).box_cursor == end.ordinal


@pytest.mark.usefixtures("users_see_all")
def test_report_at_an_impossible_place_is_left_out(cluster: Cluster) -> None:
    job_id = run(cluster)
    cursor = cluster.head.job(job_id).box_cursor
    post(cluster, JobReport(id=job_id, fields={}, events=[event(2**70)], after=cursor))
    post(cluster, replace(report_of(cluster, job_id), until=2**70))
    assert cluster.head.job(job_id).box_cursor == cursor


@pytest.mark.usefixtures("users_see_all")
def test_checkpoint_of_another_job_stays_as_it_is(cluster: Cluster) -> None:
    other = cluster.prepare()
    job_id = run(cluster)
    values: dict[str, Any] = {"attempt": 1, "created_at": 1.0, "metrics": {}, "reasons": [], "nbytes": 1}
    with cluster.head.database.write() as session:
        session.add(Checkpoint(id="ftckpt-1", job_id=other, step_number=7, model="m", path="/m", **values))
    model = f"{model_name(cluster.head.job(job_id))}-step-1"
    write_model(cluster.head.settings.fine_tuned_dir / model, b"mine")
    mine = MirroredCheckpoint(id="ftckpt-1", step_number=1, model=model, **values)
    report = JobReport(id=job_id, fields={}, after=cluster.head.job(job_id).box_cursor, checkpoints=[mine])
    tell(cluster, report)
    for lie in ({"metrics": {"a": float("nan")}}, {"created_at": float("inf")}, {"nbytes": 2**70}):
        post(cluster, replace(report, checkpoints=[replace(mine, id="ftckpt-2", **lie)]))
    twice = [replace(mine, id=f"ftckpt-{number}") for number in (2, 3)]
    tell(cluster, replace(report, checkpoints=twice))
    with cluster.head.database.read() as session:
        rows = [(row.id, row.job_id, row.model) for row in session.query(Checkpoint)]
    assert rows == [("ftckpt-1", other, "m")]


def post(cluster: Cluster, *reports: JobReport) -> None:
    """Sends reports as a program of another kind may: with numbers that are not in JSON."""
    request = SyncRequest(held=tuple(report.id for report in reports), jobs=reports)
    body = json.dumps(request.model_dump(mode="python"), default=str)
    answer = cluster.client.post("/v1/node/sync", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
