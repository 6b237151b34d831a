"""The measured times of a model's blocks. They are stored, and read where no torch is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from windlass.planner.cost import AgainTimes, BlockProfile, LayerProfile, ModelProfile, TimesFacts

# Relative standard error above which other work ran while blocks were measured.
LARGEST_ERROR = 0.05

# A job writes every layer's activations to memory that no cache holds. So as many equal layers are measured as have
# this many bytes of activations together.
_MIN_ACTIVATIONS_NBYTES = 128 << 20

# Seconds after which no further round of a measurement begins if two agree, unless the caller gives others.
MAX_S = 8.0
# Of a pass: a longer one is measured twice with all kept; recomputation counts as a forward pass.
LONG_S = 20.0
_NUM_PASSES = 9  # of a measurement whose time is over after two rounds of four passes each


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """The mean times of a block for one micro-batch."""

    forward_s: float  # the head's includes its backward pass
    backward_s: float  # without recomputation; the embedding's includes its forward pass
    again: AgainTimes | None = None  # only for layers
    norms_s: float | None = None  # of the norms of the whole gradient's chunks, once a step; only with several lanes
    facts: TimesFacts | None = None  # about the times of all blocks together

    def longer(self, factor: float) -> "BlockTimes":
        """Returns the times for a micro-batch with `factor` times the examples."""
        again = None if self.again is None else self.again.sped_up(1 / factor)
        return replace(self, forward_s=self.forward_s * factor, backward_s=self.backward_s * factor, again=again)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBlocks:
    """The measured times, with their error."""

    times: dict[int, BlockTimes]
    standard_error: float  # of the sum over all blocks, relative; large if other work ran meanwhile
    others: float = 0.0  # share of the cores' time that other processes took; 0 on a GPU, which does not share them


def num_measured_layers(layer: LayerProfile, count: int) -> int:
    """Returns how many of so many equal layers are measured."""
    return min(count, max(1, _MIN_ACTIVATIONS_NBYTES // (layer.saved_nbytes + 1)))


def measured_layers(profile: ModelProfile) -> list[tuple[LayerProfile, int]]:
    """Returns a layer of each kind, and how many of them are measured."""
    return [(layer, num_measured_layers(layer, len(blocks))) for layer, blocks in profile.blocks_of_layers.items()]


def measuring_s(pass_s: float) -> float:
    """Returns about the seconds that a measurement takes. `pass_s`: of one forward and backward pass."""
    return 2 * pass_s if pass_s > LONG_S else max(MAX_S, _NUM_PASSES * pass_s)


def with_times(profile: ModelProfile, times: Mapping[int, BlockTimes]) -> ModelProfile:
    """Returns the profile with the given block times."""

    def timed(block: int, untimed: BlockProfile) -> Any:
        measured = times[block]
        return replace(untimed, forward_s=measured.forward_s, backward_s=measured.backward_s, norms_s=measured.norms_s)

    def timed_layer(block: int, untimed: LayerProfile) -> LayerProfile:
        timed_block: LayerProfile = timed(block, untimed)
        return replace(timed_block, again=times[block].again)

    layers = tuple(timed_layer(block, layer) for block, layer in enumerate(profile.layers, start=1))
    head = len(layers) + 1
    return replace(
        profile,
        embedding=timed(0, profile.embedding),
        layers=layers,
        head=timed(head, profile.head),
        times=times[head].facts,
    )
