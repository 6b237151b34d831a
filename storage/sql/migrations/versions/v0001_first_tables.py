"""Creates the tables of files, jobs, events, metrics and checkpoints."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Creates the tables."""
    _create_files()
    _create_jobs()
    _create_events()
    _create_metrics()
    _create_checkpoints()


def downgrade() -> None:
    """Drops the tables."""
    for table in ("checkpoints", "job_metrics", "job_events", "jobs", "files"):
        op.drop_table(table)


def _create_files() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("filename", sa.String(255), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("nbytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
    )


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("started_at", sa.Double),
        sa.Column("finished_at", sa.Double),
        sa.Column("estimated_finish", sa.Double),
        sa.Column("model", sa.String(255), nullable=False),
        sa.Column("training_file", sa.String(64), nullable=False),
        sa.Column("validation_file", sa.String(64)),
        sa.Column("suffix", sa.String(64)),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("method", sa.JSON, nullable=False),
        sa.Column("windlass", sa.JSON, nullable=False),
        sa.Column("metadata", sa.JSON, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("idempotency_key", sa.String(255), unique=True),
        sa.Column("request_digest", sa.String(64)),
        sa.Column("hyperparameters", sa.JSON),
        sa.Column("cancel_requested", sa.Boolean, nullable=False),
        sa.Column("waiting_reason", sa.Text),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("total_steps", sa.Integer),
        sa.Column("trained_tokens", sa.BigInteger),
        sa.Column("journal_attempt", sa.Integer, nullable=False),
        sa.Column("journal_seq", sa.BigInteger, nullable=False),
        sa.Column("error", sa.JSON),
        sa.Column("fine_tuned_model", sa.String(255), unique=True),
        sa.Column("result_files", sa.JSON, nullable=False),
    )
    op.create_index("ix_jobs_created_at", "jobs", ["created_at"])
    op.create_index("ix_jobs_training_file", "jobs", ["training_file"])
    op.create_index("ix_jobs_validation_file", "jobs", ["validation_file"])
    op.create_index("ix_jobs_status_order", "jobs", ["status", "priority", "created_at"])


def _job_id(*, primary_key: bool = False) -> sa.Column[str]:
    owner = sa.ForeignKey("jobs.id", ondelete="CASCADE")
    return sa.Column("job_id", sa.String(64), owner, nullable=False, primary_key=primary_key)


def _create_events() -> None:
    op.create_table(
        "job_events",
        sa.Column(
            "ordinal",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            primary_key=True,
            autoincrement=True,
        ),
        _job_id(),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("seq", sa.BigInteger),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("level", sa.String(8), nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("type", sa.String(8), nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
        sa.UniqueConstraint("job_id", "attempt", "seq"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_job_events_job", "job_events", ["job_id", "ordinal"])


def _create_metrics() -> None:
    op.create_table(
        "job_metrics",
        _job_id(primary_key=True),
        sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
    )


def _create_checkpoints() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.String(64), primary_key=True),
        _job_id(),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("step_number", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("model", sa.String(255), nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("metrics", sa.JSON, nullable=False),
        sa.UniqueConstraint("job_id", "step_number"),
    )
