"""Offloads activations of a job to host memory first and, once that is full, to the SSDs.

Source: Ratel (LoHan), IV-D, equation 3.
"""

from dataclasses import dataclass

import torch

from windlass.actors.activations.parts import Moment, SsdSwap
from windlass.actors.activations.ssd_store import SsdActivations
from windlass.actors.activations.tracing import ActivationSpans
from windlass.actors.job import JobContext
from windlass.actors.ssd import SsdClient
from windlass.actors.timeline import SpanRecorder
from windlass.engine.activations import NOTHING_SWAPPED, HostActivations, SwapCounts, SwapHandle
from windlass.engine.device import Device, TensorArena
from windlass.storage.ids import BlockIndex, Step
from windlass.storage.memory import SlotPool


@dataclass(slots=True)
class _Held:
    """An offloaded tensor."""

    host: SwapHandle | None  # its first bytes; None if all are on the SSDs
    ssd: SsdSwap | None  # the other bytes; None if all are in host memory
    host_nbytes: int
    target: torch.Tensor | None = None  # set by the prefetch


class ActivationTiers:
    """An ActivationStore in the plan's slots. Each put starts a new slot and acquires only as many as it fills.

    Bytes that do not fit into host memory go to the SSDs; a tensor may be split between the two.
    """

    def __init__(
        self,
        context: JobContext,
        rank: int,
        device: Device,
        arena: TensorArena,
        client: SsdClient,
        spans: SpanRecorder,
    ) -> None:
        """`rank` is that of the GPU worker. The device's token ends all waits."""
        plan, pool = context.plan, context.activation_pool(rank)
        self._watch = ActivationSpans(spans)
        self._device = device
        self._host = HostActivations(
            device,
            arena,
            SlotPool(
                pool.offset,
                pool.slot_nbytes,
                plan.num_host_activations,
                name="activation slots",
                token=device.token,
            ),
            max_leaving_nbytes=plan.max_leaving_nbytes,
            watch=self._watch,
        )
        self._ssds: SsdActivations | None = None
        if plan.num_ssd_activations:
            self._ssds = SsdActivations(
                context, rank, device, arena, client, self._watch, max_leaving_nbytes=plan.max_leaving_nbytes
            )
        self._held: dict[SwapHandle, _Held] = {}
        self._num_puts = 0
        self._peak_held_nbytes = 0

    def begin(self, step: Step, block: BlockIndex) -> None:
        """Sets the operation to which later puts and prefetches belong; it decides their priority."""
        self._watch.begin(step, block)
        if self._ssds is not None:
            self._ssds.begin(Moment(step, block))

    def flush(self) -> None:
        """Records the last spans of a step, after its last activations are back on the device."""
        self._watch.flush()

    def put(self, tensor: torch.Tensor) -> SwapHandle:
        """See ActivationStore.

        Raises:
            ActivationMemoryError: host memory and SSDs are full.
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
            InterruptedError: the job was stopped. A failed copy raises its own error.
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
        """The bytes transferred and held so far, in host memory and on the SSDs together."""
        host, ssd = self._host.counts, self.ssd_counts
        return SwapCounts(
            out_nbytes=host.out_nbytes + ssd.out_nbytes,
            in_nbytes=host.in_nbytes + ssd.in_nbytes,
            held_nbytes=host.held_nbytes + ssd.held_nbytes,
            peak_held_nbytes=self._peak_held_nbytes,
        )

    @property
    def ssd_counts(self) -> SwapCounts:
        """The bytes transferred and held so far, on the SSDs alone."""
        return NOTHING_SWAPPED if self._ssds is None else self._ssds.counts

    def close(self) -> None:
        """Releases the slots in host memory. Call it when the threads have ended. `drop` may still be called."""
        self._host.close()
