"""Model states that are resident on the device. They are updated there, with gradients that never leave it.

Params that can be derived from the master are not stored: the forward pass rounds the master instead.
Source: AutoHete, footnote 2.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from windlass.actors.job import JobContext
from windlass.actors.lifecycle import ReportTimer, working_at, works_at
from windlass.actors.messages import (
    BlockFlushed,
    BlockUpdated,
    ChunkIo,
    FlushBlock,
    GradOffloaded,
    LoadProgressed,
    Message,
    RestoreStates,
    SkipStep,
    SpanKind,
    StatesRestored,
    UpdateBlock,
    UpdateStep,
    UserMessage,
)
from windlass.actors.optimizer import ChunkUpdater
from windlass.actors.ssd import SsdClient, chunk_io
from windlass.actors.timeline import COMPUTE, FROM_DEVICE, WHOLE_BLOCK, SpanRecorder
from windlass.actors.worker_policy import UpdateActions, UpdateQueue
from windlass.engine.device import TORCH_DTYPE, Device, Event, TensorArena, copy, release_team, state_dtype
from windlass.engine.memory_plan import rounded_numel
from windlass.storage.cancellation import Signal, TaskQueue
from windlass.storage.ids import ActorName, BlockIndex, ChunkKey, Kernel, Span, StateKind, Step
from windlass.storage.memory import SlotPool

_Command = UpdateBlock | FlushBlock | RestoreStates


class DeviceStates:
    """The states of the plan's device blocks, one flat tensor for each state of a block.

    Commands run in a thread of their own.
    """

    def __init__(
        self,
        context: JobContext,
        device: Device,
        arena: TensorArena,
        io: SsdClient,
        *,
        name: ActorName,
        acquire_grad: Callable[[BlockIndex], torch.Tensor],
        release_grad: Callable[[torch.Tensor], None],
        report: Callable[[Message], None],
        spans: SpanRecorder,
    ) -> None:
        """`acquire_grad` acquires a block's gradient; `release_grad` releases it once the update is queued."""
        self._context = context
        self._device = device
        self._arena = arena
        self._io = io
        self._name = name
        self._acquire_grad = acquire_grad
        self._release_grad = release_grad
        self._report = report
        self._spans = spans
        self._offsets = context.state_offsets()
        pool = context.plan.transit
        self._slots = SlotPool(
            pool.offset, pool.slot_nbytes, pool.num_slots, name="slots of states on their way", token=device.token
        )
        self._updater: ChunkUpdater | None = None
        if context.plan.device_blocks:
            self._updater = ChunkUpdater(context, device.device, holds_params=False, announce=self._announce)
        self._states: dict[BlockIndex, dict[StateKind, torch.Tensor]] = {}
        for index in context.plan.device_blocks:
            block = BlockIndex(index)
            numel = context.layout.blocks[block].numel
            self._states[block] = {
                kind: torch.zeros(numel, dtype=state_dtype(context.formats, kind), device=device.device)
                for kind in context.formats.kinds_to_update
            }
        # A chunk's params, rounded from its master on a GPU. Only the stream for copies to the host uses it.
        self._rounded: torch.Tensor | None = None
        numel = rounded_numel(
            context.formats, context.layout.chunk_numel, resident=context.plan.device_blocks, on_gpu=device.is_cuda
        )
        if numel:
            self._rounded = torch.empty(numel, dtype=TORCH_DTYPE[context.formats.precision], device=device.device)
        device.synchronize()  # because copies to the device run on another stream than the zeroing above
        self._lock = threading.Lock()  # of `_update_queue`
        ordering = context.spec.effective_ordering
        self._update_queue = UpdateQueue(ordering.queues, ordering.max_updating_on_device, len(self._states))
        self._commands: TaskQueue[_Command] = TaskQueue(device.token)

    @property
    def kernel(self) -> Kernel | None:
        """The kernel of the updates; None if no states are resident on the device."""
        return None if self._updater is None else self._updater.kernel

    def __contains__(self, block: BlockIndex) -> bool:
        return block in self._states

    def params(self, block: BlockIndex) -> torch.Tensor | None:
        """Returns the params of a resident block, or the master from which they are derived; None for other blocks."""
        states, formats = self._states.get(block), self._context.formats
        kind = StateKind.MASTER if formats.derives_param else formats.param_kind
        return None if states is None else states[kind]

    def post(self, command: UpdateStep | SkipStep | FlushBlock | RestoreStates) -> None:
        """Queues a command and returns at once."""
        match command:
            case UpdateStep() | SkipStep():
                with self._lock:
                    self._carry_out(self._update_queue.add(command))
            case _:
                self._commands.put(command)

    def gradient_came(self, step: Step, block: BlockIndex) -> None:
        """Records that the device has computed a block's gradient."""
        with self._lock:
            self._carry_out(
                self._update_queue.add(GradOffloaded(job=self._context.spec.job, step=step, block=block, chunks=()))
            )

    def run(self) -> None:
        """Executes commands, in the thread of this object."""
        while (command := self._commands.take()) is not None:
            works_at(command)
            match command:
                case UpdateBlock():
                    self._update(command)
                case FlushBlock():
                    self._flush(command)
                case RestoreStates():
                    self._restore(command)
            if not self._device.is_cuda:
                release_team()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _announce(self, text: str) -> None:
        spec = self._context.spec
        self._report(UserMessage(job=spec.job, step=Step(0), text=text, box=spec.box))

    def _carry_out(self, actions: UpdateActions) -> None:
        """Begins updates and discards gradients. The caller holds the lock."""
        for update in actions.begin:
            self._commands.put(update)
        for grad in actions.discard:
            self._release_grad(self._acquire_grad(grad.block))

    def _update(self, update: UpdateBlock) -> None:
        grad, compute = self._acquire_grad(update.block), self._device.compute
        times: list[Event] = []

        def work() -> None:  # on a CPU perhaps in another thread's turn, so its times are not those of this thread
            times.append(compute.record())
            assert self._updater is not None, "only resident blocks are updated here"
            self._updater.update(update, 0, grad, self._states[update.block])
            times.append(compute.record())

        compute.run(work)
        self._release_grad(grad)
        compute.then(working_at(update, functools.partial(self._updated, update, times)))

    def _updated(self, update: UpdateBlock, times: Sequence[Event]) -> None:
        begun, updated = times
        job, step, block = update.job, update.step, update.block
        self._spans.note(COMPUTE, SpanKind.UPDATE, step, block, WHOLE_BLOCK, begun.time_s(), updated.time_s())
        with self._lock:
            actions = self._update_queue.updated(step)
            if actions.is_step_over:
                self._spans.tell(step)  # before the report below, with which the step may be over for the scheduler
            self._report(BlockUpdated(job=job, step=step, block=block, actor=self._name))
            self._carry_out(actions)

    def _flush(self, message: FlushBlock) -> None:
        """Writes a block's states to the SSDs.

        The scheduler requests it only after the block's update, and requests the next update only after it.
        """
        d2h = self._device.d2h
        for key in self._context.layout.chunk_keys(message.block):
            (slot,) = self._slots.acquire(1)
            begun = d2h.record()
            parts = self._parts(key)
            for kind, here in parts.items():
                d2h.run(functools.partial(copy, self._view(slot, key, kind), here))
            if self._context.formats.derives_param:
                params = self._view(slot, key, StateKind.PARAM)
                d2h.run(functools.partial(self._round_out, params, parts[StateKind.MASTER]))
            write = functools.partial(self._write, message, key, slot, begun, d2h.record())
            d2h.then(working_at(message, write))
        self._slots.drain()
        job, step, block = message.job, message.step, message.block
        self._spans.tell(step)  # otherwise the spans of the last commit would not be sent
        self._report(BlockFlushed(job=job, step=step, block=block, actor=self._name))

    def _write(self, message: FlushBlock, key: ChunkKey, slot: Span, begun: Event, copied: Event) -> None:
        """Writes a chunk that was copied to host memory to the SSDs."""
        kind, start_s, end_s = SpanKind.COPY_STATES_OUT, begun.time_s(), copied.time_s()
        # With the params, which are rounded on the way.
        nbytes = sum(self._context.formats.itemsizes.values()) * self._context.chunk_numel(key)
        self._spans.note(FROM_DEVICE, kind, message.step, key.block, key.chunk, start_s, end_s, nbytes)
        item = self._chunk_io(slot, key, self._context.formats.itemsizes)
        self._io.write([item], message.step, (message.step, message.block), lambda key: self._slots.release([slot]))

    def _round_out(self, params: torch.Tensor, master: torch.Tensor) -> None:
        """Copies the params that follow from a chunk's master to host memory. It is work of the stream for such copies.

        A GPU rounds them, because a thread that calls back would delay all later callbacks of the stream.
        """
        if self._rounded is None:
            params.copy_(master)
        else:
            copy(params, self._rounded[: master.numel()].copy_(master))

    def _restore(self, message: RestoreStates) -> None:
        layout, timer, num_params = self._context.layout, ReportTimer(), 0
        total = sum(layout.blocks[block].numel for block in self._states)
        for block in self._states:
            for key in layout.chunk_keys(block):
                self._restore_chunk(key, message.step)
                num_params += self._context.chunk_numel(key)
                if timer.restart_if_due(time.monotonic()):
                    self._tell_loaded(num_params, total)
        self._report(StatesRestored(job=message.job, step=message.step, actor=self._name))

    def _restore_chunk(self, key: ChunkKey, step: Step) -> None:
        (slot,) = self._slots.acquire(1)
        self._read(key, slot, step)
        for kind, here in self._parts(key).items():
            self._device.copy_in(here, self._view(slot, key, kind))
        self._slots.release([slot])

    def _tell_loaded(self, num_params: int, total_params: int) -> None:
        job = self._context.spec.job
        self._report(
            LoadProgressed(job=job, step=Step(0), actor=self._name, num_params=num_params, total_params=total_params)
        )

    def _read(self, key: ChunkKey, slot: Span, step: Step) -> None:
        """Reads a chunk as a step left it, and waits for it."""
        item, arrived = self._chunk_io(slot, key, self._context.formats.kinds_to_update), Signal(self._device.token)
        self._io.read([item], step, (step, key.block), lambda _: arrived.set())
        arrived.wait(f"the states of {key} as step {step} left them, from the SSDs; check the disks")

    def _parts(self, key: ChunkKey) -> dict[StateKind, torch.Tensor]:
        start, stop = self._context.layout.chunk_range(key)
        return {kind: state[start:stop] for kind, state in self._states[key.block].items()}

    def _view(self, slot: Span, key: ChunkKey, kind: StateKind) -> torch.Tensor:
        dtype, offset = state_dtype(self._context.formats, kind), slot.offset + self._offsets[kind]
        return self._arena.view(offset, self._context.chunk_numel(key), dtype)

    def _chunk_io(self, slot: Span, key: ChunkKey, kinds: Iterable[StateKind]) -> ChunkIo:
        offsets = {kind: slot.offset + self._offsets[kind] for kind in kinds}
        return chunk_io(key, self._context.chunk_numel(key), offsets, self._context.formats.itemsizes)
