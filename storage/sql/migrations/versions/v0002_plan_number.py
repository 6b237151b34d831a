"""Adds the number of the plan that a job's next attempt uses."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds the column. Existing jobs keep the plan with which they were queued."""
    op.add_column("jobs", sa.Column("plan_number", sa.Integer, nullable=False, server_default="0"))


def downgrade() -> None:
    """Drops the column."""
    op.drop_column("jobs", "plan_number")
