"""Tells which jobs wait for room on the home's disk, also while that disk is too full for the database to say so."""

import time

from windlass.actors.lifecycle import last_sign_of_life
from windlass.service.installation import Settings, is_local, room_reason
from windlass.service.jobs.spec_builder import job_dir
from windlass.storage.ids import Attempt
from windlass.storage.sql import TERMINAL_STATUSES, Job, JobStatus

# A runner gives a sign of life each second, and none while it waits for room.
_SILENT_S = 5.0
_HAS_RUNNER = frozenset((JobStatus.RUNNING, JobStatus.PAUSING))


def why_it_waits_for_room(settings: Settings, job: Job) -> str | None:
    """Why a job of this home waits for room on the home's disk; None for a job that does not.

    An attempt that trains on a disk that is nearly full does not wait: its runner gives signs of life.
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
    """Whether its attempt has begun and has given no sign of life since; an attempt that begins is not silent."""
    sign_ns = last_sign_of_life(job_dir(settings, job.id), Attempt(job.attempt))
    return sign_ns is not None and time.time() - sign_ns / 1e9 > _SILENT_S
