"""Leases: the dispatcher that works on each job.

A dispatcher shows that it is alive by a heartbeat counter in its own row. If another dispatcher deletes that row, the
jobs can be claimed. All writes to a job are fenced by the dispatcher's id in the job's row. So a dispatcher that was
declared dead by mistake does no harm.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Double, cast, delete, func, literal, null, or_, select, update
from sqlalchemy.orm import Session

from windlass.storage.sql import ACTIVE_STATUSES, Dispatcher, Job, execute_change


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The row of a dispatcher, as other dispatchers read it."""

    id: str
    node: str
    machine: str
    heartbeat: int
    has_term: bool  # its lease expires by the database's clock; False on SQLite, which has no clock
    has_expired: bool  # its lease has expired


class LeaseRepository:
    """Dispatchers and their claims, within the caller's transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def register(self, *, node: str, machine: str, lasts_s: float) -> str:
        """Registers a dispatcher and returns its id. On PostgreSQL its lease expires `lasts_s` after a heartbeat."""
        holder_id = f"dispatcher-{secrets.token_hex(12)}"
        values = {"id": holder_id, "node": node, "machine": machine, "heartbeat": 0}
        self._session.add(Dispatcher(**values))
        self._session.flush()
        self.beat(holder_id, lasts_s)
        return holder_id

    def beat(self, holder_id: str, lasts_s: float) -> bool:
        """Records a heartbeat. Returns False if the dispatcher was declared dead and has lost its jobs."""
        values = {"heartbeat": Dispatcher.heartbeat + 1, "expires_at": self._now() + lasts_s}
        statement = update(Dispatcher).where(Dispatcher.id == holder_id).values(values)
        return execute_change(self._session, statement) == 1

    def holders(self) -> Sequence[Holder]:
        """Lists all dispatchers that were not declared dead."""
        has_expired = func.coalesce(Dispatcher.expires_at < self._now(), literal(False))
        rows = self._session.execute(select(Dispatcher, has_expired).order_by(Dispatcher.id)).all()
        return [
            Holder(
                id=row.id,
                node=row.node,
                machine=row.machine,
                heartbeat=row.heartbeat,
                has_term=row.expires_at is not None,
                has_expired=expired,
            )
            for row, expired in rows
        ]

    def end(self, holder_id: str, heartbeat: int | None = None) -> bool:
        """Declares a dispatcher dead, so that its jobs can be claimed.

        Returns False if its counter has changed since `heartbeat`, or if it was already declared dead.
        """
        statement = delete(Dispatcher).where(Dispatcher.id == holder_id)
        if heartbeat is not None:
            statement = statement.where(Dispatcher.heartbeat == heartbeat)
        return execute_change(self._session, statement) == 1

    def claimable(self, node: str) -> Sequence[str]:
        """Lists the ids of unfinished jobs that a dispatcher of this node may claim."""
        return self._session.scalars(select(Job.id).where(*_claimable(node))).all()

    def claim(self, holder_id: str, node: str) -> Sequence[Job]:
        """Claims all claimable jobs and returns them; none if the dispatcher itself was declared dead."""
        if self._session.get(Dispatcher, holder_id, populate_existing=True, with_for_update=True) is None:
            return []
        # PostgreSQL: rows locked by another transaction are being claimed or changed there. SQLite has one writer.
        free = select(Job.id).where(*_claimable(node)).with_for_update(skip_locked=True)
        ids = self._session.scalars(free).all()
        statement = update(Job).where(Job.id.in_(ids), *_claimable(node)).values(lease_holder=holder_id, node=node)
        execute_change(self._session, statement)
        claimed = select(Job).where(Job.id.in_(ids), Job.lease_holder == holder_id)
        return self._session.scalars(claimed.execution_options(populate_existing=True)).all()

    def _now(self) -> ColumnElement[float]:
        """Returns the seconds of the database's clock, NULL on SQLite, which has only this machine's clock."""
        if self._session.get_bind().dialect.name == "sqlite":
            return cast(null(), Double)
        return cast(func.extract("epoch", func.clock_timestamp()), Double)


def _claimable(node: str) -> tuple[ColumnElement[bool], ...]:
    living = select(Dispatcher.id)
    return (
        Job.status.in_(ACTIVE_STATUSES),
        or_(Job.node.is_(None), Job.node == node),
        or_(Job.lease_holder.is_(None), Job.lease_holder.not_in(living)),
    )
