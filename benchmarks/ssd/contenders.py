"""Runs windlass's SSD server for `benchmarks.ssd`, as an actor and without Ray."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ssd.requests import JOB, REQUESTER, SERVER, Requester, Traffic
from windlass.actors.messages import Message
from windlass.actors.runtime.outbox import Outbox
from windlass.actors.runtime.sockets import MessageClient, MessageServer
from windlass.actors.ssd import SsdServer
from windlass.storage.ids import ActorName
from windlass.storage.io import IoSettings
from windlass.storage.memory import Arena
from windlass.storage.ssd import Volume
from windlass.storage.store import JobSpace, StoreGeometry, TensorStore


class Setup:
    """The state that a server and its requester share: a directory with a volume, and an arena of chunk slots.

    `arena`: that of another setup that is compared with this one. Two arenas would differ in how contiguous their
    memory is, which affects rates more than what is compared.
    """

    def __init__(
        self,
        directory: Path,
        geometry: StoreGeometry,
        num_in_flight: int,
        arena_dir: Path,
        *,
        huge_pages: bool = True,
        arena: Arena | None = None,
    ) -> None:
        self.directory = directory
        self.geometry = geometry
        self.num_in_flight = num_in_flight
        directory.mkdir(exist_ok=True)
        path = arena_dir / f"windlass-{JOB}-1-{os.getpid()}-{directory.name}.arena"
        self._is_mine = arena is None
        self.arena = arena or Arena.create(path, num_in_flight * geometry.extent_nbytes, huge_pages=huge_pages)

    def close(self) -> None:
        """Releases memory and disk space."""
        if self._is_mine:
            self.arena.close()
            self.arena.unlink()
        volume = Volume.open(self.directory)
        TensorStore.delete(volume, JOB)
        volume.close()


class LocalServer:
    """A server and a requester in this process."""

    def __init__(self, setup: Setup, io: IoSettings, *, checksums: bool = True) -> None:
        self.requester = Requester(setup.geometry, setup.arena.path, setup.num_in_flight)

        def to_requester(to: ActorName, message: Message) -> None:
            self.requester.post(message)

        def to_server(to: ActorName, message: Message) -> None:
            self._server.post(message)

        space = JobSpace.open(setup.directory, setup.geometry)
        self._server = SsdServer(SERVER, space, None, setup.arena.path, to_requester, io=io, checksums=checksums)
        self.requester.send = to_server

    def measure(self, traffic: Traffic, seconds: float) -> float:
        """Returns bytes per second."""
        return self.requester.measure(traffic, seconds)

    def latency_s(self, nbytes: int) -> float:
        """Returns the seconds of one read."""
        return self.requester.latency_s(nbytes)

    def close(self) -> None:
        """Ends the threads. The states stay on the disk."""
        self._server.stop()
        self.requester.close()


class ActorServer:
    """A server and a requester as Ray actors, each in its own process, as in a job. Ray must be connected."""

    def __init__(self, setup: Setup, io: IoSettings) -> None:
        import ray

        self._ray = ray
        remote_server, remote_requester = ray.remote(_ServerShell), ray.remote(_RequesterShell)
        self._server = remote_server.options(num_cpus=0).remote(setup.directory, setup.geometry, setup.arena.path, io)
        self._requester = remote_requester.options(num_cpus=0, max_concurrency=2).remote(
            setup.geometry, setup.arena.path, setup.num_in_flight
        )
        actors = {SERVER: self._server, REQUESTER: self._requester}
        addresses = {name: ray.get(actor.open_mailbox.remote()) for name, actor in actors.items()}
        ray.get([actor.connect.remote(addresses) for actor in actors.values()])
        ray.get(self._requester.call.remote("prepare"))

    def measure(self, traffic: Traffic, seconds: float) -> float:
        """Returns bytes per second."""
        rate: float = self._ray.get(self._requester.call.remote("measure", traffic, seconds))
        return rate

    def latency_s(self, nbytes: int) -> float:
        """Returns the seconds of one read."""
        seconds: float = self._ray.get(self._requester.call.remote("latency_s", nbytes))
        return seconds

    def close(self) -> None:
        """Ends the processes. The states stay on the disk."""
        self._ray.get(self._server.stop.remote())
        for actor in (self._server, self._requester):
            self._ray.kill(actor)


class _Shell:
    """A process with a message server, which passes messages to its actor."""

    _actor: SsdServer | Requester

    def open_mailbox(self) -> str:
        self._mailbox = MessageServer(self.post)
        return self._mailbox.address

    def post(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._actor.post(message)


class _ServerShell(_Shell):
    _actor: SsdServer

    def __init__(self, directory: Path, geometry: StoreGeometry, arena_path: Path, io: IoSettings) -> None:
        self._make: Callable[..., SsdServer] = lambda send: SsdServer(
            SERVER, JobSpace.open(directory, geometry), None, arena_path, send, io=io
        )

    def connect(self, addresses: Mapping[ActorName, str]) -> None:
        self._actor = self._make(Outbox(MessageClient(addresses).deliver).send)

    def stop(self) -> None:
        self._actor.stop()


class _RequesterShell(_Shell):
    _actor: Requester

    def __init__(self, geometry: StoreGeometry, arena_path: Path, num_in_flight: int) -> None:
        self._actor = Requester(geometry, arena_path, num_in_flight)
        self._one_call = threading.Lock()

    def connect(self, addresses: Mapping[ActorName, str]) -> None:
        self._actor.send = Outbox(MessageClient(addresses).deliver).send

    def call(self, method: str, *arguments: Any) -> Any:
        with self._one_call:
            return getattr(self._actor, method)(*arguments)
