"""Finds the jobs that wait for space on the home's disk.

It works also while the full disk keeps the database from storing it.
"""

import time

from windlass.actors.lifecycle import last_sign_of_life
from windlass.service.installation import Settings, is_local, room_reason
from windlass.service.jobs.spec_builder import job_dir
from windlass.storage.ids import Attempt
from windlass.storage.sql import TERMINAL_STATUSES, Job, JobStatus

# A runner gives a sign of life each second, and none while it waits for disk space.
_SILENT_S = 5.0
_HAS_RUNNER = frozenset((JobStatus.RUNNING, JobStatus.PAUSING))


def why_it_waits_for_room(settings: Settings, job: Job) -> str | None:
    """Returns why a job of this home waits for space on the home's disk, or None if it does not wait.

    An attempt that trains on an almost full disk does not wait. Its runner gives signs of life.
    """
    if job.status in TERMINAL_STATUSES or job.status is JobStatus.PAUSED:
        return None
    reason = room_reason(settings.home)
    if reason is None or not is_local(settings, job):
        return None
    if job.status in _HAS_RUNNER and not _is_silent(settings, job):
        return None
    return reason


def _is_silent(settings: Settings, job: Job) -> bool:
    """Returns whether a begun attempt gives no signs of life. An attempt that has not begun is not silent."""
    sign_ns = last_sign_of_life(job_dir(settings, job.id), Attempt(job.attempt))
    return sign_ns is not None and time.time() - sign_ns / 1e9 > _SILENT_S
