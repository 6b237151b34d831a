"""What the compute stream does for the operations that it is given, one after the other.

On a GPU all of it runs as an operation is given, ahead of what it starts on the device. Nothing here may be looked at
by who gives operations: on a device that runs behind it is not done yet.
"""

from collections.abc import Mapping, Sequence

import torch

from windlass.actors.activations import ActivationTiers
from windlass.actors.gpu_worker.operation import LaunchedOperation
from windlass.actors.messages import ComputeBlock, Phase
from windlass.engine.data import MicroBatch
from windlass.engine.device import Device
from windlass.engine.model import BlockRunner, GradBuffer, LossSums, StreamedParams
from windlass.engine.optimizer import squared_norm
from windlass.storage.ids import BlockIndex


class Computation:
    """Carries operations out, in their order."""

    def __init__(
        self, runner: BlockRunner, device: Device, group_size: int, activations: ActivationTiers | None
    ) -> None:
        """`group_size`: micro-batches that go through the blocks together in training."""
        self._runner = runner
        self._device = device
        self._group_size = group_size
        self._activations = activations
        # Of the group that is computed, on the device.
        self._ids: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._sums: LossSums | None = None  # over the groups of the step so far

    def compute(
        self,
        operation: LaunchedOperation,
        batch: Sequence[MicroBatch],
        flats: Mapping[BlockIndex, torch.Tensor | StreamedParams],
        grads: Mapping[BlockIndex, GradBuffer],
    ) -> None:
        """`batch`: all groups of a step, or the group of an evaluation; in host memory."""
        message, runner, numbers = operation.message, self._runner, operation.numbers
        step, block = message.step, message.block
        if self._activations is not None:
            self._activations.begin(step, message.op, block)
        runner.install(block, flats, grads)
        if block == 0 and message.phase is not Phase.BACKWARD:
            self._begin_group(message, batch, operation.num_targets)
        match message.phase:
            case Phase.FORWARD | Phase.EVALUATE:
                runner.forward(block, step, self._ids, keep=message.phase is Phase.FORWARD)
                if outputs := [squared_norm(hidden.flatten()) for hidden in runner.inputs[-1]]:
                    numbers["output_sq_sum"] = torch.stack(outputs).sum()
            case Phase.BACKWARD:
                runner.backward(block, step, self._ids)
            case Phase.HEAD | Phase.EVALUATE_HEAD:
                is_training, sums = message.phase is Phase.HEAD, self._sums
                sums = runner.head(step, self._targets, train=is_training, loss_scale=message.loss_scale, sums=sums)
                numbers.update(loss_sum=sums.loss_sum, num_correct=sums.num_correct)
        runner.remove(block)

    def _begin_group(self, message: ComputeBlock, batch: Sequence[MicroBatch], num_targets: int) -> None:
        """Where an epoch ends with a small step, its last groups may be empty."""
        is_training, first = message.phase is Phase.FORWARD, 0
        if is_training:
            first = message.group * self._group_size
            batch = batch[first : first + self._group_size]
        if first == 0:
            self._sums = LossSums.nothing(num_targets, self._device.device)
        self._runner.first_microbatch = first
        self._runner.model.train(is_training)
        self._ids = [self._device.upload(microbatch.input_ids) for microbatch in batch]
        self._targets = [self._device.upload(microbatch.targets) for microbatch in batch]
