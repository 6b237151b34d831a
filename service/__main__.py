"""Entry point of the service's processes: `python -m windlass.service supervisor|api|dispatcher|cluster|agent`.

`windlass up` starts them. Without a supervisor, as in containers, the API opens its port itself. The container runtime
then restarts the processes.
"""

import argparse
import gc
import logging
import os
import resource
import socket
import ssl
import sys

from windlass.actors.lifecycle import die_with_parent
from windlass.service.installation import (
    KEY_VARIABLE,
    Settings,
    SettingsError,
    load_settings,
    set_up_logs,
)
from windlass.service.validation import ERROR_PREFIX, ReportedError
from windlass.storage.sql import NewerDatabase

_OTHER_FILES = 200  # files that the API keeps open besides connections


def main(arguments: list[str]) -> int:
    """Runs one of the service's processes until it is told to end. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="windlass.service")
    parser.add_argument("role", choices=("supervisor", "api", "dispatcher", "cluster", "agent"))
    parser.add_argument("--parent-pid", type=int)
    parser.add_argument("--listener", type=int, help="file descriptor of the server's socket; else it opens one")
    options = parser.parse_args(arguments)
    if options.parent_pid is not None:
        die_with_parent(options.parent_pid)
    os.umask(0o077)
    os.environ.pop(KEY_VARIABLE, None)  # only for requests of the command line; jobs must not see it
    try:
        settings = load_settings()
        set_up_logs(settings.log_format, options.role)
        if options.role == "supervisor":
            _supervise(settings)
        elif options.role == "api":
            if options.listener is None:  # else the supervisor has already opened it
                _open_database(settings)
            _serve_api(settings, options.listener)
        elif options.role == "cluster":
            if options.listener is None:
                _open_database(settings)
            _serve_boxes(settings, options.listener)
        elif options.role == "agent":
            _call_head(settings)
        else:
            if options.parent_pid is None:  # else the supervisor has already opened it
                _open_database(settings)
                settings.make_dirs()
            _dispatch(settings)
    except (ReportedError, NewerDatabase) as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr, flush=True)
        return 1
    return 0


# Each role imports only the modules that it needs.


def _open_database(settings: Settings) -> None:
    from windlass.service.auth import migrate_database

    migrate_database(settings)


def _supervise(settings: Settings) -> None:
    from windlass.service.processes import Supervisor

    Supervisor(settings).run()


def _serve_api(settings: Settings, listener_fd: int | None) -> None:
    import uvicorn

    from windlass.service.api import create_app
    from windlass.service.http import ConnectionBounds, bounded_protocol
    from windlass.service.processes import listening

    config = uvicorn.Config(
        # In a container, the administrator makes the first key while the API already runs.
        create_app(settings, starts_without_keys=listener_fd is None),
        http=bounded_protocol(ConnectionBounds.of(settings), tls=_tls_context(settings)),
        access_log=False,
        log_level="warning",
        # Event streams stay open until their client disconnects, so the server does not wait long for them.
        timeout_graceful_shutdown=2,
        # Longer than clients keep connections open. A connection closed while a request is being sent leaves it without
        # an answer.
        timeout_keep_alive=75,
        server_header=False,
        proxy_headers=False,  # the app reads them itself, from proxies that the settings trust
    )
    _allow_files(settings.max_connections + _OTHER_FILES)
    opened = listening(settings.host, settings.port) if listener_fd is None else socket.socket(fileno=listener_fd)
    # The imported modules stay for good. Scanning them in each garbage collection would delay requests by 0.1 s and
    # more.
    gc.collect()
    gc.freeze()
    with opened as listener:
        uvicorn.Server(config).run(sockets=[listener])


def _serve_boxes(settings: Settings, listener_fd: int | None) -> None:
    from windlass.service.cluster.authority import check_cluster_host
    from windlass.service.cluster.head import run_cluster_server
    from windlass.service.processes import listening

    if settings.cluster_host is None:
        raise SettingsError("cluster_host is not set: no box could reach this one; give an address of this machine")
    check_cluster_host(settings.cluster_host)
    _allow_files(_OTHER_FILES + 1000)
    is_own = listener_fd is None
    host, port = settings.cluster_host, settings.cluster_port
    with listening(host, port, setting="cluster_port") if is_own else socket.socket(fileno=listener_fd) as listener:
        run_cluster_server(settings, listener)


def _call_head(settings: Settings) -> None:
    from windlass.service.cluster.box.agent import run_agent

    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for each call, every second
    run_agent(settings)


def _tls_context(settings: Settings) -> ssl.SSLContext | None:
    """Returns the TLS context that the API serves HTTPS with, or None without a certificate. Raises SettingsError."""
    if settings.tls_certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_certificate, settings.tls_key)
    except OSError as error:
        raise SettingsError(
            f"tls_certificate {settings.tls_certificate} and tls_key {settings.tls_key} cannot be used: {error}; "
            "give a certificate and its own key, both as PEM without a password"
        ) from error
    return context


def _allow_files(number: int) -> None:
    """Raises this process's limit of open files and connections to `number`, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < number:
        most = number if hard == resource.RLIM_INFINITY else min(number, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _dispatch(settings: Settings) -> None:
    from windlass.service.dispatcher import RayLostError, run_dispatcher

    try:
        run_dispatcher(settings)
    except RayLostError as error:
        logging.getLogger(__name__).error("%s", error)
        logging.shutdown()
        # Without its cluster, Ray's own cleanup may hang or abort.
        os._exit(75)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
