"""Turns the warnings of a preparation into events of its job."""

from windlass.service.preparation.pipeline import Preparation
from windlass.storage.sql import Database, Job
from windlass.storage.sql.repositories import EventRepository, JobRepository


def tell_warnings(database: Database, job: Job, preparation: Preparation) -> None:
    """Write an event for each warning that has none yet; StatusConflict if the job is another dispatcher's by now."""
    if not preparation.warnings:
        return
    with database.write() as session:
        JobRepository(session).check_held(job)
        for warning in preparation.warnings:
            EventRepository(session).add(job.id, attempt=job.attempt, message=warning, level="warn")
    preparation.warnings.clear()  # once they are in the database
