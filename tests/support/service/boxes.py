"""Boxes in a service's database, as they would report themselves."""

import time
from pathlib import Path
from typing import Any, Protocol

from windlass.service.installation.home import node_of
from windlass.service.installation.settings import Settings
from windlass.service.machine.fleet.facts import BoxFacts, Finding, GpuFacts, SsdFacts
from windlass.service.machine.fleet.here import facts_of_this_box
from windlass.service.machine.fleet.messages import CapacityReport, SsdSpaceReport
from windlass.storage.sql.database import Database
from windlass.storage.sql.models import Box
from windlass.storage.sql.repositories.boxes import BoxRepository

GIB = 1024**3
TIB = 1024**4
HERE = facts_of_this_box(Settings(home=Path("/nowhere")))


def make_facts(*, num_gpus: int = 2, **more: Any) -> BoxFacts:
    """The facts of a box with GPUs and two SSDs, of the versions that are installed here."""
    ssds = (
        SsdFacts(path="/mnt/a", total_nbytes=2 * TIB, free_nbytes=TIB, written_nbytes=30 * 10**12, rated_nbytes=6e14),
        SsdFacts(path="/mnt/b", total_nbytes=2 * TIB, free_nbytes=TIB, written_nbytes=540 * 10**12, rated_nbytes=6e14),
    )
    facts: dict[str, Any] = {
        "num_gpus": num_gpus,
        "gpus": (GpuFacts(name="RTX 4090", memory_nbytes=24 * GIB),) * num_gpus,
        "num_cores": 32,
        "memory_nbytes": 256 * GIB,
        "ssds": ssds,
        "findings": (Finding(text="open files: 20000", is_problem=False),),
        "link_host": "10.77.0.2",
        "link_bytes_per_s": 1.1e9,
    }
    return HERE.model_copy(update=facts | more)


def make_capacity(*, num_devices: int = 2, free_nbytes: int = 200 * GIB) -> CapacityReport:
    """The report of such a box on what is free."""
    ssds = tuple(SsdSpaceReport(disk=path, free_nbytes=nbytes) for path, nbytes in (("/mnt/a", TIB), ("/mnt/b", GIB)))
    return CapacityReport(num_devices=num_devices, room_nbytes=free_nbytes, ssds=ssds)


class Head(Protocol):
    """A service that boxes join."""

    @property
    def settings(self) -> Settings: ...
    @property
    def database(self) -> Database: ...


def add_box(head: Head, name: str, *, seen_s_ago: float = 0.0, facts: BoxFacts | None = None) -> Box:
    """Adds a box that called so many seconds ago."""
    with head.database.write() as session:
        boxes = BoxRepository(session)
        told = (facts or make_facts()).model_dump(mode="json")
        box = boxes.add(
            name=name,
            node=f"node-{name}",
            head=node_of(head.settings.home),
            certificate=f"cert-{name}",
            address="10.77.0.2",
            facts=told,
        )
        boxes.set(box.id, capacity=make_capacity().model_dump(mode="json"), seen_at=time.time() - seen_s_ago)
        return boxes.get(box.id)
