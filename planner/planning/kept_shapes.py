"""What is known of models by their shapes, kept between the plans of one process."""

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from windlass.engine.memory_estimate import DryRunResult
from windlass.planner.cost import ModelProfile
from windlass.planner.profiling import Profiler

_MOST_MODELS = 8  # that are kept; each takes some MiB


@dataclass(slots=True, kw_only=True)
class ModelShapes:
    """A model's profiles and dry runs so far. They depend on its config alone, not on the machine or its pace."""

    profiler: Profiler
    profiles: dict[tuple[int, int], ModelProfile] = field(default_factory=dict)  # by shape of a micro-batch
    rehearsed: DryRunResult = field(default_factory=DryRunResult)


class KeptShapes:
    """The shapes of the models that were planned last."""

    def __init__(self) -> None:
        self._models = OrderedDict[str, ModelShapes]()

    def of(self, config: Any, facts: tuple[object, ...], make: Callable[[], Profiler]) -> ModelShapes:
        """Returns what is kept for a model, or begins with a new profiler.

        `config`: a transformers config. Another one, also from the same folder, is another model. `facts`: all else
        that the profiler depends on.
        """
        model = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
        key = json.dumps([type(config).__name__, model, facts], sort_keys=True, default=str)
        if key not in self._models:
            self._models[key] = ModelShapes(profiler=make())
            if len(self._models) > _MOST_MODELS:
                self._models.popitem(last=False)
        self._models.move_to_end(key)
        return self._models[key]
