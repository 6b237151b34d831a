"""The deletions by retention settings: old, finished and unused objects."""

import errno
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.service.dispatcher_stage import AtOnce, Stage
from windlass.service.data import deletion
from windlass.service.data.deletion import delete_job
from windlass.service.dispatcher.housekeeping import Housekeeping
from windlass.service.installation.settings import Settings
from windlass.storage.sql.database import Database
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Checkpoint, DeletedJob
from windlass.storage.sql.repositories.audit import AuditRepository
from windlass.storage.sql.repositories.files import FileRepository
from windlass.storage.sql.repositories.jobs import JobRepository

DAY_S = 86400.0
NOW_S = 1_700_000_000.0


class Old:
    """A home with objects of any age, and its housekeeping."""

    def __init__(self, home: Path, database: Database, **settings: Any) -> None:
        self.stage = Stage(home, database, **settings)
        self.settings = self.stage.settings
        self.database = database
        self.now = self.ahead_s = 0.0
        self.housekeeping = Housekeeping(
            database,
            self.settings,
            node=self.stage.node,
            executor=AtOnce(),
            clock=lambda: self.now,
            wall_clock=lambda: NOW_S + self.ahead_s,
        )

    def job(self, *, days: float | None, node: str | None = None, **fields: Any) -> str:
        """A job that ended `days` days ago, or has not ended."""
        job_id = self.stage.submit(node=node or self.stage.node)
        (self.settings.jobs_dir / job_id).mkdir()
        with self.database.write() as session:
            row = JobRepository(session).get(job_id)
            for name, value in fields.items():
                setattr(row, name, value)
            if days is not None:
                row.status, row.finished_at = JobStatus.FAILED, NOW_S - days * DAY_S
        return job_id

    def checkpoint(self, job_id: str, model: str) -> None:
        (self.settings.fine_tuned_dir / model).mkdir()
        about = {"attempt": 1, "created_at": 1.0, "path": "", "metrics": {}, "reasons": []}
        step = len(list(self.settings.fine_tuned_dir.iterdir()))
        with self.database.write() as session:
            session.add(Checkpoint(id=f"ftckpt-{model}", job_id=job_id, model=model, step_number=step, **about))

    def file(self, name: str, *, days: float) -> None:
        (self.settings.files_dir / name).write_text("x")
        with self.database.write() as session:
            row = FileRepository(session).add(file_id=name, filename=name, purpose="fine-tune", nbytes=1)
            row.created_at = NOW_S - days * DAY_S

    def keep_house(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.housekeeping.tick()
        self.now += 1.0
        self.housekeeping.tick()

    def jobs(self) -> set[str]:
        with self.database.read() as session:
            rows = {row.id for row in JobRepository(session).page(limit=1000, after=None, metadata={}).rows}
        assert {path.name for path in self.settings.jobs_dir.iterdir()} == rows
        return rows

    def audit(self) -> list[tuple[str, str | None, str | None, str | None]]:
        with self.database.read() as session:
            rows = AuditRepository(session).page(limit=1000).rows
        return [(row.action, row.target, row.user, row.peer) for row in reversed(rows)]


def test_by_default_everything_is_kept(tmp_path: Path, database: Database) -> None:
    old = Old(tmp_path, database)
    job = old.job(days=9999)
    old.checkpoint(job, "ft:tiny::xa-step-1")
    old.file("file-1", days=9999)
    old.keep_house()
    assert old.jobs() == {job}
    assert (old.settings.fine_tuned_dir / "ft:tiny::xa-step-1").exists()
    assert (old.settings.files_dir / "file-1").exists()


def test_jobs_go_so_many_days_after_their_end(
    tmp_path: Path, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="windlass.service.dispatcher.housekeeping")
    old = Old(tmp_path, database, keep_jobs_days=30)
    oldest, older = old.job(days=40), old.job(days=30.1)
    kept = {old.job(days=29.9), old.job(days=None, created_at=1.0)}
    elsewhere = old.job(days=99, node="node-elsewhere")
    old.keep_house()
    assert old.jobs() == kept | {elsewhere}
    assert old.audit() == [("delete_job", job, None, "retention") for job in (oldest, older)]
    assert [vars(record)["job"] for record in caplog.records] == [oldest, older]


def test_a_clock_that_is_set_ahead_deletes_nothing_for_a_day(tmp_path: Path, database: Database) -> None:
    old = Old(tmp_path, database, keep_jobs_days=30)
    old.job(days=31)
    kept = {old.job(days=1)}
    old.keep_house()
    assert old.jobs() == kept
    old.ahead_s = 40 * DAY_S
    old.keep_house(3600.0)
    old.keep_house(DAY_S - 10)
    assert old.jobs() == kept
    old.ahead_s = 0.0  # the administrator noticed
    old.keep_house(2 * DAY_S)
    assert old.jobs() == kept
    old.ahead_s = 40 * DAY_S  # or the clock is right
    old.keep_house(3600.0)
    assert old.jobs() == kept
    old.keep_house(DAY_S + 10)
    assert old.jobs() == set()


def test_failed_removal_is_retried_after_half_a_minute(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = Old(tmp_path, database)
    job_id, other = old.job(days=1), old.job(days=2)
    with database.write() as session:
        for each in (job_id, other):
            delete_job(session, old.settings, JobRepository(session).get(each))
    remove, tries = deletion.remove_deleted_job, list[str]()

    def fail_for_one(database: Database, settings: Settings, job: DeletedJob) -> bool:
        tries.append(job.id)
        if job.id == job_id and len(tries) < 3:
            raise OSError(errno.EIO, "Input/output error")
        return remove(database, settings, job)

    monkeypatch.setattr(deletion, "remove_deleted_job", fail_for_one)
    old.keep_house()
    assert sorted(tries) == sorted([job_id, other])
    assert f"job {job_id} is deleted but could not be removed; it will be tried again" in caplog.text
    old.keep_house(28)
    assert len(tries) == 2
    old.keep_house(2)
    assert tries[2:] == [job_id]
    assert list(old.settings.jobs_dir.iterdir()) == []


# Model names whose beginning is no random id of a job.
def test_checkpoints_go_and_models_stay(tmp_path: Path, database: Database) -> None:
    old = Old(tmp_path, database, keep_checkpoints_days=7)
    job, young = old.job(days=8, fine_tuned_model="ft:tiny::xa"), old.job(days=6)
    running, used = old.job(days=None), old.job(days=8)
    elsewhere, failed = old.job(days=8, node="node-elsewhere"), old.job(days=9)
    for owner, model in ((job, "ft:tiny::xa"), (job, "ft:tiny::xa-step-1"), (young, "ft:tiny::xb-step-1")):
        old.checkpoint(owner, model)
    old.checkpoint(running, "ft:tiny::xc-step-1")
    old.checkpoint(used, "ft:tiny::xd-step-1")
    old.checkpoint(elsewhere, "ft:tiny::xe-step-1")
    old.checkpoint(failed, "ft:tiny::xf-step-1")  # of a job without a model
    old.job(days=None, model="ft:tiny::xd-step-1")
    old.keep_house()
    left = {path.name for path in old.settings.fine_tuned_dir.iterdir()}
    assert left == {"ft:tiny::xa", *(f"ft:tiny::x{name}-step-1" for name in "bcde")}
    # Checkpoints of the job that ended first are deleted first.
    gone = [("delete_checkpoint", f"ft:tiny::x{name}-step-1", None, "retention") for name in "fa"]
    assert old.audit() == gone
    assert len(old.jobs()) == 7


def test_files_go_so_many_days_after_the_last_job_that_used_them(tmp_path: Path, database: Database) -> None:
    old = Old(tmp_path, database, keep_files_days=10)
    old.file("file-unused", days=30)
    for name in ("file-ended", "file-used", "file-running", "file-valid", "file-validated"):
        old.file(name, days=20)
    old.file("file-young", days=9)
    files = {"validation_file": None}
    old.job(days=11, training_file="file-ended", **files)
    old.job(days=9, training_file="file-used", validation_file="file-validated")
    old.job(days=11, training_file="file-used", **files)
    old.job(days=None, training_file="file-running", validation_file="file-valid")
    old.keep_house()
    left = {path.name for path in old.settings.files_dir.iterdir()}
    assert left == {"file-used", "file-running", "file-valid", "file-validated", "file-young"}
    assert old.audit() == [("delete_file", name, None, "retention") for name in ("file-unused", "file-ended")]
    with database.read() as session:
        assert FileRepository(session).all_ids() == left


def test_a_deleted_job_stays_on_the_disk_for_as_long_as_the_dispatcher_has_it_in_hand(
    tmp_path: Path, database: Database
) -> None:
    old = Old(tmp_path, database)
    busy, other = old.job(days=1), old.job(days=1)
    with database.write() as session:
        for job_id in (busy, other):
            delete_job(session, old.settings, JobRepository(session).get(job_id))
    old.housekeeping.tick(busy={busy})
    assert [path.name for path in old.settings.jobs_dir.iterdir()] == [busy]
    old.keep_house(1)
    assert old.jobs() == set()


def test_a_file_of_another_home_is_left_to_that_one(tmp_path: Path, database: Database) -> None:
    old = Old(tmp_path, database, keep_files_days=10)
    old.file("file-elsewhere", days=20)
    (old.settings.files_dir / "file-elsewhere").unlink()
    old.keep_house()
    with database.read() as session:
        assert FileRepository(session).all_ids() == {"file-elsewhere"}


def test_many_deletions_take_several_passes_and_then_none(tmp_path: Path, database: Database) -> None:
    old = Old(tmp_path, database, keep_jobs_days=1)
    for _ in range(50):
        old.job(days=2)
    old.housekeeping.tick()
    with database.read() as session:
        assert len(JobRepository(session).page(limit=1000, after=None, metadata={}).rows) == 30
    old.keep_house()
    old.keep_house()
    assert old.jobs() == set()
    late = old.job(days=2)
    old.keep_house(500)
    assert old.jobs() == {late}
    old.keep_house(100)
    assert old.jobs() == set()


def test_object_that_must_stay_does_not_delay_others(tmp_path: Path, database: Database) -> None:
    old = Old(tmp_path, database, keep_jobs_days=1)
    blocked = [old.job(days=9) for _ in range(25)]
    for job_id in blocked:
        model = f"ft:tiny::{job_id.removeprefix('ftjob-')[:12]}-step-1"
        old.job(days=None, model=model)
    other = old.job(days=2)
    old.keep_house()
    assert set(blocked) < old.jobs()
    assert other not in old.jobs()
