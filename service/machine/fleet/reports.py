"""Checks of what a box and its head say about jobs. The other one is a machine of its own, and may say anything."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from windlass.service.validation import ApiError, check_model_id, check_storable, check_suffix, plain_reason
from windlass.storage.sql import JobStatus
from windlass.storage.sql.repositories import JobReport, MirroredEvent

_MAX_WORDS_CHARS = 100_000  # of a text that users read
_MAX_JSON_CHARS = 1_000_000  # of an object
_MAX_RESULT_FILES = _MAX_REASONS = 100

_JOB_ID = r"ftjob-[0-9a-f]{24}"
JobId = Annotated[str, Field(pattern=f"^{_JOB_ID}$")]
_Id = Annotated[str, Field(max_length=64), AfterValidator(check_storable)]
_FileId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]  # a file's name in the files directory
_Name = Annotated[str, Field(max_length=255), AfterValidator(check_storable)]
_Words = Annotated[str, Field(max_length=_MAX_WORDS_CHARS)]
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_LongCount = Annotated[int, Field(ge=0, lt=2**63)]
_Amount = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
_Time = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]  # seconds since the epoch


def is_job_id(text: str) -> bool:
    """Returns whether a text has the form of a job's id."""
    return re.fullmatch(_JOB_ID, text) is not None


def _model_id(model: str) -> str:
    try:
        check_model_id(model)
    except ApiError as error:
        raise ValueError(str(error)) from None
    return model


def _plain(value: Any) -> Any:
    """Returns an object that every database can store as JSON and that a client can read."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)  # raises ValueError
    if len(text) > _MAX_JSON_CHARS:
        raise ValueError(f"must have at most {_MAX_JSON_CHARS} characters as JSON")
    check_storable(text)
    return value


_Object = Annotated[dict[str, Any], AfterValidator(_plain)]


def error_text(error: ValidationError) -> str:
    """Returns the first field that is wrong, and why, in one line for a log."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {plain_reason(first)}"[:300]


class _Reported(BaseModel):
    # A newer version may say more.
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", from_attributes=True)


class _Preparation(_Reported):
    step: _Words
    elapsed_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    percent: _Count | None = None
    line: _LongCount | None = None
    file: _Words | None = None
    model_config = ConfigDict(extra="forbid")  # the API adds words of its own

    @model_validator(mode="after")
    def _percent_of_a_file(self) -> Self:
        if self.percent is not None and (self.line is None or self.file is None):
            raise ValueError("a percentage needs its line and file")
        return self


class _Error(_Reported):
    code: _Words
    message: _Words
    param: _Words | None = None


class _Hyperparameters(_Reported):
    """The resolved hyperparameters that the API computes with."""

    epochs: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    batch_size: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    num_microbatches: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    learning_rate: Annotated[float, Field(allow_inf_nan=False)] | None = None


def _hyperparameters(value: dict[str, Any]) -> dict[str, Any]:
    _Hyperparameters.model_validate(value)
    return value


class ReportedFields(_Reported):
    """The columns of a job that a box decides about. All but the status may be left out."""

    status: Annotated[JobStatus, Field(strict=False)]  # JSON has it as text
    attempt: _Count = 0
    started_at: _Time | None = None
    launched_at: _Time | None = None
    finished_at: _Time | None = None
    estimated_finish: _Time | None = None
    finish_is_measured: bool = False
    hyperparameters: _Object | None = None
    cancel_requested: bool = False
    waiting_reason: _Words | None = None
    preparation: _Preparation | None = None
    step: _Count = 0
    total_steps: _Count | None = None
    trained_tokens: _LongCount | None = None
    plan_number: _Count = 0
    num_lost: _Count = 0
    yields_to: _Id | None = None
    keeps_place: bool = False
    windlass: _Object = {}
    error: _Error | None = None
    fine_tuned_model: _Name | None = None
    result_files: Annotated[list[_FileId], Field(max_length=_MAX_RESULT_FILES)] = []


class _Metrics(_Reported):
    """The metrics of a step that the service and its API compute with. Others are only shown."""

    step: _Count
    total_steps: _Count | None = None
    trained_tokens: _LongCount | None = None
    remaining_s: _Amount | None = None
    remaining_is_estimate: bool = True
    pace_s: _Amount | None = None
    evaluation_s: _Amount | None = None
    step_s: _Amount | None = None
    train_loss: Annotated[float, Field(allow_inf_nan=False)] | None = None
    valid_loss: Annotated[float, Field(allow_inf_nan=False)] | None = None
    ssd_bytes_written: _Amount = 0
    ssd_bytes_written_by_ssd: list[_Amount] | None = None
    ssd_bytes_written_step_by_ssd: list[_Amount] | None = None

    @model_validator(mode="after")
    def _same_ssds(self) -> Self:
        written, step = self.ssd_bytes_written_by_ssd, self.ssd_bytes_written_step_by_ssd
        if written is not None and step is not None and (len(written) != len(step) or self.step_s is None):
            raise ValueError("the bytes written must be of the same SSDs, and have the time of the step")
        return self


class _Event(_Reported):
    attempt: _Count
    seq: _LongCount | None
    created_at: _Time
    level: Annotated[str, Field(max_length=8), AfterValidator(check_storable)]
    message: _Words
    type: Literal["message", "metrics"]
    data: _Object

    @model_validator(mode="after")
    def _metrics_of_a_step(self) -> Self:
        if self.type == "metrics":
            _Metrics.model_validate(self.data)
        return self


class _Checkpoint(_Reported):
    id: _Id
    attempt: _Count
    step_number: _Count
    created_at: _Time
    model: _Name
    metrics: _Object
    reasons: Annotated[list[_Id], Field(max_length=_MAX_REASONS)]
    nbytes: _LongCount | None


class _ResultFile(_Reported):
    id: _Id
    filename: _Name
    purpose: Annotated[str, Field(max_length=32), AfterValidator(check_storable)]
    nbytes: _LongCount


class _Place(_Reported):
    """The position of a report among the events of its job."""

    after: _LongCount
    until: _LongCount | None


class ReportedRow(ReportedFields):
    """A job's whole row: a box takes the job with it, and a head that was restored from a backup lists it again."""

    id: JobId
    created_at: _Time
    owner: _Id | None
    model: Annotated[str, AfterValidator(_model_id)]
    training_file: _FileId
    validation_file: _FileId | None
    suffix: Annotated[str, AfterValidator(check_suffix)] | None
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    method: _Object
    job_metadata: dict[str, _Words]
    windlass: _Object
    result_files: Annotated[list[_FileId], Field(max_length=_MAX_RESULT_FILES)]
    hyperparameters: Annotated[_Object, AfterValidator(_hyperparameters)] | None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)]
    idempotency_key: _Name | None
    request_digest: _Id | None


def readable_part(report: JobReport, tell: Callable[[str], None]) -> JobReport | None:
    """Returns a report with those of its parts only that can be stored and shown; None if it has none.

    A part with a value of another type would break the answers to users. An event of this kind is replaced, because
    those after it count from its ordinal. `tell` gets what was left out, and why.
    """

    def is_readable(kind: type[_Reported], part: Any, name: str) -> bool:
        try:
            kind.model_validate(part)
        except ValidationError as error:
            tell(f"{name}: {error_text(error)}")
            return False
        return True

    ordinals = [event.ordinal for event in report.events]
    if not is_readable(_Place, report, "report") or any(not 0 <= ordinal < 2**63 for ordinal in ordinals):
        return None
    fields, checkpoints, files = report.fields, report.checkpoints, report.files
    files_are = all(is_readable(_ResultFile, file, "files") for file in files)
    if fields and not (is_readable(ReportedFields, fields, "fields") and files_are):
        fields, files = {}, ()
    if checkpoints is not None:
        steps = {each.step_number for each in checkpoints}
        are = all(is_readable(_Checkpoint, each, "checkpoints") for each in checkpoints)
        checkpoints = checkpoints if are and len(steps) == len(checkpoints) else None
    events = [
        event if is_readable(_Event, event, f"event {event.ordinal}") else _unreadable(event.ordinal)
        for event in report.events
    ]
    return replace(report, fields=fields, checkpoints=checkpoints, files=files, events=events)


def _unreadable(ordinal: int) -> MirroredEvent:
    return MirroredEvent(
        ordinal=ordinal,
        attempt=0,
        seq=None,
        created_at=time.time(),
        level="warn",
        message="The box reported an event that cannot be read",
        type="message",
        data={},
    )
