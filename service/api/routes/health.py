"""`/healthz` and `/readyz`: liveness, and readiness to accept jobs."""

import logging
import shutil
from typing import Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError

from windlass.service.api import ContextDep
from windlass.service.installation import LEAST_FREE_NBYTES
from windlass.storage.sql import why_unavailable
from windlass.storage.sql.repositories import JobRepository

# Jobs that the check reads, as a list of jobs does. A query without a table succeeds even if the database file is
# damaged.
_NUM_ROWS = 20

_LOG = logging.getLogger(__name__)

router = APIRouter()


class Alive(BaseModel):
    """The answer of a running service."""

    status: Literal["ok"] = "ok"


class Health(BaseModel):
    """The readiness of the service. `reasons`: why it is not ready, in words."""

    status: str = "ok"
    reasons: list[str] = []


@router.get("/healthz")
async def healthz() -> Alive:
    """Reports that the service answers."""
    return Alive()


@router.get("/readyz", responses={503: {"model": Health}})
def readyz(context: ContextDep, response: Response) -> Health:
    """Reports whether the service can accept jobs.

    Answers 503 if the database is unavailable or the home's disk is full.
    """
    reasons = []
    try:
        with context.database.read() as session:
            JobRepository(session).page(limit=_NUM_ROWS, after=None, metadata={})
    except SQLAlchemyError as error:
        why = why_unavailable(error) or "it does not answer"
        _LOG.warning("the database cannot be used: %s (%s)", why, error)
        reasons.append(f"the database cannot be used: {why}")
    free_nbytes = shutil.disk_usage(context.settings.home).free
    if free_nbytes < LEAST_FREE_NBYTES:
        reasons.append(f"only {free_nbytes // 1024**2} MiB are free on the home's disk")
    if not reasons:
        return Health()
    response.status_code = 503
    return Health(status="unavailable", reasons=reasons)
