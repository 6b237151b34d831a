"""A head's cluster server on loopback, in a thread of the test's process, with real TLS."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn

from tests.support.service.boxes import HERE
from windlass.service.cluster.authority.authority import make_box_request
from windlass.service.cluster.authority.codes import JoinCode, new_join_code
from windlass.service.cluster.box.connection import HeadConnection, context_for, make_client
from windlass.service.cluster.head.process import cluster_server
from windlass.service.installation.settings import Settings
from windlass.service.machine.fleet.facts import BoxFacts
from windlass.storage.sql.database import Database, migrate


@dataclass(frozen=True, slots=True)
class Head:
    """A running cluster server."""

    settings: Settings
    database: Database
    url: str

    def new_code(self) -> str:
        """Makes a join code."""
        with self.database.write() as session:
            return new_join_code(self.settings, session)

    def client(self, authority: str) -> httpx.Client:
        """Makes a client without a certificate."""
        return make_client(self.url, context_for(authority))

    def ask_to_join(
        self, code: str, *, name: str = "one", node: str = "node-" + "1" * 24, facts: BoxFacts = HERE
    ) -> tuple[httpx.Response, bytes]:
        """Sends a request to join. Returns the answer and the key."""
        key, request = make_box_request()
        body = {"secret": JoinCode.parse(code).secret.hex(), "request": request, "name": name, "node": node}
        body["facts"] = facts.model_dump(mode="json")  # type: ignore[assignment]
        authority = (self.settings.home / "cluster" / "authority.pem").read_text()
        with self.client(authority) as client:
            return client.post("/v1/node/join", json=body), key


@contextmanager
def running_head(home: Path) -> Iterator[Head]:
    """Runs a head's cluster server until the `with` block ends."""
    home.mkdir(mode=0o700, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = Settings(home=home, cluster_host="127.0.0.1", cluster_port=listener.getsockname()[1])
        migrate(settings.database_url)
        database = Database(settings.database_url)
        server = cluster_server(settings, database)
        with _running(server, listener):
            yield Head(settings, database, f"https://127.0.0.1:{settings.cluster_port}")
        database.close()


@contextmanager
def _running(server: uvicorn.Server, listener: socket.socket) -> Iterator[None]:
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        thread.join()


def joined(head: Head, folder: Path, **more: str) -> HeadConnection:
    """Joins a box with the head, and returns its connection. `folder`: for its key and certificate."""
    answer, key = head.ask_to_join(head.new_code(), **more)  # type: ignore[arg-type]
    assert answer.is_success, answer.text
    return connection_with(head, folder, key, answer.json()["certificate"], answer.json()["authority"])


def connection_with(head: Head, folder: Path, key: bytes, certificate: str, authority: str) -> HeadConnection:
    """Opens a connection that shows a certificate."""
    path = folder / "box.pem"
    path.write_bytes(key + certificate.encode())
    context = context_for(authority)
    context.load_cert_chain(path)
    return HeadConnection.to(head.url, context)
