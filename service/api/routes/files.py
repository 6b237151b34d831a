"""`/v1/files`: upload of data, and download of data and results."""

import os
import shutil
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from fastapi import APIRouter, File, Form, Query, UploadFile
from fastapi.responses import FileResponse

from windlass.amounts import bytes_text
from windlass.engine.data import HEAD_NBYTES
from windlass.service.api import AuditDep, CallerDep, ContextDep, Deleted, PageOf, check_content, check_name
from windlass.service.api.schemas import FileObject
from windlass.service.auth import check_one_more_file, check_room_to_store
from windlass.service.data import deletion
from windlass.service.installation import Settings, node_of
from windlass.service.validation import ApiError, describe_value
from windlass.storage.files import sync_path
from windlass.storage.sql.repositories import FileRepository, new_file_id

TRAINING_PURPOSE = "fine-tune"
_PART_SUFFIX = ".part"
_COPY_NBYTES = 1024**2
_RAW_BYTES = {
    "description": "The file's bytes",
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}

router = APIRouter(prefix="/v1/files")


@router.post("")
def upload_file(
    context: ContextDep,
    caller: CallerDep,
    audit: AuditDep,
    file: Annotated[UploadFile, File()],
    purpose: Annotated[str, Form(json_schema_extra={"const": TRAINING_PURPOSE})],
) -> FileObject:
    """Uploads a training or validation file."""
    if purpose != TRAINING_PURPOSE:
        raise ApiError(
            f'purpose: must be "{TRAINING_PURPOSE}", got {describe_value(purpose)}',
            param="purpose",
            code="invalid_value",
        )
    filename = _display_name(file.filename or "")
    check_name(filename, file.file.read(HEAD_NBYTES))
    file.file.seek(0)
    with context.database.read() as session:
        # Refuses early, before the upload is stored.
        check_one_more_file(session, context.settings, caller, nbytes=0)
        check_room_to_store(session, context.settings, caller, param="file")
    file_id = new_file_id()
    path = context.settings.files_dir / file_id
    nbytes = _store(file.file, path, filename, context.settings)
    try:
        check_content(path, filename, checks=context.limits.upload_checks, user=caller.user)
        sync_path(context.settings.files_dir)  # the folder is durable before a row refers to the file
        with context.database.write() as session:
            check_one_more_file(session, context.settings, caller, nbytes=nbytes)
            check_room_to_store(session, context.settings, caller, nbytes=nbytes, param="file")
            row = FileRepository(session).add(
                file_id=file_id,
                filename=filename,
                purpose=purpose,
                nbytes=nbytes,
                owner=caller.user,
                node=node_of(context.settings.home),
            )
            audit(session, file_id)
    except BaseException:
        path.unlink()
        raise
    return FileObject.of(row)


@router.get("")
def list_files(
    context: ContextDep,
    caller: CallerDep,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> PageOf[FileObject]:
    """Returns a page of files."""
    with context.database.read() as session:
        page = FileRepository(session, caller.only_of).page(
            limit=limit, after=after, newest_first=order == "desc", purpose=purpose
        )
    return PageOf.of([FileObject.of(row) for row in page.rows], has_more=page.has_more)


@router.get("/{file_id}")
def retrieve_file(context: ContextDep, caller: CallerDep, file_id: str) -> FileObject:
    """Returns a file's description, without its content."""
    with context.database.read() as session:
        return FileObject.of(FileRepository(session, caller.only_of).get(file_id))


@router.get("/{file_id}/content", response_class=FileResponse, responses={200: _RAW_BYTES})
def retrieve_content(context: ContextDep, caller: CallerDep, file_id: str) -> FileResponse:
    """Returns a file's raw bytes."""
    with context.database.read() as session:
        row = FileRepository(session, caller.only_of).get(file_id)
    path = context.settings.files_dir / row.id
    if not path.is_file():
        raise ApiError(
            f"the content of {file_id} is not here: ask the service that it was uploaded to",
            status=404,
            code="file_elsewhere",
        )
    return FileResponse(path, media_type="application/octet-stream", filename=row.filename)


@router.delete("/{file_id}")
def delete_file(context: ContextDep, caller: CallerDep, audit: AuditDep, file_id: str) -> Deleted:
    """Deletes a file. A file that an unfinished job needs is refused."""
    with context.database.write() as session:
        removal = deletion.delete_file(session, context.settings, file_id, only_of=caller.only_of)
        audit(session, file_id)
    deletion.carry_out(context.database, context.settings, removal)
    return Deleted(id=file_id, object="file")


def remove_partial_uploads(files_dir: Path) -> None:
    """Deletes partial uploads of a service that was killed."""
    for path in files_dir.glob(f"*{_PART_SUFFIX}"):
        path.unlink(missing_ok=True)


def _display_name(filename: str) -> str:
    name = filename.replace("\\", "/").rsplit("/", 1)[-1]
    return "".join(char for char in name if char.isprintable())[-255:]


def _store(source: BinaryIO, path: Path, filename: str, settings: Settings) -> int:
    """Copies an upload into its place and returns its size in bytes."""
    part = path.with_name(path.name + _PART_SUFFIX)
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as target:
            shutil.copyfileobj(source, target, _COPY_NBYTES)
            target.flush()
            os.fsync(target.fileno())
            nbytes = target.tell()
        if nbytes == 0:
            raise ApiError(f"file: {filename!r} is empty", param="file", code="invalid_file")
        if nbytes > settings.max_file_nbytes:
            raise ApiError(
                f"file: {filename!r} is larger than the {bytes_text(settings.max_file_nbytes)} that are taken "
                f"(WINDLASS_MAX_FILE_MIB is {settings.max_file_mib})",
                status=413,
                param="file",
                code="file_too_large",
            )
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)
    return nbytes
