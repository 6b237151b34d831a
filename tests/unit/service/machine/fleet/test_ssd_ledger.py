"""The bytes that jobs have written to SSDs count once, also when their rows are gone."""

import json
from pathlib import Path

import pytest

from tests.support.service.keyed import new_job
from windlass.actors.job.journal import METRICS, JournalRecord
from windlass.service.installation.settings import Settings
from windlass.service.machine.fleet.here import facts_of_this_box
from windlass.service.machine.fleet.ssd_ledger import LEDGER_FILE, note_written, written_by_ssd
from windlass.storage.sql.database import Database, migrate
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.repositories.jobs import JobRepository
from windlass.storage.sql.repositories.journal_import import import_journal

NODE = "node-here"
NOW_S = 1_700_000_000.0


class Home:
    """A home with a clock, whose jobs write."""

    def __init__(self, home: Path) -> None:
        self.settings = Settings(home=home)
        self.settings.make_dirs()
        migrate(self.settings.database_url)
        self.database = Database(self.settings.database_url)
        self.now_s = NOW_S

    def job(self, *written: int, node: str | None = NODE, cursor: int = 0) -> str:
        with self.database.write() as session:
            job = JobRepository(session).create(new_job("file-a", None))
            job.node, job.attempt, job.status, job.box_cursor = node, 1, JobStatus.RUNNING, cursor
        self.write(job.id, 1, *written)
        return job.id

    def write(self, job_id: str, step: int, *written: int) -> None:
        data = {"step": step, "ssd_bytes_written_by_ssd": list(written)}
        record = JournalRecord(
            attempt=1, seq=step, created_at=1.0, kind=METRICS, level="info", message="a step", data=data
        )
        with self.database.write() as session:
            import_journal(session, job_id, 1, [record])

    def end(self, job_id: str) -> None:
        with self.database.write() as session:
            job = JobRepository(session).get(job_id)
            job.status, job.finished_at = JobStatus.SUCCEEDED, self.now_s

    def delete(self, job_id: str) -> None:
        with self.database.write() as session:
            session.delete(JobRepository(session).get(job_id))

    def noted(self, *, after_s: float = 60.0) -> list[int | None]:
        self.now_s += after_s
        note_written(self.database, self.settings, NODE, clock=lambda: self.now_s)
        written = written_by_ssd(self.settings)
        return [written.get(str(path)) for path in self.settings.ssd_dirs]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_home_without_jobs_has_written_nothing_that_is_known(home: Home) -> None:
    assert home.noted() == [None, None]
    assert [ssd.written_nbytes for ssd in facts_of_this_box(home.settings).ssds] == [None, None]


def test_job_counts_with_its_last_metrics_and_once_after_its_end(home: Home) -> None:
    first, second = home.job(10, 20), home.job(1, 2)
    assert home.noted() == [11, 22]
    home.write(first, 2, 30, 40)
    assert home.noted() == [31, 42]
    home.write(first, 3, 50, 60)
    home.end(first)
    assert home.noted() == [51, 62]
    for after_s in (60.0, 600.0, 3000.0, 3600.0, 86400.0):
        assert home.noted(after_s=after_s) == [51, 62]
    assert list(json.loads((home.settings.home / LEDGER_FILE).read_text())["jobs"]) == [second]
    home.delete(first)
    home.delete(second)
    assert home.noted() == [51, 62]
    assert [ssd.written_nbytes for ssd in facts_of_this_box(home.settings).ssds] == [51, 62]


def test_job_that_ends_between_two_notes_counts(home: Home) -> None:
    assert home.noted() == [None, None]
    home.end(home.job(3, 4))
    assert home.noted() == [3, 4]


def test_jobs_of_other_homes_and_boxes_and_of_other_ssds_are_left_out(home: Home) -> None:
    home.job(100, 100, node="node-elsewhere")
    home.job(100, 100, cursor=7)
    home.job(100)
    home.job(1, 2, node=None)
    assert home.noted() == [1, 2]


def test_damaged_file_begins_anew(home: Home) -> None:
    home.job(1, 2)
    (home.settings.home / LEDGER_FILE).write_text("{")
    assert home.noted() == [1, 2]
