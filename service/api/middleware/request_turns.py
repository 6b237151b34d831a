"""Limits of each user's requests at once, so that a user's slow requests delay only that user."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from windlass.service.http import drain, error_response
from windlass.service.validation import ApiError, count_text

App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Starlette buffers a longer body on the disk and a shorter one in memory.
_LONG_BODY_NBYTES = 1024**2
_RETRY_AFTER_S = 10


@dataclass(slots=True, kw_only=True)
class _User:
    turns: anyio.Semaphore
    uploads: anyio.Semaphore
    num_requests: int = 0


class RequestTurns:
    """Lets each user have `num_at_once` requests at work. Further requests of the user wait.

    A request is at work from the arrival of its whole body until its answer begins. It may hold one of the API's
    threads in that time. Uploads in flight and event streams hold no thread and take no turn. Uploads occupy the disk,
    so their number is limited too. A further upload waits, and is refused after `wait_s`.
    """

    def __init__(self, num_at_once: int, *, num_uploads: int, wait_s: float = 60.0) -> None:
        self._num_at_once = num_at_once
        self._num_uploads = num_uploads
        self._wait_s = wait_s
        self._users: dict[str, _User] = {}

    @property
    def num_users(self) -> int:
        """The number of users with an unfinished request."""
        return len(self._users)

    def taken(self, user: str, app: App) -> App:
        """Wraps an app so that its next request takes one of the user's turns."""

        async def with_place(scope: Scope, receive: Receive, send: Send) -> None:
            of_user = self._users.setdefault(
                user, _User(turns=anyio.Semaphore(self._num_at_once), uploads=anyio.Semaphore(self._num_uploads))
            )
            of_user.num_requests += 1
            try:
                if not _has_long_body(scope):
                    await with_turn(of_user.turns, scope, receive, send)
                elif await self._finds_place(of_user.uploads):
                    try:
                        await with_turn(of_user.turns, scope, receive, send)
                    finally:
                        of_user.uploads.release()
                else:
                    await drain(receive)  # a client cut off while it sends would not see the answer
                    await self._refusal()(scope, receive, send)
            finally:
                of_user.num_requests -= 1
                if not of_user.num_requests:
                    del self._users[user]

        async def with_turn(turns: anyio.Semaphore, scope: Scope, receive: Receive, send: Send) -> None:
            is_taken = is_over = False

            async def take() -> None:
                nonlocal is_taken
                if not (is_taken or is_over):
                    await turns.acquire()
                    is_taken = True

            def give_back() -> None:
                nonlocal is_over
                if is_taken and not is_over:
                    turns.release()
                is_over = True

            async def receive_taking() -> Message:
                message = await receive()
                if message["type"] == "http.request" and not message.get("more_body", False):
                    await take()
                return message

            async def send_giving_back(message: Message) -> None:
                if message["type"] == "http.response.start":
                    give_back()
                await send(message)

            try:
                if not _has_body(scope):
                    await take()
                await app(scope, receive_taking, send_giving_back)
            finally:
                give_back()

        return with_place

    async def _finds_place(self, uploads: anyio.Semaphore) -> bool:
        with anyio.move_on_after(self._wait_s):
            await uploads.acquire()
            return True
        return False

    def _refusal(self) -> Response:
        error = ApiError(
            f"you have {count_text(self._num_uploads, 'upload')} on the way, and none ended within {self._wait_s:g} s; "
            "send this one again when one has",
            status=429,
            code="too_many_uploads",
            kind="requests",
        )
        return error_response(error, {"Retry-After": str(_RETRY_AFTER_S)})


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _has_long_body(scope: Scope) -> bool:
    """Returns whether a body is long. A body of unknown length counts as long."""
    headers = Headers(scope=scope)
    length = headers.get("content-length", "")
    return int(length) > _LONG_BODY_NBYTES if length.isdigit() else "transfer-encoding" in headers
