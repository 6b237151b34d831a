"""The objects that all endpoints use."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from windlass.service.api.event_feed import EventFeed
from windlass.service.api.middleware import RateLimits
from windlass.service.installation import Settings
from windlass.service.machine.fleet import FactsHere
from windlass.service.preparation import HubFiles
from windlass.service.preparation.sandbox import WarmProcess
from windlass.storage.sql import Database


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The settings and shared objects of one app."""

    settings: Settings
    database: Database
    hub_files: HubFiles
    limits: RateLimits
    news: EventFeed
    facts: FactsHere
    planner: WarmProcess  # makes the plans that requests ask for


async def _context_of(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


ContextDep = Annotated[Context, Depends(_context_of)]
