"""Converts placements to and from JSON, for the way from the planner to the runner."""

from typing import Any

from pydantic import TypeAdapter

from windlass.engine.memory_plan.plan import Placement

_PLACEMENT = TypeAdapter(Placement)


def to_json(placement: Placement) -> dict[str, Any]:
    """Converts a placement to plain JSON values."""
    values: dict[str, Any] = _PLACEMENT.dump_python(placement, mode="json")
    return values


def from_json(stored: dict[str, Any]) -> Placement:
    """Converts JSON values to a placement. Raises ValueError if they are not one."""
    return _PLACEMENT.validate_python(stored)
