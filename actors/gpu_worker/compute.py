"""Computes the operations on the compute stream, one after the other.

On a GPU, this code runs when an operation is queued, and the device executes the kernels later. The thread that queues
operations must therefore not read results from here, because they may not be computed yet.
"""

from collections.abc import Mapping, Sequence

import torch

from windlass.actors.activations import ActivationTiers
from windlass.actors.gpu_worker.operation import LaunchedOperation
from windlass.actors.messages import ComputeBlock, Phase
from windlass.engine.data import MicroBatch
from windlass.engine.device import Device
from windlass.engine.model import BlockRunner, GradSink, LossSums, StreamedParams
from windlass.engine.optimizer import squared_norm
from windlass.storage.ids import BlockIndex


class Computation:
    """Executes the operations of the block loop, in order."""

    def __init__(
        self, runner: BlockRunner, device: Device, group_size: int, activations: ActivationTiers | None
    ) -> None:
        """`group_size` is the number of micro-batches that pass through the blocks together in training."""
        self._runner = runner
        self._device = device
        self._group_size = group_size
        self._activations = activations
        # The inputs and targets of the current group, on the device.
        self._ids: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._num_targets = 0  # of the step, or of the evaluation's group

    def compute(
        self,
        operation: LaunchedOperation,
        batch: Sequence[MicroBatch],
        flats: Mapping[BlockIndex, torch.Tensor | StreamedParams],
        grads: Mapping[BlockIndex, GradSink],
    ) -> None:
        """Executes an operation.

        `batch` has all groups of a step, or one group of an evaluation, in host memory. `flats` and `grads` have the
        params and the gradient buffers of the blocks that the operation uses.
        """
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
                is_training, sums = (
                    message.phase is Phase.HEAD,
                    LossSums.nothing(self._num_targets, self._device.device),
                )
                runner.head(step, self._targets, train=is_training, loss_scale=message.loss_scale, sums=sums)
                numbers["num_correct"], operation.losses = sums.num_correct, sums.terms
        runner.remove(block)

    def _begin_group(self, message: ComputeBlock, batch: Sequence[MicroBatch], num_targets: int) -> None:
        """Uploads the inputs and targets of a group. The last groups of an epoch's last step may be empty."""
        is_training, first = message.phase is Phase.FORWARD, 0
        if is_training:
            first = message.group * self._group_size
            batch = batch[first : first + self._group_size]
        self._num_targets = num_targets
        self._runner.first_microbatch = first
        self._runner.model.train(is_training)
        self._ids = [self._device.upload(microbatch.input_ids) for microbatch in batch]
        self._targets = [self._device.upload(microbatch.targets) for microbatch in batch]
