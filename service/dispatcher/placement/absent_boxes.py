"""Tells the owners of jobs on other boxes that a box is away."""

import time
from collections.abc import Sequence
from contextlib import suppress

from windlass.storage.sql import Box, Database, Job, NotFound, StatusConflict
from windlass.storage.sql.repositories import (
    BoxRepository,
    BoxState,
    JobRepository,
    MirrorRepository,
    is_away,
)


def away_in_words(box: Box) -> str:
    """Returns since when a box is away."""
    return f"is away since {time.strftime('%Y-%m-%d %H:%M', time.localtime(box.seen_at))}"


def absence_reason(box: Box, job: Job) -> str:
    """Returns the reason why a job of a box that is away waits."""
    away = away_in_words(box)
    if job.attempt:
        return (
            f"box {box.name}, which holds its states, {away}; it may train there meanwhile, and goes on "
            "when the box is back"
        )
    return (
        f"box {box.name}, which has taken it, {away}; it begins there when the box is back, or "
        "elsewhere after `windlass restart`"
    )


def watch_absent_boxes(database: Database, absent: Sequence[Box]) -> None:
    """Writes why jobs of boxes wait that are away. The first report of a box that is back clears it.

    Jobs of removed boxes, which `absent` may contain, have got their reason with the removal.
    """
    away = [box for box in absent if box.state != BoxState.REMOVED.value]
    with database.read() as session:
        jobs = [(box, job) for box in away for job in MirrorRepository(session).jobs_of(box)]
    for box, job in jobs:
        if job.waiting_reason == absence_reason(box, job):
            continue
        with suppress(StatusConflict, NotFound), database.write() as session:
            now = BoxRepository(session).get(box.id)
            if is_away(now) and now.state != BoxState.REMOVED.value:  # it may have called meanwhile
                JobRepository(session).set_waiting_reason(job.id, absence_reason(now, job), seen=job)
