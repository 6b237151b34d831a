"""What a model's blocks take on this device: one layer of each kind, the embedding and the head, with random params.

Timed is all that a GPU worker does for an operation, so also that params and gradients are put into their places, and
the norms that it tells. Nobody else should be using the machine meanwhile. Source: AutoHete, section 3.1 (times of a
model of one block).
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from windlass.engine.block_runner import BlockRunner
from windlass.engine.formats import TORCH_DTYPE
from windlass.engine.grad_buffer import GradBuffer
from windlass.engine.grad_norm import squared_norm
from windlass.engine.model_profile import kinds_of_layers
from windlass.engine.partition import Partition, build_meta_model
from windlass.planner.activations import RECOMPUTE_ALL, BlockActivations
from windlass.planner.model_profile import BlockProfile, LayerProfile, ModelProfile
from windlass.storage.ids import BlockIndex, Precision

# Passes are repeated until their mean is known so well, or for so long: a machine's pace changes all the time.
_MIN_REPEATS = 3
_STANDARD_ERROR = 0.01
_MAX_S = 5.0
# In a job every layer writes its activations to memory that no cache holds. Of layers with small ones as many are
# measured as have so much together.
_MIN_ACTIVATIONS_NBYTES = 128 << 20
_SPREAD = 0.02  # of random params: as most models begin

_Taken = dict[BlockIndex, tuple[float, float]]  # seconds of one pass, forward and backward


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """Of one micro-batch; means."""

    forward_s: float  # of the head: forward and backward
    backward_s: float  # without computing anything again; of the embedding with its forward pass
    again_s: float = 0.0  # that a layer's takes longer where all is computed again


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBlocks:
    """What was measured, and how well."""

    times: dict[int, BlockTimes]
    standard_error: float  # of all blocks' sum, relative to it: large where others computed meanwhile


def measure_blocks(
    profile: ModelProfile, config: Any, precision: Precision, device: torch.device, *, sums_grads: bool = False
) -> MeasuredBlocks:
    """What each block of a profile takes on this device. Holds the params of some blocks meanwhile.

    `sums_grads`: gradients are added up over micro-batches, in fp32.
    """
    return _Bench(profile, config, precision, device, sums_grads=sums_grads).measure()


def with_times(profile: ModelProfile, times: Mapping[int, BlockTimes]) -> ModelProfile:
    """A profile with what its blocks take."""

    def timed(block: int, found: BlockProfile) -> Any:
        return replace(found, forward_s=times[block].forward_s, backward_s=times[block].backward_s)

    def timed_layer(block: int, found: LayerProfile) -> LayerProfile:
        timed_block: LayerProfile = timed(block, found)
        return replace(timed_block, again_s=times[block].again_s)

    layers = tuple(timed_layer(block, layer) for block, layer in enumerate(profile.layers, start=1))
    head = len(layers) + 1
    return replace(profile, embedding=timed(0, profile.embedding), layers=layers, head=timed(head, profile.head))


class _Bench:
    def __init__(
        self, profile: ModelProfile, config: Any, precision: Precision, device: torch.device, *, sums_grads: bool
    ) -> None:
        self._partition = Partition(build_meta_model(config, precision))
        self._kinds = kinds_of_layers(self._partition)
        self._layers = [
            block
            for kind in self._kinds
            for block in kind[: max(1, _MIN_ACTIVATIONS_NBYTES // (profile.layers[kind[0] - 1].saved_nbytes + 1))]
        ]
        self._device, self._dtype = device, TORCH_DTYPE[precision]
        self._runner = self._runner_of(BlockActivations(recompute=False))
        self._grad_dtype = torch.float32 if sums_grads else self._dtype
        self._sums_grads = sums_grads
        vocab = int(self._partition.model.config.get_text_config().vocab_size)
        self._ids = torch.randint(vocab, (profile.num_examples, profile.num_tokens), device=device)

    def measure(self) -> MeasuredBlocks:
        """Of each block, by what its kind takes."""
        taken = self._passes()
        # A layer that is computed again finds what it wrote in the caches: that takes less than its forward pass.
        self._runner = self._runner_of(RECOMPUTE_ALL)
        again = self._passes()
        found: dict[int, BlockTimes] = {}
        for blocks in [(BlockIndex(0),), *self._kinds, (self._partition.head,)]:
            forward_s, backward_s = _means(taken, blocks)
            again_s = max(0.0, _means(again, blocks)[1] - backward_s)
            times = BlockTimes(forward_s=forward_s, backward_s=backward_s, again_s=again_s)
            found.update(dict.fromkeys(blocks, times))
        return MeasuredBlocks(times=found, standard_error=_standard_error(taken))

    def _runner_of(self, choice: BlockActivations) -> BlockRunner:
        """Takes the place of the one before."""
        return BlockRunner(self._partition, self._device, seed=0, activations=dict.fromkeys(self._layers, choice))

    def _passes(self) -> list[_Taken]:
        self._pass()  # the first one does not count
        taken: list[_Taken] = []
        start_s = time.perf_counter()
        while len(taken) < _MIN_REPEATS or not (
            _standard_error(taken) < _STANDARD_ERROR or time.perf_counter() - start_s > _MAX_S
        ):
            taken.append(self._pass())
        return taken

    def _pass(self) -> _Taken:
        """Forward and backward through what is measured."""
        runner, batch, head = self._runner, [self._ids], self._partition.head
        blocks = [BlockIndex(0), *self._layers]
        forward = {block: self._timed(block, lambda b=block: self._forward(b)) for block in blocks}  # type: ignore[misc]
        found = {head: (self._timed(head, lambda: runner.head(1, batch), goes_backward=True), 0.0)}
        for block in reversed(blocks):
            taken = self._timed(block, lambda b=block: runner.backward(b, 1, batch), goes_backward=True)  # type: ignore[misc]
            found[block] = forward[block], taken
        return found

    def _forward(self, block: BlockIndex) -> None:
        self._runner.forward(block, 1, [self._ids])
        squared_norm(self._runner.inputs[-1][0].flatten())

    def _timed(self, block: BlockIndex, run: Callable[[], object], *, goes_backward: bool = False) -> float:
        layout = self._partition.layout
        flats, grads = {}, {}
        for each in layout.shared[block]:
            numel = layout.blocks[each].numel
            flats[each] = torch.empty(numel, dtype=self._dtype, device=self._device).normal_(std=_SPREAD)
            if goes_backward:
                touched = [param.name for param in layout.blocks[each].params] if self._sums_grads else ()
                grad = torch.zeros(numel, dtype=self._grad_dtype, device=self._device)
                grads[each] = GradBuffer(grad, touched)
        self._wait()
        start_s = time.perf_counter()
        self._runner.install(block, flats, grads)
        run()
        if goes_backward:
            squared_norm(grads[block].flat)
        self._runner.remove(block)
        self._wait()
        return time.perf_counter() - start_s

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _means(passes: list[_Taken], blocks: Sequence[BlockIndex]) -> tuple[float, float]:
    """Forward and backward, of those of the blocks that were gone through."""
    forward, backward = zip(*(each[b] for each in passes for b in blocks if b in each), strict=True)
    return statistics.fmean(forward), statistics.fmean(backward)


def _standard_error(passes: list[_Taken]) -> float:
    """Of the passes' mean, relative to it."""
    seconds = [math.fsum(map(sum, each.values())) for each in passes]
    return statistics.stdev(seconds) / math.sqrt(len(seconds)) / statistics.fmean(seconds)
