"""`/v1/webhook_endpoints`: receivers of events about ended jobs, with the calls of the official client's `webhooks`."""

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from windlass.service.api import AuditDep, CallerDep, Context, ContextDep, Deleted, Identified, ListOf, PageOf
from windlass.service.api.middleware import BusyError
from windlass.service.auth import check_one_more_endpoint
from windlass.service.validation import ApiError, check_storable
from windlass.service.webhooks import (
    DeliveryError,
    SealError,
    SecretBox,
    UrlRefusedError,
    check_url,
    new_signing_secret,
    send,
)
from windlass.storage.sql import WebhookEndpoint
from windlass.storage.sql.repositories import EVENT_TYPES, WebhookRepository, event_body, new_event_id

_KEEP_OLD_SECRET_S = 86400.0
_NUM_HINT_CHARS = 4
_NUM_DELIVERIES = 20
_KEY_UNUSABLE = "secrets_key_unusable"

router = APIRouter(prefix="/v1")


def _known_types(value: list[str]) -> list[str]:
    if unknown := sorted(set(value) - set(EVENT_TYPES)):
        raise ValueError(f"there is no event type {unknown[0]!r}; there are {', '.join(EVENT_TYPES)}")
    return sorted(set(value))


_Name = Annotated[
    str,
    Field(min_length=1, max_length=255, json_schema_extra={"pattern": r"^[^\u0000]*$"}),
    AfterValidator(check_storable),
]
_TYPE = {"type": "string", "enum": list(EVENT_TYPES)}
_Types = Annotated[
    list[str],
    Field(min_length=1, max_length=len(EVENT_TYPES), json_schema_extra={"items": _TYPE}),
    AfterValidator(_known_types),
]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class CreateEndpoint(_Request):
    """The body of `POST /v1/webhook_endpoints`."""

    name: _Name
    url: str
    event_types: _Types


class UpdateEndpoint(_Request):
    """The body of `POST /v1/webhook_endpoints/{endpoint_id}`. A missing field keeps its value."""

    name: _Name | None = None
    url: str | None = None
    event_types: _Types | None = None


class RotateSecret(_Request):
    """The body of `POST /v1/webhook_endpoints/{endpoint_id}/rotate_secret`."""

    keep_old_secret_active_for_24_hours: bool = False


class TestEndpoint(_Request):
    """The body of `POST /v1/webhook_endpoints/{endpoint_id}/test`."""

    __test__ = False  # pytest must not collect it as a test case

    event_type: Annotated[str, AfterValidator(lambda value: _known_types([value])[0]), Field(json_schema_extra=_TYPE)]


class TestedEndpoint(BaseModel):
    """The receiver's successful answer to a sample event. Other answers are errors."""

    __test__ = False

    object: Literal["webhook_endpoint.test"] = "webhook_endpoint.test"
    webhook_endpoint_id: str
    event_type: str
    status_code: int
    success: Literal[True] = True


class EndpointObject(Identified):
    """An endpoint. Only the answers that create it or rotate its secret contain the secret."""

    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    name: str
    url: str
    event_types: list[str]
    created_at: int
    updated_at: int
    signing_secret_hint: str | None = Field(
        default=None,
        description="The secret's last characters. Missing where it cannot be read; `windlass.signing_secret_error` "
        "then says why, and what to do.",
    )
    signing_secret: str | None = None
    windlass: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def of(cls, row: WebhookEndpoint, secret: str | None, **fields: Any) -> "EndpointObject":
        """Converts a row of the database."""
        return cls(
            id=row.id,
            name=row.name,
            url=row.url,
            event_types=row.event_types,
            created_at=int(row.created_at),
            updated_at=int(row.updated_at),
            signing_secret_hint=None if secret is None else f"…{secret[-_NUM_HINT_CHARS:]}",
            **fields,
        )


@router.post("/webhook_endpoints", response_model_exclude_none=True)
def create_endpoint(context: ContextDep, caller: CallerDep, audit: AuditDep, body: CreateEndpoint) -> EndpointObject:
    """Adds an endpoint. The answer contains its signing secret."""
    _check(context, body.url)
    secret = new_signing_secret()
    sealed = _close(context, secret)
    with context.database.write() as session:
        check_one_more_endpoint(session, context.settings, caller)
        row = WebhookRepository(session).add(
            name=body.name, url=body.url, event_types=body.event_types, secret=sealed, owner=caller.user
        )
        audit(session, row.id)
        return EndpointObject.of(row, secret, signing_secret=secret)


@router.get("/webhook_endpoints", response_model_exclude_none=True)
def list_endpoints(
    context: ContextDep, caller: CallerDep, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> PageOf[EndpointObject]:
    """Returns a page of endpoints, newest first."""
    with context.database.read() as session:
        page = WebhookRepository(session, caller.only_of).page(limit=limit, after=after)
        data = [_shown(context, row) for row in page.rows]
    return PageOf.of(data, has_more=page.has_more)


@router.get("/webhook_endpoints/{endpoint_id}", response_model_exclude_none=True)
def retrieve_endpoint(context: ContextDep, caller: CallerDep, endpoint_id: str) -> EndpointObject:
    """Returns an endpoint, with its last deliveries under `windlass`."""
    with context.database.read() as session:
        webhooks = WebhookRepository(session, caller.only_of)
        row = webhooks.get(endpoint_id)
        deliveries = [
            {
                "event_id": each.event_id,
                "created_at": int(each.created_at),
                "num_tries": each.num_tries,
                "delivered_at": None if each.delivered_at is None else int(each.delivered_at),
                "next_try_at": None if each.next_try_at is None else int(each.next_try_at),
                "last_error": each.last_error,
            }
            for each in webhooks.deliveries(endpoint_id, limit=_NUM_DELIVERIES)
        ]
        return _shown(context, row, deliveries=deliveries)


@router.post("/webhook_endpoints/{endpoint_id}", response_model_exclude_none=True)
def update_endpoint(
    context: ContextDep, caller: CallerDep, audit: AuditDep, endpoint_id: str, body: UpdateEndpoint
) -> EndpointObject:
    """Changes an endpoint. Pending deliveries go to the new URL."""
    if body.url is not None:
        _check(context, body.url)
    with context.database.write() as session:
        row = WebhookRepository(session, caller.only_of).get(endpoint_id)
        changes = body.model_dump(exclude_none=True)
        if any(getattr(row, name) != value for name, value in changes.items()):
            for name, value in changes.items():
                setattr(row, name, value)
            row.updated_at = time.time()
        session.flush()
        audit(session, endpoint_id)
        return _shown(context, row)


@router.delete("/webhook_endpoints/{endpoint_id}")
def delete_endpoint(context: ContextDep, caller: CallerDep, audit: AuditDep, endpoint_id: str) -> Deleted:
    """Deletes an endpoint and its pending deliveries."""
    with context.database.write() as session:
        WebhookRepository(session, caller.only_of).delete(endpoint_id)
        audit(session, endpoint_id)
    return Deleted(id=endpoint_id, object="webhook_endpoint.deleted")


@router.post("/webhook_endpoints/{endpoint_id}/rotate_secret", response_model_exclude_none=True)
def rotate_secret(
    context: ContextDep, caller: CallerDep, audit: AuditDep, endpoint_id: str, body: RotateSecret | None = None
) -> EndpointObject:
    """Makes a new signing secret. On request, deliveries are also signed with the old one for 24 hours."""
    secret, now_s = new_signing_secret(), time.time()
    sealed = _close(context, secret)
    with context.database.write() as session:
        row = WebhookRepository(session, caller.only_of).get(endpoint_id)
        keeps = body is not None and body.keep_old_secret_active_for_24_hours
        row.secret_before = row.secret if keeps else None
        row.secret_before_until = now_s + _KEEP_OLD_SECRET_S if keeps else None
        row.secret, row.updated_at = sealed, now_s
        session.flush()
        audit(session, endpoint_id)
        return EndpointObject.of(row, secret, signing_secret=secret)


@router.post("/webhook_endpoints/{endpoint_id}/test")
def test_endpoint(
    context: ContextDep, caller: CallerDep, audit: AuditDep, endpoint_id: str, body: TestEndpoint
) -> TestedEndpoint:
    """Sends a sample event now and returns the status code of the receiver's answer."""
    with context.database.read() as session:
        row = WebhookRepository(session, caller.only_of).get(endpoint_id)
    secret = _open(context, row)
    event_id = new_event_id()
    try:
        with context.limits.webhook_samples.entered(caller.user):
            status = send(
                row.url,
                event_id=event_id,
                body=event_body(event_id, body.event_type, "ftjob-sample", time.time()),
                signing_secrets=(secret,),
                allows_private=context.settings.webhook_private_addresses,
            )
    except BusyError as error:
        raise ApiError(
            f"samples are sent one by one: {error}", status=429, code="webhook_test_in_progress", kind="requests"
        ) from None
    except (DeliveryError, UrlRefusedError) as error:
        raise ApiError(f"the sample was not delivered: {error}", code="webhook_not_delivered") from error
    with context.database.write() as session:
        audit(session, endpoint_id)
    return TestedEndpoint(webhook_endpoint_id=endpoint_id, event_type=body.event_type, status_code=status)


@router.get("/webhook_event_types")
def list_event_types() -> ListOf[str]:
    """Lists the event types that an endpoint can receive."""
    return ListOf(data=list(EVENT_TYPES))


def _shown(context: Context, row: WebhookEndpoint, **windlass: Any) -> EndpointObject:
    """Returns an endpoint, also if its secret cannot be read."""
    try:
        return EndpointObject.of(row, _open(context, row), windlass=windlass)
    except ApiError as error:
        return EndpointObject.of(row, None, windlass=windlass | {"signing_secret_error": error.message})


def _open(context: Context, row: WebhookEndpoint) -> str:
    try:
        return SecretBox(context.settings.home).open(row.secret)
    except SealError as error:
        raise ApiError(
            f"the signing secret of webhook endpoint {row.id!r} cannot be read: {error}; put the right file into the "
            "home, or rotate the secret or delete the endpoint",
            code=_KEY_UNUSABLE,
        ) from error


def _close(context: Context, secret: str) -> str:
    try:
        return SecretBox(context.settings.home).close(secret)
    except SealError as error:
        raise ApiError(
            f"no signing secret can be stored: {error}; put the right file into the home", code=_KEY_UNUSABLE
        ) from error


def _check(context: Context, url: str) -> None:
    try:
        check_url(url, allows_private=context.settings.webhook_private_addresses)
    except UrlRefusedError as error:
        raise ApiError(f"url: {error}", param="url", code="invalid_value") from error
