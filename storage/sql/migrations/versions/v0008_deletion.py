"""Creates the tables of deleted jobs and of pending removals from disks."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Creates the tables."""
    op.create_table(
        "deleted_jobs",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("owner", sa.String(64)),
        sa.Column("node", sa.String(64)),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("model", sa.String(255), nullable=False),
        sa.Column("keeps_model", sa.Boolean, nullable=False),
        sa.Column("deleted_at", sa.Double, nullable=False),
        sa.Column("removed_at", sa.Double),
    )
    op.create_index("ix_deleted_jobs_removed_at", "deleted_jobs", ["removed_at"])
    op.create_table(
        "removals",
        sa.Column(
            "ordinal", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True
        ),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("node", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
    )


def downgrade() -> None:
    """Drops the tables. Pending removals stay on the disks."""
    op.drop_table("removals")
    op.drop_table("deleted_jobs")
