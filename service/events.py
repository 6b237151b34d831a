"""Live streams of events (SSE). Each event has its ordinal as id, so a reader that comes back misses none."""

from collections.abc import AsyncIterator, Sequence
from typing import Annotated

import anyio
from fastapi import APIRouter, Depends, Header, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import EventSourceResponse, ServerSentEvent

from windlass.service.context import Context, ContextDep
from windlass.service.errors import ApiError
from windlass.service.schemas import StreamedEvent
from windlass.storage.sql.events import EventRepository
from windlass.storage.sql.jobs import JobRepository
from windlass.storage.sql.models import JobEvent
from windlass.storage.sql.statuses import TERMINAL_STATUSES

_POLL_INTERVAL_S = 0.5
_BATCH_SIZE = 500
_RETRY_MS = 1000

router = APIRouter()


def _start_after(
    context: ContextDep,
    last_event_id: Annotated[str | None, Header()] = None,
    after: Annotated[int, Query(ge=0)] = 0,
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


def _existing_job(context: ContextDep, job_id: str) -> str:
    """Refuse an unknown job before the answer has begun."""
    with context.database.read() as session:
        return JobRepository(session).get(job_id).id


@router.get("/v1/events/stream", response_class=EventSourceResponse)
async def stream_all(
    context: ContextDep, start: Annotated[int, Depends(_start_after)]
) -> AsyncIterator[ServerSentEvent]:
    """Events of all jobs, for as long as the client listens."""
    async for event in _stream(context, start, None):
        yield event


@router.get("/v1/fine_tuning/jobs/{job_id}/events/stream", response_class=EventSourceResponse)
async def stream_job(
    context: ContextDep,
    start: Annotated[int, Depends(_start_after)],
    job_id: Annotated[str, Depends(_existing_job)],
) -> AsyncIterator[ServerSentEvent]:
    """A job's events, until it is finished and all have been sent."""
    async for event in _stream(context, start, job_id):
        yield event


async def _stream(context: Context, ordinal: int, job_id: str | None) -> AsyncIterator[ServerSentEvent]:
    yield ServerSentEvent(comment="events follow", retry=_RETRY_MS)
    while True:
        rows, is_finished = await run_in_threadpool(_read_batch, context, ordinal, job_id)
        for row in rows:
            ordinal = row.ordinal
            yield ServerSentEvent(data=StreamedEvent.of(row), id=str(ordinal))
        if is_finished and not rows:
            return
        if len(rows) < _BATCH_SIZE:
            await anyio.sleep(_POLL_INTERVAL_S)


def _read_batch(context: Context, ordinal: int, job_id: str | None) -> tuple[Sequence[JobEvent], bool]:
    with context.database.read() as session:
        # The status first: a job that ends in between must not be taken for one that has told all.
        is_finished = job_id is not None and JobRepository(session).get(job_id).status in TERMINAL_STATUSES
        rows = EventRepository(session).since(ordinal, limit=_BATCH_SIZE, job_id=job_id)
    return rows, is_finished
