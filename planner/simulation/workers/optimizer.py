"""Simulates one CPU optimizer, as the real `CpuOptimizer` works."""

import functools
from dataclasses import dataclass

from windlass.actors.messages import (
    BlockFlushed,
    BlockUpdated,
    FlushBlock,
    GradChunk,
    GradOffloaded,
    SpanKind,
    UpdateBlock,
    UpdateStep,
)
from windlass.actors.worker_policy import ChunkQueue, GradReleases, QueuedChunk, UpdateActions, UpdateQueue
from windlass.engine.memory_plan import Pool
from windlass.planner.simulation import Process, Resource, Signal, SimulatedMachine
from windlass.storage.ids import ActorName


@dataclass(slots=True, eq=False)
class _Chunk:
    """The update of one chunk at an optimizer."""

    update: UpdateBlock
    grad: GradChunk


class Optimizer:
    """An optimizer that reads states, updates them and writes them back."""

    def __init__(self, world: SimulatedMachine, name: ActorName, states: Pool) -> None:
        self.world = world
        self.name = name
        self._resource = Resource(world, name, world.through_memory(world.rates.optimizer_params * world.update_nbytes))
        self._slots = world.pool(f"states at {name}", states)
        self._queue: ChunkQueue[_Chunk] = ChunkQueue(
            world.shape.ordering.queues, states.num_slots, lambda chunk: chunk.grad.key in world.host_slots
        )
        self._changed = Signal(world.clock)
        self._grad_releases = GradReleases(world.context.plan.grads.num_slots, world.context.spec.num_cpu_optimizers)
        ordering = world.shape.ordering
        num_blocks = sum(name in world.shape.holders(block) for block in range(world.shape.num_blocks))
        self._update_queue = UpdateQueue(ordering.queues, ordering.max_updating, num_blocks)
        formats = world.context.formats
        kinds = set(formats.kinds_to_update)
        # Bytes that an update reads for an element, and those if its params are cached in host memory.
        self._read_itemsize = sum(formats.itemsizes[kind] for kind in kinds)
        self._itemsize_of_cached = sum(formats.itemsizes[kind] for kind in kinds - {formats.param_kind})
        world.clock.process(self._run_reads())
        world.clock.process(self._run_updates())

    def take(self, message: GradOffloaded | UpdateStep) -> None:
        """Takes in a gradient, or that a step may be updated."""
        self._carry_out(self._update_queue.add(message))

    def _carry_out(self, actions: UpdateActions) -> None:
        for update in actions.begin:
            self._update(update)

    def _update(self, message: UpdateBlock) -> None:
        """Queues the updates of a block's chunks."""
        self._grad_releases.begin(len(message.chunks))
        self._queue.add(message.step, message.block, [_Chunk(message, grad) for grad in message.chunks])
        self._changed.notify()

    def flush(self, message: FlushBlock) -> Process:
        """Writes the states of a block that is resident in host memory."""
        world, step = self.world, message.step
        writes = [
            world.chunk_move(
                key,
                world.state_itemsize * world.chunk_numel(key),
                SpanKind.WRITE_STATES,
                step,
                (step + 1, message.block),
            )
            for key in world.chunk_keys[message.block]
            if world.shape.optimizer_of(key) == self.name
        ]
        yield from writes
        world.send_to_scheduler(BlockFlushed(job=message.job, step=message.step, block=message.block, actor=self.name))

    def _run_reads(self) -> Process:
        while True:
            while self._queue.first_to_read is None:
                yield self._changed.next
            yield from self._slots.take()
            self.world.clock.soon(functools.partial(self._read, self._queue.begin_to_read()))

    def _arrive(self, chunk: QueuedChunk[_Chunk]) -> None:
        self._queue.arrived(chunk)
        self._changed.notify()

    def _read(self, chunk: QueuedChunk[_Chunk]) -> None:
        """Reads a chunk's states, and then its gradient if that is on an SSD."""
        world, update, grad = self.world, chunk.item.update, chunk.item.grad
        key = grad.key
        numel = world.chunk_numel(key)
        itemsize = self._itemsize_of_cached if key in world.cached_params else self._read_itemsize
        step, priority = update.how.from_step, (update.step, key.block)

        def read_grad() -> None:
            # From the same SSD with the same priority, so it would come after the states in any case.
            read = world.chunk_move(key, world.grad_itemsize * numel, SpanKind.READ_GRAD, step, priority)
            read.then(functools.partial(self._arrive, chunk))

        read = world.chunk_move(key, itemsize * numel, SpanKind.READ_STATES, step, priority)
        read.then(functools.partial(self._arrive, chunk) if grad.span is not None else read_grad)

    def _run_updates(self) -> Process:
        world = self.world
        while True:
            while not self._queue.has_update:
                yield self._changed.next
            chunk = self._queue.begin_update()
            update, grad = chunk.item.update, chunk.item.grad
            key = grad.key
            duration_s = world.chunk_numel(key) / world.rates.optimizer_params
            yield from self._resource.work(duration_s, SpanKind.UPDATE, update.step, key.block, key.chunk)
            if released := self._grad_releases.updated(grad.span):
                world.grad_slots.give_back(len(released))
            if chunk.is_resident:
                self._done(chunk)
            else:
                world.clock.soon(functools.partial(self._write_back, chunk))

    def _write_back(self, chunk: QueuedChunk[_Chunk]) -> None:
        world, update, key = self.world, chunk.item.update, chunk.item.grad.key
        nbytes = world.state_itemsize * world.chunk_numel(key)
        write = world.chunk_move(key, nbytes, SpanKind.WRITE_STATES, update.step, (update.step, key.block))
        write.then(functools.partial(self._written, chunk))

    def _written(self, chunk: QueuedChunk[_Chunk]) -> None:
        self._slots.give_back()
        self._done(chunk)

    def _done(self, chunk: QueuedChunk[_Chunk]) -> None:
        update = chunk.item.update
        if self._queue.chunk_done(chunk):
            self.world.send_to_scheduler(
                BlockUpdated(job=update.job, step=update.step, block=update.block, actor=self.name)
            )
            self._carry_out(self._update_queue.updated(update.step))
