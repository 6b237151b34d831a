"""The database's tables. Times are seconds since the epoch. Ids are those that users see."""

from typing import Any

from sqlalchemy import JSON, BigInteger, Double, ForeignKey, Index, Integer, String, Text, UniqueConstraint, false, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from windlass.storage.sql.job_status import JobStatus

# SQLite numbers rows automatically only if the type is exactly INTEGER.
_Ordinal = BigInteger().with_variant(Integer(), "sqlite")


class _StatusType(TypeDecorator[JobStatus]):
    """Stores a status as text, so that a new status needs no change of a database type."""

    impl = String(20)
    cache_ok = True

    def process_bind_param(self, value: JobStatus | None, dialect: Any) -> str | None:
        return None if value is None else JobStatus(value).value

    def process_result_value(self, value: str | None, dialect: Any) -> JobStatus | None:
        return None if value is None else JobStatus(value)


class _Words(TypeDecorator[str]):
    """Stores text that may come from outside: from a chat template, a data file or a web server.

    Characters that a database cannot store are replaced, so that such a text never prevents the writing of an event.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        return value and value.replace("\0", "\ufffd").encode(errors="replace").decode()


class Base(DeclarativeBase):
    """The base class of all tables. Tests compare its metadata with the migrations."""

    type_annotation_map = {float: Double}  # noqa: RUF012 - SQLAlchemy's own declaration


class File(Base):
    """An uploaded file or a result file. Its bytes are in the files directory under its id."""

    __tablename__ = "files"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    filename: Mapped[str] = mapped_column(String(255))  # the uploader's name for it; never part of a path
    purpose: Mapped[str] = mapped_column(String(32))
    nbytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[float]
    owner: Mapped[str | None] = mapped_column(String(64), index=True)  # a user; NULL: no key was needed
    node: Mapped[str | None] = mapped_column(String(64))  # the home that has the bytes; NULL: not recorded


class Job(Base):
    """A fine-tuning job. Its row is the only authority on its state."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_status_order", "status", "priority", "created_at"),
        Index("ix_jobs_owner", "owner", "created_at"),
        Index("ix_jobs_node", "node", "status"),
        Index("uq_jobs_idempotency_key", "owner", "idempotency_key", unique=True),
        # A second index for jobs without an owner, because NULLs count as different in a unique index.
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
    launched_at: Mapped[float | None]  # start of the last attempt
    finished_at: Mapped[float | None]
    estimated_finish: Mapped[float | None]
    # The estimate follows from measured steps; False: from a plan, or from too few steps.
    finish_is_measured: Mapped[bool] = mapped_column(default=False, server_default=false())

    # --- the request
    owner: Mapped[str | None] = mapped_column(String(64))  # a user; NULL: no key was needed
    model: Mapped[str] = mapped_column(String(255))
    # Not foreign keys, because a finished job outlives its files.
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

    # --- the progress
    hyperparameters: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))  # resolved; plain numbers
    cancel_requested: Mapped[bool] = mapped_column(default=False)
    waiting_reason: Mapped[str | None] = mapped_column(_Words())  # the reason why it does not run, as text
    # Progress of its preparation: `step`, `elapsed_s`, `percent`, `line` and `file`; NULL: it is not being prepared.
    preparation: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    step: Mapped[int] = mapped_column(default=0)
    total_steps: Mapped[int | None]
    trained_tokens: Mapped[int | None] = mapped_column(BigInteger)
    # The number of the plan for its next attempt; 0: the plan from before it was queued, if there is one.
    plan_number: Mapped[int] = mapped_column(default=0)
    # Consecutive lost attempts: since the last one that completed a step or ended as requested.
    num_lost: Mapped[int] = mapped_column(default=0)
    # The job of higher priority that preempts its attempt; NULL: none. It continues automatically afterwards.
    yields_to: Mapped[str | None] = mapped_column(String(64))
    # It was queued while running, and not paused by its owner: it continues before other waiting jobs.
    keeps_place: Mapped[bool] = mapped_column(default=False, server_default=false())
    # The home that has its folder and its files; NULL: the home of the dispatcher that will claim it.
    node: Mapped[str | None] = mapped_column(String(64))
    # The dispatcher that works on it. If it is NULL or not in the table, the job may be claimed.
    lease_holder: Mapped[str | None] = mapped_column(String(64))
    # The last imported journal record.
    journal_attempt: Mapped[int] = mapped_column(default=0)
    journal_seq: Mapped[int] = mapped_column(BigInteger, default=0)
    # The last imported event of the box that works on it, by that box's ordinals; 0: none, or it is worked on here.
    box_cursor: Mapped[int] = mapped_column(BigInteger, default=0, server_default=text("0"))

    # --- the end
    error: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))  # code, message, param
    fine_tuned_model: Mapped[str | None] = mapped_column(String(255), unique=True)
    result_files: Mapped[list[str]] = mapped_column(JSON)


class Dispatcher(Base):
    """A dispatcher that was not declared dead."""

    __tablename__ = "dispatchers"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    node: Mapped[str] = mapped_column(String(64))  # its home
    machine: Mapped[str] = mapped_column(String(64))  # its machine and the machine's boot
    heartbeat: Mapped[int] = mapped_column(BigInteger)  # a counter that grows while it is alive
    expires_at: Mapped[float | None]  # by the database's clock; NULL on SQLite, which has no clock


class Box(Base):
    """A box that has joined this service: it works on jobs of this database with a home and a dispatcher of its own."""

    __tablename__ = "boxes"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    node: Mapped[str] = mapped_column(String(64), unique=True)  # its home, as in `Job.node`
    head: Mapped[str] = mapped_column(String(64))  # the home of its head: several services may share a database
    state: Mapped[str] = mapped_column(String(16))  # "ready", "draining", "removed"
    state_at: Mapped[float | None]  # when a person last changed its state; NULL: never
    certificate: Mapped[str] = mapped_column(String(64), unique=True)  # SHA-256 of its certificate, in hex
    address: Mapped[str] = mapped_column(String(64))  # the address that it last called from
    joined_at: Mapped[float]
    seen_at: Mapped[float]  # when it last called
    facts: Mapped[dict[str, Any]] = mapped_column(JSON)  # what it is made of; see service.machine.fleet
    capacity: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))  # what is free on it
    # The measurement of the network that it is to take part in, and what it has answered; see service.machine.fleet.
    probe: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    probe_answer: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class NetworkRate(Base):
    """The newest measurement of the network from one box of a head to another."""

    __tablename__ = "network_rates"

    head: Mapped[str] = mapped_column(String(64), primary_key=True)  # its home
    source: Mapped[str] = mapped_column(String(64), primary_key=True)  # the id of a box, or "box-head"
    target: Mapped[str] = mapped_column(String(64), primary_key=True)
    bytes_per_s: Mapped[float]
    round_trip_s: Mapped[float]
    measured_at: Mapped[float]


class JoinCode(Base):
    """A code with which one box may join. Only its digest is stored."""

    __tablename__ = "join_codes"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)  # SHA-256 of the code's secret, in hex
    created_at: Mapped[float]
    expires_at: Mapped[float]
    used_at: Mapped[float | None]
    box_id: Mapped[str | None] = mapped_column(String(64))  # the box that joined with it


class BoxInstruction(Base):
    """An instruction for a box about a job, kept until the box has carried it out."""

    __tablename__ = "box_instructions"
    __table_args__ = (
        Index("ix_box_instructions_box", "box_id", "ordinal"),
        {"sqlite_autoincrement": True},  # an ordinal is never reused, because boxes remember the last one
    )

    ordinal: Mapped[int] = mapped_column(_Ordinal, primary_key=True, autoincrement=True)
    box_id: Mapped[str] = mapped_column(ForeignKey("boxes.id", ondelete="CASCADE"))
    job_id: Mapped[str] = mapped_column(String(64), index=True)
    kind: Mapped[str] = mapped_column(String(16))  # "take", "cancel", "pause", "resume"
    body: Mapped[dict[str, Any]] = mapped_column(JSON)
    created_at: Mapped[float]


class JobPart(Base):
    """A box's part of a job over several boxes.

    The head has the parts of all other boxes, as it wants them and as they tell. A box has its own.
    """

    __tablename__ = "job_parts"

    job_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    node: Mapped[str] = mapped_column(String(64), primary_key=True, index=True)  # the home of the box
    position: Mapped[int]  # of the box among the boxes of the job; the head's own box is 0
    # --- as the head wants it
    attempt: Mapped[int] = mapped_column(default=0)  # the attempt that the box is to serve; 0: none
    link: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))  # how it reaches the other boxes
    # Its processes end at once, and it begins no attempt: the job is over, or its last attempt never began.
    is_over: Mapped[bool] = mapped_column(default=False)
    # --- as the box tells it
    state: Mapped[str] = mapped_column(String(16))  # "copying", "ready", "running", "lost"
    served: Mapped[int] = mapped_column(default=0)  # the attempt that the box serves, or has served last
    port: Mapped[int | None]  # at which it listens for the next attempt; NULL: not known
    told: Mapped[str | None] = mapped_column(_Words())  # how far it is, or why it cannot, in words for users


class JobEvent(Base):
    """An event of a job. Ordinals follow the order in which the service learned of events."""

    __tablename__ = "job_events"
    __table_args__ = (
        UniqueConstraint("job_id", "attempt", "seq"),
        Index("ix_job_events_job", "job_id", "ordinal"),
        {"sqlite_autoincrement": True},  # an ordinal is never reused, because it is the id in the event stream
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
    """The metrics of one step. A resumed attempt replaces those after the commit from which it resumed."""

    __tablename__ = "job_metrics"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt: Mapped[int]
    created_at: Mapped[float]
    data: Mapped[dict[str, Any]] = mapped_column(JSON)


class Checkpoint(Base):
    """A model that was saved during training."""

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
    nbytes: Mapped[int | None] = mapped_column(BigInteger)  # of its folder; NULL: not known


class DeletedJob(Base):
    """A deleted job: the owner of its remaining model, and whether its files are still to be removed."""

    __tablename__ = "deleted_jobs"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    owner: Mapped[str | None] = mapped_column(String(64))
    node: Mapped[str | None] = mapped_column(String(64))  # the home that has its folder; NULL: not known
    attempt: Mapped[int]  # its last attempt
    model: Mapped[str] = mapped_column(String(255))  # name of its model, which need not exist; prefix of checkpoints
    keeps_model: Mapped[bool]
    deleted_at: Mapped[float]
    removed_at: Mapped[float | None] = mapped_column(index=True)  # NULL: its folder and states may still exist


class Removal(Base):
    """A pending removal: a deleted file or model folder that is still to be removed from the disk."""

    __tablename__ = "removals"

    ordinal: Mapped[int] = mapped_column(_Ordinal, primary_key=True, autoincrement=True)
    kind: Mapped[str] = mapped_column(String(8))  # "file", "model"
    name: Mapped[str] = mapped_column(String(255))
    node: Mapped[str] = mapped_column(String(64))  # the home that has it
    created_at: Mapped[float]


class StoredThing(Base):
    """The size of something that a user's job has left, as the dispatcher of its home measured it."""

    __tablename__ = "stored_things"

    kind: Mapped[str] = mapped_column(String(16), primary_key=True)  # "job", "states", "checkpoint", "model"
    name: Mapped[str] = mapped_column(String(255), primary_key=True)  # the id of the job or model
    job_id: Mapped[str] = mapped_column(String(64), index=True)
    owner: Mapped[str] = mapped_column(String(64), index=True)  # the job's user
    node: Mapped[str] = mapped_column(String(64))  # the home that has it
    nbytes: Mapped[int] = mapped_column(BigInteger)


class WebhookEndpoint(Base):
    """A URL that receives events about jobs' ends. Signing secrets are encrypted by a key outside the database."""

    __tablename__ = "webhook_endpoints"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(255))
    url: Mapped[str] = mapped_column(Text)
    event_types: Mapped[list[str]] = mapped_column(JSON)
    secret: Mapped[str] = mapped_column(Text)
    secret_before: Mapped[str | None] = mapped_column(Text)  # the previous secret, which signs too until the time below
    secret_before_until: Mapped[float | None]
    created_at: Mapped[float]
    updated_at: Mapped[float]
    owner: Mapped[str | None] = mapped_column(String(64))  # a user, about whose jobs it receives events


class WebhookDelivery(Base):
    """One event for one endpoint, written in the transaction of the change that it reports."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (Index("ix_webhook_deliveries_endpoint", "endpoint_id", "ordinal"),)

    ordinal: Mapped[int] = mapped_column(_Ordinal, primary_key=True, autoincrement=True)
    endpoint_id: Mapped[str] = mapped_column(ForeignKey("webhook_endpoints.id", ondelete="CASCADE"))
    event_id: Mapped[str] = mapped_column(String(64))
    body: Mapped[str] = mapped_column(Text)  # as it is sent and signed
    created_at: Mapped[float]
    num_tries: Mapped[int] = mapped_column(default=0)
    next_try_at: Mapped[float | None] = mapped_column(index=True)  # NULL: it was delivered, or all retries failed
    delivered_at: Mapped[float | None]
    last_error: Mapped[str | None] = mapped_column(_Words())


class ApiKey(Base):
    """An API key. Only its digest is stored, so only its holder knows the key itself."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(64))
    user: Mapped[str] = mapped_column("user_name", String(64))  # the owner of jobs and files that are made with it
    role: Mapped[str] = mapped_column(String(8))
    digest: Mapped[str] = mapped_column(String(64), unique=True)  # SHA-256 of the key, in hex
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]
    last_used_at: Mapped[float | None]  # to the minute
    # Its holder's limits that differ from those of the settings: see service.entitlements.
    limits: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class LoginSession(Base):
    """A browser's login with a key. It ends with that key."""

    __tablename__ = "login_sessions"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)  # SHA-256 of the cookie's token, in hex
    key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id", ondelete="CASCADE"), index=True)
    created_at: Mapped[float]
    expires_at: Mapped[float]


class AuditEvent(Base):
    """A change, or the attempt of one, with its user. Rows outlive the objects that they name."""

    __tablename__ = "audit_events"
    __table_args__ = ({"sqlite_autoincrement": True},)

    ordinal: Mapped[int] = mapped_column(_Ordinal, primary_key=True, autoincrement=True)
    created_at: Mapped[float]
    key_id: Mapped[str | None] = mapped_column(String(64))  # NULL: no key was needed, or the key was unknown
    user: Mapped[str | None] = mapped_column("user_name", String(64))
    action: Mapped[str] = mapped_column(String(64))
    target: Mapped[str | None] = mapped_column(String(255))  # the id of the changed object
    peer: Mapped[str | None] = mapped_column(String(64))  # the client's address
    result: Mapped[str] = mapped_column(String(8))
