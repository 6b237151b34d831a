"""The box that calls: it is known by the certificate that it showed, and its row is read for each request."""

from typing import Annotated

from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.service.http import answer_to_trouble, drain, error_response
from windlass.service.validation import ApiError
from windlass.storage.sql import Box, Database
from windlass.storage.sql.repositories import BoxRepository, BoxState

# The SHA-256, in hex, of the certificate that the connection's client showed; absent or None: it showed none.
CERTIFICATE_KEY = "windlass_certificate"
# Requests that need no certificate. Each is answered in the same way whoever sends it, or asks for a join code.
OPEN_PATHS = frozenset(("/v1/node/join", "/v1/node/ca", "/v1/node/wheel"))


def find_box(database: Database, certificate: str | None) -> Box:
    """Returns the box with this certificate. Raises ApiError if there is none, or if it was removed."""
    if certificate is None:
        raise ApiError(
            "a certificate of a box is needed; `windlass node join` gets one", status=401, code="no_certificate"
        )
    with database.read() as session:
        box = BoxRepository(session).by_certificate(certificate)
    if box is None or box.state == BoxState.REMOVED.value:
        name = "this box" if box is None else f"box {box.name}"
        raise ApiError(
            f"{name} was removed from the service; it can join again with a new code", status=403, code="box_removed"
        )
    return box


def calling_box(request: Request) -> Box:
    """Returns the box that sent a request. Raises ApiError."""
    box: Box | None = getattr(request.state, "box", None)
    if box is None:
        return find_box(request.app.state.database, request.scope.get(CERTIFICATE_KEY))
    return box


BoxDep = Annotated[Box, Depends(calling_box)]


class AdmissionMiddleware:
    """Refuses requests without the certificate of a box, before anything of their bodies is stored."""

    def __init__(self, app: ASGIApp, database: Database) -> None:
        self._app = app
        self._database = database

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            box = await run_in_threadpool(find_box, self._database, scope.get(CERTIFICATE_KEY))
        except ApiError as error:
            refusal = error_response(error)
        except SQLAlchemyError as error:
            answer = answer_to_trouble(error)
            if answer is None:
                raise
            refusal = answer
        else:
            scope.setdefault("state", {})["box"] = box
            await self._app(scope, receive, send)
            return
        await drain(receive)  # a client cut off while it sends would not see the answer
        await refusal(scope, receive, send)
