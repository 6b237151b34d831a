"""Sends load to a service: `python -m benchmarks.api.load` reads an Order as JSON, and prints its measurements.

It runs in its own process. With a given rate it is an open loop: requests start on time, whether or not earlier ones
were answered. Latencies count from the time at which a request was due, so they include queueing.
"""

import asyncio
import json
import random
import secrets
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

_JOBS = "/v1/fine_tuning/jobs"
_TIMEOUT_S = 30.0  # of a request
_MOST_REFUSALS = 3  # maximum number of stored refusal texts
_MOST_CONNECTIONS = 50  # for requests other than streams
_SETTLE_S = 2.0  # seconds until all streams are open
# Requests of each kind per hundred. Each submitted job is cancelled, so that none of them trains.
MIX = {"retrieve": 40, "list": 20, "events": 30, "submit": 5, "cancel": 5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The requests to send."""

    url: str
    seconds: float
    job_ids: list[str]
    job: dict[str, Any]  # body of a submitted job
    key: str
    rate: float | None = None  # requests a second; None: as fast as answers come, with `num_lines` requests at once
    num_lines: int = 16
    # Kinds of requests, with the number of each in a mix.
    kinds: dict[str, int] = field(default_factory=lambda: dict(MIX))
    num_streams: int = 0


@dataclass(slots=True, kw_only=True)
class Measured:
    """The measurements."""

    seconds: float
    latencies_s: dict[str, list[float]]  # by kind
    statuses: dict[str, int]
    refusals: list[str]  # texts of the first refusals
    arrivals: dict[str, list[float]]  # by event message: arrival time on each stream, in `time.monotonic()`


class _Load:
    def __init__(self, order: Order, client: httpx.AsyncClient) -> None:
        self._order = order
        self._client = client
        self._random = random.Random(0)
        self._made: deque[str] = deque()
        self._kinds = [kind for kind, often in order.kinds.items() for _ in range(often)]
        self._asks: dict[str, Callable[[], Coroutine[Any, Any, httpx.Response]]] = {
            "retrieve": lambda: client.get(f"{_JOBS}/{self._some_job()}"),
            "list": lambda: client.get(_JOBS, params={"limit": 20, **self._place()}),
            "events": lambda: client.get(f"{_JOBS}/{self._some_job()}/events", params={"limit": 20}),
            "submit": self._submit,
            "cancel": self._cancel,
        }
        self.latencies_s: dict[str, list[float]] = defaultdict(list)
        self.statuses: Counter[str] = Counter()
        self.refusals: list[str] = []

    def _some_job(self) -> str:
        return self._random.choice(self._order.job_ids)

    def _place(self) -> dict[str, str]:
        """Returns a random cursor, or none for the first page, each in half of the cases."""
        return {"after": self._some_job()} if self._random.random() < 0.5 else {}

    async def _submit(self) -> httpx.Response:
        # Do not use the seed: the key would be that of an earlier load's job, and no new job would be created.
        key = secrets.token_hex(16)
        response = await self._client.post(_JOBS, json=self._order.job, headers={"Idempotency-Key": key})
        if response.status_code == 200:
            self._made.append(response.json()["id"])
        return response

    async def _cancel(self) -> httpx.Response:
        return await self._client.post(f"{_JOBS}/{self._made.popleft()}/cancel")

    async def one(self, begins_s: float | None = None) -> None:
        kind = self._random.choice(self._kinds)
        if kind == "cancel" and not self._made:
            kind = "submit"
        begins_s = time.perf_counter() if begins_s is None else begins_s
        try:
            response = await self._asks[kind]()
            self.statuses[str(response.status_code)] += 1
            if response.status_code != 200 and len(self.refusals) < _MOST_REFUSALS:
                self.refusals.append(f"{kind}: {response.text}")
        except httpx.HTTPError as error:
            self.statuses[type(error).__name__] += 1
        self.latencies_s[kind].append(time.perf_counter() - begins_s)

    async def at_rate(self, rate: float, seconds: float) -> None:
        begin_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(round(rate * seconds)):
                due_s = begin_s + number / rate
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                group.create_task(self.one(due_s))

    async def in_lines(self, num_lines: int, seconds: float) -> None:
        until_s = time.perf_counter() + seconds

        async def line() -> None:
            while time.perf_counter() < until_s:
                await self.one()

        async with asyncio.TaskGroup() as group:
            for _ in range(num_lines):
                group.create_task(line())

    async def end(self) -> None:
        while self._made:
            await self._cancel()


async def _listen(client: httpx.AsyncClient, arrivals: dict[str, list[float]]) -> None:
    """Receives one stream of new events until it is cancelled."""
    newest = (await client.get(_JOBS, params={"limit": 1})).json()["windlass"]["last_event_ordinal"]
    async with client.stream("GET", "/v1/events/stream", params={"after": newest}, timeout=None) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                arrivals[json.loads(line[6:])["message"]].append(time.monotonic())


async def _run(order: Order) -> Measured:
    arrivals: dict[str, list[float]] = defaultdict(list)
    # With hundreds of connections, the client would be the bottleneck. A request that waits for a connection counts as
    # late.
    most = order.num_streams + _MOST_CONNECTIONS
    limits = httpx.Limits(max_connections=most, max_keepalive_connections=most)
    headers = {"Authorization": f"Bearer {order.key}"}
    async with httpx.AsyncClient(base_url=order.url, limits=limits, timeout=_TIMEOUT_S, headers=headers) as client:
        streams = [asyncio.create_task(_listen(client, arrivals)) for _ in range(order.num_streams)]
        if streams:
            await asyncio.sleep(_SETTLE_S)
        load = _Load(order, client)
        begin_s = time.perf_counter()
        if order.rate is None:
            await load.in_lines(order.num_lines, order.seconds)
        else:
            await load.at_rate(order.rate, order.seconds)
        seconds = time.perf_counter() - begin_s
        for stream in streams:
            assert not stream.done(), stream.exception()
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await load.end()
    return Measured(
        seconds=seconds,
        latencies_s=dict(load.latencies_s),
        statuses=dict(load.statuses),
        refusals=load.refusals,
        arrivals=dict(arrivals),
    )


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(_run(Order(**json.load(sys.stdin)))))))
