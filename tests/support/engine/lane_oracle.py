"""A step's gradients in lanes, the plain way: each lane is computed alone, and all are kept until they are added."""

from collections.abc import Sequence
from typing import Any

import torch

from windlass.engine.data.dataset import MicroBatch
from windlass.engine.model.block_runner import BlockRunner
from windlass.engine.model.grad_buffer import GradBuffer
from windlass.engine.model.head_slices import LossSums
from windlass.engine.model.partition import Partition
from windlass.storage.ids import BlockIndex

# The block whose operation computes a sum, and the block of the params.
_Use = tuple[BlockIndex, BlockIndex]


class LaneOracle:
    """Computes lanes one by one with an engine that knows only one."""

    def __init__(self, partition: Partition, model: Any, seed: int, *, step: int, loss_scale: float) -> None:
        """`model` has the params."""
        self._layout, self._head = partition.layout, partition.head
        self._runner = BlockRunner(partition, torch.device("cpu"), seed)
        self._runner.model.train()
        self._params = dict(model.named_parameters())
        self._step, self._loss_scale = step, loss_scale

    def gradients(
        self, batch: Sequence[MicroBatch], *, num_lanes: int, num_microbatches: int
    ) -> dict[int, torch.Tensor]:
        """The gradient of each block. `batch` may have fewer than the `num_microbatches` of a full step."""
        num_targets = sum(microbatch.num_targets for microbatch in batch)
        sums: dict[_Use, list[GradBuffer]] = {}
        for lane in range(num_lanes):
            start, stop = (number * num_microbatches // num_lanes for number in (lane, lane + 1))
            if batch[start:stop]:
                for use, grad in self._lane(batch[start:stop], start, num_targets).items():
                    sums.setdefault(use, []).append(grad)
        found: dict[int, torch.Tensor] = {}
        for (_, block), lanes in sorted(sums.items(), reverse=True):  # the head's use of a tied block comes first
            total = lanes[0].flat
            for other in lanes[1:]:
                total = total + other.flat
            found[block] = total if block not in found else found[block] + total
        return found

    def _lane(self, batch: Sequence[MicroBatch], first: int, num_targets: int) -> dict[_Use, GradBuffer]:
        runner, grads = self._runner, dict[_Use, GradBuffer]()
        ids, targets = ([getattr(each, name) for each in batch] for name in ("input_ids", "targets"))
        runner.first_microbatch = first
        blocks = [block.index for block in self._layout.blocks[:-1]]
        for block in blocks:
            runner.install(block, self._flats(block), {})
            runner.forward(block, self._step, ids)
            runner.remove(block)
        runner.install(self._head, self._flats(self._head), self._sinks(self._head, grads))
        sums = LossSums.nothing(num_targets, torch.device("cpu"))
        runner.head(self._step, targets, loss_scale=self._loss_scale, sums=sums)
        runner.remove(self._head)
        for block in reversed(blocks):
            runner.install(block, self._flats(block), self._sinks(block, grads))
            runner.backward(block, self._step, ids)
            runner.remove(block)
        return grads

    def _flats(self, block: BlockIndex) -> dict[BlockIndex, torch.Tensor]:
        return {
            used: torch.cat([self._params[param.name].detach().flatten() for param in self._layout.blocks[used].params])
            for used in self._layout.shared[block]
        }

    def _sinks(self, block: BlockIndex, grads: dict[_Use, GradBuffer]) -> dict[BlockIndex, GradBuffer]:
        sinks = {}
        for used in self._layout.shared[block]:
            grad = torch.full((self._layout.blocks[used].numel,), torch.nan)
            sinks[used] = grads[block, used] = GradBuffer(grad)
        return sinks
