"""Tells the owners of jobs on other boxes that a box is away."""

import time

from windlass.service.machine.fleet import is_away
from windlass.storage.sql import Box, Database
from windlass.storage.sql.repositories import BoxRepository, JobRepository, MirrorRepository


def absence_reason(box: Box) -> str:
    """Returns the reason why a job of a box that is away waits."""
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(box.seen_at))
    return f"box {box.name}, which holds its states, is away since {since}; the job goes on there when it is back"


def watch_absent_boxes(database: Database) -> None:
    """Writes why jobs of boxes wait that are away. The first report of a box that is back clears it.

    Jobs of removed boxes have got their reason with the removal.
    """
    with database.read() as session:
        absent = [box for box in BoxRepository(session).all() if is_away(box)]
        jobs = [(box, job) for box in absent for job in MirrorRepository(session).jobs_of(box)]
    for box, job in jobs:
        if job.waiting_reason != (reason := absence_reason(box)):
            with database.write() as session:
                JobRepository(session).set_waiting_reason(job.id, reason, seen=job)
