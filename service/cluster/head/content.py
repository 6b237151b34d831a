"""The routes by which a box fetches the files of its jobs, and sends the results."""

import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, BinaryIO

import anyio.to_thread
from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ValidationError
from sqlalchemy.orm import Session
from starlette.requests import ClientDisconnect

from windlass.amounts import bytes_text
from windlass.service.cluster.head.caller import BoxDep
from windlass.service.cluster.head.incoming import Incoming, check_result
from windlass.service.cluster.head.manifest import Manifests
from windlass.service.machine.fleet import ContentFile, ContentPending, JobContent, ResultFolder, Where
from windlass.service.validation import ApiError
from windlass.storage.sql import Box, Database, Job, NotFound
from windlass.storage.sql.repositories import JobRepository, MirrorRepository, PartRepository

OFFSET_HEADER = "Upload-Offset"
_RANGE = re.compile(r"bytes=([0-9]+)-")
_BLOCK_NBYTES = 1024**2
_SPEED_BLOCKS = 16  # of a measurement of the link: an eighth of a second at 1 Gbit/s


class Uploaded(BaseModel):
    """The answer to a part of an upload."""

    offset: int
    is_complete: bool


def content_router(database: Database, manifests: Manifests, incoming: Incoming) -> APIRouter:
    """Makes the routes. Each serves only the jobs of the calling box."""
    router = APIRouter(prefix="/v1/node")

    @router.get("/jobs/{job_id}", response_model=JobContent)
    def fetch_job(job_id: str, box: BoxDep) -> Response:
        """Answers with a job's row and the files that it needs; with 202 while their digests are being computed."""
        with database.read() as session:
            job = _its_job(session, box, job_id)
            if job.node == box.node and not MirrorRepository(session).was_given(job_id, box):  # it has all its files
                raise ApiError(f"job {job_id} came from box {box.name}", status=404, code="job_elsewhere")
            row = MirrorRepository(session).row_of(job)
        files = manifests.of(job)
        if isinstance(files, ContentPending):
            return JSONResponse(files.model_dump(mode="json"), status_code=HTTPStatus.ACCEPTED)
        return JSONResponse(JobContent(row=row, files=files).model_dump(mode="json"))

    @router.get("/content/{digest}")
    def fetch_content(digest: str, box: BoxDep, range: Annotated[str | None, Header()] = None) -> Response:
        """Sends a file that one of the box's jobs needs, from an offset on."""

        def jobs() -> Sequence[Job]:
            with database.read() as session:
                mirror, parts = MirrorRepository(session), PartRepository(session).on(box.node)
                found = (JobRepository(session).find(part.job_id) for part in parts)
                return [
                    *(job for job in mirror.jobs_of(box) if mirror.was_given(job.id, box)),
                    *(job for job in found if job is not None),
                ]

        if (path := manifests.find(jobs, digest)) is None:
            message = f"no job of box {box.name} needs a file with the SHA-256 {digest[:64]}, or it has changed"
            raise ApiError(message, status=HTTPStatus.NOT_FOUND, code="not_found")
        return _send_file(path, range)

    @router.get("/speed")
    def send_bytes(box: BoxDep) -> Response:
        """Sends random bytes, by which the box measures the link. It ends the answer when it has seen enough."""
        block = secrets.token_bytes(_BLOCK_NBYTES)
        return StreamingResponse((block for _ in range(_SPEED_BLOCKS)), media_type="application/octet-stream")

    @router.head("/jobs/{job_id}/results/{where}/{path:path}")
    def find_offset(job_id: str, where: Where, path: str, sha256: str, nbytes: int, box: BoxDep) -> Response:
        """Answers with the bytes of an upload that have arrived."""
        file = _uploaded_file(path, where, nbytes, sha256)
        with database.read() as session:
            check_result(own_job(JobRepository(session), box, job_id), where, path)
        return Response(headers={OFFSET_HEADER: str(incoming.offset(job_id, file))})

    @router.put("/jobs/{job_id}/results/{where}/{path:path}")
    async def put_part(
        job_id: str,
        where: Where,
        path: str,
        sha256: str,
        nbytes: int,
        box: BoxDep,
        request: Request,
        offset: Annotated[int, Query(ge=0)] = 0,
    ) -> Uploaded:
        """Appends a part of a file."""
        file = _uploaded_file(path, where, nbytes, sha256)

        def check() -> None:
            with database.read() as session:
                check_result(own_job(JobRepository(session), box, job_id), where, path)

        await anyio.to_thread.run_sync(check)
        try:
            here = await incoming.append(job_id, file, offset, request.stream())
        except ClientDisconnect:
            raise ApiError("the upload was cut off; what has arrived stays", code="cut_off") from None
        return Uploaded(offset=here, is_complete=here == nbytes)

    @router.post("/jobs/{job_id}/results/complete", status_code=HTTPStatus.NO_CONTENT)
    def complete(job_id: str, folder: ResultFolder, box: BoxDep) -> None:
        """Moves uploaded files into place."""
        with database.read() as session:
            job = own_job(JobRepository(session), box, job_id)
        incoming.place(job, folder)

    return router


def _its_job(session: Session, box: Box, job_id: str) -> Job:
    """Returns a job that was given to this box, as a whole or in part. Raises ApiError for any other."""
    if PartRepository(session).find(job_id, box.node) is not None:
        with suppress(NotFound):
            return JobRepository(session).get(job_id)
    return own_job(JobRepository(session), box, job_id)


def own_job(jobs: JobRepository, box: Box, job_id: str) -> Job:
    """Returns a job that was given to this box. Raises ApiError for any other."""
    try:
        job = jobs.get(job_id)
    except NotFound:
        job = None
    if job is None or job.node != box.node:
        message = f"job {job_id} was not given to box {box.name}, or not any more"
        raise ApiError(message, status=HTTPStatus.NOT_FOUND, code="job_elsewhere")
    return job


def _uploaded_file(path: str, where: Where, nbytes: int, sha256: str) -> ContentFile:
    try:
        return ContentFile(path=path, where=where, nbytes=nbytes, sha256=sha256)
    except ValidationError as error:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"])
        raise ApiError(f"{param}: {first['msg']}", param=param, code="invalid_value") from None


def _send_file(path: Path, range: str | None) -> Response:
    """Streams a file. `range`: the header of that name; only "bytes=N-" is understood."""
    start = 0
    if range is not None:
        if (match := _RANGE.fullmatch(range)) is None:
            raise ApiError(f"the range must be bytes=N-, got {range[:80]}", param="range", code="invalid_value")
        start = int(match[1])
    try:
        file = path.open("rb", buffering=0)
    except OSError as error:
        raise ApiError(f"the file cannot be read now: {error.strerror}", status=503, code="unreadable") from None
    nbytes = path.stat().st_size
    if start > nbytes:
        file.close()
        status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
        raise ApiError(f"the file has only {bytes_text(nbytes)}", status=status, param="range", code="invalid_value")
    file.seek(start)
    headers = {"Content-Length": str(nbytes - start), "Accept-Ranges": "bytes"}
    if range is not None:
        headers["Content-Range"] = f"bytes {start}-{max(start, nbytes - 1)}/{nbytes}"
    return StreamingResponse(
        _blocks(file, nbytes - start),
        status_code=HTTPStatus.OK if range is None else HTTPStatus.PARTIAL_CONTENT,
        media_type="application/octet-stream",
        headers=headers,
    )


def _blocks(file: BinaryIO, nbytes: int) -> Iterator[bytes]:
    with file:
        while nbytes > 0 and (block := file.read(min(_BLOCK_NBYTES, nbytes))):
            nbytes -= len(block)
            yield block
