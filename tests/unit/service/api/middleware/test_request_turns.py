"""A user with slow requests delays only their own: other users' requests are answered meanwhile."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from tests.support.service.api_client import context_of, serve
from tests.support.service.keyed import make_keys
from windlass.service.api.middleware.request_turns import RequestTurns
from windlass.service.installation.settings import Settings

_POST: Scope = {"type": "http", "method": "POST", "headers": [(b"content-length", b"2")]}
_UPLOAD: Scope = {"type": "http", "method": "POST", "headers": [(b"content-length", b"2000000")]}
_GET: Scope = {"type": "http", "method": "GET", "headers": []}
_START: Message = {"type": "http.response.start", "status": 200, "headers": []}


class _Handler:
    """An app that records the requests in progress, and answers when the test says so."""

    def __init__(self) -> None:
        self.at_work: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_end = asyncio.Event()

    def of(self, name: str) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope in (_POST, _UPLOAD):
                while (await receive()).get("more_body"):
                    pass
            self.at_work.append(name)
            await self.may_answer.wait()
            await send(_START)
            # as a streaming answer does, to notice that its client has left
            assert (await receive())["type"] == "http.request"
            await self.may_end.wait()

        return app


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def _send(_message: Message) -> None:
    """Accepts the message."""


async def _receive() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


def test_request_beyond_the_users_number_waits_until_one_is_answered_and_other_users_do_not() -> None:
    async def check() -> None:
        handler, turns = _Handler(), RequestTurns(2, num_uploads=1)
        names = ("ann-0", "ann-1", "ann-2", "bob-0")
        async with asyncio.TaskGroup() as tasks:
            for name in names:
                app = turns.taken(name.partition("-")[0], handler.of(name))
                tasks.create_task(app(_GET, _receive, _send))  # type: ignore[arg-type]
            await _settle()
            assert sorted(handler.at_work) == ["ann-0", "ann-1", "bob-0"]
            handler.may_answer.set()
            await _settle()
            assert sorted(handler.at_work) == sorted(names), "an answer that has begun takes no turn"
            handler.may_end.set()
        assert turns.num_users == 0

    asyncio.run(check())


def test_request_whose_body_is_on_its_way_takes_no_turn() -> None:
    async def check() -> None:
        handler, turns = _Handler(), RequestTurns(1, num_uploads=1)
        handler.may_answer.set()
        handler.may_end.set()
        parts = asyncio.Queue[Message]()
        async with asyncio.TaskGroup() as tasks:
            slow = turns.taken("ann", handler.of("slow"))(_POST, parts.get, _send)
            tasks.create_task(slow)  # type: ignore[arg-type]
            parts.put_nowait({"type": "http.request", "body": b"x", "more_body": True})
            await _settle()
            await turns.taken("ann", handler.of("quick"))(_GET, _receive, _send)
            assert handler.at_work == ["quick"]
            for _ in range(2):
                parts.put_nowait({"type": "http.request", "body": b"x", "more_body": False})
        assert handler.at_work == ["quick", "slow"]

    asyncio.run(check())


def test_upload_beyond_the_users_number_waits_unread_until_one_is_over_and_other_users_do_not() -> None:
    """The received part of an upload is on disk, even of one that never ends."""

    async def check() -> None:
        handler, turns = _Handler(), RequestTurns(10, num_uploads=2)
        handler.may_answer.set()
        handler.may_end.set()
        parts = {name: asyncio.Queue[Message]() for name in ("ann-0", "ann-1", "ann-2", "bob-0")}
        async with asyncio.TaskGroup() as tasks:
            for name, queue in parts.items():
                queue.put_nowait({"type": "http.request", "body": b"x", "more_body": True})
                app = turns.taken(name.partition("-")[0], handler.of(name))
                tasks.create_task(app(_UPLOAD, queue.get, _send))  # type: ignore[arg-type]
            await _settle()
            assert [name for name, queue in parts.items() if not queue.empty()] == ["ann-2"]
            await turns.taken("ann", handler.of("short"))(_POST, _receive, _send)
            assert handler.at_work == ["short"]
            for queue in parts.values():
                for _ in range(2):
                    queue.put_nowait({"type": "http.request", "body": b"x", "more_body": False})
        assert sorted(handler.at_work) == [*parts, "short"]
        assert turns.num_users == 0

    asyncio.run(check())


def test_upload_that_finds_no_place_in_time_is_refused_and_told_why() -> None:
    async def check() -> None:
        handler, turns = _Handler(), RequestTurns(10, num_uploads=1, wait_s=0.05)
        handler.may_end.set()
        told: list[Message] = []

        async def note(message: Message) -> None:
            told.append(message)

        async with asyncio.TaskGroup() as tasks:
            first = turns.taken("ann", handler.of("first"))(_UPLOAD, _receive, _send)
            tasks.create_task(first)  # type: ignore[arg-type]
            await _settle()
            await turns.taken("ann", handler.of("second"))(_UPLOAD, _receive, note)
            assert (told[0]["status"], dict(told[0]["headers"])[b"retry-after"]) == (429, b"10")
            assert b"you have 1 upload on the way" in told[1]["body"]
            handler.may_answer.set()
        assert handler.at_work == ["first"]
        assert turns.num_users == 0

    asyncio.run(check())


def test_request_that_fails_gives_its_turn_back() -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("no")

    async def check() -> None:
        turns = RequestTurns(1, num_uploads=1)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="no"):
                await asyncio.wait_for(turns.taken("ann", fail)(_GET, _receive, _send), timeout=30)
        assert turns.num_users == 0

    asyncio.run(check())


def test_user_whose_requests_all_hang_delays_no_other_user(settings: Settings) -> None:
    """Each uses one of the API's 40 threads."""
    may_end = threading.Event()

    def hang() -> str:
        assert may_end.wait(60)
        return "done"

    with serve(settings) as client, ThreadPoolExecutor(45) as pool, ThreadPoolExecutor(1) as bobs:
        cast(FastAPI, client.app).add_api_route("/v1/slow", hang)
        secrets, _ = make_keys(context_of(client).database)

        def get(who: str, path: str) -> int:
            return client.get(path, headers={"Authorization": f"Bearer {secrets[who]}"}).status_code

        hanging = [pool.submit(get, "alice", "/v1/slow") for _ in range(45)]
        try:
            assert bobs.submit(get, "bob", "/v1/files").result(timeout=20) == 200
            assert not any(each.done() for each in hanging)
        finally:
            may_end.set()
        assert {each.result() for each in hanging} == {200}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, port=8642)
