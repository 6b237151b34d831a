"""Alembic's entry point. The caller opened the connection and owns its transaction."""

from alembic import context

from windlass.storage.sql import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
with context.begin_transaction():
    context.run_migrations()
