"""The JSON of requests and answers: OpenAI's fine-tuning API, with windlass's additions under `windlass`."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, field_validator

from windlass.service.api import Identified, ListOf
from windlass.service.jobs import ssd_wear
from windlass.service.validation import (
    DEFAULT_LEARNING_RATE,
    SUFFIX,
    ApiError,
    Boxes,
    GpuNumber,
    JobSettings,
    JsonNumbers,
    SettingError,
    SupervisedHyperparameters,
    WindlassSettings,
    check_storable,
    check_suffix,
    told_preparation,
)
from windlass.storage.sql import TERMINAL_STATUSES, Checkpoint, File, Job, JobEvent

_MAX_METADATA_PAIRS = 16
# Pattern of stored text in the API's description: no null characters. Lone surrogates need no mention, because valid
# JSON has none.
_STORABLE = {"pattern": r"^[^\u0000]*$"}
_FileId = Annotated[
    str,
    StringConstraints(min_length=1, max_length=64),
    AfterValidator(check_storable),
    Field(json_schema_extra=_STORABLE),
]
_METADATA = {
    "maxProperties": _MAX_METADATA_PAIRS,
    # The pattern allows printable ASCII. The service accepts other printable characters, too.
    "propertyNames": {"pattern": r"^[ !#-\[\]-~]{1,64}$"},
    "additionalProperties": {"type": "string", "maxLength": 512, **_STORABLE},
}


def _check_metadata(value: dict[str, str]) -> dict[str, str]:
    if len(value) > _MAX_METADATA_PAIRS:
        raise ValueError(f"must have at most {_MAX_METADATA_PAIRS} pairs, got {len(value)}")
    for key, item in value.items():
        # Keys become part of a JSON path when jobs are searched by metadata.
        if not 1 <= len(key) <= 64 or any(char in '"\\' or not char.isprintable() for char in key):
            raise ValueError(f"keys must be 1 to 64 printable characters without quotes and backslashes, got {key!r}")
        if len(item) > 512:
            raise ValueError(f"values must have at most 512 characters, {key!r} has {len(item)}")
        check_storable(item)
    return value


class _Request(JsonNumbers):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SupervisedMethod(_Request):
    """The hyperparameters of supervised training."""

    hyperparameters: SupervisedHyperparameters = SupervisedHyperparameters()


class Method(_Request):
    """The training method. Only "supervised" is supported."""

    type: Annotated[str, Field(json_schema_extra={"const": "supervised"})]
    supervised: SupervisedMethod | None = None
    # Allowed here so that the error names the unsupported method, not an unknown field. They are not stored.
    dpo: Annotated[Any, Field(exclude=True)] = None
    reinforcement: Annotated[Any, Field(exclude=True)] = None

    @field_validator("type")
    @classmethod
    def _supervised_only(cls, value: str) -> str:
        if value != "supervised":
            raise ValueError('only "supervised" is supported yet')
        return value


class ResumeSettings(_Request):
    """The settings of a paused job that its resumption may change. The results do not depend on them."""

    gpus: GpuNumber | None = None  # None: as before
    boxes: Boxes = None  # their number, or their names, the head among them; None: as before


class ResumeJob(_Request):
    """The body of `POST /v1/fine_tuning/jobs/{id}/resume`. It may be left out."""

    windlass: ResumeSettings = ResumeSettings()


class RestartSettings(_Request):
    """The settings of a job that begins again. All others are those of the job before."""

    box: str | None = Field(default=None, max_length=64)  # None: any


class RestartJob(_Request):
    """The body of `POST /v1/fine_tuning/jobs/{id}/restart`. It may be left out."""

    windlass: RestartSettings = RestartSettings()


class CreateJob(_Request):
    """The body of `POST /v1/fine_tuning/jobs`."""

    model: Annotated[str, AfterValidator(check_storable), Field(json_schema_extra=_STORABLE)]
    training_file: _FileId
    validation_file: _FileId | None = None
    suffix: Annotated[str, AfterValidator(check_suffix), Field(json_schema_extra={"pattern": SUFFIX})] | None = None
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    metadata: Annotated[dict[str, str], AfterValidator(_check_metadata), Field(json_schema_extra=_METADATA)] | None = (
        None
    )
    integrations: Annotated[list[Any], Field(json_schema_extra={"maxItems": 0})] | None = None
    method: Method | None = None
    hyperparameters: SupervisedHyperparameters | None = None  # deprecated by `method`
    windlass: WindlassSettings = WindlassSettings()

    @field_validator("integrations")
    @classmethod
    def _no_integrations(cls, value: list[Any] | None) -> list[Any] | None:
        if value:
            raise ValueError("integrations are not supported; leave the list empty")
        return value

    def job_settings(self) -> JobSettings:
        """Merges the three places of a request that hold training settings. Raises ApiError if they disagree."""
        by_method = self.method.supervised.hyperparameters if self.method and self.method.supervised else None
        if by_method and self.hyperparameters and by_method != self.hyperparameters:
            raise ApiError(
                "hyperparameters: they differ from method.supervised.hyperparameters; give one of the two",
                param="hyperparameters",
                code="invalid_value",
            )
        if None not in (self.seed, self.windlass.seed) and self.seed != self.windlass.seed:
            raise ApiError(
                f"seed: it is {self.seed} but windlass.seed is {self.windlass.seed}", param="seed", code="invalid_value"
            )
        if self.validation_file is None and (name := self.windlass.needs_validation) is not None:
            raise ApiError(
                f"windlass.{name}: it goes by the loss on a validation file; give validation_file",
                param=f"windlass.{name}",
                code="invalid_value",
            )
        seed = self.windlass.seed if self.seed is None else self.seed
        try:
            return JobSettings(
                supervised=by_method or self.hyperparameters or SupervisedHyperparameters(),
                windlass=self.windlass,
                seed=secrets.randbits(31) if seed is None else seed,
            )
        except SettingError as error:
            raise ApiError(str(error), param=error.param, code="invalid_value") from None


class FileObject(Identified):
    """A file."""

    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, row: File) -> "FileObject":
        """Converts a row of the database."""
        return cls(
            id=row.id, bytes=row.nbytes, created_at=int(row.created_at), filename=row.filename, purpose=row.purpose
        )


class JobHyperparameters(BaseModel):
    """The three hyperparameters of OpenAI's API: as requested, then with their values once the data was counted."""

    n_epochs: int | Literal["auto"] = "auto"
    batch_size: int | Literal["auto"] = "auto"
    learning_rate_multiplier: float | Literal["auto"] = "auto"

    @classmethod
    def of(cls, job: Job) -> "JobHyperparameters":
        """Reads a job's row. Until the data was counted, the object `windlass` overrides the method's "auto"."""
        requested = job.method["supervised"]["hyperparameters"]
        known = job.hyperparameters or job.windlass
        learning_rate = known.get("learning_rate")
        values = {
            "n_epochs": known.get("epochs"),
            "batch_size": known.get("batch_size"),
            "learning_rate_multiplier": learning_rate and round(learning_rate / DEFAULT_LEARNING_RATE, 9),
        }
        return cls(**requested | {name: value for name, value in values.items() if value is not None})


class JobSupervised(BaseModel):
    """The hyperparameters of supervised training."""

    hyperparameters: JobHyperparameters


class JobMethod(BaseModel):
    """The training method of a job."""

    type: Literal["supervised"] = "supervised"
    supervised: JobSupervised


class JobError(BaseModel):
    """The reason why a job failed."""

    code: str
    message: str
    param: str | None = None


class PreparationState(BaseModel):
    """The progress of a job's preparation."""

    step: str  # "download_model", "check_model", "prepare_data", "plan_job", "plan_stages" or "check_budgets"
    elapsed_s: float  # since the preparation began
    percent: int | None = None  # of the bytes of the job's files, while data is prepared
    line: int | None = None  # the line being read ...
    file: str | None = None  # ... of this file
    summary: str  # all fields in words

    @classmethod
    def of(cls, preparation: dict[str, Any]) -> "PreparationState":
        """Converts the field of a job's row."""
        return cls(**preparation, summary=told_preparation(preparation))


class JobExtras(BaseModel):
    """Windlass's additions to a job."""

    settings: dict[str, Any]  # as requested
    hyperparameters: dict[str, Any] | None  # as resolved
    attempt: int
    priority: int
    step: int
    total_steps: int | None
    started_at: int | None
    waiting_reason: str | None
    preparation: PreparationState | None  # null unless the job is being prepared
    cancel_requested: bool
    has_plan: bool
    finish_is_estimate: bool | None  # about `estimated_finish`; null if that is null
    last_metrics: dict[str, Any] | None
    ssd_wear: dict[str, Any] | None
    box: str | None  # the box that has its files and states; null: of another service with the same database
    # Those that share it, in the order of its blocks; null: one box has all of it, or they are not chosen yet.
    boxes: list[str] | None
    is_here: bool  # whether this service has its files, so that it can tell their size, plan and timeline


class JobObject(BaseModel):
    """A fine-tuning job."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None
    estimated_finish: int | None
    model: str
    fine_tuned_model: str | None
    organization_id: str = "windlass"
    status: str
    hyperparameters: JobHyperparameters
    training_file: str
    validation_file: str | None
    result_files: list[str]
    trained_tokens: int | None
    seed: int
    error: JobError | None
    method: JobMethod
    metadata: dict[str, str]
    integrations: list[Any]
    suffix: str | None
    windlass: JobExtras

    @classmethod
    def of(
        cls,
        job: Job,
        last_metrics: dict[str, Any] | None = None,
        ssd_endurance_nbytes: Sequence[float] = (),
        *,
        has_plan: bool = False,
        room_reason: str | None = None,
        box: str | None = None,
        boxes: Sequence[str] | None = None,
        is_here: bool = True,
    ) -> "JobObject":
        """Converts a job's row, with the metrics of its last step and the SSD wear that they imply.

        `ssd_endurance_nbytes`: the rated bytes of each SSD. `room_reason`: why the job waits for disk space. It is
        passed in because a full disk may keep the database from storing it.
        """
        hyperparameters = JobHyperparameters.of(job)
        # A time in the past was a wrong estimate: the attempt began later than planned, or its steps became slower.
        finish = None if job.estimated_finish is None or job.estimated_finish <= time.time() else job.estimated_finish
        return cls(
            id=job.id,
            created_at=int(job.created_at),
            finished_at=_seconds(job.finished_at),
            estimated_finish=_seconds(finish),
            model=job.model,
            fine_tuned_model=job.fine_tuned_model,
            status=job.status.value,
            hyperparameters=hyperparameters,
            training_file=job.training_file,
            validation_file=job.validation_file,
            result_files=job.result_files,
            trained_tokens=job.trained_tokens,
            seed=job.seed,
            error=None if job.error is None else JobError(**job.error),
            method=JobMethod(supervised=JobSupervised(hyperparameters=hyperparameters)),
            metadata=job.job_metadata,
            integrations=[],
            suffix=job.suffix,
            windlass=JobExtras(
                settings=job.windlass,
                hyperparameters=job.hyperparameters,
                attempt=job.attempt,
                priority=job.priority,
                step=job.step,
                total_steps=job.total_steps,
                started_at=_seconds(job.started_at),
                waiting_reason=room_reason or job.waiting_reason,
                preparation=None if job.preparation is None else PreparationState.of(job.preparation),
                cancel_requested=job.cancel_requested,
                has_plan=has_plan,
                finish_is_estimate=None if finish is None else not job.finish_is_measured,
                last_metrics=last_metrics,
                ssd_wear=None if last_metrics is None else _ssd_wear(job, last_metrics, ssd_endurance_nbytes),
                box=box,
                boxes=None if boxes is None else list(boxes),
                is_here=is_here,
            ),
        )


class StreamStart(BaseModel):
    """The position for an event stream that misses no change since the list was read."""

    last_event_ordinal: int


class JobList(ListOf[JobObject]):
    """A page of jobs."""

    windlass: StreamStart


class EventObject(BaseModel):
    """An event of a job."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: str
    message: str
    type: str
    data: dict[str, Any]

    @classmethod
    def of(cls, row: JobEvent) -> "EventObject":
        """Converts a row of the database."""
        return cls(
            id=event_id(row.ordinal),
            created_at=int(row.created_at),
            level=row.level,
            message=row.message,
            type=row.type,
            data=row.data,
        )


class StreamedEvent(EventObject):
    """An event as live streams send it."""

    job_id: str
    attempt: int

    @classmethod
    def of(cls, row: JobEvent) -> "StreamedEvent":
        """Converts a row of the database."""
        return cls(**EventObject.of(row).model_dump(), job_id=row.job_id, attempt=row.attempt)


class CheckpointObject(Identified):
    """A model saved during training."""

    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    step_number: int
    metrics: dict[str, Any]
    windlass: dict[str, Any]

    @classmethod
    def of(cls, row: Checkpoint) -> "CheckpointObject":
        """Converts a row of the database."""
        return cls(
            id=row.id,
            created_at=int(row.created_at),
            fine_tuned_model_checkpoint=row.model,
            fine_tuning_job_id=row.job_id,
            step_number=row.step_number,
            metrics=row.metrics,
            windlass={"reasons": row.reasons, "bytes": row.nbytes},
        )


class CurveColumns(BaseModel):
    """Columns with one entry for each step; null for a value that was not measured."""

    step: list[int]
    attempt: list[int]
    train_loss: list[float | None]
    valid_loss: list[float | None]


class MetricsObject(BaseModel):
    """A job's curves."""

    object: Literal["fine_tuning.job.metrics"] = "fine_tuning.job.metrics"
    job_id: str
    last_event_ordinal: int
    data: CurveColumns


class TraceObject(BaseModel):
    """A trace in the format of Perfetto and Chrome."""

    traceEvents: list[dict[str, Any]]
    displayTimeUnit: Literal["ms"]
    otherData: dict[str, Any]


class ModelObject(BaseModel):
    """A base or a fine-tuned model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    windlass: dict[str, Any] | None = None  # its disk usage; not in lists


def event_id(ordinal: int) -> str:
    """Returns an event's public id."""
    return f"ftevent-{ordinal}"


def event_ordinal(public_id: str) -> int:
    """Returns the ordinal of an event's id. Raises ApiError for an invalid id."""
    digits = public_id.removeprefix("ftevent-")
    if not (public_id.startswith("ftevent-") and digits.isascii() and digits.isdigit() and len(digits) < 19):
        raise ApiError(f"after: {public_id!r:.80} is not an event's id", param="after", code="invalid_value")
    return int(digits)


def _ssd_wear(job: Job, metrics: dict[str, Any], rated_nbytes: Sequence[float]) -> dict[str, Any] | None:
    is_over = job.status in TERMINAL_STATUSES
    wear = ssd_wear(metrics, total_steps=job.total_steps or 0, is_over=is_over, rated_nbytes=rated_nbytes)
    return None if wear is None else asdict(wear)


def _seconds(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s)
