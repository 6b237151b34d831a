"""Why there is a checkpoint, and what it occupies."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add both; of checkpoints that are there neither is known."""
    op.add_column("checkpoints", sa.Column("reasons", sa.JSON, nullable=False, server_default="[]"))
    op.add_column("checkpoints", sa.Column("nbytes", sa.BigInteger))


def downgrade() -> None:
    """Drop them."""
    op.drop_column("checkpoints", "nbytes")
    op.drop_column("checkpoints", "reasons")
