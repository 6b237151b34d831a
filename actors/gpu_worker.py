"""One rank: owns the device and runs the block loop.

Five threads: two bring params (`param_feed`), one computes, one moves gradients out, one updates the states that rest
on the device (`device_states`). `post` only hands messages to them. Scheduler messages are about blocks; SSD servers
and optimizers are spoken to in chunks.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from windlass.actors.chunk_io import ChunkIoClient, chunk_io
from windlass.actors.context import GPU_WORKER, SCHEDULER, JobContext, evaluation_batch_size, grad_precision
from windlass.actors.device_states import DeviceStates
from windlass.actors.guarded_threads import GuardedThreads
from windlass.actors.job_spec import JobSpec
from windlass.actors.messages import (
    BlockBackwardDone,
    BlockComputed,
    BorrowParams,
    ChunkIoDone,
    ComputeBlock,
    FlushBlock,
    GradChunk,
    GradDropped,
    GradOffloaded,
    GradSlotsReturned,
    KernelChosen,
    LossComputed,
    Message,
    OffloadGrad,
    ParamsReturned,
    Phase,
    PrefetchParams,
    RestoreStates,
    SpanKind,
    UpdateBlock,
)
from windlass.actors.param_feed import Fetch, ParamFeed
from windlass.actors.spans import COMPUTE, FROM_DEVICE, WHOLE_BLOCK, SpanLog
from windlass.engine.block_runner import BlockRunner, GradBuffer
from windlass.engine.dataset import MicroBatch, PreparedDataset
from windlass.engine.device import Device
from windlass.engine.formats import TORCH_DTYPE
from windlass.engine.grad_norm import squared_norm
from windlass.engine.partition import Partition
from windlass.storage.arena import Arena, SlotPool
from windlass.storage.ids import BlockIndex, ChunkKey, Span, StateKind, Step

# Gradients of so many blocks may lie on the device while the offload is behind.
MAX_GRAD_BUFFERS = 2


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
        self._io = ChunkIoClient(self.name, context, send)
        self._spans = SpanLog(self.name, context.spec.job, send)
        self._backward_step = 0  # the last one whose backward pass is over
        self._to_compute: queue.Queue[ComputeBlock | None] = queue.Queue()
        self._to_offload: queue.Queue[OffloadGrad | None] = queue.Queue()
        self._lock = threading.Lock()
        self._grads: dict[BlockIndex, GradBuffer] = {}
        self._offloadable: dict[BlockIndex, torch.Tensor] = {}
        self._grad_permits = threading.Semaphore(MAX_GRAD_BUFFERS)
        self._permitted: set[BlockIndex] = set()
        self._threads = GuardedThreads(self.name, context.spec.job, send, lambda: self._stopping)
        self._batch: list[MicroBatch] = []
        self._evaluation: list[list[MicroBatch]] = []
        self._stopping = False

    # --- life cycle -------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Maps the arena, opens the data, starts the threads."""
        self._arena = Arena.open(self.context.arena_path)
        plan = self.context.plan
        self._grad_slots = SlotPool(plan.grads.offset, plan.grads.slot_nbytes, plan.grads.num_slots, name="grad slots")
        self._memory = torch.frombuffer(self._arena.buffer(Span(0, self._arena.nbytes)), dtype=torch.uint8)
        self.device.pin(self._memory)
        self._states = DeviceStates(
            self.context,
            self.device,
            self._memory,
            self._io,
            name=self.name,
            take_grad=self._take_grad,
            report=lambda message: self.send(SCHEDULER, message),
            spans=self._spans,
        )
        if self._states.kernel is not None:
            chosen = KernelChosen(job=self.spec.job, step=Step(0), actor=self.name, kernel=self._states.kernel)
            self.send(SCHEDULER, chosen)
        self._feed = ParamFeed(self.context, self.device, self._memory, self._io, self._states.params, self._spans)
        self.runner = BlockRunner(self.partition, self.device.device, self.hyper.seed)
        self.dataset = PreparedDataset.open(self.spec.dataset_dir, "train")
        self._evaluation = evaluation_groups(self.spec)
        self._threads.start((*self._feed.loops, self._run_compute, self._run_offloads, self._states.run))

    def post(self, message: Message) -> None:
        """Takes a message and returns at once."""
        match message:
            case PrefetchParams():
                self._feed.request(message)
            case ComputeBlock():
                self._to_compute.put(message)
            case OffloadGrad():
                self._to_offload.put(message)
            case UpdateBlock() | FlushBlock() | RestoreStates():
                self._states.post(message)
            case ChunkIoDone():
                self._io.take(message)
            case GradSlotsReturned():
                self._grad_slots.release(message.spans)
            case GradDropped():
                self._drop(message)
            case BorrowParams():
                self.send(message.actor, self._feed.lend(message))
            case ParamsReturned():
                self._feed.take_back(message)
            case _:
                raise ValueError(f"{self.name} does not take {type(message).__name__}")

    def stop(self) -> None:
        """Ends the threads, whatever they wait for, and unmaps the arena."""
        self._stopping = True
        self._feed.stop()
        self._states.stop()
        self._grad_slots.close()
        self._grad_permits.release()
        self._to_compute.put(None)
        self._to_offload.put(None)
        self._threads.join(self.spec.deadline_s)
        self.device.unpin(self._memory)
        del self._memory
        self._arena.close()

    # --- compute ----------------------------------------------------------------------------------------------------

    def _run_compute(self) -> None:
        if not self.device.is_cuda:
            torch.set_num_threads(self.spec.compute_threads)
        while (operation := self._next_operation()) is not None:
            fetches = [self._wait_for_params(operation, block) for block in operation.blocks]
            flats = {fetch.request.block: fetch.buffer for fetch in fetches}
            grads = self._grad_buffers(operation)
            start_s = time.monotonic()
            self.runner.install(operation.block, flats, grads)
            events = self._compute(operation)
            is_finite = self._is_finite(operation, events)
            self.runner.remove(operation.block)
            self.device.synchronize()
            for fetch in fetches:
                self._feed.release(fetch)
            computed = BlockComputed(
                job=self.spec.job,
                step=operation.step,
                op=operation.op,
                phase=operation.phase,
                block=operation.block,
                compute_s=time.monotonic() - start_s,
                is_finite=is_finite,
            )
            events += self._finish_grads(operation)
            self._note(operation, SpanKind(operation.phase), operation.block, start_s)
            if operation.phase in (Phase.HEAD, Phase.BACKWARD) and operation.block == 0:
                self._backward_step = operation.step
                self._spans.tell(operation.step)
            for event in (*events, computed):
                self.send(SCHEDULER, event)

    def _note(self, operation: ComputeBlock, kind: SpanKind, block: BlockIndex, start_s: float) -> None:
        self._spans.note(COMPUTE, kind, operation.step, block, WHOLE_BLOCK, start_s, time.monotonic())

    def _next_operation(self) -> ComputeBlock | None:
        start_s = time.monotonic()
        operation = self._to_compute.get()
        if operation is not None:
            self._note(operation, SpanKind.WAIT_OPERATION, operation.block, start_s)
        return operation

    def _wait_for_params(self, operation: ComputeBlock, block: BlockIndex) -> Fetch:
        start_s = time.monotonic()
        fetch = self._feed.wait_for(operation, block)
        self._note(operation, SpanKind.WAIT_PARAMS, block, start_s)
        return fetch

    def _grad_buffers(self, operation: ComputeBlock) -> dict[BlockIndex, GradBuffer]:
        """The gradient buffers an operation adds to. A tied one lives from the head until its own block's backward."""
        if operation.phase not in (Phase.HEAD, Phase.BACKWARD):
            return {}
        for block in operation.blocks:
            if block in self._grads:
                continue
            # The shared one is exempt: it waits for the last operation of the step, which must not wait for it. So is
            # what stays on the device until its update.
            if block == operation.block and block not in self._states:
                start_s = time.monotonic()
                if not self._grad_permits.acquire(timeout=self.spec.deadline_s):
                    raise TimeoutError(
                        f"no gradient buffer came free for block {block} in step {operation.step} within "
                        f"{self.spec.deadline_s:g} s; the gradient offload or the optimizer is stuck"
                    )
                self._permitted.add(block)
                self._note(operation, SpanKind.WAIT_GRAD_BUFFER, block, start_s)
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

    def _take_grad(self, block: BlockIndex) -> torch.Tensor:
        with self._lock:
            return self._offloadable.pop(block)

    def _drop(self, message: GradDropped) -> None:
        """A step is skipped."""
        self._grad_slots.release([chunk.span for chunk in message.chunks if chunk.span is not None])
        if message.block in self._states:
            self.device.give(self._take_grad(message.block))

    def _run_offloads(self) -> None:
        while (request := self._to_offload.get()) is not None:
            flat = self._take_grad(request.block)
            if request.block in self.context.plan.spilled_blocks:
                self._spill(request, flat)
            else:
                self._offload(request, flat)

    def _offload(self, request: OffloadGrad, flat: torch.Tensor) -> None:
        chunks = tuple(GradChunk(key, span) for key, span in self._copy_out(request, flat).items())
        self._finish_offload(request, chunks)

    def _spill(self, request: OffloadGrad, flat: torch.Tensor) -> None:
        """Through grad slots to the SSDs."""
        spans = self._copy_out(request, flat)
        num_missing = len(spans)

        def written(key: ChunkKey) -> None:
            nonlocal num_missing
            self._grad_slots.release([spans[key]])
            with self._lock:
                num_missing -= 1
                is_last = num_missing == 0
            if is_last:
                self._finish_offload(request, tuple(GradChunk(key, None) for key in spans))

        itemsizes = {StateKind.GRAD: flat.itemsize}
        items = [
            chunk_io(key, self.context.chunk_numel(key), {StateKind.GRAD: span.offset}, itemsizes)
            for key, span in spans.items()
        ]
        self._io.write(items, request.step, (request.step, request.block), written)

    def _copy_out(self, request: OffloadGrad, flat: torch.Tensor) -> dict[ChunkKey, Span]:
        """A block's gradient to grad slots; its buffer is free then."""
        layout, block = self.context.layout, request.block
        keys = layout.chunk_keys(block)
        spans = dict(zip(keys, self._grad_slots.acquire(len(keys), self.spec.deadline_s), strict=True))
        for key, span in spans.items():
            start, stop = layout.chunk_range(key)
            source = flat[start:stop]
            target = self._memory[span.offset : span.offset + source.nbytes].view(flat.dtype)
            start_s, kind = time.monotonic(), SpanKind.COPY_GRAD_OUT
            self.device.copy_out(target, source)
            self._spans.note(
                FROM_DEVICE, kind, request.step, block, key.chunk, start_s, time.monotonic(), source.nbytes
            )
        self.device.give(flat)
        if block in self._permitted:
            self._permitted.remove(block)
            self._grad_permits.release()
        return spans

    def _finish_offload(self, request: OffloadGrad, chunks: tuple[GradChunk, ...]) -> None:
        if request.step <= self._backward_step:  # else the end of the backward pass tells
            self._spans.tell(request.step)
        self.send(SCHEDULER, GradOffloaded(job=self.spec.job, step=request.step, block=request.block, chunks=chunks))


def evaluation_groups(spec: JobSpec) -> list[list[MicroBatch]]:
    """The validation data in groups as large as a training batch; empty without validation data."""
    if not spec.has_validation:
        return []
    dataset = PreparedDataset.open(spec.dataset_dir, "validation")
    num_microbatches = spec.hyperparameters.num_microbatches
    microbatches = list(dataset.evaluation_batches(evaluation_batch_size(spec)))
    return [microbatches[i : i + num_microbatches] for i in range(0, len(microbatches), num_microbatches)]
