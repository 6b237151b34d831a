"""`/v1/audit`: a log of changes and of their callers, for administrators."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel

from windlass.service.api import CallerDep, ContextDep, ListOf
from windlass.service.validation import ApiError
from windlass.storage.sql import AuditEvent
from windlass.storage.sql.repositories import AuditRepository, Role, audit_id

router = APIRouter(prefix="/v1/audit")


class AuditObject(BaseModel):
    """An event of the audit log."""

    id: str
    object: Literal["audit_event"] = "audit_event"
    created_at: int
    key_id: str | None
    user: str | None
    action: str
    target: str | None
    peer: str | None
    result: str

    @classmethod
    def of(cls, row: AuditEvent) -> "AuditObject":
        """Converts a row of the database."""
        return cls(
            id=audit_id(row.ordinal),
            created_at=int(row.created_at),
            key_id=row.key_id,
            user=row.user,
            action=row.action,
            target=row.target,
            peer=row.peer,
            result=row.result,
        )


@router.get("")
def list_audit_events(
    context: ContextDep,
    caller: CallerDep,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> ListOf[AuditObject]:
    """Returns a page of audit events, newest first."""
    if caller.role is not Role.ADMIN:
        raise ApiError("the audit is for admins", status=403, code="permission_denied")
    ordinal = None if after is None else _ordinal(after)
    with context.database.read() as session:
        page = AuditRepository(session).page(limit=limit, after=ordinal)
    return ListOf(data=[AuditObject.of(row) for row in page.rows], has_more=page.has_more)


def _ordinal(public_id: str) -> int:
    digits = public_id.removeprefix("audit-")
    if not (public_id.startswith("audit-") and digits.isascii() and digits.isdigit() and len(digits) < 19):
        raise ApiError(f"after: {public_id!r:.80} is not an audit event's id", param="after", code="invalid_value")
    return int(digits)
