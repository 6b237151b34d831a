"""The service's processes: `python -m windlass.service supervisor|api|dispatcher`; `windlass up` starts them.

Without a supervisor, as in containers, the API opens its port itself, and who runs them starts them again.
"""

import argparse
import gc
import logging
import os
import resource
import socket
import ssl
import sys

from windlass.service.installation import (
    KEY_VARIABLE,
    Settings,
    SettingsError,
    die_with_parent,
    load_settings,
    set_up_logs,
)
from windlass.service.validation import ERROR_PREFIX, ReportedError
from windlass.storage.sql import NewerDatabase

_OTHER_FILES = 200  # that the API has open besides connections


def main(arguments: list[str]) -> int:
    """Be one of the service's processes until told to end; returns its exit code."""
    parser = argparse.ArgumentParser(prog="windlass.service")
    parser.add_argument("role", choices=("supervisor", "api", "dispatcher"))
    parser.add_argument("--parent-pid", type=int)
    parser.add_argument("--listener", type=int, help="file descriptor of the API's socket; else it opens one")
    options = parser.parse_args(arguments)
    if options.parent_pid is not None:
        die_with_parent(options.parent_pid)
    os.umask(0o077)
    os.environ.pop(KEY_VARIABLE, None)  # for requests only: no job is to know it
    try:
        settings = load_settings()
        set_up_logs(settings.log_format, options.role)
        if options.role == "supervisor":
            _supervise(settings)
        elif options.role == "api":
            if options.listener is None:  # else the supervisor has done it
                _open_database(settings)
            _serve_api(settings, options.listener)
        else:
            if options.parent_pid is None:  # else the supervisor has done it
                _open_database(settings)
                settings.make_dirs()
            _dispatch(settings)
    except (ReportedError, NewerDatabase) as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr, flush=True)
        return 1
    return 0


# Each role imports what it alone needs.


def _open_database(settings: Settings) -> None:
    from windlass.service.auth import migrate_database

    migrate_database(settings)


def _supervise(settings: Settings) -> None:
    from windlass.service.processes import Supervisor

    Supervisor(settings).run()


def _serve_api(settings: Settings, listener_fd: int | None) -> None:
    import uvicorn

    from windlass.service.api import create_app
    from windlass.service.api.middleware import ConnectionBounds, bounded_protocol
    from windlass.service.processes import listening

    config = uvicorn.Config(
        # In a container the first key is made beside the API that runs.
        create_app(settings, starts_without_keys=listener_fd is None),
        http=bounded_protocol(ConnectionBounds.of(settings), tls=_tls_context(settings)),
        access_log=False,
        log_level="warning",
        # Event streams stay open until their reader goes.
        timeout_graceful_shutdown=2,
        # Longer than clients keep connections: one that closes as a request is sent leaves it unanswered.
        timeout_keep_alive=75,
        server_header=False,
        proxy_headers=False,  # the app reads them itself, from proxies that the settings trust
    )
    _allow_files(settings.max_connections + _OTHER_FILES)
    opened = listening(settings.host, settings.port) if listener_fd is None else socket.socket(fileno=listener_fd)
    # What was imported stays; to look through it for garbage again and again would hold requests up by 0.1 s and more.
    gc.collect()
    gc.freeze()
    with opened as listener:
        uvicorn.Server(config).run(sockets=[listener])


def _tls_context(settings: Settings) -> ssl.SSLContext | None:
    """The certificate with which the API speaks HTTPS; None without one. Raises SettingsError."""
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
    """Let this process have so many files and connections open, as far as it may say so itself."""
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
        # Without its cluster, Ray's own clean-up may hang or abort.
        os._exit(75)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
