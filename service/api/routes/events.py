"""Live streams of events (SSE). Each event has its ordinal as id, so a reader that comes back misses none."""

import bisect
import operator
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Depends, Header, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from windlass.service.api import CallerDep, Context, ContextDep, News, Told
from windlass.service.auth import Caller
from windlass.service.validation import ApiError
from windlass.storage.sql import TERMINAL_STATUSES
from windlass.storage.sql.repositories import EventRepository, JobRepository

_POLL_INTERVAL_S = 0.1
# After which a stream asks the database whether its caller is still let in; at once where a key or a login was ended.
_LOOK_AGAIN_S = 2.0
_BATCH_SIZE = 500
# Events that are looked through for one user's: not all that there are, where that user has few or none.
_WINDOW = 100_000
_RETRY_MS = 1000
# After which a reader is told that the stream still lives.
_SILENCE_S = 15.0
_MEDIA_TYPE = "text/event-stream"
# Of the stream, as OpenAPI 3.2 has it (4.14.4): FastAPI says so only of those that it puts together itself, which takes
# a tenth of a millisecond and more for each event and reader.
_DESCRIBED: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            _MEDIA_TYPE: {
                "itemSchema": {
                    "type": "object",
                    "properties": {
                        "data": {"type": "string"},
                        "id": {"type": "string"},
                        "retry": {"type": "integer", "minimum": 0},
                    },
                }
            }
        }
    }
}

router = APIRouter()


def _start_after(
    context: ContextDep,
    last_event_id: Annotated[str | None, Header()] = None,
    after: Annotated[int, Query(ge=0, le=2**63 - 1)] = 0,
) -> int:
    """The ordinal to go on from: what a browser noted last, else the query's, else the beginning."""
    if last_event_id is None:
        return after
    if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) < 19):
        raise ApiError(f"Last-Event-ID: must be a whole number, got {last_event_id!r:.80}", param="Last-Event-ID")
    with context.database.read() as session:
        newest = EventRepository(session).last_ordinal()
    # A page that outlived its database would wait for numbers that are long in coming.
    return int(last_event_id) if int(last_event_id) <= newest else 0


def _existing_job(context: ContextDep, caller: CallerDep, job_id: str) -> str:
    """Refuse an unknown job before the answer has begun."""
    with context.database.read() as session:
        return JobRepository(session, caller.only_of).get(job_id).id


@router.get("/v1/events/stream", response_class=StreamingResponse, responses=_DESCRIBED)
async def stream_all(
    context: ContextDep, caller: CallerDep, start: Annotated[int, Depends(_start_after)]
) -> StreamingResponse:
    """Events of all jobs that the caller sees, for as long as the client listens and may do so."""
    return _answer(_stream(context, caller, start, None))


@router.get("/v1/fine_tuning/jobs/{job_id}/events/stream", response_class=StreamingResponse, responses=_DESCRIBED)
async def stream_job(
    context: ContextDep,
    caller: CallerDep,
    start: Annotated[int, Depends(_start_after)],
    job_id: Annotated[str, Depends(_existing_job)],
) -> StreamingResponse:
    """A job's events, until it is finished and all have been sent."""
    return _answer(_stream(context, caller, start, job_id))


def _answer(chunks: AsyncIterator[bytes]) -> StreamingResponse:
    # The second is for proxies like nginx, which would keep events back.
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(chunks, media_type=_MEDIA_TYPE, headers=headers)


@dataclass(frozen=True, slots=True)
class _Batch:
    events: Sequence[Told]
    newest: int  # ordinal up to which there is nothing else to send
    is_last: bool


async def _stream(context: Context, caller: Caller, ordinal: int, job_id: str | None) -> AsyncIterator[bytes]:
    yield format_sse_event(comment="events follow", retry=_RETRY_MS)
    keys, look_at_s, told_at_s = None, 0.0, time.monotonic()
    while True:
        news = await context.news.latest()
        if news.keys != keys or time.monotonic() >= look_at_s or ordinal < news.after:
            # Not at the same moments as the other streams that began when this one did.
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
            look_at_s = 0.0  # it may have been the last one
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
        # The status first: a job that ends in between must not be taken for one that has told all.
        job = None if job_id is None else JobRepository(session).find(job_id)
        is_finished = job_id is not None and (job is None or job.status in TERMINAL_STATUSES)  # None: it was deleted
        # Before the rows: what comes in between is looked for again. Others' events are passed over only once.
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
