"""Turns the warnings of a preparation into events of its job."""

from windlass.service.preparation.pipeline import Preparation
from windlass.storage.sql import Database, Job
from windlass.storage.sql.repositories import EventRepository, JobRepository


def tell_warnings(database: Database, job: Job, preparation: Preparation) -> None:
    """Writes an event for each new warning, and clears the warnings.

    Raises StatusConflict if another dispatcher holds the job by now.
    """
    if not preparation.warnings:
        return
    with database.write() as session:
        JobRepository(session).check_held(job)
        for warning in preparation.warnings:
            EventRepository(session).add(job.id, attempt=job.attempt, message=warning, level="warn")
    preparation.warnings.clear()  # only after they are in the database
