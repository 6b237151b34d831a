"""Chooses the cheapest way to the facts of a model."""

import copy
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.engine.memory_estimate import Passes, PassNeeds
from windlass.engine.memory_plan import BlockActivations
from windlass.engine.model import ModelLayout
from windlass.planner.profiling.kept_facts import KeptFacts
from windlass.planner.profiling.known import KnownModel, NotKnownError, known_facts, shape_of_config
from windlass.planner.profiling.model_config import FolderConfig, ShapeConfig, loaded
from windlass.planner.profiling.profiled_facts import LayerOperators, ProfiledFacts
from windlass.storage.ids import BlockIndex, Precision

if TYPE_CHECKING:
    from windlass.planner.hardware import ModelShape
    from windlass.planner.profiling.record_shapes import RecordedModel

# Positions of a model of GPT's shape that does not tell its longest sequence; each has an embedding.
_TOKENS_OF_GPT = 1024


def facts_of(
    config: Any, precision: Precision, folder: Path | None = None, *, on_trace: Callable[[], None] | None = None
) -> ProfiledFacts:
    """Returns the facts of a model.

    Args:
        config: a transformers config, or one that is not loaded yet.
        precision: of the params.
        folder: of the facts of models that were traced before; None: they are not stored.
        on_trace: called before torch is loaded to trace the model.
    """

    def traced() -> ProfiledFacts:
        return trace() if folder is None else KeptFacts(config, precision, folder, trace)

    def trace() -> "RecordedModel":
        if on_trace is not None:
            on_trace()
        from windlass.planner.profiling.record_shapes import RecordedModel

        # A copy, because building a model changes its config, and stored facts are found by its content.
        return RecordedModel(copy.deepcopy(loaded(config)), precision)

    if (known := _by_sizes(config)) is not None:
        try:
            return KnownOrTraced(known_facts(known.shape, precision, num_tokens=known.num_tokens), traced)
        except NotKnownError:
            pass
    return traced()


def num_params_of(shape: "ModelShape") -> int:
    """Returns the parameters of a model by its shape. They do not depend on the longest sequence, but for GPT's."""
    num_tokens = shape.max_tokens or _TOKENS_OF_GPT
    layout = known_facts(shape, Precision.BF16, num_tokens=num_tokens).layout
    return sum(block.numel for block in layout.blocks)


def _by_sizes(config: Any) -> ShapeConfig | None:
    """Returns the sizes of a model, if they say all that decides its facts."""
    if isinstance(config, ShapeConfig):
        return config
    shape = shape_of_config(config.content) if isinstance(config, FolderConfig) else None
    if shape is None or shape.max_tokens is None:
        return None
    return ShapeConfig(shape=shape, num_tokens=shape.max_tokens)


class KnownOrTraced:
    """Implements `ProfiledFacts` for a model of a known family, and traces it for what is not known."""

    def __init__(self, known: KnownModel, trace: Callable[[], ProfiledFacts]) -> None:
        self._known, self._trace = known, trace
        self.precision = known.precision

    @property
    def layout(self) -> ModelLayout:
        """See ModelFacts."""
        return self._known.layout

    @property
    def vocab_size(self) -> int:
        """See ModelFacts."""
        return self._known.vocab_size

    @property
    def buffers_nbytes(self) -> int:
        """See ModelFacts."""
        return self._known.buffers_nbytes

    @property
    def name(self) -> str:
        """See ProfiledFacts."""
        return self._known.name

    @property
    def hidden_size(self) -> int:
        """See ProfiledFacts."""
        return self._known.hidden_size

    @property
    def head_matrix_numel(self) -> int:
        """See ProfiledFacts."""
        return self._known.head_matrix_numel

    def operators(self, block: BlockIndex, num_examples: int, num_tokens: int) -> LayerOperators:
        """See ProfiledFacts."""
        try:
            return self._known.operators(block, num_examples, num_tokens)
        except NotKnownError:
            return self._traced.operators(block, num_examples, num_tokens)

    def needs(self, choices: Mapping[BlockIndex, BlockActivations], passes: Passes) -> PassNeeds:
        """See ModelFacts."""
        try:
            return self._known.needs(choices, passes)
        except NotKnownError:
            return self._traced.needs(choices, passes)

    @cached_property
    def _traced(self) -> ProfiledFacts:
        return self._trace()
