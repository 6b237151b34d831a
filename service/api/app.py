"""The HTTP application. It reads and writes SQL and files; it never talks to Ray and never trains."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.types import Scope
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from windlass.service.api.authentication import AccessMiddleware
from windlass.service.api.context import Context
from windlass.service.api.event_feed import EventFeed
from windlass.service.api.middleware import (
    HiddenPathsMiddleware,
    NullCharacterMiddleware,
    RateLimits,
    SameOriginMiddleware,
    SecurityHeadersMiddleware,
)
from windlass.service.api.openapi import install_openapi
from windlass.service.api.routes import (
    JobCollector,
    RequestMetrics,
    RequestMetricsMiddleware,
    audit,
    boxes,
    events,
    files,
    health,
    install_dashboard,
    jobs,
    login,
    models,
    plans,
    storage,
    webhooks,
)
from windlass.service.api.routes import metrics as prometheus
from windlass.service.auth import require_auth_if_exposed
from windlass.service.http import BodyLimitMiddleware, install_error_handlers
from windlass.service.installation import Settings
from windlass.service.machine.fleet import FactsHere
from windlass.service.preparation import HubFiles, list_hub_files, warm_planner
from windlass.storage.sql import Database, migrate

_MULTIPART_OVERHEAD_NBYTES = 64 * 1024


def create_app(
    settings: Settings, hub_files: HubFiles = list_hub_files, *, starts_without_keys: bool = False
) -> FastAPI:
    """Builds the application of one home.

    It opens the folders and the database at its start and closes them at its end.

    `starts_without_keys`: starts without a key also where other machines reach it. It refuses every caller until the
    first key is made.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        settings.make_home_dirs()
        files.remove_partial_uploads(settings.files_dir)
        migrate(settings.database_url)
        database = Database(settings.database_url)
        limits, facts = RateLimits(settings.requests_per_minute), FactsHere(settings)
        planner = warm_planner(settings.home / "logs" / "planner.log")
        app.state.context = Context(
            settings=settings,
            database=database,
            hub_files=hub_files,
            limits=limits,
            news=EventFeed(database),
            facts=facts,
            planner=planner,
        )
        app.state.request_metrics.registry.register(JobCollector(database, settings, facts))
        try:
            if not starts_without_keys:
                require_auth_if_exposed(settings, database)
            yield
        finally:
            planner.close()
            database.close()

    # FastAPI's interactive documentation would load scripts from other servers.
    app = FastAPI(title="windlass", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.request_metrics = RequestMetrics()
    install_error_handlers(app)
    for router in (
        files.router,
        jobs.router,
        models.router,
        events.router,
        plans.router,
        health.router,
        prometheus.router,
        storage.router,
        boxes.router,
        boxes.machines_router,
        webhooks.router,
        audit.router,
        login.router,
    ):
        app.include_router(router)
    install_dashboard(app)
    install_openapi(app)

    # The middleware added last sees a request first.
    app.add_middleware(BodyLimitMiddleware, limit_of=lambda scope: _body_limit_nbytes(settings, scope))
    app.add_middleware(NullCharacterMiddleware)
    app.add_middleware(HiddenPathsMiddleware, settings=settings)
    app.add_middleware(AccessMiddleware, settings=settings)
    app.add_middleware(SameOriginMiddleware, host=settings.host, names=settings.host_names)
    app.add_middleware(SecurityHeadersMiddleware)
    if settings.trusted_proxies:
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=list(settings.trusted_proxies))
    app.add_middleware(RequestMetricsMiddleware, metrics=app.state.request_metrics)
    return app


def _body_limit_nbytes(settings: Settings, scope: Scope) -> int:
    if scope["path"] == "/v1/files":
        return settings.max_file_nbytes + _MULTIPART_OVERHEAD_NBYTES
    return settings.max_request_nbytes
