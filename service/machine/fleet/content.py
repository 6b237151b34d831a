"""The files that travel between the head and a box, and the places where both keep them."""

import hashlib
import re
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from windlass.service.installation import Settings
from windlass.service.jobs import job_dir
from windlass.service.machine.fleet.reports import ReportedRow
from windlass.service.validation import fine_tuned_model_id
from windlass.storage.sql import Job

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # SHA-256 in hex
_ID_CHARS = 24
_MAX_PATH_CHARS = 1000
_MAX_FILES = 100_000  # of a job, or of a folder
_PARTS_OF_JOB_SENT = re.compile(r"plans/[0-9]+\.json|timeline/step-[0-9]+\.json")


def _inside(path: str) -> str:
    """Checks that a relative path stays below its folder. Raises ValueError."""
    parts = PurePosixPath(path).parts
    if not parts or path != "/".join(parts) or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"must be a relative path without '..', got {path[:80]!r}")
    return path


RelativePath = Annotated[str, Field(max_length=_MAX_PATH_CHARS), AfterValidator(_inside)]


class Where(StrEnum):
    """The folder that a path is relative to, on the head and on a box alike."""

    JOB = "job"  # the job's folder
    MODEL = "model"  # the models directory
    FINE_TUNED = "fine_tuned"  # the directory of fine-tuned models and checkpoints
    FILE = "file"  # the directory of files


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ContentFile(_Message):
    """A file by its content, and its place."""

    path: RelativePath
    where: Where
    nbytes: int = Field(ge=0)
    sha256: Digest


def _readable_row(row: dict[str, Any]) -> dict[str, Any]:
    """Checks a row before its names become paths. Raises ValueError."""
    ReportedRow.model_validate(row)
    return row


class JobContent(_Message):
    """The row of a job and all files that a box needs to run it."""

    row: Annotated[dict[str, Any], AfterValidator(_readable_row)]
    files: tuple[ContentFile, ...] = Field(max_length=_MAX_FILES)


class ContentPending(_Message):
    """Tells that the head is still reading a job's files."""

    done_nbytes: int
    total_nbytes: int


class ResultFolder(_Message):
    """Files that a box has uploaded and that now belong into place together.

    `folder`: the name of a model or checkpoint, which appears as a whole; None: each file for itself.
    """

    where: Where
    folder: RelativePath | None = None
    files: tuple[ContentFile, ...] = Field(max_length=_MAX_FILES)


def taken_dir(home: Path) -> Path:
    """Returns the folder with the lists of files of the jobs that a box has taken.

    Only the home of a box has it, also after it has left.
    """
    return home / "taken"


def taken_file(home: Path, job_id: str) -> Path:
    """Returns the file with the row and the list of files of a job that a box has taken, a `JobContent`."""
    return taken_dir(home) / f"{job_id}.json"


def root_of(settings: Settings, job_id: str, where: Where) -> Path:
    """Returns the folder that paths of this kind are relative to."""
    roots = {
        Where.JOB: job_dir(settings, job_id),
        Where.MODEL: settings.models_dir,
        Where.FINE_TUNED: settings.fine_tuned_dir,
        Where.FILE: settings.files_dir,
    }
    return roots[where]


def place_of(settings: Settings, job_id: str, file: ContentFile) -> Path:
    """Returns the path of a file in this home."""
    return root_of(settings, job_id, file.where) / file.path


def result_file_id(job_id: str) -> str:
    """Returns the id of a job's result file. It is the same for every try to write it."""
    return f"file-{hashlib.sha256(job_id.encode()).hexdigest()[:_ID_CHARS]}"


def model_name(job: Job) -> str:
    """Returns the name of the model that a job makes. The names of its checkpoints begin with it."""
    return fine_tuned_model_id(job.model, job.suffix, job.id)


def is_model_of(job: Job, name: str) -> bool:
    """Returns whether a folder's name is that of the job's model or of one of its checkpoints."""
    model = model_name(job)
    return re.fullmatch(rf"{re.escape(model)}(-step-[0-9]+)?", name) is not None


def is_result_of(job: Job, where: Where, path: str) -> bool:
    """Returns whether a box may send this file of a job."""
    if where is Where.JOB:
        return _PARTS_OF_JOB_SENT.fullmatch(path) is not None
    if where is Where.FINE_TUNED:
        name, slash, _ = path.partition("/")
        return bool(slash) and is_model_of(job, name)
    return where is Where.FILE and path == result_file_id(job.id)
