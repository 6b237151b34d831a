"""The facts of models and their profiles by shapes, kept between the plans of one process."""

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass.planner.cost import ModelProfile
from windlass.planner.profiling import ProfiledFacts, content_of, facts_of, profile_of
from windlass.storage.ids import HeadSlices, Precision

_MOST_MODELS = 8  # that are kept; each takes some MiB

_ShapeKey = tuple[int, int, bool, HeadSlices, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapes:
    """A model's facts, and its profiles so far. They depend on its config alone, not on the machine or its pace."""

    facts: ProfiledFacts
    _profiles: dict[_ShapeKey, ModelProfile] = field(default_factory=dict)

    def profile(
        self,
        num_examples: int,
        num_tokens: int,
        *,
        for_gpu: bool,
        head_slices: HeadSlices,
        cut_matrices: int | None = None,
    ) -> ModelProfile:
        """Returns the profile for micro-batches of this shape, without measured times."""
        key = (num_examples, num_tokens, for_gpu, head_slices, cut_matrices)
        if key not in self._profiles:
            self._profiles[key] = profile_of(
                self.facts,
                num_examples,
                num_tokens,
                for_gpu=for_gpu,
                head_slices=head_slices,
                cut_matrices=cut_matrices,
            )
        return self._profiles[key]


class KeptShapes:
    """The shapes of the models that were planned last."""

    def __init__(self) -> None:
        self._models = OrderedDict[str, ModelShapes]()

    def of(
        self, config: Any, precision: Precision, folder: Path | None, *, on_trace: Callable[[], None] | None = None
    ) -> ModelShapes:
        """Returns what is kept for a model, or begins anew. See `facts_of` for the arguments.

        `config`: another content, also of the same folder, is another model.
        """
        about = [type(config).__name__, content_of(config), precision, str(folder)]
        key = json.dumps(about, sort_keys=True, default=str)
        if key not in self._models:
            self._models[key] = ModelShapes(facts=facts_of(config, precision, folder, on_trace=on_trace))
            if len(self._models) > _MOST_MODELS:
                self._models.popitem(last=False)
        self._models.move_to_end(key)
        return self._models[key]
