"""Tells commands what a head's database has of its boxes, also while no service runs."""

from contextlib import closing, suppress

from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from windlass.planner.hardware import Hardware
from windlass.service.installation import Settings, node_of
from windlass.service.machine.fleet import BoxFacts
from windlass.storage.sql import Database
from windlass.storage.sql.repositories import BoxRepository


def slowest_rate(settings: Settings) -> float | None:
    """Returns the slowest measured rate between present boxes, in bytes per second; None: nothing can be read."""
    try:
        with closing(Database(settings.database_url)) as database, database.read() as session:
            rates = BoxRepository(session).rates(node_of(settings.home))
            return min((rate.bytes_per_s for rate in rates), default=None)
    except SQLAlchemyError:  # such as a database that was not migrated yet
        return None


def hardware_of_boxes(settings: Settings) -> dict[str, Hardware]:
    """Returns the measured profiles of the boxes that have joined, by name; empty: nothing can be read."""
    try:
        with closing(Database(settings.database_url)) as database, database.read() as session:
            facts = {box.name: box.facts for box in BoxRepository(session).all(node_of(settings.home))}
    except SQLAlchemyError:  # such as a database that was not migrated yet
        return {}
    found = {}
    for name, told in facts.items():
        with suppress(ValidationError):  # of another release
            if (hardware := BoxFacts.model_validate(told).hardware) is not None:
                found[name] = Hardware.model_validate(hardware)
    return found
