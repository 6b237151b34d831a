"""Live streams of events (SSE). An event's id is its ordinal, so a client that reconnects misses none."""

import bisect
import operator
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import anyio
from fastapi import APIRouter, Depends, Header, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from windlass.service.api import (
    MAX_STREAMS_PER_USER,
    CallerDep,
    Context,
    ContextDep,
    News,
    Told,
    described_stream,
    event_stream,
)
from windlass.service.auth import Caller
from windlass.service.validation import ApiError
from windlass.storage.sql import TERMINAL_STATUSES
from windlass.storage.sql.repositories import EventRepository, JobRepository

_POLL_INTERVAL_S = 0.1
# A stream checks after this time whether its caller still has access. It checks at once if a key or a login was ended.
_LOOK_AGAIN_S = 2.0
_BATCH_SIZE = 500
# Events scanned in one query for one user's events. It bounds the query if the user has few events or none.
_WINDOW = 100_000
_RETRY_MS = 1000
# After this time without an event, the stream sends a keep-alive comment.
_SILENCE_S = 15.0
_DESCRIBED = described_stream(
    {"data": {"type": "string"}, "id": {"type": "string"}, "retry": {"type": "integer", "minimum": 0}}
)

router = APIRouter()


def _start_after(
    context: ContextDep,
    last_event_id: Annotated[str | None, Header()] = None,
    after: Annotated[int, Query(ge=0, le=2**63 - 1)] = 0,
) -> int:
    """Returns the ordinal to continue after: the Last-Event-ID header, else the query's `after`, else 0."""
    if last_event_id is None:
        return after
    if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) < 19):
        raise ApiError(f"Last-Event-ID: must be a whole number, got {last_event_id!r:.80}", param="Last-Event-ID")
    with context.database.read() as session:
        newest = EventRepository(session).last_ordinal()
    # A page may have outlived its database. It would wait for ordinals that the new database reaches only much later.
    return int(last_event_id) if int(last_event_id) <= newest else 0


def _existing_job(context: ContextDep, caller: CallerDep, job_id: str) -> str:
    """Raises NotFound for an unknown job, before the answer has begun."""
    with context.database.read() as session:
        return JobRepository(session, caller.only_of).get(job_id).id


@router.get("/v1/events/stream", response_class=StreamingResponse, responses=_DESCRIBED)
async def stream_all(
    context: ContextDep, caller: CallerDep, start: Annotated[int, Depends(_start_after)]
) -> StreamingResponse:
    """Streams the events of all jobs that the caller sees, while the client listens and has access."""
    return _answer(context, caller, _stream(context, caller, start, None))


@router.get("/v1/fine_tuning/jobs/{job_id}/events/stream", response_class=StreamingResponse, responses=_DESCRIBED)
async def stream_job(
    context: ContextDep,
    caller: CallerDep,
    start: Annotated[int, Depends(_start_after)],
    job_id: Annotated[str, Depends(_existing_job)],
) -> StreamingResponse:
    """Streams a job's events until it is finished and all are sent."""
    return _answer(context, caller, _stream(context, caller, start, job_id))


def _answer(context: Context, caller: Caller, chunks: AsyncIterator[bytes]) -> StreamingResponse:
    """Answers with the chunks. Raises ApiError if the caller's user has too many streams open; admins have no limit."""
    if caller.only_of is not None:
        if not context.news.has_place(caller.only_of):
            raise ApiError(
                f"you have {MAX_STREAMS_PER_USER} event streams open, which is the most that one user may have; close "
                "some of them first, or follow all your jobs by one stream of /v1/events/stream",
                status=429,
                code="too_many_streams",
                kind="requests",
            )
        chunks = _counted(context, caller.only_of, chunks)
    return event_stream(chunks)


async def _counted(context: Context, user: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    with context.news.place(user):
        async for chunk in chunks:
            yield chunk


@dataclass(frozen=True, slots=True)
class _Batch:
    events: Sequence[Told]
    newest: int  # every event up to this ordinal was sent or is not for this stream
    is_last: bool


async def _stream(context: Context, caller: Caller, ordinal: int, job_id: str | None) -> AsyncIterator[bytes]:
    yield format_sse_event(comment="events follow", retry=_RETRY_MS)
    keys, look_at_s, told_at_s = None, 0.0, time.monotonic()
    while True:
        news = await context.news.latest()
        if news.keys != keys or time.monotonic() >= look_at_s or ordinal < news.after:
            # At a random time, so that streams that began together do not all query at once.
            keys, look_at_s = news.keys, time.monotonic() + _LOOK_AGAIN_S * random.uniform(0.5, 1.0)
            batch = await run_in_threadpool(_read_batch, context, caller, ordinal, job_id, news)
        else:
            batch = _batch_of(news, caller, ordinal, job_id)
        if batch.events:
            yield b"".join(event.encoded for event in batch.events)
            told_at_s = time.monotonic()
        elif time.monotonic() - told_at_s > _SILENCE_S:
            yield KEEPALIVE_COMMENT
            told_at_s = time.monotonic()
        ordinal = batch.newest
        if batch.is_last:
            return
        if job_id is not None and any(event.has_status for event in batch.events):
            look_at_s = 0.0  # the job may have ended, so the next round reads its status
        elif ordinal >= news.newest:
            await anyio.sleep(_POLL_INTERVAL_S)


def _batch_of(news: News, caller: Caller, ordinal: int, job_id: str | None) -> _Batch:
    begin = bisect.bisect_right(news.events, ordinal, key=operator.attrgetter("ordinal"))
    events = [
        event
        for event in news.events[begin:]
        if job_id in (None, event.job_id) and caller.only_of in (None, event.owner)
    ]
    return _Batch(events, max(ordinal, news.newest), is_last=False)


def _read_batch(context: Context, caller: Caller, ordinal: int, job_id: str | None, news: News) -> _Batch:
    with context.database.read() as session:
        if not caller.is_still_in(session):
            return _Batch((), ordinal, is_last=True)
        if job_id is None and ordinal >= news.after:
            return _batch_of(news, caller, ordinal, job_id)
        events = EventRepository(session)
        # Reads the status first. Otherwise a job that ends in between would seem to have no more events.
        job = None if job_id is None else JobRepository(session).find(job_id)
        is_finished = job_id is not None and (job is None or job.status in TERMINAL_STATUSES)  # None: it was deleted
        # Reads the last ordinal before the rows, so that later events are read in the next round. Other users' events
        # are scanned only once.
        newest = max(ordinal, events.last_ordinal())
        until = None
        if job_id is None and caller.only_of is not None:
            until = newest = min(newest, ordinal + _WINDOW)
        rows = events.since(ordinal, limit=_BATCH_SIZE, until=until, job_id=job_id, only_of=caller.only_of)
    if len(rows) == _BATCH_SIZE:
        newest = rows[-1].ordinal
    elif rows:
        newest = max(newest, rows[-1].ordinal)
    return _Batch([Told.of(row) for row in rows], newest, is_last=is_finished and not rows)
