"""The tables. Times are seconds since the epoch; ids are the ones users see."""

from typing import Any

from sqlalchemy import JSON, BigInteger, Double, ForeignKey, Index, Integer, String, Text, UniqueConstraint, false, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from windlass.storage.sql.job_status import JobStatus

# SQLite numbers rows by itself only where the type is exactly INTEGER.
_Ordinal = BigInteger().with_variant(Integer(), "sqlite")


class _StatusType(TypeDecorator[JobStatus]):
    """A status as its plain word, so that a new one needs no change of type in the database."""

    impl = String(20)
    cache_ok = True

    def process_bind_param(self, value: JobStatus | None, dialect: Any) -> str | None:
        return None if value is None else JobStatus(value).value

    def process_result_value(self, value: str | None, dialect: Any) -> JobStatus | None:
        return None if value is None else JobStatus(value)


class _Words(TypeDecorator[str]):
    """Text for people, some of which strangers have written: a chat template, a data file, a web server.

    What no database stores is replaced, so that no word of theirs keeps an event from being written.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        return value and value.replace("\0", "\ufffd").encode(errors="replace").decode()


class Base(DeclarativeBase):
    """Holds the metadata that the migrations are checked against."""

    type_annotation_map = {float: Double}  # noqa: RUF012 - SQLAlchemy's own declaration


class File(Base):
    """An uploaded or a result file; its bytes lie in the files directory under its id."""

    __tablename__ = "files"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    filename: Mapped[str] = mapped_column(String(255))  # the uploader's name for it; never part of a path
    purpose: Mapped[str] = mapped_column(String(32))
    nbytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[float]
    owner: Mapped[str | None] = mapped_column(String(64), index=True)  # a user; NULL: made while no key was needed
    node: Mapped[str | None] = mapped_column(String(64))  # the home that has the bytes; NULL: made before that was kept


class Job(Base):
    """A fine-tuning job, and the one authority on its state."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_status_order", "status", "priority", "created_at"),
        Index("ix_jobs_owner", "owner", "created_at"),
        Index("uq_jobs_idempotency_key", "owner", "idempotency_key", unique=True),
        # For those without an owner: NULLs differ from each other.
        Index(
            "uq_jobs_idempotency_key_unowned",
            "idempotency_key",
            unique=True,
            sqlite_where=text("owner IS NULL"),
            postgresql_where=text("owner IS NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    status: Mapped[JobStatus] = mapped_column(_StatusType())
    attempt: Mapped[int] = mapped_column(default=0)  # 0: never launched
    created_at: Mapped[float] = mapped_column(index=True)
    started_at: Mapped[float | None]  # of the first attempt
    launched_at: Mapped[float | None]  # when the last attempt began
    finished_at: Mapped[float | None]
    estimated_finish: Mapped[float | None]
    # It follows from steps that were measured; else from a plan, or from too few steps.
    finish_is_measured: Mapped[bool] = mapped_column(default=False, server_default=false())

    # What was asked for, and by which user; NULL: while no key was needed.
    owner: Mapped[str | None] = mapped_column(String(64))
    model: Mapped[str] = mapped_column(String(255))
    # Not foreign keys: a finished job outlives the files it was made from.
    training_file: Mapped[str] = mapped_column(String(64), index=True)
    validation_file: Mapped[str | None] = mapped_column(String(64), index=True)
    suffix: Mapped[str | None] = mapped_column(String(64))
    seed: Mapped[int] = mapped_column(BigInteger)
    method: Mapped[dict[str, Any]] = mapped_column(JSON)
    windlass: Mapped[dict[str, Any]] = mapped_column(JSON)  # the request's `windlass` object
    job_metadata: Mapped[dict[str, str]] = mapped_column("metadata", JSON)
    priority: Mapped[int] = mapped_column(default=0)  # smaller first; ties by created_at
    idempotency_key: Mapped[str | None] = mapped_column(String(255))  # one job for each of an owner's; see service.jobs
    request_digest: Mapped[str | None] = mapped_column(String(64))

    # How it goes.
    hyperparameters: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))  # resolved; plain numbers
    cancel_requested: Mapped[bool] = mapped_column(default=False)
    waiting_reason: Mapped[str | None] = mapped_column(_Words())  # why it does not run, in words
    # How far its preparation is: `step`, `elapsed_s`, `percent`, `line` and `file`; NULL: it is not being prepared.
    preparation: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    step: Mapped[int] = mapped_column(default=0)
    total_steps: Mapped[int | None]
    trained_tokens: Mapped[int | None] = mapped_column(BigInteger)
    # Of its plans, the one that its next attempt runs by; 0: as it was planned before it was queued, if it was.
    plan_number: Mapped[int] = mapped_column(default=0)
    # Attempts that were lost since the last that brought a step, or ended as it was asked to.
    num_lost: Mapped[int] = mapped_column(default=0)
    # The job of higher priority that its attempt ends for; NULL: it need not. It goes on by itself afterwards.
    yields_to: Mapped[str | None] = mapped_column(String(64))
    # Whether it ran until it was queued, and was not paused by its owner: then it goes on before jobs that wait.
    keeps_place: Mapped[bool] = mapped_column(default=False, server_default=false())
    # The home that has its folder and its files; NULL: that of the dispatcher that will claim it.
    node: Mapped[str | None] = mapped_column(String(64))
    # The dispatcher that works on it; NULL, or one that is not in the table: it may be claimed.
    lease_holder: Mapped[str | None] = mapped_column(String(64))
    # The last journal record that was imported.
    journal_attempt: Mapped[int] = mapped_column(default=0)
    journal_seq: Mapped[int] = mapped_column(BigInteger, default=0)

    # How it ended.
    error: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))  # code, message, param
    fine_tuned_model: Mapped[str | None] = mapped_column(String(255), unique=True)
    result_files: Mapped[list[str]] = mapped_column(JSON)


class Dispatcher(Base):
    """A dispatcher that lives, as far as anybody knows."""

    __tablename__ = "dispatchers"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    node: Mapped[str] = mapped_column(String(64))  # its home
    machine: Mapped[str] = mapped_column(String(64))  # and this boot of it
    heartbeat: Mapped[int] = mapped_column(BigInteger)  # it goes up for as long as it lives
    expires_at: Mapped[float | None]  # by the database's clock; NULL on SQLite, which has none


class JobEvent(Base):
    """Something that happened to a job, in the order in which the service learnt of it."""

    __tablename__ = "job_events"
    __table_args__ = (
        UniqueConstraint("job_id", "attempt", "seq"),
        Index("ix_job_events_job", "job_id", "ordinal"),
        {"sqlite_autoincrement": True},  # an ordinal is never used twice: it is the event stream's id
    )

    ordinal: Mapped[int] = mapped_column(_Ordinal, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    seq: Mapped[int | None] = mapped_column(BigInteger)  # the journal's number; NULL: the service wrote it
    created_at: Mapped[float]
    level: Mapped[str] = mapped_column(String(8))
    message: Mapped[str] = mapped_column(_Words())
    type: Mapped[str] = mapped_column(String(8))
    data: Mapped[dict[str, Any]] = mapped_column(JSON)


class JobMetrics(Base):
    """The metrics of one step. A resumed attempt replaces those past the commit it went on from."""

    __tablename__ = "job_metrics"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt: Mapped[int]
    created_at: Mapped[float]
    data: Mapped[dict[str, Any]] = mapped_column(JSON)


class Checkpoint(Base):
    """A model saved on the way."""

    __tablename__ = "checkpoints"
    __table_args__ = (UniqueConstraint("job_id", "step_number"),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    step_number: Mapped[int]
    created_at: Mapped[float]
    model: Mapped[str] = mapped_column(String(255))
    path: Mapped[str] = mapped_column(Text)
    metrics: Mapped[dict[str, Any]] = mapped_column(JSON)
    reasons: Mapped[list[str]] = mapped_column(JSON)  # "interval", "minutes", "best", "last"
    nbytes: Mapped[int | None] = mapped_column(BigInteger)  # of its folder; NULL: nobody told


class DeletedJob(Base):
    """A job that was deleted: whose its model is that stays, and what of it is still to be removed from disks."""

    __tablename__ = "deleted_jobs"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    owner: Mapped[str | None] = mapped_column(String(64))
    node: Mapped[str | None] = mapped_column(String(64))  # the home that has its folder; NULL: any, of an old version
    attempt: Mapped[int]  # its last
    model: Mapped[str] = mapped_column(String(255))  # what it made, or would have; checkpoints are called after it
    keeps_model: Mapped[bool]
    deleted_at: Mapped[float]
    removed_at: Mapped[float | None] = mapped_column(index=True)  # NULL: its folder and its states may still be there


class Removal(Base):
    """A file or a model's folder that has been deleted, until it is removed from the disk."""

    __tablename__ = "removals"

    ordinal: Mapped[int] = mapped_column(_Ordinal, primary_key=True, autoincrement=True)
    kind: Mapped[str] = mapped_column(String(8))  # "file", "model"
    name: Mapped[str] = mapped_column(String(255))
    node: Mapped[str] = mapped_column(String(64))  # the home that has it
    created_at: Mapped[float]


class WebhookEndpoint(Base):
    """Who is told how jobs end. Signing secrets are sealed: the key lies outside the database."""

    __tablename__ = "webhook_endpoints"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(255))
    url: Mapped[str] = mapped_column(Text)
    event_types: Mapped[list[str]] = mapped_column(JSON)
    secret: Mapped[str] = mapped_column(Text)
    secret_before: Mapped[str | None] = mapped_column(Text)  # signs as well, until then
    secret_before_until: Mapped[float | None]
    created_at: Mapped[float]
    updated_at: Mapped[float]
    owner: Mapped[str | None] = mapped_column(String(64))  # a user, who is told of their own jobs


class WebhookDelivery(Base):
    """One event for one endpoint, written with the change that it tells of."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (Index("ix_webhook_deliveries_endpoint", "endpoint_id", "ordinal"),)

    ordinal: Mapped[int] = mapped_column(_Ordinal, primary_key=True, autoincrement=True)
    endpoint_id: Mapped[str] = mapped_column(ForeignKey("webhook_endpoints.id", ondelete="CASCADE"))
    event_id: Mapped[str] = mapped_column(String(64))
    body: Mapped[str] = mapped_column(Text)  # as it is sent and signed
    created_at: Mapped[float]
    num_tries: Mapped[int] = mapped_column(default=0)
    next_try_at: Mapped[float | None] = mapped_column(index=True)  # None: it was delivered, or given up
    delivered_at: Mapped[float | None]
    last_error: Mapped[str | None] = mapped_column(_Words())


class ApiKey(Base):
    """Who may use the service. The key itself is known to its holder only."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(64))
    user: Mapped[str] = mapped_column("user_name", String(64))  # whose jobs and files are made with it
    role: Mapped[str] = mapped_column(String(8))
    digest: Mapped[str] = mapped_column(String(64), unique=True)  # SHA-256 of the key, in hex
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]
    last_used_at: Mapped[float | None]  # to the minute
    # What its holder may ask for, where it differs from what settings say: see service.entitlements.
    limits: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class LoginSession(Base):
    """A browser that its person has logged in with a key; it ends with that key."""

    __tablename__ = "login_sessions"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)  # SHA-256 of the cookie's token, in hex
    key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id", ondelete="CASCADE"), index=True)
    created_at: Mapped[float]
    expires_at: Mapped[float]


class AuditEvent(Base):
    """Who changed what, or tried to. Rows outlive what they speak of."""

    __tablename__ = "audit_events"
    __table_args__ = ({"sqlite_autoincrement": True},)

    ordinal: Mapped[int] = mapped_column(_Ordinal, primary_key=True, autoincrement=True)
    created_at: Mapped[float]
    key_id: Mapped[str | None] = mapped_column(String(64))  # NULL: no key was needed, or known
    user: Mapped[str | None] = mapped_column("user_name", String(64))
    action: Mapped[str] = mapped_column(String(64))
    target: Mapped[str | None] = mapped_column(String(255))  # the id of what was changed
    peer: Mapped[str | None] = mapped_column(String(64))  # the address that asked
    result: Mapped[str] = mapped_column(String(8))
