"""A proxy that cuts a connection after the server has done its work, before the client receives the answer."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_DEADLINE_S = 20.0


@contextmanager
def cutting_proxy(port: int) -> Iterator[int]:
    """The port of a proxy to a local server. It cuts the first connection at the answer and passes on all others."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_serve, args=(listener, port))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(_DEADLINE_S)


def _serve(listener: socket.socket, port: int) -> None:
    is_first, threads, sockets = True, [], []
    with suppress(OSError):  # the listener was closed
        while True:
            client, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", port), timeout=_DEADLINE_S)
            sockets += [client, server]
            threads += [
                threading.Thread(target=_pass_on, args=(client, server)),
                threading.Thread(target=_cut if is_first else _pass_on, args=(server, client)),
            ]
            for thread in threads[-2:]:
                thread.start()
            is_first = False
    for each in sockets:  # else their threads wait until the server closes what the client keeps open
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(_DEADLINE_S)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


def _cut(server: socket.socket, client: socket.socket) -> None:
    server.recv(65536)  # the answer begins: the server has done its work
    for each in (server, client):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
