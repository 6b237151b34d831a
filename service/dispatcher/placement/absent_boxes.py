"""Tells the owners of jobs on other boxes that a box is away, and ends the jobs of boxes that were removed."""

import logging
import time

from windlass.service.dispatcher.outcomes import fail_job
from windlass.service.installation import about
from windlass.service.machine.fleet import is_away
from windlass.storage.sql import Box, Database, Job
from windlass.storage.sql.repositories import BoxRepository, BoxState, JobRepository, MirrorRepository

_LOG = logging.getLogger(__name__)


def absence_reason(box: Box) -> str:
    """Returns the reason why a job of a box that is away waits."""
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(box.seen_at))
    return f"box {box.name}, which holds its states, is away since {since}; the job goes on there when it is back"


def watch_absent_boxes(database: Database, here: str) -> None:
    """Writes why jobs of absent boxes wait, and fails the jobs of removed ones. `here`: the head's own home.

    A job that its box has not taken is taken back before.
    """
    with database.read() as session:
        boxes = BoxRepository(session).all(with_removed=True)
        absent = [box for box in boxes if box.state == BoxState.REMOVED.value or is_away(box)]
        jobs = [(box, job) for box in absent for job in MirrorRepository(session).jobs_of(box)]
    for box, job in jobs:
        if box.state == BoxState.REMOVED.value:
            _end(database, box, job, here)
        elif job.waiting_reason != (reason := absence_reason(box)):
            with database.write() as session:
                JobRepository(session).set_waiting_reason(job.id, reason, seen=job)


def _end(database: Database, box: Box, job: Job, here: str) -> None:
    message = (
        f"box {box.name}, which holds its states, was removed from the service; `windlass restart {job.id}` begins a "
        "new job from the newest checkpoint that it exported, or from its base model"
    )
    with database.write() as session:
        fail_job(session, job, "box_removed", message)
        MirrorRepository(session).end_here(job.id, here)
    _LOG.warning("ended, because box %s was removed", box.name, extra=about(job.id, job.attempt))
