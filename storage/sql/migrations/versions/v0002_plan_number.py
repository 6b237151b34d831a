"""Which of its plans a job goes on by."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the number; jobs that are there have the plan that they were queued with."""
    op.add_column("jobs", sa.Column("plan_number", sa.Integer, nullable=False, server_default="0"))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("jobs", "plan_number")
