"""Creates the tables of webhook endpoints and of their deliveries."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Creates the tables."""
    op.create_table(
        "webhook_endpoints",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("event_types", sa.JSON, nullable=False),
        sa.Column("secret", sa.Text, nullable=False),
        sa.Column("secret_before", sa.Text),
        sa.Column("secret_before_until", sa.Double),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.Column("owner", sa.String(64)),
    )
    op.create_table(
        "webhook_deliveries",
        sa.Column(
            "ordinal", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True
        ),
        sa.Column(
            "endpoint_id",
            sa.String(64),
            sa.ForeignKey("webhook_endpoints.id", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("event_id", sa.String(64), nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("num_tries", sa.Integer, nullable=False),
        sa.Column("next_try_at", sa.Double),
        sa.Column("delivered_at", sa.Double),
        sa.Column("last_error", sa.Text),
    )
    op.create_index("ix_webhook_deliveries_next_try_at", "webhook_deliveries", ["next_try_at"])
    op.create_index("ix_webhook_deliveries_endpoint", "webhook_deliveries", ["endpoint_id", "ordinal"])


def downgrade() -> None:
    """Drops the tables."""
    op.drop_table("webhook_deliveries")
    op.drop_table("webhook_endpoints")
