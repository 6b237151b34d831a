"""One rank: owns the device and runs the block loop.

Four threads: one asks the SSD servers for params, one copies what has arrived to the device, one computes, one moves
gradients out. `post` only hands messages to them. Scheduler messages are about blocks; SSD servers and optimizers are
spoken to in chunks.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from windlass.actors.context import (
    GPU_WORKER,
    SCHEDULER,
    JobContext,
    aligned,
    evaluation_batch_size,
    grad_precision,
    ssd_name,
)
from windlass.actors.job_spec import JobSpec
from windlass.actors.messages import (
    ActorFailed,
    BlockBackwardDone,
    BlockComputed,
    ChunkIo,
    ChunkIoDone,
    ChunkPart,
    ComputeBlock,
    GradChunk,
    GradOffloaded,
    GradSlotsReturned,
    LossComputed,
    Message,
    OffloadGrad,
    Phase,
    PrefetchParams,
    ReadChunks,
)
from windlass.engine.block_runner import BlockRunner, GradBuffer
from windlass.engine.dataset import MicroBatch, PreparedDataset
from windlass.engine.device import Device
from windlass.engine.formats import TORCH_DTYPE
from windlass.engine.grad_norm import squared_norm
from windlass.engine.partition import Partition
from windlass.storage.arena import Arena, SlotPool
from windlass.storage.ids import BlockIndex, ChunkKey, CorrelationId, Span, Step

# Gradients of so many blocks may lie on the device while the offload is behind.
MAX_GRAD_BUFFERS = 2


@dataclass(slots=True)
class _Fetch:
    """Params of one block on their way to a device buffer."""

    block: BlockIndex
    buffer: torch.Tensor
    num_missing: int
    ready: threading.Event = field(default_factory=threading.Event)


class GpuWorker:
    """The compute of one rank. `send` carries messages to other actors and must not block."""

    name = GPU_WORKER

    def __init__(
        self,
        context: JobContext,
        partition: Partition,
        send: Callable[..., None],
        *,
        device: str = "cpu",
        poison_released: bool = False,
    ) -> None:
        self.context = context
        self.spec = context.spec
        self.hyper = context.spec.hyperparameters
        self.partition = partition
        self.send = send
        self.device = Device(torch.device(device), poison_released=poison_released)
        self._geometry = context.geometry(0)
        self._to_fetch: queue.Queue[PrefetchParams | None] = queue.Queue()
        self._arrived: queue.Queue[ChunkIoDone | None] = queue.Queue()
        self._to_compute: queue.Queue[ComputeBlock | None] = queue.Queue()
        self._to_offload: queue.Queue[OffloadGrad | None] = queue.Queue()
        self._lock = threading.Condition()
        self._fetches: dict[tuple[int, BlockIndex], _Fetch] = {}
        self._expected: dict[CorrelationId, tuple[_Fetch, dict[ChunkKey, Span]]] = {}
        self._grads: dict[BlockIndex, GradBuffer] = {}
        self._offloadable: dict[BlockIndex, torch.Tensor] = {}
        self._grad_permits = threading.Semaphore(MAX_GRAD_BUFFERS)
        self._permitted: set[BlockIndex] = set()
        self._correlation = 0
        self._threads: list[threading.Thread] = []
        self._batch: list[MicroBatch] = []
        self._evaluation: list[list[MicroBatch]] = []
        self._stopping = False

    # --- life cycle -------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Maps the arena, opens the data, starts the threads."""
        self._arena = Arena.open(self.context.arena_path)
        plan = self.context.plan
        self._param_slots = SlotPool(
            plan.params.offset, plan.params.slot_nbytes, plan.params.num_slots, name="param slots"
        )
        self._grad_slots = SlotPool(plan.grads.offset, plan.grads.slot_nbytes, plan.grads.num_slots, name="grad slots")
        self._memory = torch.frombuffer(self._arena.buffer(Span(0, self._arena.nbytes)), dtype=torch.uint8)
        self.device.pin(self._memory)
        self.runner = BlockRunner(self.partition, self.device.device, self.hyper.seed)
        self.dataset = PreparedDataset.open(self.spec.dataset_dir, "train")
        self._evaluation = evaluation_groups(self.spec)
        for target in (self._run_fetches, self._run_arrivals, self._run_compute, self._run_offloads):
            thread = threading.Thread(target=self._guard, args=(target,), name=target.__name__, daemon=True)
            thread.start()
            self._threads.append(thread)

    def post(self, message: Message) -> None:
        """Takes a message and returns at once."""
        match message:
            case PrefetchParams():
                self._to_fetch.put(message)
            case ComputeBlock():
                self._to_compute.put(message)
            case OffloadGrad():
                self._to_offload.put(message)
            case ChunkIoDone():
                self._arrived.put(message)
            case GradSlotsReturned():
                self._grad_slots.release(message.spans)
            case _:
                raise ValueError(f"{self.name} does not take {type(message).__name__}")

    def stop(self) -> None:
        """Ends the threads, whatever they wait for, and unmaps the arena."""
        with self._lock:
            self._stopping = True
            for fetch in self._fetches.values():
                fetch.ready.set()
            self._lock.notify_all()
        self._param_slots.close()
        self._grad_slots.close()
        self._grad_permits.release()
        for pending in (self._to_fetch, self._arrived, self._to_compute, self._to_offload):
            pending.put(None)
        for thread in self._threads:
            thread.join(self.spec.deadline_s)
        self.device.unpin(self._memory)
        del self._memory
        self._arena.close()

    def _guard(self, target: Callable[[], None]) -> None:
        try:
            target()
        except Exception as error:  # noqa: BLE001 - an actor's thread has nobody else to tell
            if not self._stopping:
                self.send(SCHEDULER, ActorFailed.of(error, job=self.spec.job, step=Step(0), actor=self.name))

    # --- params in --------------------------------------------------------------------------------------------------

    def _run_fetches(self) -> None:
        while (request := self._to_fetch.get()) is not None:
            layout = self.context.layout
            keys = layout.chunk_keys(request.block)
            buffer = self.device.take(layout.blocks[request.block].numel, TORCH_DTYPE[self.hyper.precision])
            fetch = _Fetch(request.block, buffer, len(keys))
            with self._lock:
                self._fetches[(request.op, request.block)] = fetch
                self._lock.notify_all()
            # So many chunks at a time that the next ones are on their way while these are copied.
            size = max(1, self._param_slots.num_slots // 2)
            for start in range(0, len(keys), size):
                self._read(request, fetch, keys[start : start + size])

    def _read(self, request: PrefetchParams, fetch: _Fetch, keys: Sequence[ChunkKey]) -> None:
        spans = self._param_slots.acquire(len(keys), self.spec.deadline_s)
        by_ssd: dict[int, dict[ChunkKey, Span]] = {}
        for key, span in zip(keys, spans, strict=True):
            by_ssd.setdefault(self._geometry.ssd_of(key), {})[key] = span
        kind = self.context.formats.param_kind
        for ssd, placed in by_ssd.items():
            with self._lock:
                self._correlation += 1
                correlation = CorrelationId(self._correlation)
                self._expected[correlation] = (fetch, placed)
            items = []
            for key, span in placed.items():
                nbytes = aligned(self.context.chunk_numel(key) * fetch.buffer.itemsize)
                items.append(ChunkIo(key, (ChunkPart(kind, Span(span.offset, nbytes)),)))
            read = ReadChunks(
                job=self.spec.job,
                step=request.step,
                correlation=correlation,
                reply_to=self.name,
                priority=(request.step, request.op),
                deadline_s=self.spec.deadline_s,
                items=tuple(items),
            )
            self.send(ssd_name(ssd), read)

    def _run_arrivals(self) -> None:
        layout = self.context.layout
        while (done := self._arrived.get()) is not None:
            with self._lock:
                fetch, placed = self._expected[done.correlation]
                span = placed.pop(done.key)
                if not placed:
                    del self._expected[done.correlation]
            start, stop = layout.chunk_range(done.key)
            source = self._view(span, stop - start, fetch.buffer.dtype)
            self.device.copy_in(fetch.buffer[start:stop], source)
            self._param_slots.release([span])
            fetch.num_missing -= 1
            if fetch.num_missing == 0:
                fetch.ready.set()

    def _view(self, span: Span, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._memory[span.offset : span.offset + numel * dtype.itemsize].view(dtype)

    # --- compute ----------------------------------------------------------------------------------------------------

    def _run_compute(self) -> None:
        if not self.device.is_cuda:
            torch.set_num_threads(self.spec.compute_threads)
        while (operation := self._to_compute.get()) is not None:
            fetches = [self._await_params(operation, block) for block in operation.blocks]
            flats = {fetch.block: fetch.buffer for fetch in fetches}
            grads = self._grad_buffers(operation)
            started_s = time.perf_counter()
            self.runner.install(operation.block, flats, grads)
            events = self._compute(operation)
            is_finite = self._is_finite(operation, events)
            self.runner.remove(operation.block)
            self.device.synchronize()
            for fetch in fetches:
                self.device.give(fetch.buffer)
            computed = BlockComputed(
                job=self.spec.job,
                step=operation.step,
                op=operation.op,
                phase=operation.phase,
                block=operation.block,
                compute_s=time.perf_counter() - started_s,
                is_finite=is_finite,
            )
            for event in (*events, *self._finish_grads(operation), computed):
                self.send(SCHEDULER, event)

    def _await_params(self, operation: ComputeBlock, block: BlockIndex) -> _Fetch:
        key = (operation.op, block)
        with self._lock:
            if not self._lock.wait_for(lambda: self._stopping or key in self._fetches, self.spec.deadline_s):
                raise TimeoutError(f"the params of block {block} in step {operation.step} were never asked for")
            if self._stopping:
                raise InterruptedError("the job was stopped")
            fetch = self._fetches[key]
        arrived = fetch.ready.wait(self.spec.deadline_s)
        with self._lock:
            del self._fetches[key]
            if self._stopping:
                raise InterruptedError("the job was stopped")
        if not arrived:
            raise TimeoutError(
                f"the params of block {block} in step {operation.step} did not arrive within "
                f"{self.spec.deadline_s:g} s; {fetch.num_missing} chunks are missing"
            )
        return fetch

    def _grad_buffers(self, operation: ComputeBlock) -> dict[BlockIndex, GradBuffer]:
        """The gradient buffers an operation adds to. A tied one lives from the head until its own block's backward."""
        if operation.phase not in (Phase.HEAD, Phase.BACKWARD):
            return {}
        for block in operation.blocks:
            if block in self._grads:
                continue
            # The shared one is exempt: it waits for the last operation of the step, which must not wait for it.
            if block == operation.block:
                if not self._grad_permits.acquire(timeout=self.spec.deadline_s):
                    raise TimeoutError(
                        f"no gradient buffer came free for block {block} in step {operation.step} within "
                        f"{self.spec.deadline_s:g} s; the gradient offload or the optimizer is stuck"
                    )
                self._permitted.add(block)
            flat = self.device.take(self.context.layout.blocks[block].numel, self._accumulation_dtype(operation, block))
            self._grads[block] = GradBuffer(flat)
        return {block: self._grads[block] for block in operation.blocks}

    def _accumulation_dtype(self, operation: ComputeBlock, block: BlockIndex) -> torch.dtype:
        """fp32 wherever gradients are summed: over micro-batches (unless the job wants less), slices, tied uses."""
        is_sliced = (
            operation.phase is Phase.HEAD and self._batch[0].targets.numel() > self.runner.num_tokens_of_head_slice
        )
        is_tied = any(block in shared[1:] for shared in self.context.layout.shared)
        return torch.float32 if is_sliced or is_tied else TORCH_DTYPE[grad_precision(self.spec)]

    def _compute(self, operation: ComputeBlock) -> list[Message]:
        step, block, runner = operation.step, operation.block, self.runner
        if block == 0 and operation.phase is not Phase.BACKWARD:
            self._load_batch(operation)
        ids = [microbatch.input_ids for microbatch in self._batch]
        targets = [microbatch.targets for microbatch in self._batch]
        match operation.phase:
            case Phase.FORWARD:
                runner.forward(block, step, ids)
            case Phase.EVALUATE:
                runner.forward(block, step, ids, keep=False)
            case Phase.BACKWARD:
                runner.backward(block, step, ids)
            case Phase.HEAD | Phase.EVALUATE_HEAD:
                is_training = operation.phase is Phase.HEAD
                sums = runner.head(step, targets, train=is_training, loss_scale=operation.loss_scale)
                loss = LossComputed(
                    job=self.spec.job,
                    step=step,
                    phase=operation.phase,
                    loss_sum=sums.loss_sum,
                    num_targets=sums.num_targets,
                    num_correct=sums.num_correct,
                    group=operation.group,
                )
                return [loss]
        return []

    def _is_finite(self, operation: ComputeBlock, events: Sequence[Message]) -> bool:
        """Whether what the operation put out is; a gradient's own sum tells of that."""
        if operation.phase in (Phase.FORWARD, Phase.EVALUATE):
            return all(math.isfinite(float(squared_norm(hidden.flatten()))) for hidden in self.runner.inputs[-1])
        return all(math.isfinite(event.loss_sum) for event in events if isinstance(event, LossComputed))

    def _load_batch(self, operation: ComputeBlock) -> None:
        if operation.phase is Phase.FORWARD:
            hyper = self.hyper
            batch = self.dataset.batch(operation.step - 1, hyper.batch_size, hyper.num_microbatches, hyper.seed)
        else:
            batch = self._evaluation[operation.group]
        self.partition.model.train(operation.phase is Phase.FORWARD)
        device = self.device.device
        self._batch = [MicroBatch(m.input_ids.to(device), m.targets.to(device)) for m in batch]

    def _finish_grads(self, operation: ComputeBlock) -> list[Message]:
        """A block's gradient is complete after its own operation, when it is not shared with one still to come."""
        block = operation.block
        if operation.phase not in (Phase.HEAD, Phase.BACKWARD):
            return []
        grad = self._grads.pop(block)
        grad.finish([(p.name, p.offset, p.numel) for p in self.context.layout.blocks[block].params])
        flat = self._as_offloaded(grad.flat)
        sq_sum = float(squared_norm(flat))
        self.device.synchronize()
        with self._lock:
            self._offloadable[block] = flat
        return [BlockBackwardDone(job=self.spec.job, step=operation.step, block=block, grad_sq_sum=sq_sum)]

    def _as_offloaded(self, flat: torch.Tensor) -> torch.Tensor:
        """The gradient as the optimizer will see it: what overflows on the way there must not be missed."""
        dtype = TORCH_DTYPE[grad_precision(self.spec)]
        if flat.dtype is dtype:
            return flat
        rounded = self.device.take(flat.numel(), dtype).copy_(flat)
        self.device.give(flat)
        return rounded

    # --- gradients out ----------------------------------------------------------------------------------------------

    def _run_offloads(self) -> None:
        layout = self.context.layout
        while (request := self._to_offload.get()) is not None:
            with self._lock:
                flat = self._offloadable.pop(request.block)
            keys = layout.chunk_keys(request.block)
            spans = self._grad_slots.acquire(len(keys), self.spec.deadline_s)
            chunks = []
            for key, span in zip(keys, spans, strict=True):
                start, stop = layout.chunk_range(key)
                self.device.copy_out(self._view(span, stop - start, flat.dtype), flat[start:stop])
                chunks.append(GradChunk(key, span))
            self.device.give(flat)
            if request.block in self._permitted:
                self._permitted.remove(request.block)
                self._grad_permits.release()
            offloaded = GradOffloaded(job=self.spec.job, step=request.step, block=request.block, chunks=tuple(chunks))
            self.send(SCHEDULER, offloaded)


def evaluation_groups(spec: JobSpec) -> list[list[MicroBatch]]:
    """The validation data in groups as large as a training batch; empty without validation data."""
    if not spec.has_validation:
        return []
    dataset = PreparedDataset.open(spec.dataset_dir, "validation")
    num_microbatches = spec.hyperparameters.num_microbatches
    microbatches = list(dataset.evaluation_batches(evaluation_batch_size(spec)))
    return [microbatches[i : i + num_microbatches] for i in range(0, len(microbatches), num_microbatches)]
