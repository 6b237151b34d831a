"""The dashboard's login: a user enters an API key once, and the browser gets a cookie that expires with it."""

from typing import Annotated

from fastapi import APIRouter, Form, Request
from fastapi.responses import RedirectResponse, Response

from windlass.service.api import (
    LOGIN_COOKIE,
    LOGIN_PATH,
    LOGOUT_PATH,
    AuditDep,
    CallerDep,
    ContextDep,
    caller_of_key,
    missing_origin,
    needs_key,
    note_use,
    peer_of,
    record,
    too_many,
)
from windlass.service.api.routes.dashboard import render
from windlass.service.auth import Caller
from windlass.storage.sql.repositories import AuditResult, KeyRepository, Role

_ACTION = "log_in"

router = APIRouter(include_in_schema=False)


@router.get(LOGIN_PATH)
def show_login(context: ContextDep, request: Request) -> Response:
    """Shows the login page. Redirects to the dashboard if no key is needed."""
    with context.database.read() as session:
        if not needs_key(context.settings, peer_of(request), session):
            return RedirectResponse("/", status_code=303)
    return render(request, "login.html")


@router.post(LOGIN_PATH)
def log_in(context: ContextDep, request: Request, key: Annotated[str, Form()] = "") -> Response:
    """Creates a login from a key."""
    if "origin" not in request.headers:
        raise missing_origin()
    peer = peer_of(request)
    with context.database.read() as session:
        found = KeyRepository(session).find(key.strip())
    if found is None:
        if (wait_s := context.limits.failed(peer)) is not None:
            return too_many(wait_s)
        stranger = Caller(user=None, role=Role.USER, key_id=None, peer=peer)
        with context.database.write() as session:
            record(session, _ACTION, None, stranger, AuditResult.REFUSED)
        return render(request, "login.html", status_code=401, problem="This key is wrong, expired or revoked.")
    lasts_s = context.settings.login_hours * 3600
    with context.database.write() as session:
        token = KeyRepository(session).log_in(found.id, lasts_s=lasts_s)
        record(session, _ACTION, found.id, caller_of_key(found, peer=peer))
    note_use(context, found)
    response = RedirectResponse("/", status_code=303)
    response.set_cookie(
        LOGIN_COOKIE,
        token,
        max_age=int(lasts_s),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


@router.post(LOGOUT_PATH)
def log_out(context: ContextDep, request: Request, caller: CallerDep, audit: AuditDep) -> Response:
    """Ends the browser's login."""
    with context.database.write() as session:
        KeyRepository(session).log_out(request.cookies.get(LOGIN_COOKIE, ""))
        audit(session, caller.key_id)
    response = RedirectResponse(LOGIN_PATH, status_code=303)
    response.delete_cookie(LOGIN_COOKIE, httponly=True, samesite="strict", secure=request.url.scheme == "https")
    return response
