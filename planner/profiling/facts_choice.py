"""Chooses the cheapest way to the facts of a model."""

from typing import Any

from windlass.planner.profiling.model_config import loaded
from windlass.planner.profiling.profiled_facts import ProfiledFacts
from windlass.storage.ids import Precision


def facts_of(config: Any, precision: Precision) -> ProfiledFacts:
    """Returns the facts of a model. `config`: a transformers config, or one that is not loaded yet."""
    from windlass.planner.profiling.model_profiler import TracedModel

    return TracedModel(loaded(config), precision)
