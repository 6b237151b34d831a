"""Adds the reasons for each checkpoint, and its size."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds both columns. For existing checkpoints neither value is known."""
    op.add_column("checkpoints", sa.Column("reasons", sa.JSON, nullable=False, server_default="[]"))
    op.add_column("checkpoints", sa.Column("nbytes", sa.BigInteger))


def downgrade() -> None:
    """Drops both columns."""
    op.drop_column("checkpoints", "nbytes")
    op.drop_column("checkpoints", "reasons")
