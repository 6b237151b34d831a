"""Computes the operations on the compute stream, one after the other.

On a GPU, this code runs when an operation is queued, and the device executes the kernels later. The thread that queues
operations must therefore not read results from here, because they may not be computed yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from windlass.actors.activations import ActivationTiers
from windlass.actors.gpu_worker.operation import LaunchedOperation
from windlass.actors.messages import ComputeBlock, Phase
from windlass.actors.worker_policy import Stage
from windlass.engine.data import MicroBatch
from windlass.engine.device import Device
from windlass.engine.model import BlockRunner, GradSink, GroupActivations, LossSums, StreamedParams
from windlass.engine.optimizer import squared_norm
from windlass.storage.ids import BlockIndex


@dataclass(slots=True)
class _Group:
    """A group of micro-batches between its first operation in the stage and its last one."""

    index: int
    num_targets: int  # of the step, or of the evaluation's group
    # On the device.
    ids: list[torch.Tensor] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)
    activations: GroupActivations = field(default_factory=GroupActivations)  # while another group is computed
    goes_on: bool = False  # it will be computed again, perhaps after another group


class Computation:
    """Executes the operations of the block loop, in order."""

    def __init__(
        self, runner: BlockRunner, device: Device, group_size: int, activations: ActivationTiers | None, stage: Stage
    ) -> None:
        """`group_size` is the number of micro-batches that pass through the blocks together in training.

        `stage` has the blocks of the box.
        """
        self._runner = runner
        self._device = device
        self._group_size = group_size
        self._activations = activations
        self._stage = stage
        self._group = _Group(0, 0)  # the current one
        self._others: dict[int, _Group] = {}  # groups that have passed forward, and wait for another box, by index

    def compute(
        self,
        operation: LaunchedOperation,
        batch: Sequence[MicroBatch],
        flats: Mapping[BlockIndex, torch.Tensor | StreamedParams],
        grads: Mapping[BlockIndex, GradSink],
        received: Sequence[torch.Tensor] = (),
    ) -> None:
        """Executes an operation.

        `batch` has all groups of a step, or one group of an evaluation, in host memory. `flats` and `grads` have the
        params and the gradient buffers of the blocks that the operation uses. `received`: hidden states of another box,
        or their gradients, on the device. The results for another box are put into the operation.
        """
        message, runner, numbers = operation.message, self._runner, operation.numbers
        step, block = message.step, message.block
        if self._activations is not None:
            self._activations.begin(step, block)
        self._turn_to(message, batch, operation.num_targets, received)
        runner.install(block, flats, grads)
        match message.phase:
            case Phase.FORWARD | Phase.EVALUATE:
                runner.forward(block, step, self._group.ids, keep=message.phase is Phase.FORWARD)
                if outputs := [squared_norm(hidden.flatten()) for hidden in runner.inputs[-1]]:
                    numbers["output_sq_sum"] = torch.stack(outputs).sum()
                if operation.is_sent:
                    operation.results = runner.take_outputs()
            case Phase.BACKWARD:
                runner.backward(block, step, self._group.ids)
                if operation.is_sent:
                    operation.results = runner.take_grads()
            case Phase.HEAD | Phase.EVALUATE_HEAD:
                is_training, sums = (
                    message.phase is Phase.HEAD,
                    LossSums.nothing(self._group.num_targets, self._device.device),
                )
                runner.head(step, self._group.targets, train=is_training, loss_scale=message.loss_scale, sums=sums)
                numbers["num_correct"], operation.losses = sums.num_correct, sums.terms
                if operation.is_sent:
                    operation.results = runner.take_grads()
        runner.remove(block)
        if self._stage.ends_group(message.phase, block):
            self._group.goes_on = False

    def _turn_to(
        self, message: ComputeBlock, batch: Sequence[MicroBatch], num_targets: int, received: Sequence[torch.Tensor]
    ) -> None:
        """Begins the group of an operation, or goes on with it."""
        if self._stage.begins_group(message.phase, message.block):
            self._leave_group()
            self._runner.forget()
            self._begin_group(message, batch, num_targets)
            if self._stage.first > 0:
                self._enter_group(message, received)
            return
        if message.group != self._group.index:
            self._leave_group()
            self._group = self._others.pop(message.group)
            self._runner.exchange(self._group.activations)
        if self._stage.takes_grads(message.phase, message.block):
            self._runner.grads = list(received)

    def _leave_group(self) -> None:
        """Puts the current group aside, if it will go on after another one."""
        if self._group.goes_on:
            self._group.activations = self._runner.exchange(GroupActivations())
            self._others[self._group.index] = self._group

    def _begin_group(self, message: ComputeBlock, batch: Sequence[MicroBatch], num_targets: int) -> None:
        """Uploads the inputs and targets of a group. The last groups of an epoch's last step may be empty."""
        is_training, first = message.phase in (Phase.FORWARD, Phase.HEAD), 0
        if is_training:
            first = message.group * self._group_size
            batch = batch[first : first + self._group_size]
        self._runner.first_microbatch = first
        self._runner.model.train(is_training)
        ids = [self._device.upload(microbatch.input_ids) for microbatch in batch]
        targets = [self._device.upload(microbatch.targets) for microbatch in batch]
        self._group = _Group(message.group, num_targets, ids, targets, goes_on=is_training)

    def _enter_group(self, message: ComputeBlock, received: Sequence[torch.Tensor]) -> None:
        """Begins a group with hidden states of another box."""
        if message.phase in (Phase.HEAD, Phase.EVALUATE_HEAD):
            self._runner.inputs = [list(received)]  # the head needs no arguments of layers
        else:
            self._runner.enter(message.step, self._group.ids, received)
