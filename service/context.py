"""What the endpoints work with."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from windlass.service.event_news import EventNews
from windlass.service.limits import RateLimits
from windlass.service.model_check import HubFiles
from windlass.service.settings import Settings
from windlass.storage.sql.database import Database


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The installation, as one app serves it."""

    settings: Settings
    database: Database
    hub_files: HubFiles
    limits: RateLimits
    news: EventNews


async def _context_of(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


ContextDep = Annotated[Context, Depends(_context_of)]
