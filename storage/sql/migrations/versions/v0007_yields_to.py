"""For which job of higher priority a running one makes room."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add it; no job does yet."""
    op.add_column("jobs", sa.Column("yields_to", sa.String(64)))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("jobs", "yields_to")
