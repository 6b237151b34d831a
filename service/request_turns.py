"""Turns of users at the API's threads, so that one user's requests that take long hold up that user alone."""

from collections import Counter
from collections.abc import Awaitable, Callable

import anyio
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class RequestTurns:
    """Lets each user have a number of requests at work at once. Further ones wait for one of the user's own.

    A request is at work from when its body is there until its answer begins: meanwhile it may hold one of the API's
    threads. Uploads on their way and event streams hold none, and take no turn.
    """

    def __init__(self, num_at_once: int) -> None:
        self._num_at_once = num_at_once
        self._turns: dict[str, anyio.Semaphore] = {}
        self._num_requests = Counter[str]()

    @property
    def num_users(self) -> int:
        """Users with a request that has not ended."""
        return len(self._turns)

    def taken(self, user: str, app: App) -> App:
        """Wrap an app, so that its next request takes a turn of this user."""

        async def with_turn(scope: Scope, receive: Receive, send: Send) -> None:
            turns = self._turns.setdefault(user, anyio.Semaphore(self._num_at_once))
            self._num_requests[user] += 1
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
                self._num_requests[user] -= 1
                if not self._num_requests[user]:
                    del self._num_requests[user], self._turns[user]

        return with_turn


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
