"""What a model's blocks take on this device: one layer of each kind, the embedding and the head, with random params.

Nobody else should be using the machine meanwhile. Source: AutoHete, section 3.1 (times of a model of one block).
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from windlass.engine.block_runner import BlockRunner
from windlass.engine.formats import TORCH_DTYPE
from windlass.engine.grad_buffer import GradBuffer
from windlass.engine.model_profile import kinds_of_layers
from windlass.engine.partition import Partition, build_meta_model
from windlass.planner.activations import BlockActivations
from windlass.planner.model_profile import BlockProfile, LayerProfile, ModelProfile
from windlass.storage.ids import BlockIndex, Precision

_NUM_REPEATS = 3
_SPREAD = 0.02  # of random params: as most models begin


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """Of one micro-batch; medians."""

    forward_s: float  # of the head: forward and backward
    backward_s: float  # without computing anything again; of the embedding with its forward pass


def with_times(profile: ModelProfile, config: Any, precision: Precision, device: torch.device) -> ModelProfile:
    """A profile with the times that its blocks take on this device. Holds the params of some blocks meanwhile."""
    bench = _Bench(config, precision, device, (profile.num_examples, profile.num_tokens))
    times = bench.measure()

    def timed(block: int, found: BlockProfile) -> Any:
        return replace(found, forward_s=times[block].forward_s, backward_s=times[block].backward_s)

    layers: tuple[LayerProfile, ...] = tuple(timed(block, layer) for block, layer in enumerate(profile.layers, start=1))
    head = len(layers) + 1
    return replace(profile, embedding=timed(0, profile.embedding), layers=layers, head=timed(head, profile.head))


class _Bench:
    def __init__(self, config: Any, precision: Precision, device: torch.device, shape: tuple[int, int]) -> None:
        self._partition = Partition(build_meta_model(config, precision))
        self._kinds = kinds_of_layers(self._partition)
        keeps = BlockActivations(recompute=False)
        firsts = {blocks[0]: keeps for blocks in self._kinds}
        self._runner = BlockRunner(self._partition, device, seed=0, activations=firsts)
        self._device, self._dtype = device, TORCH_DTYPE[precision]
        vocab = int(self._partition.model.config.get_text_config().vocab_size)
        self._ids = torch.randint(vocab, shape, device=device)

    def measure(self) -> dict[int, BlockTimes]:
        """Of each block, by what its kind takes."""
        taken: list[dict[BlockIndex, tuple[float, float]]] = [self._pass() for _ in range(1 + _NUM_REPEATS)]
        found: dict[int, BlockTimes] = {}
        representatives = [(BlockIndex(0),), *self._kinds, (self._partition.head,)]
        for blocks in representatives:
            forward, backward = zip(*(each[blocks[0]] for each in taken[1:]), strict=True)
            times = BlockTimes(forward_s=statistics.median(forward), backward_s=statistics.median(backward))
            found.update(dict.fromkeys(blocks, times))
        return found

    def _pass(self) -> dict[BlockIndex, tuple[float, float]]:
        """Forward and backward through what is measured."""
        runner, batch, head = self._runner, [self._ids], self._partition.head
        blocks = [BlockIndex(0), *(kind[0] for kind in self._kinds)]
        forward = {block: self._timed(block, lambda b=block: runner.forward(b, 1, batch)) for block in blocks}  # type: ignore[misc]
        found = {head: (self._timed(head, lambda: runner.head(1, batch), goes_backward=True), 0.0)}
        for block in reversed(blocks):
            taken = self._timed(block, lambda b=block: runner.backward(b, 1, batch), goes_backward=True)  # type: ignore[misc]
            found[block] = forward[block], taken
        return found

    def _timed(self, block: BlockIndex, run: Callable[[], object], *, goes_backward: bool = False) -> float:
        layout = self._partition.layout
        flats, grads = {}, {}
        for each in layout.shared[block]:
            numel = layout.blocks[each].numel
            flats[each] = torch.empty(numel, dtype=self._dtype, device=self._device).normal_(std=_SPREAD)
            if goes_backward:
                grads[each] = GradBuffer(torch.empty(numel, dtype=self._dtype, device=self._device))
        self._runner.install(block, flats, grads)
        self._wait()
        start_s = time.perf_counter()
        run()
        self._wait()
        taken = time.perf_counter() - start_s
        self._runner.remove(block)
        return taken

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
