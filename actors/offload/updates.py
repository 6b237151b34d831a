"""Offloads layers' gradients from the device and updates their states, while the compute continues.

A gradient is copied into host slots and added to those of earlier backward passes in the step. An update reads a
chunk's states, changes them in place and writes them back. Updates of successive chunks overlap.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from windlass.actors.offload.layers import OffloadedBlock
from windlass.actors.offload.param_prefetcher import ParamFeed
from windlass.actors.offload.store import OffloadStore
from windlass.actors.optimizer import ChunkPipeline
from windlass.actors.policy import fold
from windlass.actors.worker_policy import QueueOrder
from windlass.engine.device import Device, Event, state_dtype
from windlass.engine.memory_plan import Plan
from windlass.engine.optimizer import AdamSettings, ChunkStates, KernelSet, element_position, squared_norm
from windlass.storage.cancellation import Permits, Signal, TaskQueue
from windlass.storage.ids import BlockIndex, ChunkKey, Span, StateKind, Step
from windlass.storage.memory import SlotPool

# Largest number of layers' gradients that wait on the device to be copied out.
_MAX_WAITING_GRADS = 2


@dataclass(frozen=True, slots=True)
class Run:
    """A range of a block's elements with the same update settings."""

    start: int
    stop: int
    settings: AdamSettings
    learning_rate: float
    num_updates: int  # of these elements, this one included

    def joined(self, following: "Run") -> "Run | None":
        """Returns this run joined with the next one; None if they are not adjacent or have other settings."""
        is_one = self.stop == following.start and replace(following, start=self.start, stop=self.stop) == self
        return replace(self, stop=following.stop) if is_one else None


@dataclass(frozen=True, slots=True)
class BlockUpdate:
    """The update of a block in a step. Elements outside of the runs are not changed."""

    block: OffloadedBlock
    step: Step
    runs: tuple[Run, ...]
    grad_scale: float


@dataclass(slots=True, eq=False)
class _Grad:
    """A gradient that is being offloaded."""

    block: OffloadedBlock
    flat: torch.Tensor
    computed: Event  # after the gradient's computation
    update: BlockUpdate | None  # the update to begin afterwards


@dataclass(frozen=True, slots=True, eq=False)
class _ChunkUpdate:
    update: BlockUpdate
    key: ChunkKey
    grad: Span


class LayerUpdates:
    """Offloads the gradients of all layers and updates the layers. Only one thread may call it."""

    def __init__(
        self,
        blocks: Sequence[OffloadedBlock],
        store: OffloadStore,
        feed: ParamFeed,
        device: Device,
        plan: Plan,
        kernels: KernelSet,
        host_slots: Mapping[ChunkKey, Span],
        offsets: Mapping[StateKind, int],
        *,
        num_threads: int,
        with_norms: bool,
    ) -> None:
        """`offsets` has the offset of each state in a state slot. `num_threads` is torch's number for updates."""
        self._store = store
        self._feed = feed
        self._device = device
        self._kernels = kernels
        self._host_slots = host_slots
        self._offsets = offsets
        self._with_norms = with_norms
        self._token = device.token
        self._formats = store.formats
        grads, states = plan.grads, plan.states[0]
        self._grad_slots, self._state_slots = (
            SlotPool(pool.offset, pool.slot_nbytes, pool.num_slots, name=f"slots of {name}", token=device.token)
            for pool, name in ((grads, "gradients"), (states, "states"))
        )
        self._scratch = torch.empty(store.chunk_numel, dtype=feed.dtype)  # for a gradient that is added to another
        self._permits = Permits(device.token, _MAX_WAITING_GRADS)
        self._to_offload: TaskQueue[_Grad] = TaskQueue(device.token)
        self._pipeline: ChunkPipeline[_ChunkUpdate] = ChunkPipeline(
            self, self._state_slots, QueueOrder.PRIORITY, device.token, num_threads=num_threads
        )
        self._changed = threading.Condition()
        # All attributes below are protected by `_changed`.
        self._kept: dict[BlockIndex, dict[ChunkKey, Span]] = {}  # gradients in host memory
        self._squares: dict[ChunkKey, float] = {}  # their squared norms
        self._num_offloading = 0

    @property
    def loops(self) -> tuple[Callable[[], None], ...]:
        """The functions to run in threads."""
        return (self._run_offloads, *self._pipeline.loops)

    def offload(self, block: OffloadedBlock, grad: torch.Tensor, update: BlockUpdate | None) -> None:
        """Offloads a gradient and releases its buffer; afterwards begins `update`, if there is one.

        Blocks while too many gradients are in flight.
        """
        self._permits.acquire("gradients to leave the device")
        done = self._device.record_current()
        with self._changed:
            self._num_offloading += 1
        if update is not None:
            self._feed.block(block.index)
        self._to_offload.put(_Grad(block, grad, done, update))

    def update(self, update: BlockUpdate) -> None:
        """Begins the update of a block. Its gradient must be in host memory; see `await_grads`."""
        self._feed.block(update.block.index)
        self._begin(update, self._take_grad(update.block))

    def await_grads(self) -> None:
        """Waits until all gradients in flight are in host memory."""
        with self._changed:
            self._token.wait_for(self._changed, lambda: self._num_offloading == 0, "gradients to leave the device")

    def squared_norm(self) -> float:
        """Returns the squared norm of all gradients in host memory, summed from the last block to the first.

        Waits for gradients in flight.
        """
        self.await_grads()
        with self._changed:
            keys = sorted(self._squares, key=lambda key: (-key.block, key.chunk))
            return fold(self._squares[key] for key in keys)

    def drop_grads(self) -> None:
        """Discards all gradients in host memory for which no update has begun."""
        self.await_grads()
        with self._changed:
            for spans in self._kept.values():
                self._grad_slots.release(list(spans.values()))
            self._kept.clear()
            self._squares.clear()

    def load(self, block: OffloadedBlock, params: Mapping[str, torch.Tensor]) -> None:
        """Writes a block's first states: these params, unchanged, and moments of zero."""
        for key in block.chunk_keys(self._store.chunk_numel):
            start, stop = block.chunk_range(key, self._store.chunk_numel)
            slot = self._slot_of(key)
            views = self._states(slot, key, stop - start)
            for state in views.values():
                state.zero_()
            for param in block.params:
                first, last = max(start, param.offset), min(stop, param.stop)
                if first < last:
                    part = params[param.name].detach().reshape(-1)[first - param.offset : last - param.offset]
                    for kind in (StateKind.PARAM, StateKind.MASTER):
                        if kind in views:
                            views[kind][first - start : last - start].copy_(part)
            self._write_back(block, key, slot, Step(0))
        self.await_writes()

    @contextmanager
    def states(
        self, block: OffloadedBlock, key: ChunkKey, *, write_as: Step | None = None
    ) -> Iterator[dict[StateKind, torch.Tensor]]:
        """Yields the states of a chunk in host memory. No update of its block may be running.

        With `write_as`, the states may be changed. They are then written back as those of that step, and `await_writes`
        must follow. Params that follow from a master are not read, and derived before the write.
        """
        start, stop = block.chunk_range(key, self._store.chunk_numel)
        is_resident = key in self._host_slots
        slot = self._slot_of(key)
        states = self._states(slot, key, stop - start)
        if not is_resident:
            self._read_now(block, key, slot)
        try:
            yield states
        except BaseException:
            write_as = None
            raise
        finally:
            if write_as is not None:
                if self._formats.derives_param:
                    states[StateKind.PARAM].copy_(states[StateKind.MASTER])
                self._write_back(block, key, slot, write_as)
            elif not is_resident:
                self._state_slots.release([slot])

    def await_writes(self) -> None:
        """Waits until no states are in flight."""
        self._state_slots.drain()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _take_grad(self, block: OffloadedBlock) -> dict[ChunkKey, Span]:
        """Removes and returns the slots of a gradient in host memory. The caller must release them."""
        with self._changed:
            spans = self._kept.pop(block.index)
            for key in spans:
                del self._squares[key]
            return spans

    def _view(self, slot: Span, key: ChunkKey, kind: StateKind, numel: int) -> torch.Tensor:
        return self._store.arena.view(slot.offset + self._offsets[kind], numel, state_dtype(self._formats, kind))

    def _grad_view(self, span: Span, numel: int) -> torch.Tensor:
        return self._store.arena.view(span.offset, numel, self._feed.dtype)

    def _states(self, slot: Span, key: ChunkKey, numel: int) -> dict[StateKind, torch.Tensor]:
        return {kind: self._view(slot, key, kind, numel) for kind in self._offsets}

    def _slot_of(self, key: ChunkKey) -> Span:
        """Returns the slot in which a chunk is resident, or else acquires one."""
        host_slot = self._host_slots.get(key)
        return self._state_slots.acquire(1)[0] if host_slot is None else host_slot

    def _read(self, block: OffloadedBlock, key: ChunkKey, slot: Span, on_done: Callable[[], None]) -> None:
        start, stop = block.chunk_range(key, self._store.chunk_numel)
        offsets = {kind: slot.offset + self._offsets[kind] for kind in self._formats.kinds_to_update}
        self._store.read(key, stop - start, self._feed.labels[key], offsets, (1, key.block), on_done)

    def _read_now(self, block: OffloadedBlock, key: ChunkKey, slot: Span) -> None:
        arrived = Signal(self._token)
        self._read(block, key, slot, arrived.set)
        arrived.wait(f"states of {block.name} from the SSDs")

    def _write_back(self, block: OffloadedBlock, key: ChunkKey, slot: Span, step: Step) -> None:
        """Writes a chunk's states and releases their slot, unless the chunk is resident."""
        if key in self._host_slots:
            self._feed.labels[key] = step
        else:
            self._write(block, key, slot, step, lambda: self._state_slots.release([slot]))

    def _write(self, block: OffloadedBlock, key: ChunkKey, slot: Span, step: Step, on_done: Callable[[], None]) -> None:
        def written() -> None:
            self._feed.labels[key] = step
            on_done()

        start, stop = block.chunk_range(key, self._store.chunk_numel)
        offsets = {kind: slot.offset + offset for kind, offset in self._offsets.items()}
        self._store.write(key, stop - start, step, offsets, (1, key.block), written)

    def _begin(self, update: BlockUpdate, spans: Mapping[ChunkKey, Span]) -> None:
        """Queues the chunks that an update changes, and releases the gradients of the others."""
        block, chunks = update.block, []
        for key, span in spans.items():
            start, stop = block.chunk_range(key, self._store.chunk_numel)
            if any(run.start < stop and start < run.stop for run in update.runs):
                chunks.append(_ChunkUpdate(update, key, span))
            else:
                self._grad_slots.release([span])
        if chunks:
            self._pipeline.begin(update.step, block.index, chunks)
        else:
            self.block_updated(update.step, block.index)

    # --- calls of the pipeline --------------------------------------------------------------------------------------

    def works_at(self, chunk: _ChunkUpdate) -> None:
        """See UpdateIo. Errors of the library name no step."""

    def resident_slot(self, chunk: _ChunkUpdate) -> Span | None:
        """See UpdateIo."""
        return self._host_slots.get(chunk.key)

    def read_states(self, chunk: _ChunkUpdate, slot: Span, on_done: Callable[[], None]) -> None:
        """See UpdateIo."""
        self._read(chunk.update.block, chunk.key, slot, on_done)

    def update_chunk(self, chunk: _ChunkUpdate, slot: Span) -> None:
        """See UpdateIo."""
        update, key = chunk.update, chunk.key
        start, stop = update.block.chunk_range(key, self._store.chunk_numel)
        grad = self._grad_view(chunk.grad, stop - start)
        states = self._states(slot, key, stop - start)
        for run in update.runs:
            first, last = max(run.start, start), min(run.stop, stop)
            if first < last:
                self._update(update, run, first, last, start, grad, states)
        self._grad_slots.release([chunk.grad])

    def write_states(self, chunk: _ChunkUpdate, slot: Span, on_done: Callable[[], None]) -> None:
        """See UpdateIo."""
        self._write(chunk.update.block, chunk.key, slot, chunk.update.step, on_done)

    def block_updated(self, step: Step, block: BlockIndex) -> None:
        """See UpdateIo."""
        self._feed.unblock(block)

    # --- inside: threads --------------------------------------------------------------------------------------------

    def _run_offloads(self) -> None:
        torch.set_num_threads(1)
        while (grad := self._to_offload.take()) is not None:
            grad.computed.wait()
            self._copy_out(grad.block, grad.flat)
            self._device.give(grad.flat)
            self._permits.release()
            if grad.update is not None:
                self._begin(grad.update, self._take_grad(grad.block))
            with self._changed:
                self._num_offloading -= 1
                self._changed.notify_all()

    def _copy_out(self, block: OffloadedBlock, flat: torch.Tensor) -> None:
        keys = block.chunk_keys(self._store.chunk_numel)
        with self._changed:
            spans = self._kept.get(block.index)
        is_first = spans is None
        if spans is None:
            spans = dict(zip(keys, self._grad_slots.acquire(len(keys)), strict=True))
        squares = {}
        for key, span in spans.items():
            start, stop = block.chunk_range(key, self._store.chunk_numel)
            kept = self._grad_view(span, stop - start)
            if is_first:
                self._device.copy_out(kept, flat[start:stop])
            else:
                added = self._scratch[: stop - start]
                self._device.copy_out(added, flat[start:stop])
                kept.add_(added)
            squares[key] = float(squared_norm(kept)) if self._with_norms else 0.0
        with self._changed:
            self._kept[block.index] = spans
            self._squares |= squares

    def _update(
        self, update: BlockUpdate, run: Run, first: int, last: int, start: int, grad: torch.Tensor,
        states: Mapping[StateKind, torch.Tensor],
    ) -> None:  # fmt: skip
        parts = {kind: state[first - start : last - start] for kind, state in states.items()}
        self._kernels.of(run.settings).update(
            ChunkStates.of(grad[first - start : last - start], parts),
            learning_rate=run.learning_rate,
            step=run.num_updates,
            grad_scale=update.grad_scale,
            decay_numel=last - first,
            position=element_position(update.block.index, first),
        )
