"""The audit log: the user, action and target of each change. A change and its event are in one transaction."""

import time
from enum import StrEnum

from sqlalchemy import select
from sqlalchemy.orm import Session

from windlass.storage.sql import AuditEvent, NotFound, Page, page_of

_MAX_TARGET_CHARS = 255
_MAX_PEER_CHARS = 64


class AuditResult(StrEnum):
    """The result of an audited action."""

    DONE = "done"
    REFUSED = "refused"  # nothing was changed


def audit_id(ordinal: int) -> str:
    """Returns an audit event's public id."""
    return f"audit-{ordinal}"


class AuditRepository:
    """Audit events, within the caller's transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(
        self,
        action: str,
        target: str | None,
        *,
        key_id: str | None,
        user: str | None,
        peer: str | None,
        result: AuditResult = AuditResult.DONE,
    ) -> None:
        """Writes an event. It may hold names and ids, but no secrets."""
        event = AuditEvent(
            created_at=time.time(),
            key_id=key_id,
            user=user,
            action=action,
            target=target and target[:_MAX_TARGET_CHARS],
            peer=peer and peer[:_MAX_PEER_CHARS],
            result=result.value,
        )
        self._session.add(event)
        self._session.flush()

    def page(self, *, limit: int, after: int | None = None) -> Page[AuditEvent]:
        """Lists events, newest first, older than `after` if given. Raises NotFound if `after` is no event."""
        query = select(AuditEvent).order_by(AuditEvent.ordinal.desc()).limit(limit + 1)
        if after is not None:
            if self._session.get(AuditEvent, after) is None:
                raise NotFound("audit event", audit_id(after))
            query = query.where(AuditEvent.ordinal < after)
        return page_of(self._session.scalars(query).all(), limit)
