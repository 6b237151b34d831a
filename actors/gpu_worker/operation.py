"""An operation that was queued on the device: its times, its waits, and its numeric results."""

import functools
import math
from dataclasses import dataclass

import torch

from windlass.actors.messages import (
    BlockComputed,
    ComputeBlock,
    Loss,
    Phase,
    SpanKind,
)
from windlass.actors.timeline import COMPUTE, NO_BOX, WHOLE_BLOCK, SpanRecorder
from windlass.engine.device import Device, Event
from windlass.storage.ids import BlockIndex


@dataclass(frozen=True, slots=True)
class _Wait:
    """A wait of compute, from a time of the machine's clock to an event of the compute stream."""

    kind: SpanKind
    block: BlockIndex
    start_s: float
    end: Event
    box: int
    after: Event | None  # compute worked until then


class LaunchedOperation:
    """An operation from its command until the device has finished it.

    The thread that queues the operation sets the three events.
    """

    begun: Event
    computed: Event  # after the last use of the params
    ended: Event  # after the gradient, too, is complete

    def __init__(
        self, message: ComputeBlock, device: Device, num_targets: int, *, is_last: bool, is_sent: bool = False
    ) -> None:
        """`num_targets` counts the target tokens of the step, or of the evaluation's group.

        `is_last`: the operation belongs to the step's last group of micro-batches. `is_sent`: another box takes its
        results.
        """
        self.message = message
        self.is_sent = is_sent
        self.results: list[torch.Tensor] = []  # for another box, on the device
        self.is_last = is_last
        self.num_targets = num_targets
        # Scalar tensors on the device, set by the compute stream: "output_sq_sum" of a forward pass, "num_correct" of a
        # head, a head's losses, and the sums of squares of a complete gradient.
        self.numbers: dict[str, torch.Tensor] = {}
        self.losses: list[torch.Tensor] = []
        self.sq_sums: list[torch.Tensor] = []
        self._device = device
        self._waits: list[_Wait] = []
        self._results: torch.Tensor | None = None  # the numbers, in host memory

    @property
    def goes_backward(self) -> bool:
        """True if the operation computes gradients."""
        return self.message.phase in (Phase.HEAD, Phase.BACKWARD)

    def waited(
        self, kind: SpanKind, block: BlockIndex, start_s: float, *, box: int = NO_BOX, after: Event | None = None
    ) -> None:
        """Records a wait that began at `start_s`, or at the event `after` if that came later.

        It ends when the compute stream reaches this point. `box`: the one that was waited for.
        """
        self._waits.append(_Wait(kind, block, start_s, self._device.compute.record(), box, after))

    def download(self) -> None:
        """Copies the numbers to the host. Runs on the compute stream."""
        if values := [*self.numbers.values(), *self.losses, *self.sq_sums]:
            self._results = self._device.download(values)

    def note(self, spans: SpanRecorder) -> None:
        """Records the spans of a finished operation."""
        message, past_s = self.message, 0.0
        for wait in self._waits:
            # A wait begins only when the device has finished its earlier work.
            start_s, end_s = max(wait.start_s, past_s), wait.end.time_s()
            if wait.after is not None:
                start_s = max(start_s, wait.after.time_s())
            past_s = max(past_s, end_s)
            if start_s < end_s:
                spans.note(COMPUTE, wait.kind, message.step, wait.block, WHOLE_BLOCK, start_s, end_s, box=wait.box)
        kind, start_s, end_s = SpanKind(message.phase), self.begun.time_s(), self.ended.time_s()
        spans.note(COMPUTE, kind, message.step, message.block, WHOLE_BLOCK, start_s, end_s)

    @property
    def grad_sq_sums(self) -> tuple[float, ...]:
        """The sums of squares of the gradient that the operation completed; empty if it completed none."""
        return tuple(self._values_on_host[len(self.numbers) + len(self.losses) :])

    def report(self) -> BlockComputed:
        """Returns what the scheduler learns of a finished operation, except for its gradient."""
        message, loss = self.message, None
        numbers = dict(zip(self.numbers, self._values_on_host, strict=False))  # losses and sums of squares follow
        losses = tuple(self._values_on_host[len(numbers) :][: len(self.losses)])
        if "num_correct" in numbers:
            loss = Loss(losses, self.num_targets, int(numbers["num_correct"]))
        return BlockComputed(
            job=message.job,
            step=message.step,
            op=message.op,
            phase=message.phase,
            block=message.block,
            group=message.group,
            compute_s=self.computed.time_s() - self.begun.time_s(),
            is_finite=all(map(math.isfinite, (numbers.get("output_sq_sum", 0.0), *losses))),
            loss=loss,
        )

    @functools.cached_property
    def _values_on_host(self) -> list[float]:
        return [] if self._results is None else self._results.tolist()
