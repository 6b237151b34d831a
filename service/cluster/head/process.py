"""The server that boxes call, as a process: TLS 1.3 on the cluster port only."""

import gc
import logging
import socket
import ssl
import threading
from typing import Any

import uvicorn
from sqlalchemy.exc import SQLAlchemyError

from windlass.service.cluster.authority import Authority, AuthorityError, digest_of_certificate, ensure_link_of_head
from windlass.service.cluster.head.caller import CERTIFICATE_KEY
from windlass.service.cluster.head.incoming import Incoming
from windlass.service.cluster.head.server import create_cluster_app
from windlass.service.http import BoundedConnection, ConnectionBounds, bounded_protocol
from windlass.service.installation import Settings
from windlass.storage.sql import Database
from windlass.storage.sql.repositories import MirrorRepository

_LOG = logging.getLogger(__name__)

# A box has some connections: one for its calls, and some for files. One address may be a router before several boxes.
_BOUNDS = ConnectionBounds(most=500, most_per_address=100)
_LOOK_EVERY_S = 3600.0  # for the end of the server's certificate, and for uploads of jobs that are on no box


class BoxConnection(BoundedConnection):
    """A connection that tells the app which certificate its client showed.

    TLS has checked that the authority signed it.
    """

    def on_message_begin(self) -> None:
        """Called by the parser at the beginning of each request."""
        super().on_message_begin()
        tls = self.transport.get_extra_info("ssl_object")
        certificate = None if tls is None else tls.getpeercert(binary_form=True)
        # The scope is the server's own; no header of a request can set the key.
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[CERTIFICATE_KEY] = None if certificate is None else digest_of_certificate(certificate)


def cluster_server(settings: Settings, database: Database) -> uvicorn.Server:
    """Makes the server of a head. Its certificates are renewed while it runs. Raises AuthorityError."""
    assert settings.cluster_host is not None
    context = _tls_context(settings, settings.cluster_host)
    ensure_link_of_head(Authority.of(settings.home))
    config = uvicorn.Config(
        create_cluster_app(settings, database),
        http=bounded_protocol(_BOUNDS, tls=context, base=BoxConnection),
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=2,
        timeout_keep_alive=75,
        server_header=False,
        proxy_headers=False,  # the certificate of a connection is that of its own client
    )
    server = uvicorn.Server(config)
    arguments = (settings, settings.cluster_host, context)
    threading.Thread(target=_renew_forever, args=arguments, name="certificate", daemon=True).start()
    threading.Thread(target=_tidy_forever, args=(settings, database), name="uploads", daemon=True).start()
    return server


def run_cluster_server(settings: Settings, listener: socket.socket) -> None:
    """Serves boxes until SIGTERM. `listener`: the bound socket. Raises AuthorityError."""
    database = Database(settings.database_url)
    try:
        server = cluster_server(settings, database)
        gc.collect()
        gc.freeze()
        server.run(sockets=[listener])
    finally:
        database.close()


def _tls_context(settings: Settings, host: str) -> ssl.SSLContext:
    authority = Authority.of(settings.home)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Optional, because a box that joins has none yet. All else is refused without one, by the app.
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(cadata=authority.pem)
    context.load_cert_chain(*authority.ensure_server_certificate(host))
    context.num_tickets = 0  # every connection shows its certificate
    return context


def _renew_forever(settings: Settings, host: str, context: ssl.SSLContext) -> None:
    waiting = threading.Event()
    while not waiting.wait(_LOOK_EVERY_S):
        try:
            authority = Authority.of(settings.home)
            # Connections that begin from now on get it.
            context.load_cert_chain(*authority.ensure_server_certificate(host))
            ensure_link_of_head(authority)
        except (OSError, AuthorityError) as error:
            _LOG.warning("the certificates of this head could not be renewed: %s", error)


def tidy_uploads(settings: Settings, database: Database) -> None:
    """Removes uploads of jobs that are on no box: the box was removed, or the head was killed after the job's end."""

    def find_jobs() -> set[str]:
        with database.read() as session:
            return MirrorRepository(session).ids_on_boxes()

    Incoming(settings).forget_all_but(find_jobs)


def _tidy_forever(settings: Settings, database: Database) -> None:
    waiting = threading.Event()
    while True:
        try:
            tidy_uploads(settings, database)
        except (OSError, SQLAlchemyError) as error:
            _LOG.warning("uploads of jobs that have ended could not be removed: %s", error)
        waiting.wait(_LOOK_EVERY_S)
