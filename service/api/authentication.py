"""Access control: admits or refuses every request, and identifies its caller."""

import logging
import time
from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windlass.service.api.context import Context
from windlass.service.api.middleware import RequestTurns
from windlass.service.auth import Caller
from windlass.service.http import answer_to_trouble, drain, error_response
from windlass.service.installation import Settings, is_loopback
from windlass.service.validation import ApiError
from windlass.storage.sql import ApiKey
from windlass.storage.sql.repositories import AuditRepository, AuditResult, KeyRepository, Role, digest_of, needs_note

_log = logging.getLogger(__name__)

LOGIN_PATH = "/login"
LOGOUT_PATH = "/logout"
LOGIN_COOKIE = "windlass_login"
OPEN_PATHS = ("/healthz", "/readyz", LOGIN_PATH)
_OPEN_FOLDER = "/static/"
_PAGES = ("/", "/docs", LOGOUT_PATH)  # a caller without access is redirected to the login page
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
# Limits for one user. The API has 40 threads, and buffers uploads on the disk.
_REQUESTS_AT_ONCE = 10
_UPLOADS_AT_ONCE = 4
_HOW = "send it as `Authorization: Bearer wk-…`; `windlass keys create` makes one"


async def _caller_of(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


CallerDep = Annotated[Caller, Depends(_caller_of)]


class Audit:
    """Writes an audit event for a change. The action has the endpoint's name."""

    def __init__(self, request: Request, caller: Caller) -> None:
        self._action = _action_of(request.scope)
        self._caller = caller

    def __call__(self, session: Session, target: str | None) -> None:
        """Records that `target` was changed, in the transaction of the change."""
        record(session, self._action, target, self._caller)


async def _audit_of(request: Request, caller: CallerDep) -> Audit:
    request.state.changes = True
    return Audit(request, caller)


# Every endpoint that changes something takes this dependency. If the endpoint answers with an error, the middleware
# records the refusal.
AuditDep = Annotated[Audit, Depends(_audit_of)]


def record(
    session: Session, action: str, target: str | None, caller: Caller, result: AuditResult = AuditResult.DONE
) -> None:
    """Writes an audit event."""
    AuditRepository(session).add(
        action, target, key_id=caller.key_id, user=caller.user, peer=caller.peer, result=result
    )


def caller_of_key(key: ApiKey, *, peer: str | None, login: str | None = None) -> Caller:
    """Returns the caller that an API key identifies."""
    return Caller(user=key.user, role=Role(key.role), key_id=key.id, login=login, peer=peer)


def needs_key(settings: Settings, peer: str | None, session: Session) -> bool:
    """Returns whether requests from an address need a key.

    Requests of this machine need none until the first key is made.
    """
    return settings.is_for_others or peer is None or not is_loopback(peer) or KeyRepository(session).is_needed()


def unauthorized(message: str) -> Response:
    """Makes the 401 answer for a caller without access."""
    return error_response(
        ApiError(message, status=401, code="invalid_api_key"), {"WWW-Authenticate": 'Bearer realm="windlass"'}
    )


class AccessMiddleware:
    """Admits callers with a key, in a header or a login cookie. Without any key, it admits all callers of this machine.

    The request's state holds the caller. The health checks, the login page and static files are open to all.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._turns = RequestTurns(_REQUESTS_AT_ONCE, num_uploads=_UPLOADS_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or path in OPEN_PATHS or path.startswith(_OPEN_FOLDER):
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        context: Context = scope["app"].state.context
        caller: Caller | None = None
        refusal: Response | None = None
        try:
            caller = await run_in_threadpool(self._admit, context, request)
        except SQLAlchemyError as error:
            if (refusal := answer_to_trouble(error)) is None:
                raise
        refusal = refusal or self._refusal(context, request, caller)
        if refusal is not None:
            await drain(receive)  # a client cut off while it sends would not see the answer
            await refusal(scope, receive, send)
            return
        assert caller is not None
        request.state.caller = caller
        status = 0

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        app = self._app if caller.user is None else self._turns.taken(caller.user, self._app)
        await app(scope, receive, send_noting)
        # 503 is no refusal: the database could not be read or written.
        if status >= 400 and status != 503 and getattr(request.state, "changes", False):
            # The last path parameter is the changed object, such as a checkpoint of a job.
            target = next(reversed(scope.get("path_params", {}).values()), None)
            await run_in_threadpool(_record_refusal, context, _action_of(scope), target, caller)

    def _admit(self, context: Context, request: Request) -> Caller | None:
        peer = peer_of(request)
        with context.database.read() as session:
            keys = KeyRepository(session)
            secret, token = _bearer(request), request.cookies.get(LOGIN_COOKIE)
            if secret is not None:
                key, token = keys.find(secret), None
            else:
                key = None if token is None else keys.find_login(token)
            if key is None:
                if needs_key(self._settings, peer, session):
                    return None
                return Caller(user=None, role=Role.ADMIN, key_id=None, peer=peer)
        note_use(context, key)
        return caller_of_key(key, peer=peer, login=token and digest_of(token))

    def _refusal(self, context: Context, request: Request, caller: Caller | None) -> Response | None:
        limits = context.limits
        if caller is None:
            if (wait_s := limits.failed(peer_of(request))) is not None:
                return too_many(wait_s)
            if request.url.path in _PAGES:
                return RedirectResponse(LOGIN_PATH, status_code=303)
            if _bearer(request) is None:
                return unauthorized(f"an API key is needed: {_HOW}")
            return unauthorized(f"the API key is wrong, expired or revoked: {_HOW}")
        if caller.key_id is not None and (wait_s := limits.count_request(caller.key_id)) is not None:
            return too_many(wait_s)
        if caller.login is not None and request.method not in _SAFE_METHODS and "origin" not in request.headers:
            # Browsers name the page that sends a form. A client that does not is no browser and must send a key.
            return error_response(missing_origin())
        return None


def peer_of(request: Request) -> str | None:
    """Returns the client's address. Behind a trusted proxy, it is the address of the proxy's client."""
    return None if request.client is None else request.client.host


def missing_origin() -> ApiError:
    """Makes the refusal of a form without an Origin header."""
    return ApiError("requests with a login must name their page as Origin", status=403, code="origin_not_allowed")


def too_many(wait_s: int) -> Response:
    """Makes the 429 answer with the seconds to wait."""
    error = ApiError(
        f"too many requests; try again in {wait_s} s", status=429, code="rate_limit_exceeded", kind="requests"
    )
    return error_response(error, {"Retry-After": str(wait_s)})


def note_use(context: Context, key: ApiKey) -> None:
    """Stores when a key was last used. A failure to store it is logged only."""
    now_s = time.time()
    if not needs_note(key, now_s):
        return
    try:
        with context.database.write() as session:
            KeyRepository(session).note_use(key.id, now_s)
    except OperationalError as error:
        _log.warning("the use of key %s could not be noted: %s", key.id, type(error.orig).__name__)


def _record_refusal(context: Context, action: str, target: str | None, caller: Caller) -> None:
    try:
        with context.database.write() as session:
            record(session, action, target, caller, AuditResult.REFUSED)
    except OperationalError as error:
        _log.warning("a refused %s of %s could not be audited: %s", action, caller.user, type(error.orig).__name__)


def _bearer(request: Request) -> str | None:
    values = request.headers.getlist("authorization")
    if not values:
        return None
    scheme, _, secret = values[0].partition(" ")
    # Several headers, or another scheme, count as a wrong key.
    return secret.strip() if scheme.lower() == "bearer" and len(values) == 1 else ""


def _action_of(scope: Scope) -> str:
    endpoint: Callable[..., object] = scope["endpoint"]
    return endpoint.__name__
