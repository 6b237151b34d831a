"""Placements as JSON keeps them, between who plans a job and who runs it."""

from typing import Any

from pydantic import TypeAdapter

from windlass.engine.memory_plan.plan import Placement

_PLACEMENT = TypeAdapter(Placement)


def to_json(placement: Placement) -> dict[str, Any]:
    """Plain values only."""
    found: dict[str, Any] = _PLACEMENT.dump_python(placement, mode="json")
    return found


def from_json(stored: dict[str, Any]) -> Placement:
    """Raises ValueError for what is no placement."""
    return _PLACEMENT.validate_python(stored)
