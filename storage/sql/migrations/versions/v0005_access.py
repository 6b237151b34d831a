"""Adds API keys, logins, owners of jobs and files, and audit events."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

# In SQLite the constraint of the first revision has no name; in PostgreSQL it has a generated one.
_NAMES = {"uq": "%(table_name)s_%(column_0_name)s_key"}
_OLD_UNIQUE = "jobs_idempotency_key_key"


def upgrade() -> None:
    """Creates the tables. Existing rows have no owner. Idempotency keys become unique for each owner."""
    op.add_column("files", sa.Column("owner", sa.String(64)))
    op.create_index("ix_files_owner", "files", ["owner"])
    with op.batch_alter_table("jobs", naming_convention=_NAMES) as jobs:
        jobs.add_column(sa.Column("owner", sa.String(64)))
        jobs.drop_constraint(_OLD_UNIQUE, type_="unique")
    op.create_index("ix_jobs_owner", "jobs", ["owner", "created_at"])
    op.create_index("uq_jobs_idempotency_key", "jobs", ["owner", "idempotency_key"], unique=True)
    unowned = sa.text("owner IS NULL")
    op.create_index(
        "uq_jobs_idempotency_key_unowned",
        "jobs",
        ["idempotency_key"],
        unique=True,
        sqlite_where=unowned,
        postgresql_where=unowned,
    )
    _create_keys()
    _create_audit_events()


def downgrade() -> None:
    """Drops the tables. Of two jobs with the same idempotency key the later one loses it."""
    for table in ("audit_events", "login_sessions", "api_keys"):
        op.drop_table(table)
    for index in ("uq_jobs_idempotency_key_unowned", "uq_jobs_idempotency_key", "ix_jobs_owner"):
        op.drop_index(index, "jobs")
    op.execute(
        "UPDATE jobs SET idempotency_key = NULL WHERE EXISTS (SELECT 1 FROM jobs AS other WHERE "
        "other.idempotency_key = jobs.idempotency_key AND (other.created_at, other.id) < (jobs.created_at, jobs.id))"
    )
    with op.batch_alter_table("jobs", naming_convention=_NAMES) as jobs:
        jobs.drop_column("owner")
        jobs.create_unique_constraint(_OLD_UNIQUE, ["idempotency_key"])
    op.drop_index("ix_files_owner", "files")
    op.drop_column("files", "owner")


def _create_keys() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("user_name", sa.String(64), nullable=False),
        sa.Column("role", sa.String(8), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False, unique=True),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double),
        sa.Column("revoked_at", sa.Double),
        sa.Column("last_used_at", sa.Double),
    )
    op.create_table(
        "login_sessions",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("key_id", sa.String(64), sa.ForeignKey("api_keys.id", ondelete="CASCADE"), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
    )
    op.create_index("ix_login_sessions_key_id", "login_sessions", ["key_id"])


def _create_audit_events() -> None:
    op.create_table(
        "audit_events",
        sa.Column(
            "ordinal",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            primary_key=True,
            autoincrement=True,
        ),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("key_id", sa.String(64)),
        sa.Column("user_name", sa.String(64)),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("target", sa.String(255)),
        sa.Column("peer", sa.String(64)),
        sa.Column("result", sa.String(8), nullable=False),
        sqlite_autoincrement=True,
    )
