"""Measures the times of a model's blocks on this device: the embedding, one layer of each kind, and the head.

The params are random. A time covers all that a GPU worker does for an operation. That includes installing params and
gradients, converting sums to the type in which gradients leave the device, and computing the norms that it reports. No
other work should run on the machine meanwhile.

Source: AutoHete, section 3.1 (times of a model of one block).
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from windlass.engine.device import TORCH_DTYPE
from windlass.engine.memory_plan import RECOMPUTE_ALL, BlockActivations
from windlass.engine.model import BlockRunner, GradBuffer, Partition, build_meta_model
from windlass.engine.optimizer import portable_squared_norms, squared_norm
from windlass.planner.cost import AgainTimes, LayerProfile, ModelProfile, TimesFacts, holding_ways
from windlass.planner.profiling.block_times import (
    LARGEST_ERROR,
    LONG_S,
    MAX_S,
    BlockTimes,
    MeasuredBlocks,
    num_measured_layers,
)
from windlass.planner.profiling.machine_pace import OtherWork
from windlass.planner.profiling.profiled_facts import kinds_of_layers
from windlass.storage.ids import BlockIndex, HeadSlices, Precision

# Rounds are repeated until the standard error of the mean is low, or the time is over, because a machine's pace varies.
_USUAL_ROUNDS = 3  # minimum number of rounds
_LONGEST_S = 240.0  # of a pass: a longer one is the only one, because a measurement may take ten minutes
_STANDARD_ERROR = 0.01  # relative error below which rounds end
# Relative error that a single round is assumed to have: as much as an estimate by rates, and more than times may have
# that are stored for good. A busy machine is slow, so it is the one on which only one round fits.
_UNKNOWN_ERROR = 0.25
_NUM_NORMS = 3  # times that the norms of a gradient's chunks are computed; the fastest one counts
_SPREAD = 0.02  # standard deviation of random params, as most models initialize them
_KEEP_ALL = BlockActivations(recompute=False)

_Taken = dict[BlockIndex, tuple[float, float]]  # seconds of one pass, forward and backward
Round = list[_Taken]  # one for each choice of activations


def measure_blocks(
    profile: ModelProfile,
    config: Any,
    precision: Precision,
    device: torch.device,
    *,
    sums_grads: bool = False,
    has_lanes: bool = False,
    grad_precision: Precision | None = None,
    head_slices: HeadSlices = HeadSlices.LARGE,
    max_s: float | None = None,
) -> MeasuredBlocks:
    """Measures the time of each block of a profile on this device. Meanwhile some blocks' params are in memory.

    `sums_grads`: gradients are summed over micro-batches. `has_lanes`: in several lanes, so the norms of gradients are
    measured separately, because a step has them only once. `grad_precision`: type of a block's gradient; None: that of
    the model. `head_slices`: the way in which the head goes over tokens. `max_s`: seconds after which no further round
    begins if two agree; None: the usual ones.
    """
    return BlockBench(
        profile,
        config,
        precision,
        device,
        sums_grads=sums_grads,
        has_lanes=has_lanes,
        grad_precision=grad_precision,
        head_slices=head_slices,
    ).measure(MAX_S if max_s is None else max_s)


class BlockBench:
    """Blocks of a model on this device, ready to be measured; for the parameters see `measure_blocks`."""

    def __init__(
        self,
        profile: ModelProfile,
        config: Any,
        precision: Precision,
        device: torch.device,
        *,
        sums_grads: bool = False,
        has_lanes: bool = False,
        grad_precision: Precision | None = None,
        head_slices: HeadSlices = HeadSlices.LARGE,
    ) -> None:
        self._partition = Partition(build_meta_model(config, precision))
        self._kinds = kinds_of_layers(self._partition.layout)
        choices: dict[BlockIndex, tuple[BlockActivations, ...]] = {}
        for kind in self._kinds:
            layer = profile.layers[kind[0] - 1]
            measured = kind[: num_measured_layers(layer, len(kind))]
            choices |= dict.fromkeys(measured, _choices_of(layer))
        self._choices = [dict(zip(choices, choice, strict=True)) for choice in zip(*choices.values(), strict=True)]
        self._device, self._dtype = device, TORCH_DTYPE[precision]
        self._runner = BlockRunner(self._partition, device, seed=0, head_slices=head_slices)
        self._grad_dtype = TORCH_DTYPE[grad_precision or precision]
        self._sums_grads, self._has_lanes = sums_grads, has_lanes
        vocab = int(self._partition.model.config.get_text_config().vocab_size)
        self._ids = torch.randint(vocab, (profile.num_examples, profile.num_tokens), device=device)

    def measure(self, max_s: float) -> MeasuredBlocks:
        """Repeats rounds until they are enough. Returns the times of each block."""
        work = OtherWork()
        measured = self.times_of(self._rounds(max_s))
        return replace(measured, others=work.share()) if self._device.type == "cpu" else measured

    def times_of(self, rounds: Sequence[Round]) -> MeasuredBlocks:
        """Returns the mean times of each block; equal layers share the times measured for their kind."""
        embedding, head = BlockIndex(0), self._partition.head
        times: dict[int, BlockTimes] = {}
        for block in (embedding, head):
            forward_s, backward_s = _both(chain(*rounds), (block,))
            times[block] = BlockTimes(forward_s=forward_s, backward_s=backward_s, norms_s=self._norms_s(block))
        for kind in self._kinds:
            kept, *others = (_both(passes, kind) for passes in zip(*rounds, strict=True))
            longer = [max(0.0, sum(other) - sum(kept)) for other in others]
            again = AgainTimes(all_s=longer[0], one_held_s=longer[1], most_held_s=longer[2]) if longer else None
            of_kind = BlockTimes(forward_s=kept[0], backward_s=kept[1], again=again, norms_s=self._norms_s(kind[0]))
            times.update(dict.fromkeys(kind, of_kind))
        error = _standard_error(rounds)
        facts = TimesFacts(standard_error=error)
        times = {block: replace(block_times, facts=facts) for block, block_times in times.items()}
        return MeasuredBlocks(times=times, standard_error=error)

    def _rounds(self, max_s: float) -> list[Round]:
        start_s = time.perf_counter()
        first = self._pass(self._choices[0])
        pass_s = time.perf_counter() - start_s
        if pass_s > LONG_S:
            return [[first]] if pass_s > _LONGEST_S else [[first], [self._pass(self._choices[0])]]
        rounds = [self.round(), self.round()]
        # The first round includes one-time work: on a GPU it can take seconds. It counts if the time is over after two
        # rounds that agree.
        if time.perf_counter() - start_s > max_s and _standard_error(rounds) <= LARGEST_ERROR:
            return rounds
        rounds = [rounds[1], self.round()]
        while time.perf_counter() - start_s <= max_s and not _are_enough(rounds):
            rounds.append(self.round())
        return rounds

    def round(self) -> Round:
        """Runs a pass with each choice in turn, so that changes of the machine's pace affect all choices alike."""
        return [self._pass(choices) for choices in self._choices]

    def _pass(self, choices: dict[BlockIndex, BlockActivations]) -> _Taken:
        """Runs forward and backward through the measured blocks with one choice for each layer."""
        self._runner.activations = choices
        runner, batch, head = self._runner, [self._ids], self._partition.head
        blocks = [BlockIndex(0), *choices]
        forward = {block: self._timed(block, partial(self._forward, block)) for block in blocks}
        times = {head: (self._timed(head, partial(runner.head, 1, batch), goes_backward=True), 0.0)}
        for block in reversed(blocks):
            taken = self._timed(block, partial(runner.backward, block, 1, batch), goes_backward=True)
            times[block] = forward[block], taken
        return times

    def _forward(self, block: BlockIndex) -> None:
        self._runner.forward(block, 1, [self._ids])
        squared_norm(self._runner.inputs[-1][0].flatten())

    def _timed(self, block: BlockIndex, run: Callable[[], object], *, goes_backward: bool = False) -> float:
        layout = self._partition.layout
        flats, grads = {}, {}
        in_fp32 = self._runner.summed_in_fp32(self._ids.numel())
        for shared in layout.shared[block]:
            numel = layout.blocks[shared].numel
            flats[shared] = torch.empty(numel, dtype=self._dtype, device=self._device).normal_(std=_SPREAD)
            if goes_backward:
                touched = [param.name for param in layout.blocks[shared].params] if self._sums_grads else ()
                dtype = torch.float32 if shared in in_fp32 else self._grad_dtype
                grad = torch.zeros(numel, dtype=dtype, device=self._device)
                grads[shared] = GradBuffer(grad, touched)
        leaving = None  # the gradient in the type in which it leaves the device, if its sum has another one
        if goes_backward and grads[block].flat.dtype is not self._grad_dtype:
            leaving = torch.zeros(layout.blocks[block].numel, dtype=self._grad_dtype, device=self._device)
        self._wait()
        start_s = time.perf_counter()
        self._runner.install(block, flats, grads)
        run()
        if goes_backward and not self._has_lanes:
            grad = grads[block].flat
            squared_norm(grad if leaving is None else leaving.copy_(grad))
        self._runner.remove(block)
        self._wait()
        return time.perf_counter() - start_s

    def _norms_s(self, block: BlockIndex) -> float | None:
        """Returns the seconds for the norms of a gradient's chunks in a job with several lanes, else None."""
        if not self._has_lanes:
            return None
        layout, seconds = self._partition.layout, []
        grad = torch.zeros(layout.blocks[block].numel, device=self._device)
        for _ in range(_NUM_NORMS):
            self._wait()
            start_s = time.perf_counter()
            portable_squared_norms(grad, layout.chunk_numel)
            self._wait()
            seconds.append(time.perf_counter() - start_s)
        return min(seconds)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _choices_of(layer: LayerProfile) -> tuple[BlockActivations, ...]:
    """Returns the choices to measure: no recomputation first, then in the order of `AgainTimes`."""
    holding = [way.choice for way in holding_ways(layer)] or [RECOMPUTE_ALL] * 2
    return (_KEEP_ALL, RECOMPUTE_ALL, *holding)


def _both(passes: Iterable[_Taken], blocks: Sequence[BlockIndex]) -> tuple[float, float]:
    """Returns the mean forward and backward times of the given blocks over the passes that include them."""
    forward, backward = zip(*(times[block] for times in passes for block in blocks if block in times), strict=True)
    return statistics.fmean(forward), statistics.fmean(backward)


def _are_enough(rounds: Sequence[Round]) -> bool:
    return len(rounds) >= _USUAL_ROUNDS and _standard_error(rounds) < _STANDARD_ERROR


def _standard_error(rounds: Sequence[Round]) -> float:
    """Returns the relative standard error of the rounds' mean.

    A single round says nothing of its error, so that is assumed to be large.
    """
    if len(rounds) == 1:
        return _UNKNOWN_ERROR
    seconds = [math.fsum(sum(taken) for times in passes for taken in times.values()) for passes in rounds]
    return statistics.stdev(seconds) / math.sqrt(len(seconds)) / statistics.fmean(seconds)
