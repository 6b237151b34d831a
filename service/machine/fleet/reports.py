"""Checks of what a box reports about its jobs. A box is a machine of its own, and may say anything."""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from windlass.service.validation import ApiError, check_model_id, check_storable, check_suffix
from windlass.storage.sql import JobStatus

_MAX_WORDS_CHARS = 100_000  # of a text that users read
_MAX_JSON_CHARS = 1_000_000  # of an object
_MAX_RESULT_FILES = 100

JobId = Annotated[str, Field(pattern=r"^ftjob-[0-9a-f]{24}$")]
_Id = Annotated[str, Field(max_length=64), AfterValidator(check_storable)]
_Name = Annotated[str, Field(max_length=255), AfterValidator(check_storable)]
_Words = Annotated[str, Field(max_length=_MAX_WORDS_CHARS)]
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_LongCount = Annotated[int, Field(ge=0, lt=2**63)]
_Time = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]  # seconds since the epoch


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
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:300]


class _Reported(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")  # a newer version may say more


class _Preparation(_Reported):
    step: _Words
    elapsed_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    percent: _Count | None = None
    line: _LongCount | None = None
    file: _Words | None = None


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
    result_files: Annotated[list[_Id], Field(max_length=_MAX_RESULT_FILES)] = []


class ReportedRow(ReportedFields):
    """A job's whole row, by which a head that was restored from an older backup lists the job again."""

    id: JobId
    created_at: _Time
    owner: _Id | None
    model: Annotated[str, AfterValidator(_model_id)]
    training_file: _Id
    validation_file: _Id | None
    suffix: Annotated[str, AfterValidator(check_suffix)] | None
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    method: _Object
    job_metadata: dict[str, _Name]
    windlass: _Object
    result_files: Annotated[list[_Id], Field(max_length=_MAX_RESULT_FILES)]
    hyperparameters: Annotated[_Object, AfterValidator(_hyperparameters)] | None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)]
    idempotency_key: _Name | None
    request_digest: _Id | None
