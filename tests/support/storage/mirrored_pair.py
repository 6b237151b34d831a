"""A head and a box, each with its database, and what travels between them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from windlass.storage.sql import Box, Database, Job, JobStatus, migrate
from windlass.storage.sql.repositories import (
    BoxRepository,
    EventRepository,
    Instruction,
    JobReport,
    JobRepository,
    MirrorRepository,
    NewJob,
)

HEAD, ATTIC = "node-head", "node-attic"


def new_database(folder: Path, name: str) -> Database:
    url = f"sqlite:///{folder / name}.db"
    migrate(url)
    return Database(url)


def add_job(session: Session, **values: Any) -> Job:
    fields: dict[str, Any] = {
        "model": "tiny",
        "training_file": "file-1",
        "validation_file": None,
        "suffix": None,
        "seed": 1,
        "method": {},
        "windlass": {"gpus": 1},
        "metadata": {"team": "a"},
        "priority": 0,
        "idempotency_key": None,
        "request_digest": None,
        "node": HEAD,
    }
    jobs = JobRepository(session)
    job = jobs.create(NewJob(**(fields | values)))
    return jobs.transition(
        job.id,
        JobStatus.VALIDATING_FILES,
        JobStatus.QUEUED,
        message="Queued",
        hyperparameters={"batch_size": 2},
        total_steps=4,
    )


def add_box(session: Session, name: str = "attic", node: str = ATTIC) -> Box:
    return BoxRepository(session).add(name=name, node=node, head=HEAD, certificate=name, address="10.0.0.2", facts={})


class Pair:
    """A head and a box, each with its database, and what travels between them."""

    def __init__(self, folder: Path) -> None:
        self.head, self.box = new_database(folder, "head"), new_database(folder, "box")
        with self.head.write() as session:
            self.box_id = add_box(session).id
        self.done = 0  # the last instruction that the box carried out

    def close(self) -> None:
        self.head.close()
        self.box.close()

    @contextmanager
    def of_head(self) -> Iterator[tuple[Session, MirrorRepository, Box]]:
        with self.head.write() as session:
            yield session, MirrorRepository(session), BoxRepository(session).get(self.box_id)

    def row(self, job_id: str) -> Job | None:
        with self.head.read() as session:
            return JobRepository(session).find(job_id)

    def box_row(self, job_id: str) -> Job | None:
        with self.box.read() as session:
            return JobRepository(session).find(job_id)

    def give(self, job_id: str) -> None:
        with self.of_head() as (session, mirror, box):
            mirror.give_away(JobRepository(session).get(job_id), box, message="is being copied")

    def held(self) -> list[str]:
        with self.box.read() as session:
            return sorted(JobRepository(session).all_ids())

    def reports(self, cursors: dict[str, int], *, limit: int = 500) -> list[JobReport]:
        found = []
        with self.box.read() as session:
            mirror, jobs = MirrorRepository(session), JobRepository(session)
            for job_id in self.held():
                if job_id not in cursors:
                    continue
                job = jobs.get(job_id)
                report = mirror.report(job, after=max(0, cursors[job_id]), limit=limit)
                if cursors[job_id] < 0:
                    report = replace(report, row=mirror.row_of(job))
                found.append(report)
        return found

    def arrive(self, reports: list[JobReport], done: int) -> dict[str, int]:
        """The head's part of a call."""
        with self.of_head() as (session, mirror, box):
            boxes = BoxRepository(session)
            for each in boxes.instructions(box.id):
                if each.ordinal <= done:
                    boxes.withdraw(each.ordinal)
            for report in reports:
                mirror.apply(box, report, here=HEAD, path_of=lambda name: f"/head/{name}")
            return mirror.cursors(box, self.held())

    def take_in(self, cursors: dict[str, int]) -> None:
        """The box's part after an answer: new jobs are added, jobs that the head does not name are discarded."""
        for job_id in cursors:
            row = self.row(job_id)
            if row is not None:
                with self.box.write() as session:
                    MirrorRepository(session).insert(MirrorRepository(session).row_of(row), ATTIC)
        for job_id in self.held():
            if job_id not in cursors:
                with self.box.write() as session:
                    job = JobRepository(session).get(job_id)
                    if job.status in (JobStatus.SUCCEEDED, JobStatus.CANCELLED, JobStatus.FAILED):
                        MirrorRepository(session).forget(job_id)
                    else:
                        MirrorRepository(session).carry_out(Instruction.CANCEL, job_id, {})

    def carry_out(self) -> None:
        with self.head.read() as session:
            waiting = BoxRepository(session).instructions(self.box_id, after=self.done)
        for each in waiting:
            if each.kind != Instruction.TAKE:
                with self.box.write() as session:
                    MirrorRepository(session).carry_out(Instruction(each.kind), each.job_id, each.body)
            self.done = each.ordinal

    def call(self) -> None:
        """Two whole calls: the second one confirms and reports what the first one brought."""
        for _ in range(2):
            cursors = self.arrive(self.reports(self._cursors()), self.done)
            self.take_in(cursors)
            self.carry_out()

    def _cursors(self) -> dict[str, int]:
        with self.of_head() as (_, mirror, box):
            return mirror.cursors(box, self.held())

    # --- the box's dispatcher

    def begin(self, job_id: str) -> None:
        with self.box.write() as session:
            job = JobRepository(session).get(job_id)
            JobRepository(session).transition(
                job_id, JobStatus.QUEUED, JobStatus.RUNNING, message="Begun", attempt=job.attempt + 1
            )

    def end(self, job_id: str, status: JobStatus) -> None:
        with self.box.write() as session:
            job = JobRepository(session).get(job_id)
            JobRepository(session).transition(job_id, job.status, status, message=f"Ended: {status}")


def messages(database: Database, job_id: str) -> list[str]:
    with database.read() as session:
        return [event.message for event in EventRepository(session).since(0, limit=100, job_id=job_id)]
