"""Where the activations of a job are that leave the device: in host memory first, and beyond it on the SSDs.

Source: Ratel (LoHan), IV-D, equation 3.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from windlass.actors.activations.parts import Moment, SsdSwap
from windlass.actors.activations.ssd_store import SsdActivations
from windlass.actors.activations.tracing import ActivationSpans
from windlass.actors.job import JobContext
from windlass.actors.messages import ActivationIoDone, Message
from windlass.actors.timeline import SpanRecorder
from windlass.engine.activations import NOTHING_SWAPPED, HostActivations, SwapCounts, SwapHandle
from windlass.engine.device import Device
from windlass.storage.ids import ActorName, BlockIndex, Step
from windlass.storage.memory import SlotPool


@dataclass(slots=True)
class _Held:
    """The first bytes of a tensor and the rest; either may be none."""

    host: SwapHandle | None
    ssd: SsdSwap | None
    host_nbytes: int
    target: torch.Tensor | None = None  # since it is to come back


class ActivationTiers:
    """An ActivationStore over the plan's slots. Each put begins a new slot, and takes no more than it fills.

    What no longer fits into host memory goes to the SSDs, also in the middle of a tensor.
    """

    def __init__(
        self,
        context: JobContext,
        device: Device,
        memory: torch.Tensor,
        send: Callable[[ActorName, Message], None],
        name: ActorName,
        spans: SpanRecorder,
    ) -> None:
        """`memory`: the arena, flat uint8. `send` goes to the SSD servers, whose answers to `name` go to `take`."""
        plan, pool = context.plan, context.plan.activations
        self._watch = ActivationSpans(spans)
        self._device = device
        self._host = HostActivations(
            device,
            memory,
            SlotPool(pool.offset, pool.slot_nbytes, plan.num_host_activations, name="activation slots"),
            max_leaving_nbytes=plan.max_leaving_nbytes,
            deadline_s=context.spec.deadline_s,
            watch=self._watch,
        )
        self._ssds: SsdActivations | None = None
        if plan.num_ssd_activations:
            self._ssds = SsdActivations(
                context, device, memory, send, name, self._watch, max_leaving_nbytes=plan.max_leaving_nbytes
            )
        self._held: dict[SwapHandle, _Held] = {}
        self._num_puts = 0
        self._peak_held_nbytes = 0

    def begin(self, step: Step, op: int, block: BlockIndex) -> None:
        """What is put and prefetched from now on belongs to this operation, and is as urgent."""
        self._watch.begin(step, block)
        if self._ssds is not None:
            self._ssds.begin(Moment(step, op, block))

    def flush(self) -> None:
        """The step's last activations are back: its spans may be told."""
        self._watch.flush()

    def take(self, done: ActivationIoDone) -> None:
        """An SSD server's answer."""
        assert self._ssds is not None
        self._ssds.take(done)

    def describe_overdue(self) -> str:
        """What each SSD server has owed for longest; empty where none owes anything."""
        return "" if self._ssds is None else self._ssds.describe_overdue()

    def put(self, tensor: torch.Tensor) -> SwapHandle:
        """See ActivationStore.

        Raises:
            ActivationMemoryError: host memory and SSDs are full.
            ActivationTimeoutError: earlier puts hang.
            InterruptedError: the job was stopped.
        """
        host_nbytes, ssd = tensor.nbytes, None
        if self._ssds is not None:
            host_nbytes = self._host.room_nbytes(tensor.nbytes)
            if host_nbytes < tensor.nbytes:
                ssd = self._ssds.put(tensor[host_nbytes:])  # first: it may fail
        host = self._host.put(tensor[:host_nbytes]) if host_nbytes else None
        handle = SwapHandle(self._num_puts, tensor.nbytes)
        self._num_puts += 1
        self._held[handle] = _Held(host, ssd, host_nbytes)
        self._peak_held_nbytes = max(self._peak_held_nbytes, self.counts.held_nbytes)
        return handle

    def prefetch(self, handle: SwapHandle) -> None:
        """See ActivationStore."""
        held = self._held[handle]
        if held.target is not None:
            return
        held.target = self._device.empty(handle.nbytes)
        if held.host is not None:
            self._host.prefetch(held.host, held.target[: held.host_nbytes])
        if held.ssd is not None and self._ssds is not None:
            self._ssds.prefetch(held.ssd, held.target[held.host_nbytes :])

    def get(self, handle: SwapHandle) -> torch.Tensor:
        """See ActivationStore.

        Raises:
            ActivationTimeoutError: it does not come back. A failed copy raises its own error.
            InterruptedError: the job was stopped.
        """
        self.prefetch(handle)
        held = self._held.pop(handle)
        assert held.target is not None
        try:
            if held.ssd is not None and self._ssds is not None:
                self._ssds.wait_for(held.ssd)
        except BaseException:
            if held.host is not None:
                self._host.drop(held.host)
            raise
        if held.host is not None:
            self._host.get(held.host)
        return held.target

    def drop(self, handle: SwapHandle) -> None:
        """See ActivationStore."""
        held = self._held.pop(handle)
        if held.host is not None:
            self._host.drop(held.host)
        if held.ssd is not None and self._ssds is not None:
            self._ssds.drop(held.ssd)

    @property
    def counts(self) -> SwapCounts:
        """What was moved so far, to and from both."""
        host, ssd = self._host.counts, self.ssd_counts
        return SwapCounts(
            out_nbytes=host.out_nbytes + ssd.out_nbytes,
            in_nbytes=host.in_nbytes + ssd.in_nbytes,
            held_nbytes=host.held_nbytes + ssd.held_nbytes,
            peak_held_nbytes=self._peak_held_nbytes,
        )

    @property
    def ssd_counts(self) -> SwapCounts:
        """To and from the SSDs alone."""
        return NOTHING_SWAPPED if self._ssds is None else self._ssds.counts

    def stop(self) -> None:
        """Ends the waits of others: who puts or gets is told that the job was stopped. What is held may be dropped."""
        self._host.stop()
        if self._ssds is not None:
            self._ssds.stop()

    def close(self) -> None:
        """After `stop`, when the threads of the device have ended: the memory is not touched from here any more."""
        if self._ssds is not None:
            self._ssds.close()
        self._host.close()
