"""Whether a job's estimated finish follows from steps that were measured."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add it; of times that are there it is not known, so they count as estimates."""
    op.add_column("jobs", sa.Column("finish_is_measured", sa.Boolean, nullable=False, server_default=sa.false()))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("jobs", "finish_is_measured")
