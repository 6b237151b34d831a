"""`/healthz` and `/readyz`: whether the service answers, and whether it can take jobs."""

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

# Of jobs, which are read as a list of them is: a damaged file answers what reads no table.
_NUM_ROWS = 20

_LOG = logging.getLogger(__name__)

router = APIRouter()


class Alive(BaseModel):
    """Said by a service that answers at all."""

    status: Literal["ok"] = "ok"


class Health(BaseModel):
    """`reasons`: why the service is not ready, in words."""

    status: str = "ok"
    reasons: list[str] = []


@router.get("/healthz")
async def healthz() -> Alive:
    """Whether the service answers."""
    return Alive()


@router.get("/readyz", responses={503: {"model": Health}})
def readyz(context: ContextDep, response: Response) -> Health:
    """Whether it can take jobs: 503 where the database does not answer, or the home's disk is full."""
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
