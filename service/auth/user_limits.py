"""Limits on what the holder of an API key may ask for: those of the settings, and those of the key itself.

Admins have no limits here. Nor have programs of this machine while no key is needed.
"""

import time
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from windlass.amounts import GIB, bytes_text
from windlass.service.auth.caller import Caller
from windlass.service.installation import Settings
from windlass.service.validation import ApiError, count_text
from windlass.storage.sql.repositories import (
    FileRepository,
    JobRepository,
    KeyRepository,
    Role,
    StoredRepository,
    WebhookRepository,
    is_active,
)

MOST_URGENT, LEAST_URGENT = -1000, 1000  # priorities; the smaller begins first
_Number = Annotated[int, Field(ge=0, le=2**31 - 1)]
_HOW_TO_GET_MORE = "the administrator sets it with `windlass keys limit`"


class KeyLimits(BaseModel):
    """The limits that a key has of its own; None: the settings' limit holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    most_urgent_priority: Annotated[int, Field(ge=MOST_URGENT, le=LEAST_URGENT)] | None = None
    max_running_jobs: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_waiting_jobs: _Number | None = None
    max_files: _Number | None = None
    max_file_gib: Annotated[float, Field(ge=0, le=2**31)] | None = None
    max_stored_gib: Annotated[float, Field(ge=0, le=2**31)] | None = None
    max_webhook_endpoints: _Number | None = None

    def over(self, settings: Settings) -> "UserLimits":
        """Returns these limits, completed by those of the settings."""
        own = self.model_dump(exclude_none=True)
        return UserLimits(**{**_of_settings(settings), **own})


class UserLimits(BaseModel):
    """The limits that hold for a user."""

    model_config = ConfigDict(frozen=True)

    most_urgent_priority: int
    max_running_jobs: int | None  # at once; None: as many as there is room for
    max_waiting_jobs: int
    max_files: int
    max_file_gib: float
    max_stored_gib: float | None  # files, and what jobs leave; None: no limit
    max_webhook_endpoints: int


def _of_settings(settings: Settings) -> dict[str, int | float | None]:
    return {
        "most_urgent_priority": settings.most_urgent_priority,
        "max_running_jobs": settings.max_running_jobs_per_user,
        "max_waiting_jobs": settings.max_waiting_jobs_per_user,
        "max_files": settings.max_files_per_user,
        "max_file_gib": settings.max_file_gib_per_user,
        "max_stored_gib": settings.max_stored_gib_per_user,
        "max_webhook_endpoints": settings.max_webhook_endpoints_per_user,
    }


def check_priority(session: Session, settings: Settings, caller: Caller, priority: int) -> None:
    """Refuse a priority that the caller may not ask for."""
    limits = _limits_of(session, settings, caller)
    if limits is not None and priority < limits.most_urgent_priority:
        raise ApiError(
            f"windlass.priority: your key may ask for priorities from {limits.most_urgent_priority} to {LEAST_URGENT}, "
            f"got {priority}; {_HOW_TO_GET_MORE}",
            status=403,
            param="windlass.priority",
            code="priority_not_allowed",
        )


def check_one_more_job(session: Session, settings: Settings, caller: Caller) -> None:
    """Refuse one more job where the caller's user has too many that wait."""
    limits = _limits_of(session, settings, caller)
    if limits is None:
        return
    num_waiting = JobRepository(session).count_waiting(caller.user)
    if num_waiting >= limits.max_waiting_jobs:
        raise ApiError(
            f"you have {count_text(num_waiting, 'job')} that wait or are paused; your limit is "
            f"{limits.max_waiting_jobs}. Wait until one of them has begun, or cancel some; {_HOW_TO_GET_MORE}",
            status=403,
            code="job_quota_exceeded",
        )


def check_one_more_file(session: Session, settings: Settings, caller: Caller, *, nbytes: int) -> None:
    """Refuse one more file of so many bytes where the caller's user would have too much. Admins are users here."""
    if caller.user is None:
        return
    limits = _own_limits(session, caller).over(settings)
    num_files, stored_nbytes = FileRepository(session).usage(caller.user)
    most_nbytes = int(limits.max_file_gib * GIB)
    if num_files >= limits.max_files:
        problem = f"you have {count_text(num_files, 'file')}; your limit is {limits.max_files}"
    elif stored_nbytes + nbytes > most_nbytes:
        problem = f"with this one your files would take more than your limit of {bytes_text(most_nbytes)}"
    else:
        return
    raise ApiError(f"file: {problem}; delete some first", status=403, param="file", code="file_quota_exceeded")


def check_room_to_store(
    session: Session, settings: Settings, caller: Caller, *, nbytes: int = 0, param: str | None = None
) -> None:
    """Refuses a job, or an upload of so many bytes, where the caller's user has or would have too much stored.

    What jobs have left is what the dispatcher measured last. No folder is looked at.
    """
    limits = _limits_of(session, settings, caller)
    if limits is None or limits.max_stored_gib is None or caller.user is None:
        return
    _, file_nbytes = FileRepository(session).usage(caller.user)
    left_nbytes = StoredRepository(session).nbytes_of(caller.user)
    most_nbytes = int(limits.max_stored_gib * GIB)
    stored_nbytes = file_nbytes + left_nbytes
    if stored_nbytes < most_nbytes and stored_nbytes + nbytes <= most_nbytes:
        return
    prefix = "" if param is None else f"{param}: "
    beyond = f", this one has {bytes_text(nbytes)}" if nbytes else ""
    raise ApiError(
        f"{prefix}you have {bytes_text(stored_nbytes)} stored ({bytes_text(file_nbytes)} of files, "
        f"{bytes_text(left_nbytes)} left by your jobs){beyond}, and your limit is {bytes_text(most_nbytes)}."
        " `windlass storage` (GET /v1/storage) lists what takes them; `windlass delete` frees those of jobs, models, "
        f"checkpoints and files, and cancelling a paused job frees its states; {_HOW_TO_GET_MORE}",
        status=403,
        param=param,
        code="storage_quota_exceeded",
    )


def are_stored_bytes_limited(session: Session, settings: Settings) -> bool:
    """Tells whether a limit of stored bytes is set for any user. Only then are job remains measured."""
    if settings.max_stored_gib_per_user is not None:
        return True
    now_s = time.time()
    keys = KeyRepository(session).all()
    return any(_parsed(key.limits).max_stored_gib is not None for key in keys if is_active(key, now_s))


def check_one_more_endpoint(session: Session, settings: Settings, caller: Caller) -> None:
    """Refuse one more webhook endpoint where the caller's user has too many."""
    limits = _limits_of(session, settings, caller)
    if limits is None:
        return
    num_endpoints = WebhookRepository(session, caller.user).count()
    if num_endpoints >= limits.max_webhook_endpoints:
        raise ApiError(
            f"you have {count_text(num_endpoints, 'webhook endpoint')}; your limit is "
            f"{limits.max_webhook_endpoints}. Delete one first; {_HOW_TO_GET_MORE}",
            status=403,
            code="webhook_quota_exceeded",
        )


def most_running_jobs(session: Session, settings: Settings, owner: str | None) -> int | None:
    """Returns the number of a user's jobs that may run at once; None: any number.

    If the user has several keys, the largest of their limits holds.
    """
    if owner is None:
        return None
    keys = KeyRepository(session).active_of(owner)
    if any(Role(key.role) is Role.ADMIN for key in keys):
        return None
    allowed = [_parsed(key.limits).over(settings).max_running_jobs for key in keys] or [
        settings.max_running_jobs_per_user
    ]
    numbers = [number for number in allowed if number is not None]
    return max(numbers) if len(numbers) == len(allowed) else None


def _limits_of(session: Session, settings: Settings, caller: Caller) -> UserLimits | None:
    if caller.role is Role.ADMIN:
        return None
    return _own_limits(session, caller).over(settings)


def _own_limits(session: Session, caller: Caller) -> KeyLimits:
    return KeyLimits() if caller.key_id is None else _parsed(KeyRepository(session).get(caller.key_id).limits)


def _parsed(limits: dict[str, object] | None) -> KeyLimits:
    return KeyLimits.model_validate(limits or {})
