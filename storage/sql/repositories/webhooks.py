"""Webhook endpoints and deliveries. A delivery is written in the transaction of the change that it reports."""

import json
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from sqlalchemy import ColumnElement, case, func, or_, select, tuple_, update
from sqlalchemy.orm import Session

from windlass.storage.sql import (
    TERMINAL_STATUSES,
    Job,
    JobStatus,
    NotFound,
    Page,
    WebhookDelivery,
    WebhookEndpoint,
    page_of,
)

EVENT_TYPES = tuple(sorted(f"fine_tuning.job.{status.value}" for status in TERMINAL_STATUSES))


def event_body(event_id: str, event_type: str, job_id: str, created_at: float) -> str:
    """Returns the body of an event in the form in which it is sent."""
    return json.dumps(
        {"id": event_id, "object": "event", "type": event_type, "created_at": int(created_at), "data": {"id": job_id}}
    )


def new_event_id() -> str:
    """Returns a new unique event id."""
    return f"evt_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A claimed delivery. The caller may try it until it is due again."""

    ordinal: int
    event_id: str
    body: str
    num_tries: int  # including this one
    url: str
    endpoint_id: str
    owner: str | None
    signing_secrets: tuple[str, ...] = field(repr=False)


class WebhookRepository:
    """Endpoints and deliveries, within the caller's transaction. With `only_of`, only that user's endpoints."""

    def __init__(self, session: Session, only_of: str | None = None) -> None:
        self._session = session
        self._only_of = only_of

    # --- endpoints --------------------------------------------------------------------------------------------------

    def add(
        self, *, name: str, url: str, event_types: Sequence[str], secret: str, owner: str | None = None
    ) -> WebhookEndpoint:
        """Creates an endpoint. `secret` is encrypted."""
        now_s = time.time()
        endpoint = WebhookEndpoint(
            id=f"we_{secrets.token_hex(12)}",
            name=name,
            url=url,
            event_types=list(event_types),
            secret=secret,
            created_at=now_s,
            updated_at=now_s,
            owner=owner,
        )
        self._session.add(endpoint)
        self._session.flush()
        return endpoint

    def get(self, endpoint_id: str) -> WebhookEndpoint:
        """Returns the endpoint; changes to it are written with the transaction. Raises NotFound if there is none."""
        endpoint = self._session.get(WebhookEndpoint, endpoint_id)
        if endpoint is None or self._only_of not in (None, endpoint.owner):
            raise NotFound("webhook endpoint", endpoint_id)
        return endpoint

    def delete(self, endpoint_id: str) -> None:
        """Deletes an endpoint and its deliveries."""
        self._session.delete(self.get(endpoint_id))
        self._session.flush()

    def count(self) -> int:
        """Returns the number of endpoints."""
        query = select(func.count()).select_from(WebhookEndpoint)
        if self._only_of is not None:
            query = query.where(WebhookEndpoint.owner == self._only_of)
        return self._session.scalar(query) or 0

    def page(self, *, limit: int, after: str | None) -> Page[WebhookEndpoint]:
        """Lists endpoints, newest first. Raises NotFound if `after` is not an endpoint's id."""
        query = select(WebhookEndpoint).order_by(WebhookEndpoint.created_at.desc(), WebhookEndpoint.id.desc())
        if self._only_of is not None:
            query = query.where(WebhookEndpoint.owner == self._only_of)
        if after is not None:
            last = self.get(after)
            position = tuple_(WebhookEndpoint.created_at, WebhookEndpoint.id)
            query = query.where(position < tuple_(last.created_at, last.id))
        return page_of(self._session.scalars(query.limit(limit + 1)).all(), limit)

    def deliveries(self, endpoint_id: str, *, limit: int) -> Sequence[WebhookDelivery]:
        """Lists the last deliveries to an endpoint, newest first."""
        query = select(WebhookDelivery).where(WebhookDelivery.endpoint_id == endpoint_id)
        return self._session.scalars(query.order_by(WebhookDelivery.ordinal.desc()).limit(limit)).all()

    # --- deliveries -------------------------------------------------------------------------------------------------

    def enqueue_deliveries(self, job: Job, status: JobStatus) -> None:
        """Queues a delivery about a job's end for each of its owner's endpoints that subscribes to this event."""
        event_type, now_s = f"fine_tuning.job.{status.value}", time.time()
        event_id = new_event_id()
        for endpoint in self._session.scalars(
            select(WebhookEndpoint).where(WebhookEndpoint.owner.is_not_distinct_from(job.owner))
        ):
            if event_type in endpoint.event_types:
                body = event_body(event_id, event_type, job.id, now_s)
                delivery = WebhookDelivery(
                    endpoint_id=endpoint.id, event_id=event_id, body=body, created_at=now_s, next_try_at=now_s
                )
                self._session.add(delivery)

    def due_secrets(
        self,
        now_s: float,
        longest_s: float,
        *,
        busy: Collection[str] = (),
        full: Collection[str | None] = (),
    ) -> dict[str, tuple[str, ...]]:
        """Returns the encrypted signing secrets, newest first, of each endpoint with a due delivery, by endpoint id.

        The endpoints `busy` and those of the owners `full` are left out. `longest_s`: the longest delay of a retry; a
        delivery further in the future is due, because the clock must have been set back.
        """
        due = select(WebhookDelivery.endpoint_id).where(_is_due(now_s, longest_s))
        query = select(WebhookEndpoint).where(WebhookEndpoint.id.in_(due), WebhookEndpoint.id.not_in(busy))
        named = [owner for owner in full if owner is not None]
        query = query.where(or_(WebhookEndpoint.owner.is_(None), WebhookEndpoint.owner.not_in(named)))
        if None in full:
            query = query.where(WebhookEndpoint.owner.is_not(None))
        signing_secrets = {}
        for endpoint in self._session.scalars(query):
            is_signing = endpoint.secret_before_until is not None and now_s < endpoint.secret_before_until
            before = (endpoint.secret_before,) if is_signing and endpoint.secret_before is not None else ()
            signing_secrets[endpoint.id] = (endpoint.secret, *before)
        return signing_secrets

    def claim(
        self,
        signing_secrets: Mapping[str, tuple[str, ...]],
        *,
        now_s: float,
        until_s: float,
        longest_s: float,
        in_flight: Mapping[str | None, int] = MappingProxyType({}),
    ) -> Due | None:
        """Claim the next delivery, which no other sender claims before `until_s`; None if no delivery is due.

        The owner with the fewest deliveries `in_flight` comes first; of these, the delivery that was due first.
        `signing_secrets`: by endpoint; deliveries to other endpoints are left alone.
        """
        query = select(WebhookDelivery, WebhookEndpoint).join(
            WebhookEndpoint, WebhookDelivery.endpoint_id == WebhookEndpoint.id
        )
        query = query.where(_is_due(now_s, longest_s), WebhookEndpoint.id.in_(signing_secrets))
        # Owners whose endpoints hang have deliveries that were due first. By time alone they got every free place.
        owners = [(WebhookEndpoint.owner.is_not_distinct_from(owner), number) for owner, number in in_flight.items()]
        if owners:
            query = query.order_by(case(*owners, else_=0))
        row = self._session.execute(query.order_by(WebhookDelivery.next_try_at).limit(1)).first()
        if row is None:
            return None
        delivery, endpoint = row
        delivery.num_tries += 1
        delivery.next_try_at = until_s
        return Due(
            ordinal=delivery.ordinal,
            event_id=delivery.event_id,
            body=delivery.body,
            num_tries=delivery.num_tries,
            url=endpoint.url,
            endpoint_id=endpoint.id,
            owner=endpoint.owner,
            signing_secrets=signing_secrets[endpoint.id],
        )

    def delivered(self, ordinal: int) -> None:
        """Records that a delivery has succeeded."""
        self._end(ordinal, delivered_at=time.time(), next_try_at=None, last_error=None)

    def failed(self, ordinal: int, error: str, *, next_try_at: float | None) -> None:
        """Records that a delivery has failed. `next_try_at`: the time of the retry; None: there is none."""
        self._end(ordinal, next_try_at=next_try_at, last_error=error)

    def _end(self, ordinal: int, **values: object) -> None:
        where = (WebhookDelivery.ordinal == ordinal, WebhookDelivery.delivered_at.is_(None))
        self._session.execute(update(WebhookDelivery).where(*where).values(**values))


def _is_due(now_s: float, longest_s: float) -> ColumnElement[bool]:
    """Returns the condition that a delivery is due.

    A delivery further in the future than the longest delay is due too, because the clock must have been set back.
    """
    return or_(WebhookDelivery.next_try_at <= now_s, WebhookDelivery.next_try_at > now_s + longest_s)
