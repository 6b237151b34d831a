"""An operation that the device was given: when it was computed, what it waited for, and the numbers it came to."""

import math
from dataclasses import dataclass

import torch

from windlass.actors.messages import (
    BlockBackwardDone,
    BlockComputed,
    ComputeBlock,
    LossComputed,
    Message,
    Phase,
    SpanKind,
)
from windlass.actors.timeline import COMPUTE, WHOLE_BLOCK, SpanRecorder
from windlass.engine.device import Device, Event
from windlass.storage.ids import BlockIndex


@dataclass(frozen=True, slots=True)
class _Wait:
    """What compute waited for: from a time of the machine's clock to an event of the compute stream."""

    kind: SpanKind
    block: BlockIndex
    start_s: float
    end: Event


class LaunchedOperation:
    """From its instruction until the device is through with it. The three events are set by who gives it."""

    begun: Event
    computed: Event  # params are read no more
    ended: Event  # the gradient, too, is as the optimizer will see it

    def __init__(self, message: ComputeBlock, device: Device, num_targets: int, *, is_last: bool) -> None:
        """`num_targets`: target tokens of the step, or of the evaluation's group. `is_last`: no group of micro-batches
        follows in the step."""
        self.message = message
        self.is_last = is_last
        self.num_targets = num_targets
        # 0-dim tensors of the device, which the compute stream puts here: "output_sq_sum" of a forward pass, "loss_sum"
        # and "num_correct" of a head, over all groups so far, "grad_sq_sum" of a gradient that is complete.
        self.numbers: dict[str, torch.Tensor] = {}
        self._device = device
        self._waits: list[_Wait] = []
        self._found: torch.Tensor | None = None

    @property
    def goes_backward(self) -> bool:
        """Whether it computes gradients."""
        return self.message.phase in (Phase.HEAD, Phase.BACKWARD)

    def waited(self, kind: SpanKind, block: BlockIndex, start_s: float) -> None:
        """What was waited for since then is there, for what the compute stream is given from now on."""
        self._waits.append(_Wait(kind, block, start_s, self._device.compute.record()))

    def download(self) -> None:
        """Work for the compute stream: brings the numbers to the host."""
        if self.numbers:
            self._found = self._device.download(list(self.numbers.values()))

    def note(self, spans: SpanRecorder) -> None:
        """The spans of an operation that has ended."""
        message, past_s = self.message, 0.0
        for wait in self._waits:
            # While the device still worked at what came before, nothing was waited for.
            start_s, end_s = max(wait.start_s, past_s), wait.end.time_s()
            past_s = max(past_s, end_s)
            if start_s < end_s:
                spans.note(COMPUTE, wait.kind, message.step, wait.block, WHOLE_BLOCK, start_s, end_s)
        kind, start_s, end_s = SpanKind(message.phase), self.begun.time_s(), self.ended.time_s()
        spans.note(COMPUTE, kind, message.step, message.block, WHOLE_BLOCK, start_s, end_s)

    def messages(self) -> list[Message]:
        """What the scheduler is told of an operation that has ended."""
        message = self.message
        found = {} if self._found is None else dict(zip(self.numbers, self._found.tolist(), strict=True))
        told: list[Message] = []
        if "loss_sum" in found:
            loss = LossComputed(
                job=message.job,
                step=message.step,
                phase=message.phase,
                loss_sum=found["loss_sum"],
                num_targets=self.num_targets,
                num_correct=int(found["num_correct"]),
                group=message.group,
            )
            told.append(loss)
        if "grad_sq_sum" in found:
            grad_sq_sum = found["grad_sq_sum"]
            told.append(
                BlockBackwardDone(job=message.job, step=message.step, block=message.block, grad_sq_sum=grad_sq_sum)
            )
        computed = BlockComputed(
            job=message.job,
            step=message.step,
            op=message.op,
            phase=message.phase,
            block=message.block,
            compute_s=self.computed.time_s() - self.begun.time_s(),
            # A gradient's own sum tells of that.
            is_finite=all(math.isfinite(found.get(name, 0.0)) for name in ("output_sq_sum", "loss_sum")),
        )
        return [*told, computed]
