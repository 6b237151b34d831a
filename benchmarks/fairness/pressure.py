"""Parts of `benchmarks.fairness`: a slow server, idle connections, and the delay of a webhook."""

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

_OTHER_FILES = 500  # open files allowed beside the idle connections
# Another local address, as another client would have.
_OTHER_ADDRESS = "127.0.0.2"
_TRICKLE_S = 4.0
_DEADLINE_S = 300.0


@contextmanager
def trickling_server() -> Iterator[str]:
    """Runs a server that sends one byte every four seconds, and yields its URL."""
    ending = threading.Event()
    with socket.create_server(("127.0.0.1", 0), backlog=256) as server:

        def answer(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                for byte in b"HTTP/1.1 200 OK\r\nX: " + b"x" * 10_000:
                    connection.sendall(bytes([byte]))
                    if ending.wait(_TRICKLE_S):
                        return

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # the server was closed
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"
        ending.set()
        server.shutdown(socket.SHUT_RDWR)


@contextmanager
def idle_connections(port: int, number: int) -> Iterator[None]:
    """Keeps `number` connections open that never finish their headers. Reopens each one that is closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, number + _OTHER_FILES)), hard))
    ending = threading.Event()

    def keep() -> None:
        held: list[socket.socket] = []
        while not ending.is_set():
            held = [each for each in held if not _is_closed(each)]
            for _ in range(min(100, number - len(held))):
                with contextlib.suppress(OSError):
                    held.append(_open(port))
            ending.wait(0.5)
        for each in held:
            each.close()

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def _open(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=1.0, source_address=(_OTHER_ADDRESS, 0))
    connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
    connection.setblocking(False)
    return connection


def _is_closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    connection.close()
    return True


def told_webhooks(client: httpx.Client, end_a_job: Callable[[], None]) -> float:
    """Returns the seconds from a job's end to its webhook, at an endpoint created for this."""
    came = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
            came.set()

        def log_message(self, format: str, *args: object) -> None:
            """Discards the log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        body = {"name": "mine", "url": url, "event_types": ["fine_tuning.job.cancelled"]}
        endpoint = client.post("/v1/webhook_endpoints", json=body).raise_for_status().json()["id"]
        end_a_job()
        ended_s = time.monotonic()
        if not came.wait(_DEADLINE_S):
            raise RuntimeError(f"no webhook came within {_DEADLINE_S:g} s")
        delay_s = time.monotonic() - ended_s
        client.delete(f"/v1/webhook_endpoints/{endpoint}")
        server.shutdown()
    return delay_s
