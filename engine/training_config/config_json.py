"""Converts training configs to and from JSON, for the job's row and for the planner's question."""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from windlass.engine.training_config.training_config import TrainingConfig

_CONFIG = TypeAdapter(TrainingConfig)


def to_json(config: TrainingConfig) -> dict[str, Any]:
    """Converts a training config to plain JSON values."""
    values: dict[str, Any] = _CONFIG.dump_python(config, mode="json")
    return values


def from_json(stored: Mapping[str, Any]) -> TrainingConfig:
    """Converts JSON values to a training config. Missing fields get their defaults.

    Raises:
        ValueError: the values are not those of a training config.
    """
    return _CONFIG.validate_python(stored)
