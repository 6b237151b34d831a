"""A head and a box in one process, each with a home, a database, and a real dispatcher with stand-in runners.

The box calls the head's routes over a local connection whenever the test ticks its agent.
"""

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request

from tests.support.service.api_client import make_model
from tests.support.service.boxes import make_capacity, make_facts
from tests.support.service.dispatcher_stage import PREPARED, Stage
from windlass.engine.model.layout import BlockLayout, ModelLayout
from windlass.service.cluster.box.agent import Agent, BoxFunctions
from windlass.service.cluster.box.connection import HeadConnection
from windlass.service.cluster.box.head_link import HeadLink
from windlass.service.cluster.head.caller import calling_box
from windlass.service.cluster.head.content import content_router
from windlass.service.cluster.head.incoming import Incoming
from windlass.service.cluster.head.manifest import Manifests
from windlass.service.cluster.head.sync import sync_router
from windlass.service.http.errors import install_error_handlers
from windlass.service.validation.request_errors import ApiError
from windlass.storage.ids import BlockIndex
from windlass.storage.sql.database import Database
from windlass.storage.sql.models import Box
from windlass.storage.sql.repositories.boxes import BoxRepository, BoxState, MirrorRepository

NAME = "attic"
# Of a model with two layers.
LAYOUT = ModelLayout(
    blocks=tuple(
        BlockLayout(index=BlockIndex(index), name=name, params=())
        for index, name in enumerate(("embedding", "model.layers.0", "model.layers.1", "head"))
    ),
    tied={},
    chunk_numel=4096,
)


def add_box(database: Database, name: str, node: str, *, head: str) -> Box:
    """Adds a box that is called like its certificate."""
    with database.write() as session:
        facts = make_facts().model_dump(mode="json")
        return BoxRepository(session).add(name=name, node=node, head=head, certificate=name, address="", facts=facts)


def head_app(stage: Stage, manifests: Manifests, incoming: Incoming) -> FastAPI:
    """The app that boxes call. A box says its name in a header, in place of a certificate."""
    app = FastAPI()
    install_error_handlers(app)

    def caller(request: Request) -> Box:
        with stage.database.read() as session:
            box = BoxRepository(session).by_certificate(request.headers["X-Box"])
        if box is None or box.state == BoxState.REMOVED:
            raise ApiError("this box was removed", status=403, code="box_removed")
        return box

    app.dependency_overrides[calling_box] = caller
    app.include_router(content_router(stage.database, manifests, incoming))
    app.include_router(sync_router(stage.database, stage.settings, manifests, incoming))
    return app


class AppServer:
    """Serves an app at a free port of this machine, in a thread."""

    def __init__(self, app: FastAPI) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


class Cluster:
    """A head with one box, which calls it over a local connection.

    `client`: of a box that has joined as `NAME`, for a head that is served already; None: the head is served here.
    """

    def __init__(
        self, folder: Path, head_database: Database, box_database: Database, *, client: httpx.Client | None = None
    ) -> None:
        self.head = Stage(folder / "head", head_database)
        self.box = Stage(folder / "box", box_database)
        if not (self.head.settings.models_dir / "tiny").exists():
            make_model(self.head.settings.models_dir / "tiny")
        self.manifests = Manifests(self.head.settings)
        self.incoming = Incoming(self.head.settings)
        self.server: AppServer | None = None
        if client is None:
            add_box(head_database, NAME, self.box.node, head=self.head.node)
            self.server = AppServer(head_app(self.head, self.manifests, self.incoming))
            client = httpx.Client(base_url=self.server.url, headers={"X-Box": NAME}, trust_env=False, timeout=20)
        with head_database.read() as session:
            row = BoxRepository(session).by_node(self.box.node)
        assert row is not None, "the box has joined"
        self.row = row
        self.client = client
        self.link = HeadLink(HeadConnection(self.client))
        self.now = 1000.0
        self.agent = self.new_agent()

    def new_agent(self) -> Agent:
        """Makes an agent without memory, as after a kill."""
        functions = BoxFunctions(facts=make_facts, capacity=make_capacity)
        self.agent = Agent(
            self.box.database, self.box.settings, self.link, functions, name=NAME, clock=lambda: self.now
        )
        return self.agent

    def close(self) -> None:
        self.agent.close()
        self.manifests.close()
        self.client.close()
        if self.server is not None:
            self.server.close()

    def prepare(self, **windlass: Any) -> str:
        """A job in the head's queue that never began."""
        job_id = self.head.submit(**windlass)
        self.head.prepare_at_once(job_id, PREPARED)
        folder = self.head.settings.jobs_dir / job_id
        (folder / "layout.json").write_text(LAYOUT.to_json())
        (folder / "dataset").mkdir()
        (folder / "dataset" / "tokens.bin").write_bytes(bytes(range(256)) * 5000)
        (folder / "prepare" / "kinds").mkdir()
        (folder / "prepare" / "kinds" / "numbers.json").write_text("{}")
        return job_id

    def give(self, job_id: str) -> None:
        """Gives a job to the box."""
        with self.head.database.write() as session:
            MirrorRepository(session).give_away(
                self.head.job(job_id), BoxRepository(session).get(self.row.id), message=f"is copied to box {NAME}"
            )

    def box_row(self) -> Box:
        with self.head.database.read() as session:
            return BoxRepository(session).get(self.row.id)

    def until(self, is_so: Callable[[], object], *, most: int = 100) -> None:
        """Ticks agent and dispatcher of the box until something is so."""
        for _ in range(most):
            if is_so():
                return
            self.agent.tick()
            self.box.tick()
            self.now += 1.0
            for transfers in (self.agent._takings, self.agent._sendings):
                for transfer in list(transfers._transfers.values()):
                    transfer.retry_at = 0.0
                    if transfer.task is not None:
                        transfer.task.exception(timeout=20)
        raise AssertionError("it did not come to be so")

    def has(self, job_id: str) -> bool:
        """Returns whether the box has the job in its database."""
        return any(job.id == job_id for job in self.agent._held())
