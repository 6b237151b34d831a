"""Adds the boxes of a service, the codes with which they join, and the instructions that they get."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_ORDINAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Adds empty tables, and a cursor to jobs. No existing job is worked on by another box."""
    op.create_table(
        "boxes",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(64), nullable=False, unique=True),
        sa.Column("node", sa.String(64), nullable=False, unique=True),
        sa.Column("head", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("state_at", sa.Double, nullable=True),
        sa.Column("certificate", sa.String(64), nullable=False, unique=True),
        sa.Column("address", sa.String(64), nullable=False),
        sa.Column("joined_at", sa.Double, nullable=False),
        sa.Column("seen_at", sa.Double, nullable=False),
        sa.Column("facts", sa.JSON, nullable=False),
        sa.Column("capacity", sa.JSON, nullable=True),
    )
    op.create_table(
        "join_codes",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("used_at", sa.Double, nullable=True),
        sa.Column("box_id", sa.String(64), nullable=True),
    )
    op.create_table(
        "box_instructions",
        sa.Column("ordinal", _ORDINAL, primary_key=True, autoincrement=True),
        sa.Column("box_id", sa.String(64), sa.ForeignKey("boxes.id", ondelete="CASCADE"), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False, index=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("body", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_box_instructions_box", "box_instructions", ["box_id", "ordinal"])
    op.add_column("jobs", sa.Column("box_cursor", sa.BigInteger, nullable=False, server_default=sa.text("0")))
    op.create_index("ix_jobs_node", "jobs", ["node", "status"])


def downgrade() -> None:
    """Drops the tables and the cursor."""
    op.drop_index("ix_jobs_node", "jobs")
    op.drop_column("jobs", "box_cursor")
    op.drop_table("box_instructions")
    op.drop_table("join_codes")
    op.drop_table("boxes")
