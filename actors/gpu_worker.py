"""One rank: owns the device and runs the block loop.

Six threads: two bring params (`param_feed`), one computes, one moves gradients out (`grad_offload`), one brings sums of
them back (`partial_grads`), one updates the states that rest on the device (`device_states`). `post` only hands
messages to them. Scheduler messages are about blocks; SSD servers and optimizers are spoken to in chunks.
"""

import math
import queue
import time
from collections.abc import Callable

import torch

from windlass.actors.activation_room import layer_activations, require_activation_room
from windlass.actors.activation_tiers import ActivationTiers
from windlass.actors.chunk_io import ChunkIoClient
from windlass.actors.context import GPU_WORKER, SCHEDULER, JobContext, evaluation_batch_size, grad_precision
from windlass.actors.device_states import DeviceStates
from windlass.actors.grad_offload import GradOffload
from windlass.actors.guarded_threads import GuardedThreads, works_at
from windlass.actors.job_spec import JobSpec
from windlass.actors.messages import (
    ActivationIoDone,
    Announcement,
    BlockBackwardDone,
    BlockComputed,
    BorrowParams,
    ChunkIoDone,
    ComputeBlock,
    FlushBlock,
    GradDropped,
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
from windlass.actors.spans import COMPUTE, WHOLE_BLOCK, SpanLog
from windlass.engine.activations_need import ActivationNeedUnknownError
from windlass.engine.block_runner import BlockRunner, LossSums
from windlass.engine.dataset import MicroBatch, PreparedDataset
from windlass.engine.device import Device
from windlass.engine.formats import TORCH_DTYPE
from windlass.engine.grad_buffer import GradBuffer
from windlass.engine.grad_norm import squared_norm
from windlass.engine.partition import Partition
from windlass.engine.self_check import check_architecture
from windlass.planner.activations import RECOMPUTE_ALL
from windlass.storage.arena import Arena
from windlass.storage.ids import BlockIndex, Span, Step


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
        self._to_compute: queue.Queue[ComputeBlock | None] = queue.Queue()
        self._threads = GuardedThreads(
            self.name, context.spec.job, send, lambda: self._stopping, owed=self._io.oldest_in_words
        )
        self._step_batch: list[MicroBatch] = []  # all groups of a step, or of an evaluation one group
        self._batch: list[MicroBatch] = []  # the group that is computed, on the device
        self._sums = LossSums()  # over the groups of `_step_batch` so far
        self._evaluation: list[list[MicroBatch]] = []
        self._stopping = False

    # --- life cycle -------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Maps the arena, opens the data, starts the threads."""
        plan = self.context.plan
        self._arena = Arena.open(self.context.arena_path)
        self._memory = torch.frombuffer(self._arena.buffer(Span(0, self._arena.nbytes)), dtype=torch.uint8)
        self.device.pin(self._memory)
        self._grads = GradOffload(
            self.context,
            self.device,
            self._memory,
            self._io,
            self._spans,
            lambda message: self.send(SCHEDULER, message),
        )
        self._states = DeviceStates(
            self.context,
            self.device,
            self._memory,
            self._io,
            name=self.name,
            take_grad=self._grads.take,
            report=lambda message: self.send(SCHEDULER, message),
            spans=self._spans,
        )
        if self._states.kernel is not None:
            chosen = KernelChosen(job=self.spec.job, step=Step(0), actor=self.name, kernel=self._states.kernel)
            self.send(SCHEDULER, chosen)
        self._feed = ParamFeed(self.context, self.device, self._memory, self._io, self._states.params, self._spans)
        self._activations: ActivationTiers | None = None
        if plan.activations.num_slots:
            self._activations = ActivationTiers(
                self.context, self.device, self._memory, self.send, self.name, self._spans
            )
        self.runner = BlockRunner(
            self.partition,
            self.device.device,
            self.hyper.seed,
            activations=layer_activations(self.context),
            store=self._activations,
        )
        self.dataset = PreparedDataset.open(self.spec.dataset_dir, "train")
        self._evaluation = evaluation_groups(self.spec)
        self._check_activations()
        self._threads.start(
            (*self._feed.loops, self._run_compute, *self._grads.loops, self._states.run, self._io.watch)
        )

    def post(self, message: Message) -> None:
        """Takes a message and returns at once."""
        match message:
            case PrefetchParams():
                self._feed.request(message)
            case ComputeBlock():
                self._grads.expect(message)
                self._to_compute.put(message)
            case OffloadGrad():
                self._grads.request(message)
            case UpdateBlock() | FlushBlock() | RestoreStates():
                self._states.post(message)
            case ChunkIoDone():
                self._io.take(message)
            case ActivationIoDone():
                assert self._activations is not None
                self._activations.take(message)
            case GradSlotsReturned():
                self._grads.take_back(message.spans)
            case GradDropped():
                self._grads.drop(message)
            case BorrowParams():
                self.send(message.actor, self._feed.lend(message))
            case ParamsReturned():
                self._feed.take_back(message)
            case _:
                raise ValueError(f"{self.name} does not take {type(message).__name__}")

    def stop(self) -> None:
        """Ends the threads, whatever they wait for, and unmaps the arena.

        Raises:
            TimeoutError: a thread hangs; the arena stays mapped, as it may still use it.
        """
        self._stopping = True
        self._io.stop()
        self._feed.stop()
        self._states.stop()
        self._grads.stop()
        if self._activations is not None:
            self._activations.stop()
        self._to_compute.put(None)
        self._threads.join(self.spec.deadline_s)
        self.runner.forget()
        if self._activations is not None:
            self._activations.close()
        self.device.unpin(self._memory)
        del self._memory
        self._arena.close()

    def _check_activations(self) -> None:
        """Whether the model is computed rightly with the plan's choices, and whether there is room for what they swap.

        Raises:
            UnsupportedArchitectureError: a tiny model of its class is not.
            ActivationMemoryError: there is not.
        """
        choices = set(self.context.plan.layer_activations) - {RECOMPUTE_ALL}
        if not choices:
            return  # a job's preparation has checked the default
        check_architecture(self.partition.model.config, choices)
        shapes = self.dataset.largest_shapes(self.hyper.batch_size, self.hyper.num_microbatches)
        try:
            require_activation_room(self.context, self.runner, shapes[: self.context.plan.group_size])
        except ActivationNeedUnknownError as error:
            text = f"{error}. If they find too little room, the job ends in its first step"
            self.send(SCHEDULER, Announcement(job=self.spec.job, step=Step(0), text=text))

    # --- compute ----------------------------------------------------------------------------------------------------

    def _run_compute(self) -> None:
        if not self.device.is_cuda:
            torch.set_num_threads(self.spec.compute_threads)
        while (operation := self._next_operation()) is not None:
            fetches = [self._wait_for_params(operation, block) for block in operation.blocks]
            flats = {fetch.request.block: fetch.buffer for fetch in fetches}
            grads = self._grad_buffers(operation)
            start_s = time.monotonic()
            if self._activations is not None:
                self._activations.begin(operation.step, operation.op, operation.block)
            self.runner.install(operation.block, flats, grads)
            events = self._compute(operation)
            is_finite = self._is_finite(operation)
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
            if operation.phase in (Phase.HEAD, Phase.BACKWARD) and operation.block == 0 and self._is_last(operation):
                if self._activations is not None:
                    self._activations.flush()
                self._grads.backward_over(operation.step)
            for event in (*events, computed):
                self.send(SCHEDULER, event)

    def _note(self, operation: ComputeBlock, kind: SpanKind, block: BlockIndex, start_s: float) -> None:
        self._spans.note(COMPUTE, kind, operation.step, block, WHOLE_BLOCK, start_s, time.monotonic())

    def _next_operation(self) -> ComputeBlock | None:
        start_s = time.monotonic()
        operation = self._to_compute.get()
        if operation is not None:
            works_at(operation)
            self._note(operation, SpanKind.WAIT_OPERATION, operation.block, start_s)
        return operation

    def _wait_for_params(self, operation: ComputeBlock, block: BlockIndex) -> Fetch:
        start_s = time.monotonic()
        fetch = self._feed.wait_for(operation, block)
        self._note(operation, SpanKind.WAIT_PARAMS, block, start_s)
        return fetch

    def _grad_buffers(self, operation: ComputeBlock) -> dict[BlockIndex, GradBuffer]:
        """The gradient buffers an operation adds to."""
        if operation.phase not in (Phase.HEAD, Phase.BACKWARD):
            return {}
        start_s = time.monotonic()
        buffers = {
            block: self._grads.buffer(operation, block, self._accumulation_dtype(operation, block))
            for block in operation.blocks
        }
        self._note(operation, SpanKind.WAIT_GRAD_BUFFER, operation.block, start_s)
        return buffers

    def _accumulation_dtype(self, operation: ComputeBlock, block: BlockIndex) -> torch.dtype:
        """fp32 wherever gradients are summed: over micro-batches (unless the job wants less), slices, tied uses."""
        is_sliced = (
            operation.phase is Phase.HEAD and self._step_batch[0].targets.numel() > self.runner.num_tokens_of_head_slice
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
                is_training, sums = operation.phase is Phase.HEAD, self._sums
                runner.head(step, targets, train=is_training, loss_scale=operation.loss_scale, sums=sums)
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

    def _is_last(self, operation: ComputeBlock) -> bool:
        """Whether an operation in training is of the step's last group."""
        return operation.group == self.context.plan.num_groups - 1

    def _is_finite(self, operation: ComputeBlock) -> bool:
        """Whether what the operation put out is; a gradient's own sum tells of that."""
        if operation.phase in (Phase.FORWARD, Phase.EVALUATE):
            return all(math.isfinite(float(squared_norm(hidden.flatten()))) for hidden in self.runner.inputs[-1])
        return operation.phase is Phase.BACKWARD or math.isfinite(self._sums.loss_sum)

    def _load_batch(self, operation: ComputeBlock) -> None:
        """The group that is computed next; where an epoch ends with a small step, its last groups may be empty."""
        is_training, hyper, first = operation.phase is Phase.FORWARD, self.hyper, 0
        if not is_training:
            batch = self._begin_batch(self._evaluation[operation.group])
        else:
            if operation.group == 0:
                step = operation.step - 1
                self._begin_batch(self.dataset.batch(step, hyper.batch_size, hyper.num_microbatches, hyper.seed))
            first = operation.group * self.context.plan.group_size
            batch = self._step_batch[first : first + self.context.plan.group_size]
        self.runner.first_microbatch = first
        self.partition.model.train(is_training)
        device = self.device.device
        self._batch = [MicroBatch(m.input_ids.to(device), m.targets.to(device)) for m in batch]

    def _begin_batch(self, batch: list[MicroBatch]) -> list[MicroBatch]:
        self._step_batch = batch
        self._sums = LossSums(num_targets=sum(microbatch.num_targets for microbatch in batch))
        return batch

    def _finish_grads(self, operation: ComputeBlock) -> list[Message]:
        """A block's gradient is complete after its own operation in the step's last group."""
        block = operation.block
        if operation.phase not in (Phase.HEAD, Phase.BACKWARD):
            return []
        if not self._is_last(operation):
            self._grads.set_aside(operation)
            return []
        flat = self._grads.complete(block)
        sq_sum = float(squared_norm(flat))
        self.device.synchronize()
        return [BlockBackwardDone(job=self.spec.job, step=operation.step, block=block, grad_sq_sum=sq_sum)]


def evaluation_groups(spec: JobSpec) -> list[list[MicroBatch]]:
    """The validation data in groups as large as a training batch; empty without validation data."""
    if not spec.has_validation:
        return []
    dataset = PreparedDataset.open(spec.dataset_dir, "validation")
    num_microbatches = spec.hyperparameters.num_microbatches
    microbatches = list(dataset.evaluation_batches(evaluation_batch_size(spec)))
    return [microbatches[i : i + num_microbatches] for i in range(0, len(microbatches), num_microbatches)]
