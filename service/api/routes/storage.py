"""Disk usage of one job, and of all that a caller sees. It is measured at each request."""

import shutil
from collections import Counter
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from windlass.service.api import CallerDep, ContextDep, ListOf
from windlass.service.data import Kind, all_that_occupies, parts_of_job, states_nbytes
from windlass.service.installation import check_is_here
from windlass.storage.sql.repositories import FileRepository, JobRepository

router = APIRouter()


class JobStorage(BaseModel):
    """The disk usage of one job."""

    object: Literal["fine_tuning.job.storage"] = "fine_tuning.job.storage"
    job_id: str
    bytes: int
    parts: dict[str, int]  # bytes


@router.get("/v1/fine_tuning/jobs/{job_id}/storage")
def get_job_storage(context: ContextDep, caller: CallerDep, job_id: str) -> JobStorage:
    """Returns the bytes of a job's prepared data, journal, timeline, states, model, checkpoints and result files."""
    with context.database.read() as session:
        job = JobRepository(session, caller.only_of).get(job_id)
    check_is_here(context.settings, job)
    parts = parts_of_job(context.settings, job, states_nbytes(context.settings))
    return JobStorage(job_id=job_id, bytes=sum(parts.values()), parts=parts)


class StorageObject(BaseModel):
    """One item that occupies disk space."""

    object: Literal["storage"] = "storage"
    kind: Kind
    id: str
    bytes: int


class StorageTotals(BaseModel):
    """The totals of all listed items, and the free space on the home's disk."""

    bytes: int
    bytes_by_kind: dict[Kind, int]
    free_bytes: int


class StorageList(ListOf[StorageObject]):
    """All items that occupy disk space."""

    windlass: StorageTotals


@router.get("/v1/storage")
def list_storage(context: ContextDep, caller: CallerDep) -> StorageList:
    """Lists the disk usage of the caller's jobs, files and models, largest first.

    Administrators get all of this installation.
    """
    jobs = files = None
    if caller.only_of is not None:
        with context.database.read() as session:
            jobs = JobRepository(session, caller.only_of).all_ids()
            files = FileRepository(session, caller.only_of).all_ids()
    found = all_that_occupies(context.settings, states_nbytes(context.settings), jobs=jobs, files=files)
    totals: Counter[Kind] = Counter()
    for each in found:
        totals[each.kind] += each.nbytes
    return StorageList(
        data=[StorageObject(kind=each.kind, id=each.id, bytes=each.nbytes) for each in found],
        windlass=StorageTotals(
            bytes=sum(totals.values()),
            bytes_by_kind=dict(totals),
            free_bytes=shutil.disk_usage(context.settings.home).free,
        ),
    )
