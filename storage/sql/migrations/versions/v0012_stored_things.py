"""Adds the sizes of what users' jobs leave on disks."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds an empty table. The dispatcher fills it if a user's stored bytes are limited."""
    op.create_table(
        "stored_things",
        sa.Column("kind", sa.String(16), primary_key=True),
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("job_id", sa.String(64), nullable=False, index=True),
        sa.Column("owner", sa.String(64), nullable=False, index=True),
        sa.Column("node", sa.String(64), nullable=False),
        sa.Column("nbytes", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    """Drops the table."""
    op.drop_table("stored_things")
