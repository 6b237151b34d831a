"""Which home has a file's bytes."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add it; of files that are there it is not known."""
    op.add_column("files", sa.Column("node", sa.String(64)))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("files", "node")
