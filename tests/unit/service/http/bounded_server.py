"""A server with bounded connections in a thread, and clients of it. Tests set the server's clock forward."""

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import trustme
import uvicorn
import uvloop
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from windlass.service.http.connections import BoundedConnection, ConnectionBounds, bounded_protocol

HEAD = b"GET /quick HTTP/1.1\r\nHost: x\r\n"
GET = HEAD + b"\r\n"
# Bytes: more than the kernel buffers between two sockets with small buffers, and less than uvicorn's high-water mark.
LARGE_NBYTES = 60_000
_BUFFER_NBYTES = 4096
# Seconds, for every limit that a test does not give. Only a clock that is set forward gets there.
LIMIT_S = 1000.0
# Seconds, for every wait; only a hang takes that long.
_PATIENCE_S = 60.0


class _SkippingLoop(asyncio.SelectorEventLoop):
    """A loop whose clock can be set forward."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


class BoundedServer(uvicorn.Server):
    """Serves the app of these tests. Its connections count what they receive."""

    def __init__(
        self, listener: socket.socket, bounds: ConnectionBounds, *, tls: ssl.SSLContext | None, ws: Any, loop: str
    ) -> None:
        self.port: int = listener.getsockname()[1]
        self.num_received = 0  # bytes of requests, from all connections
        self._listener = listener
        self._gate = asyncio.Event()
        self._loop = uvloop.new_event_loop() if loop == "uvloop" else _SkippingLoop()
        server = self

        class Counting(BoundedConnection):
            def data_received(self, data: bytes) -> None:
                super().data_received(data)
                server.num_received += len(data)

        self._protocol: Any = bounded_protocol(bounds, tls=tls, base=Counting)
        super().__init__(
            uvicorn.Config(
                self._app(),
                http=self._protocol,
                ws=ws,
                log_level="error",
                timeout_keep_alive=int(LIMIT_S),
                lifespan="off",
            )
        )

    def serve_until_exit(self) -> None:
        """Runs the loop; called by the server's thread."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self.serve(sockets=[self._listener]))

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/quick")
        async def quick() -> str:
            return "done"

        @app.post("/upload")
        async def upload(request: Request) -> int:
            return len(await request.body())

        @app.get("/stream")
        async def stream() -> StreamingResponse:
            async def lines() -> AsyncIterator[bytes]:
                yield b"first\n"
                await self._gate.wait()
                yield b"last\n"

            return StreamingResponse(lines())

        @app.get("/scheme")
        async def scheme(request: Request) -> str:
            return request.url.scheme

        @app.get("/large")
        async def large() -> Response:
            return Response(b"x" * LARGE_NBYTES)

        @app.get("/endless")
        async def endless() -> StreamingResponse:
            async def pieces() -> AsyncIterator[bytes]:
                while True:
                    yield b"x" * 4096
                    await asyncio.sleep(0)

            return StreamingResponse(pieces())

        @app.post("/late")
        async def late(request: Request) -> int:
            await self._gate.wait()
            return len(await request.body())

        return app

    # --- what a test does with the server -----------------------------------------------------------------------------

    def skip(self, duration_s: float) -> None:
        """Sets the clock of the server's loop forward, so that what is due by then happens next."""
        loop = self._loop
        assert isinstance(loop, _SkippingLoop), "the clock of uvloop is the machine's"
        done = threading.Event()

        def skip() -> None:
            loop.skipped_s += duration_s
            done.set()

        loop.call_soon_threadsafe(skip)
        assert done.wait(_PATIENCE_S)

    def open_gate(self) -> None:
        """Lets `/stream` and `/late` go on."""
        self._loop.call_soon_threadsafe(self._gate.set)

    def num_unsent(self) -> int:
        """Bytes of answers that no connection's socket has taken yet."""
        return sum(each.transport.get_write_buffer_size() for each in list(self.server_state.connections))

    def await_received(self, num_bytes: int) -> None:
        """Waits until so many bytes of requests have been read in all."""
        await_true(lambda: self.num_received >= num_bytes, f"{num_bytes} bytes are received")

    def await_connections(self, num: int) -> None:
        """Waits until so many connections are counted."""
        await_true(lambda: self._protocol.counts.total == num, f"{num} connections are open")

    def await_sent(self, num_unsent: int) -> None:
        """Waits until fewer than so many bytes of answers are unsent."""
        await_true(lambda: self.num_unsent() < num_unsent, f"fewer than {num_unsent} bytes are unsent")

    def await_room(self, *, skip_s: float = 0.0) -> None:
        """Waits until a new client is answered. Sets the clock forward after each that is not."""

        def has_room() -> bool:
            if is_answered(self):
                return True
            if skip_s:
                self.skip(skip_s)
            return False

        await_true(has_room, "there is room")


def await_true(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s, f"never: {what}"
        time.sleep(0.01)


@contextmanager
def serving(
    *, tls: ssl.SSLContext | None = None, ws: Any = "auto", loop: str = "asyncio", **bounds: float
) -> Iterator[BoundedServer]:
    """Serves the app in a thread."""
    given = {"most": 100, "most_per_address": 100}
    given |= dict.fromkeys(("head_s", "body_s", "write_s", "stall_s"), LIMIT_S) | bounds
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_NBYTES)
        server = BoundedServer(listener, ConnectionBounds(**given), tls=tls, ws=ws, loop=loop)  # type: ignore[arg-type]
        thread = threading.Thread(target=server.serve_until_exit)
        thread.start()
        try:
            yield server
        finally:
            server.should_exit = True
            server.open_gate()
            thread.join()


@contextmanager
def connected(server: BoundedServer, *, source: str = "127.0.0.1") -> Iterator[socket.socket]:
    address = ("127.0.0.1", server.port)
    with socket.create_connection(address, timeout=_PATIENCE_S, source_address=(source, 0)) as connection:
        yield connection


@contextmanager
def connected_with_small_buffer(server: BoundedServer) -> Iterator[socket.socket]:
    """The kernel receives little for this client, so that the server notices how much it reads."""
    with socket.socket() as connection:
        connection.settimeout(_PATIENCE_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_NBYTES)
        connection.connect(("127.0.0.1", server.port))
        yield connection


@contextmanager
def connected_by_tls(
    server: BoundedServer, authority: trustme.CA, *, source: str = "127.0.0.1"
) -> Iterator[ssl.SSLSocket]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(context)
    with (
        connected(server, source=source) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        yield connection


def read_all(connection: socket.socket) -> bytes:
    """Reads until the service closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """Reads an answer that arrives in parts, such as TLS records."""
    answer = b""
    while not answer.endswith(end):
        part = connection.recv(65536)
        assert part, answer
        answer += part
    return answer


def read_num(connection: socket.socket, num_bytes: int) -> bytes:
    """Reads so many bytes, or fewer at the end of the answer."""
    answer = b""
    while len(answer) < num_bytes and (part := connection.recv(num_bytes - len(answer))):
        answer += part
    return answer


def read_answer(connection: socket.socket) -> bytes:
    """Reads a whole answer, whose head may arrive before its body."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        part = connection.recv(1)
        assert part, head
        head += part
    (length,) = (line.partition(b":")[2] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    return head + read_num(connection, int(length))


def ask(connection: socket.socket) -> bytes:
    """Sends a request, and returns the answer."""
    connection.sendall(GET)
    return read_answer(connection)


def is_answered(server: BoundedServer) -> bool:
    """Tells whether a new client is answered."""
    with connected(server) as connection:
        return ask(connection).startswith(b"HTTP/1.1 200 OK")


def error_of(answer: bytes) -> tuple[int, str]:
    """The status and the code of an answer that ends its connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert f"content-length: {len(body)}".encode() in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]["code"]
