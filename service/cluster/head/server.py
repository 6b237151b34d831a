"""The application that boxes call: joining, their reports, and the files of their jobs."""

from fastapi import FastAPI
from starlette.types import Scope

from windlass.service.cluster.head.caller import CERTIFICATE_KEY, OPEN_PATHS, AdmissionMiddleware
from windlass.service.cluster.head.content import content_router
from windlass.service.cluster.head.incoming import Incoming
from windlass.service.cluster.head.join import join_router
from windlass.service.cluster.head.link import link_router
from windlass.service.cluster.head.manifest import Manifests
from windlass.service.cluster.head.sync import sync_router
from windlass.service.http import BodyLimitMiddleware, install_error_handlers
from windlass.service.installation import Settings
from windlass.storage.sql import Database

# Bytes of a body: of a client that is no box, of a box's report, and of a part of a file that a box sends.
_MAX_OPEN_NBYTES = 64 * 1024
_MAX_REPORT_NBYTES = 64 * 1024**2
_MAX_PART_NBYTES = 256 * 1024**2


def create_cluster_app(settings: Settings, database: Database) -> FastAPI:
    """Builds the application. The caller closes the database after it has ended."""
    app = FastAPI(title="windlass boxes", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.settings = settings
    app.state.database = database
    install_error_handlers(app)
    app.include_router(join_router(settings, database))
    app.include_router(link_router(settings))
    manifests, incoming = Manifests(settings), Incoming(settings)
    app.include_router(content_router(database, manifests, incoming))
    app.include_router(sync_router(database, settings, manifests, incoming))
    # The middleware added last sees a request first.
    app.add_middleware(AdmissionMiddleware, database=database)
    app.add_middleware(BodyLimitMiddleware, limit_of=_body_limit_nbytes)
    return app


def _body_limit_nbytes(scope: Scope) -> int:
    if scope["path"] in OPEN_PATHS or scope.get(CERTIFICATE_KEY) is None:
        return _MAX_OPEN_NBYTES
    return _MAX_PART_NBYTES if scope["method"] == "PUT" else _MAX_REPORT_NBYTES
