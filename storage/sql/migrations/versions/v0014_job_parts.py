"""Adds the parts of jobs over several boxes."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds an empty table. No existing job is over several boxes."""
    op.create_table(
        "job_parts",
        sa.Column("job_id", sa.String(64), primary_key=True),
        sa.Column("node", sa.String(64), primary_key=True),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("link", sa.JSON, nullable=True),
        sa.Column("is_over", sa.Boolean, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("served", sa.Integer, nullable=False),
        sa.Column("port", sa.Integer, nullable=True),
        sa.Column("told", sa.Text, nullable=True),
    )
    op.create_index("ix_job_parts_node", "job_parts", ["node"])


def downgrade() -> None:
    """Drops the table."""
    op.drop_table("job_parts")
