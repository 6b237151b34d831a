"""New events, read from the database once for all live streams of this process."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import anyio
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import format_sse_event

from windlass.service.api.schemas import StreamedEvent
from windlass.storage.sql import Database, JobEvent
from windlass.storage.sql.repositories import EventRepository, KeyRepository

_INTERVAL_S = 0.1
# Event streams of one user at an API process. A page of the dashboard has one.
MAX_STREAMS_PER_USER = 64
_MOST_ROWS = 500  # events read in one query, and kept for streams that lag a little


@dataclass(frozen=True, slots=True)
class Told:
    """An event as streams send it, encoded once for all streams."""

    ordinal: int
    job_id: str
    has_status: bool
    encoded: bytes
    owner: str | None = None  # the user who owns the job, where known

    @classmethod
    def of(cls, row: JobEvent, owner: str | None = None) -> "Told":
        """Encodes a row of the database."""
        encoded = format_sse_event(data_str=StreamedEvent.of(row).model_dump_json(), id=str(row.ordinal))
        return cls(row.ordinal, row.job_id, "status" in row.data, encoded, owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """All events after the ordinal `after`, up to the ordinal `newest`."""

    after: int
    newest: int
    events: tuple[Told, ...]
    keys: tuple[int, int]  # changes when a key or a login is made or ended


class EventFeed:
    """The latest events. A stream that lacks only these need not query the database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = anyio.Lock()
        self._news: News | None = None
        self._looked_s = 0.0
        self._num_streams: Counter[str] = Counter()  # open streams by user

    async def latest(self) -> News:
        """Returns the latest events, at most `_INTERVAL_S` old."""
        async with self._lock:
            if self._news is None or time.monotonic() - self._looked_s >= _INTERVAL_S:
                self._news = await run_in_threadpool(self._look, self._news)
                self._looked_s = time.monotonic()
            return self._news

    def has_place(self, user: str) -> bool:
        """Tells whether a user may open one more stream."""
        return self._num_streams[user] < MAX_STREAMS_PER_USER

    @contextlib.contextmanager
    def place(self, user: str) -> Iterator[None]:
        """Counts one of a user's streams while it is open."""
        self._num_streams[user] += 1
        try:
            yield
        finally:
            self._num_streams[user] -= 1
            if not self._num_streams[user]:
                del self._num_streams[user]

    def _look(self, before: News | None) -> News:
        with self._database.read() as session:
            keys, events = KeyRepository(session).revision(), EventRepository(session)
            if before is None:
                newest = events.last_ordinal()
                return News(after=newest, newest=newest, events=(), keys=keys)
            found = [Told.of(*each) for each in events.with_owners(before.newest, limit=_MOST_ROWS)]
        told = (*before.events, *found)
        dropped, told = told[:-_MOST_ROWS], told[-_MOST_ROWS:]
        return News(
            after=dropped[-1].ordinal if dropped else before.after,
            newest=found[-1].ordinal if found else before.newest,
            events=told,
            keys=keys,
        )
