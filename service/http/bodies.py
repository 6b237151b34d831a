"""The limit of a request's length."""

from collections.abc import Callable

import anyio
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windlass.amounts import bytes_text

_DRAIN_TIMEOUT_S = 60.0


class BodyLimitMiddleware:
    """Refuses a request whose body exceeds its path's limit, with 413, before any of the excess is stored.

    It reads and discards the excess, because a client cut off while it sends would not see the answer.

    `limit_of`: returns the most bytes of a request's body.
    """

    def __init__(self, app: ASGIApp, limit_of: Callable[[Scope], int]) -> None:
        self._app = app
        self._limit_of = limit_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limit_of(scope)
        declared = Headers(scope=scope).get("content-length", "")
        too_long = declared.isdigit() and int(declared) > limit
        num_received = 0

        async def receive_limited() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if too_long or num_received > limit:
                if message["type"] == "http.request" and message.get("more_body", False):
                    await drain(receive)
                raise HTTPException(
                    413, f"the request is longer than the {bytes_text(limit)} that {scope['path']} takes"
                )
            return message

        await self._app(scope, receive_limited, send)


async def drain(receive: Receive) -> None:
    """Reads and discards the rest of a request, for at most `_DRAIN_TIMEOUT_S`."""
    with anyio.move_on_after(_DRAIN_TIMEOUT_S):
        while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
            pass
