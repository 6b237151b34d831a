"""What a model's blocks take on this device: one layer of each kind, the embedding and the head, with random params.

Timed is all that a GPU worker does for an operation, so also that params and gradients are put into their places, and
the norms that it tells. Nobody else should be using the machine meanwhile. Source: AutoHete, section 3.1 (times of a
model of one block).
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from windlass.engine.device import TORCH_DTYPE
from windlass.engine.memory_plan import RECOMPUTE_ALL, BlockActivations
from windlass.engine.model import BlockRunner, GradBuffer, Partition, build_meta_model
from windlass.engine.optimizer import squared_norm
from windlass.planner.cost import AgainTimes, BlockProfile, LayerProfile, ModelProfile, holding_ways
from windlass.planner.profiling.model_profiler import kinds_of_layers
from windlass.storage.ids import BlockIndex, Precision

# All is repeated until its mean is known so well, or for so long: a machine's pace changes all the time.
_USUAL_ROUNDS = 3
_LONG_S = 20.0  # one pass; then it is the only one, and what is computed again counts as a forward pass
_STANDARD_ERROR = 0.01
_MAX_S = 8.0
# In a job every layer writes its activations to memory that no cache holds. Of layers with small ones as many are
# measured as have so much together.
_MIN_ACTIVATIONS_NBYTES = 128 << 20
_SPREAD = 0.02  # of random params: as most models begin
_KEEP_ALL = BlockActivations(recompute=False)

_Taken = dict[BlockIndex, tuple[float, float]]  # seconds of one pass, forward and backward
_Round = list[_Taken]  # with each of the choices


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """Of one micro-batch; means."""

    forward_s: float  # of the head: forward and backward
    backward_s: float  # without computing anything again; of the embedding with its forward pass
    again: AgainTimes | None = None  # of a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBlocks:
    """What was measured, and how well."""

    times: dict[int, BlockTimes]
    standard_error: float  # of all blocks' sum, relative to it: large where others computed meanwhile


def measure_blocks(
    profile: ModelProfile,
    config: Any,
    precision: Precision,
    device: torch.device,
    *,
    sums_grads: bool = False,
    grad_precision: Precision | None = None,
) -> MeasuredBlocks:
    """What each block of a profile takes on this device. Holds the params of some blocks meanwhile.

    `sums_grads`: gradients are added up over micro-batches. `grad_precision`: the type of a block's gradient; None: the
    model's.
    """
    return _Bench(
        profile, config, precision, device, sums_grads=sums_grads, grad_precision=grad_precision or precision
    ).measure()


def with_times(profile: ModelProfile, times: Mapping[int, BlockTimes]) -> ModelProfile:
    """A profile with what its blocks take."""

    def timed(block: int, found: BlockProfile) -> Any:
        return replace(found, forward_s=times[block].forward_s, backward_s=times[block].backward_s)

    def timed_layer(block: int, found: LayerProfile) -> LayerProfile:
        timed_block: LayerProfile = timed(block, found)
        return replace(timed_block, again=times[block].again)

    layers = tuple(timed_layer(block, layer) for block, layer in enumerate(profile.layers, start=1))
    head = len(layers) + 1
    return replace(profile, embedding=timed(0, profile.embedding), layers=layers, head=timed(head, profile.head))


class _Bench:
    def __init__(
        self,
        profile: ModelProfile,
        config: Any,
        precision: Precision,
        device: torch.device,
        *,
        sums_grads: bool,
        grad_precision: Precision,
    ) -> None:
        self._partition = Partition(build_meta_model(config, precision))
        self._kinds = kinds_of_layers(self._partition)
        choices: dict[BlockIndex, tuple[BlockActivations, ...]] = {}
        for kind in self._kinds:
            layer = profile.layers[kind[0] - 1]
            measured = kind[: max(1, _MIN_ACTIVATIONS_NBYTES // (layer.saved_nbytes + 1))]
            choices |= dict.fromkeys(measured, _choices_of(layer))
        self._choices = [dict(zip(choices, choice, strict=True)) for choice in zip(*choices.values(), strict=True)]
        self._device, self._dtype = device, TORCH_DTYPE[precision]
        self._runner = BlockRunner(self._partition, device, seed=0)
        self._grad_dtype = TORCH_DTYPE[grad_precision]
        self._sums_grads = sums_grads
        vocab = int(self._partition.model.config.get_text_config().vocab_size)
        self._ids = torch.randint(vocab, (profile.num_examples, profile.num_tokens), device=device)

    def measure(self) -> MeasuredBlocks:
        """Of each block, by what its kind takes."""
        rounds = self._rounds()
        embedding, head = BlockIndex(0), self._partition.head
        found: dict[int, BlockTimes] = {}
        for block in (embedding, head):
            forward_s, backward_s = _both(chain(*rounds), (block,))
            found[block] = BlockTimes(forward_s=forward_s, backward_s=backward_s)
        for kind in self._kinds:
            kept, *others = (_both(passes, kind) for passes in zip(*rounds, strict=True))
            longer = [max(0.0, sum(other) - sum(kept)) for other in others]
            again = AgainTimes(all_s=longer[0], one_held_s=longer[1], most_held_s=longer[2]) if longer else None
            found.update(dict.fromkeys(kind, BlockTimes(forward_s=kept[0], backward_s=kept[1], again=again)))
        return MeasuredBlocks(times=found, standard_error=_standard_error(rounds))

    def _rounds(self) -> list[_Round]:
        start_s = time.perf_counter()
        first = self._pass(self._choices[0])
        if time.perf_counter() - start_s > _LONG_S:
            return [[first]]
        rounds = [self._round()]
        if time.perf_counter() - start_s < _MAX_S / 2:
            rounds.clear()  # what is done only once counts in a short one
        while not _is_known(rounds, time.perf_counter() - start_s):
            rounds.append(self._round())
        return rounds

    def _round(self) -> _Round:
        """With each choice in turn, as a machine's pace changes."""
        return [self._pass(choices) for choices in self._choices]

    def _pass(self, choices: dict[BlockIndex, BlockActivations]) -> _Taken:
        """Forward and backward through what is measured."""
        self._runner.activations = choices
        runner, batch, head = self._runner, [self._ids], self._partition.head
        blocks = [BlockIndex(0), *choices]
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


def _choices_of(layer: LayerProfile) -> tuple[BlockActivations, ...]:
    """First that nothing is computed again, then as `AgainTimes` has them."""
    holding = [way.choice for way in holding_ways(layer)] or [RECOMPUTE_ALL] * 2
    return (_KEEP_ALL, RECOMPUTE_ALL, *holding)


def _both(passes: Iterable[_Taken], blocks: Sequence[BlockIndex]) -> tuple[float, float]:
    """What they take forward and backward: the mean of those that were gone through."""
    forward, backward = zip(*(each[block] for each in passes for block in blocks if block in each), strict=True)
    return statistics.fmean(forward), statistics.fmean(backward)


def _is_known(rounds: Sequence[_Round], taken_s: float) -> bool:
    if rounds and taken_s > _MAX_S:
        return True
    return len(rounds) >= _USUAL_ROUNDS and _standard_error(rounds) < _STANDARD_ERROR


def _standard_error(rounds: Sequence[_Round]) -> float:
    """Of the rounds' mean, relative to it; 0 for one so long that a machine's pace is in it."""
    if len(rounds) == 1:
        return 0.0
    seconds = [math.fsum(sum(taken) for each in passes for taken in each.values()) for passes in rounds]
    return statistics.stdev(seconds) / math.sqrt(len(seconds)) / statistics.fmean(seconds)
