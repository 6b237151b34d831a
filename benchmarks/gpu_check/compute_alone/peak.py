"""Measures the compute-only peak: the time of a step without any transfers.

A few layers, the embedding and the head run forward and backward through the engine's own block runner. Their params
and gradients are on the device. A layer's time counts as many times as the model has layers. Nothing is updated.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.peers.workload import ModelShape, model_config
from windlass.engine.memory_plan import ActivationChoice
from windlass.engine.model import BlockRunner, GradBuffer, Partition, build_meta_model
from windlass.storage.ids import BlockIndex, Precision

_NUM_LAYERS = 2  # distinct layers: more than a device's caches hold
_NUM_REPEATS = 3  # after one warm-up
_STEP = 1


@dataclass(slots=True)
class _Times:
    """Seconds of one pass."""

    layers_s: float = 0.0
    ends_s: float = 0.0  # embedding and head


def peak_step_s(
    shape: ModelShape,
    *,
    batch_size: int,
    sequence_length: int,
    num_microbatches: int,
    activations: ActivationChoice,
    device: torch.device,
) -> float:
    """Returns the seconds of a step's operations, the fastest of a few passes. Activations must not be swapped."""
    few = replace(shape, num_layers=_NUM_LAYERS)
    partition = Partition(build_meta_model(model_config(few, sequence_length), Precision.BF16))
    layers = [block.index for block in partition.layout.blocks[1:-1]]
    runner = BlockRunner(partition, device, seed=0, activations=dict.fromkeys(layers, *activations.of_layers(1)))
    # As in a job: sums over micro-batches leave in fp32. Sums over slices of the head, and of tied uses, are fp32 too.
    leaving_dtype = torch.bfloat16 if num_microbatches == 1 else torch.float32
    in_fp32 = runner.summed_in_fp32(batch_size // num_microbatches * sequence_length)
    flats, grads, leaving = {}, {}, {}
    for block in partition.layout.blocks:
        flats[block.index] = torch.empty(block.numel, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
        dtype = torch.float32 if block.index in in_fp32 else leaving_dtype
        grads[block.index] = torch.empty(block.numel, dtype=dtype, device=device)
        if dtype is not leaving_dtype:
            leaving[block.index] = torch.empty(block.numel, dtype=leaving_dtype, device=device)
    tokens = torch.randint(0, shape.vocab, (batch_size, sequence_length), device=device)
    batch = list(tokens.chunk(num_microbatches))
    passes = [_pass(runner, flats, grads, leaving, batch) for _ in range(1 + _NUM_REPEATS)][1:]
    return min(times.ends_s + times.layers_s / _NUM_LAYERS * shape.num_layers for times in passes)


def _pass(
    runner: BlockRunner,
    flats: dict[BlockIndex, torch.Tensor],
    grads: dict[BlockIndex, torch.Tensor],
    leaving: dict[BlockIndex, torch.Tensor],
    batch: list[torch.Tensor],
) -> _Times:
    """Runs one pass. `leaving` has tensors for the gradients that leave the device in another type than their sum."""
    times, head = _Times(), runner.partition.head
    embedding, layers = BlockIndex(0), [BlockIndex(i) for i in range(1, head)]

    def run(block: BlockIndex, operation: Callable[[], object], *, with_grads: bool) -> None:
        blocks = runner.partition.layout.shared[block]
        sinks = {each: GradBuffer(grads[each]) for each in blocks} if with_grads else {}
        runner.install(block, {each: flats[each] for each in blocks}, sinks)
        operation()
        if with_grads and block in leaving:
            leaving[block].copy_(grads[block])
        runner.remove(block)

    def forward(block: BlockIndex) -> None:
        run(block, lambda: runner.forward(block, _STEP, batch), with_grads=False)

    def backward(block: BlockIndex) -> None:
        run(block, lambda: runner.backward(block, _STEP, batch), with_grads=True)

    times.ends_s += _timed(partial(forward, embedding))
    times.layers_s += _timed(*(partial(forward, block) for block in layers))
    # Each token is its own target, which costs as much as the next token.
    times.ends_s += _timed(lambda: run(head, lambda: runner.head(_STEP, batch), with_grads=True))
    times.layers_s += _timed(*(partial(backward, block) for block in reversed(layers)))
    times.ends_s += _timed(partial(backward, embedding))
    return times


def _timed(*operations: Callable[[], object]) -> float:
    """Returns the seconds of operations until the device has finished. The device must be idle before."""
    start_s = time.perf_counter()
    for operation in operations:
        operation()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start_s
