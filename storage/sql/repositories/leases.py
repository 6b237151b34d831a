"""Which dispatcher works on which job: a job is claimed by one that lives, and by none that is taken for dead.

A dispatcher shows that it lives by a counter in a row of its own; whoever is without one has lost its jobs. What it
writes of a job is fenced by its id in the job's row, so that a dispatcher that was taken for dead and is not can do no
harm.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, CursorResult, Double, cast, delete, func, literal, null, or_, select, update
from sqlalchemy.orm import Session

from windlass.storage.sql import ACTIVE_STATUSES, Dispatcher, Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A dispatcher, as another one sees it."""

    id: str
    node: str
    machine: str
    heartbeat: int
    has_term: bool  # by the database's clock: not on SQLite, which has none
    has_expired: bool  # its term, if it has one


class LeaseRepository:
    """Dispatchers and their claims, within the caller's transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def register(self, *, node: str, machine: str, lasts_s: float) -> str:
        """A new dispatcher's id. It lives until it is ended; on PostgreSQL, `lasts_s` after its last sign of life."""
        holder_id = f"dispatcher-{secrets.token_hex(12)}"
        values = {"id": holder_id, "node": node, "machine": machine, "heartbeat": 0}
        self._session.add(Dispatcher(**values))
        self._session.flush()
        self.beat(holder_id, lasts_s)
        return holder_id

    def beat(self, holder_id: str, lasts_s: float) -> bool:
        """A dispatcher's sign of life. False if it was taken for dead: its jobs are others' by now, or will be."""
        values = {"heartbeat": Dispatcher.heartbeat + 1, "expires_at": self._now() + lasts_s}
        statement = update(Dispatcher).where(Dispatcher.id == holder_id).values(values)
        return self._changes(statement.execution_options(synchronize_session=False)) == 1

    def holders(self) -> Sequence[Holder]:
        """All that are not taken for dead."""
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
        """Take a dispatcher for dead: its jobs can be claimed. False if it has given a sign since `heartbeat`."""
        statement = delete(Dispatcher).where(Dispatcher.id == holder_id)
        if heartbeat is not None:
            statement = statement.where(Dispatcher.heartbeat == heartbeat)
        return self._changes(statement) == 1

    def claimable(self, node: str) -> Sequence[str]:
        """Ids of unfinished jobs that a dispatcher of this node may claim."""
        return self._session.scalars(select(Job.id).where(*_claimable(node))).all()

    def claim(self, holder_id: str, node: str) -> Sequence[Job]:
        """Take all jobs that may be claimed, and return them; none if the holder is taken for dead itself."""
        if self._session.get(Dispatcher, holder_id, populate_existing=True, with_for_update=True) is None:
            return []
        # PostgreSQL: what another transaction has locked, it is claiming or changing. SQLite has one writer at a time.
        free = select(Job.id).where(*_claimable(node)).with_for_update(skip_locked=True)
        ids = self._session.scalars(free).all()
        statement = update(Job).where(Job.id.in_(ids), *_claimable(node)).values(lease_holder=holder_id, node=node)
        self._changes(statement.execution_options(synchronize_session=False))
        claimed = select(Job).where(Job.id.in_(ids), Job.lease_holder == holder_id)
        return self._session.scalars(claimed.execution_options(populate_existing=True)).all()

    def _now(self) -> ColumnElement[float]:
        """Seconds by the database's clock. SQLite has none but this machine's, which may jump."""
        if self._session.get_bind().dialect.name == "sqlite":
            return cast(null(), Double)
        return cast(func.extract("epoch", func.clock_timestamp()), Double)

    def _changes(self, statement: object) -> int:
        result = self._session.execute(statement)  # type: ignore[call-overload]
        assert isinstance(result, CursorResult)
        return result.rowcount


def _claimable(node: str) -> tuple[ColumnElement[bool], ...]:
    living = select(Dispatcher.id)
    return (
        Job.status.in_(ACTIVE_STATUSES),
        or_(Job.node.is_(None), Job.node == node),
        or_(Job.lease_holder.is_(None), Job.lease_holder.not_in(living)),
    )
