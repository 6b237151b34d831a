"""The facts of a model from which a job's device memory follows. It imports no torch, so that a plan needs none.

`TracedFacts` finds them with torch. `windlass.planner.profiling` also knows models whose facts need no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from windlass.engine.memory_plan import BlockActivations, UnitNeed
from windlass.engine.model import ModelLayout
from windlass.storage.ids import BlockIndex, HeadSlices, Precision


class DeviceNeedUnknownError(RuntimeError):
    """A block cannot be run by shapes alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The passes of one micro-batch, without the layers' choices of activations."""

    num_examples: int
    num_tokens: int  # of an example
    train: bool = True  # False: those of an evaluation, for which choices do not matter
    grad_precision: Precision  # of gradients that are sent to the optimizer
    is_summed: bool  # gradients are added to those of earlier micro-batches
    head_slices: HeadSlices = HeadSlices.LARGE
    cut_matrices: int | None = None  # as in the job's `TrainingConfig`


@dataclass(frozen=True, slots=True, kw_only=True)
class PassNeeds:
    """The device memory of one micro-batch's passes."""

    units: tuple[UnitNeed, ...]  # of the embedding and each layer
    head_peak_nbytes: int


class ModelFacts(Protocol):
    """The facts of a model, in one precision."""

    @property
    def layout(self) -> ModelLayout:
        """The layout of the model's blocks."""

    @property
    def vocab_size(self) -> int:
        """The vocabulary size of the model's config, on which the head's slices depend."""

    @property
    def buffers_nbytes(self) -> int:
        """The bytes of the model's own constants."""

    def needs(self, choices: Mapping[BlockIndex, BlockActivations], passes: Passes) -> PassNeeds:
        """Returns the needs of one micro-batch. `choices`: of layers; the others recompute everything.

        Raises:
            DeviceNeedUnknownError: a block has operators whose output shapes torch cannot derive without computing, or
                a Python autograd function that launches its own kernels.
        """
