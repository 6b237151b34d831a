"""The GPU worker: owns the device and runs the block loop.

It has these threads; `post` only passes messages to them:
- two prefetch params (`param_prefetcher`),
- one queues operations on the compute stream,
- one offloads gradients (`grad_offload`),
- one copies gradient sums back (`grad_accumulation`),
- one updates the states that are resident on the device (`device_optimizer`).

If the job runs on several boxes, hidden states, their gradients and shared params come from other boxes (`edges`).

Messages with the scheduler are about blocks; those with SSD servers and optimizers are about chunks.

None of these threads waits for a GPU. They queue work on its streams, where it waits for its inputs. The threads of the
streams report finished work with its results. The scheduler grants operations ahead of time; `Ordering.max_prefetched`
of them at a time are prefetched, queued and computed (`OperationWindow`).
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence

import torch

from windlass.actors.activations import ActivationTiers
from windlass.actors.gpu_worker.activation_memory_check import (
    layer_activations,
    require_activation_room,
    unknown_operators,
)
from windlass.actors.gpu_worker.compute import Computation
from windlass.actors.gpu_worker.device_optimizer import DeviceStates
from windlass.actors.gpu_worker.edges import SharedParams, StageEdges
from windlass.actors.gpu_worker.grad_offload import GradOffload
from windlass.actors.gpu_worker.kernel_selection import choose_kernels
from windlass.actors.gpu_worker.memory_usage import (
    DeviceMemory,
    gpu_memory_nbytes,
    limit_device_memory,
    release_device_memory,
)
from windlass.actors.gpu_worker.operation import LaunchedOperation
from windlass.actors.gpu_worker.param_prefetcher import Fetch, ParamFeed
from windlass.actors.job import (
    SCHEDULER,
    JobContext,
    JobSpec,
    evaluation_batch_size,
    grad_precision,
    require_device_room,
)
from windlass.actors.lifecycle import NICENESS_BESIDE_COMPUTE, ActorThreads, working_at, works_at
from windlass.actors.messages import (
    ActivationIoDone,
    BlockComputed,
    ChunkIoDone,
    CommitReached,
    ComputeBlock,
    ComputeBlocks,
    DescribeStatus,
    FlushBlock,
    GradSlotsReleased,
    KernelChosen,
    MemoryKind,
    MemoryReported,
    Message,
    ModelKernelsChosen,
    OfferSpan,
    OfferTaken,
    ParamsArrived,
    Phase,
    RestoreStates,
    SkipStep,
    SpanKind,
    SpanPulled,
    SumPassed,
    SumTaken,
    UpdateStep,
    UserMessage,
)
from windlass.actors.ssd import ParamServer, SsdClient
from windlass.actors.timeline import SpanRecorder
from windlass.actors.worker_policy import ComputeReports, OperationWindow, ends_rank, has_group
from windlass.engine.data import MicroBatch, PreparedDataset
from windlass.engine.device import TORCH_DTYPE, Device, TensorArena, compute_on_cpu, release_team, with_index
from windlass.engine.memory_estimate import ActivationNeedUnknownError, DeviceNeedUnknownError
from windlass.engine.memory_plan import RECOMPUTE_ALL
from windlass.engine.model import BlockRunner, GradSink, Partition, UnsupportedArchitectureError, check_architecture
from windlass.engine.optimizer import NormInParts, portable_squared_norms, squared_norm
from windlass.engine.pieces import ChunkNorms
from windlass.storage.cancellation import CancelToken, TaskQueue
from windlass.storage.ids import ActorName, BlockIndex, Step
from windlass.storage.memory import Arena


class GpuWorker:
    """The actor that computes the model, or some groups of its micro-batches if the job has several GPU workers."""

    def __init__(
        self,
        context: JobContext,
        partition: Partition,
        send: Callable[..., None],
        *,
        rank: int = 0,
        device: str = "cpu",
        poison_released: bool = False,
    ) -> None:
        """Maps the arena, opens the data, and starts the threads. After an error nothing stays open.

        `rank`: the worker's number among the job's GPU workers.
        `send` sends messages to other actors and must not block.

        Raises:
            PlanError: the job needs more device memory than its budget.
        """
        self.name = context.gpu_worker(rank)
        self.rank = rank
        self.context = context
        self.spec = context.spec
        self.hyper = context.spec.training
        self.partition = partition
        self.send = send
        self._token = CancelToken()
        self._io = SsdClient(self.name, context, send)
        self._activations: ActivationTiers | None = None
        self._launched: list[ComputeBlock] = []  # operations that were queued on the device and are not finished
        self._threads = ActorThreads(
            self.name,
            self.spec.job,
            self._token,
            send,
            deadline_s=self.spec.deadline_s,
            under_way=lambda: next(iter(self._launched[:1]), None),
        )
        self._spans = SpanRecorder(self.name, context.spec.job, send)
        self._to_compute: TaskQueue[ComputeBlock] = TaskQueue(self._token)
        self._lock = threading.Lock()  # of the following
        self._window = OperationWindow(context.spec.effective_ordering)
        self._reports = ComputeReports(context.spec.job, self.name)
        # The micro-batches of the current operation's step, or of its evaluation group, in host memory.
        self._batch: list[MicroBatch] = []
        self._batch_of: tuple[bool, int] | None = None  # whether it is an evaluation's; its step or group
        self._num_targets = 0  # target tokens of all micro-batches in `_batch`
        self._evaluation: list[list[MicroBatch]] = []
        self._reported_nbytes: dict[MemoryKind, int] = {}  # the last reported peaks
        with self._threads.stopped_on_error():
            self._open_memory(torch.device(device), poison_released=poison_released)
            self._prepare_model()
            self._make_workers()
            self._check_activations()
            self._start()

    # --- life cycle -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ends the threads, whatever they wait for, and unmaps the arena.

        Raises:
            TimeoutError: a thread hangs. The arena stays mapped, because the thread may still use it.
        """
        self._threads.stop()

    def _open_memory(self, device: torch.device, *, poison_released: bool) -> None:
        device = with_index(device)
        self.device = Device(
            device, poison_released=poison_released, token=self._token, start_threads=self._threads.start
        )
        if self.spec.device_memory_nbytes is not None:
            limit_device_memory(device, self.spec.device_memory_nbytes)
        self._arena = Arena.open(self.context.arena_path)
        self._threads.resources.callback(self._arena.close)
        self._tensors = TensorArena.of(self._arena)
        self._threads.resources.callback(self._tensors.release)
        self._pin_arena()
        self._threads.resources.callback(self.device.unpin, self._tensors.memory)

    def _pin_arena(self) -> None:
        """Registers the arena with CUDA. That can take minutes, which are reported."""
        start_s = time.monotonic()
        self.device.pin(self._tensors.memory)
        if self.device.is_cuda:
            gib, seconds = self._tensors.memory.nbytes / 2**30, time.monotonic() - start_s
            self._announce(f"{gib:.1f} GiB of host memory registered with CUDA: {seconds / gib:.2f} s a GiB")

    def _prepare_model(self) -> None:
        kernels = choose_kernels(self.context, self.partition, self.device.device, self._announce)
        if kernels or self.spec.num_ranks > 1 or self.spec.stages:  # the scheduler compares those of several workers
            chosen = ModelKernelsChosen(job=self.spec.job, step=Step(0), actor=self.name, kernels=kernels)
            self.send(SCHEDULER, chosen)
        release_device_memory(self.device.device)  # of the check of the kernels, which this thread has computed
        self._require_room()
        self._device_memory = DeviceMemory(self.device.device)
        if self.context.plan.activations.num_slots:
            self._activations = ActivationTiers(
                self.context, self.rank, self.device, self._tensors, self._io, self._spans
            )
            self._threads.resources.callback(self._activations.close)
        self.runner = BlockRunner(
            self.partition,
            self.device.device,
            self.hyper.seed,
            activations=layer_activations(self.context),
            store=self._activations,
            head_slices=self.hyper.head_slices,
            lanes=self.hyper.lane_division if self.hyper.lanes > 1 else None,
            kernels=kernels,
            cut_matrices=self.hyper.cut_matrices,
        )
        self._threads.resources.callback(self.runner.forget)

    def _make_workers(self) -> None:
        group_size = self.context.plan.group_size
        longest = evaluation_batch_size(self.spec) * self.hyper.sequence_length
        self._computation = Computation(self.runner, self.device, group_size, self._activations, self.context.stage)
        self._edges = StageEdges(self.context, self.device, self._tensors, self.send, rank=self.rank)
        names = self.partition.grads_used(self.partition.head, 0, self.hyper.cut_matrices)
        self._shared = SharedParams(self.context, self.device, self._tensors, self.send, rank=self.rank, names=names)
        self._grads = GradOffload(
            self.context,
            self.device,
            self._tensors,
            self._io,
            self._spans,
            self.send,
            self._report_grad,
            rank=self.rank,
            summed_in_fp32=self.runner.summed_in_fp32(longest),
        )
        self._states = DeviceStates(
            self.context,
            self.device,
            self._tensors,
            self._io,
            name=self.name,
            acquire_grad=self._grads.acquire,
            release_grad=self._grads.release_buffer,
            report=lambda message: self.send(SCHEDULER, message),
            spans=self._spans,
        )
        if (kernel := self._states.kernel) is not None:
            self.send(SCHEDULER, KernelChosen(job=self.spec.job, step=Step(0), actor=self.name, kernel=kernel))
        self._feed = ParamFeed(
            self.context, self.device, self._tensors, self.rank, self._ask_for_params, self._params_here, self._spans
        )
        self._params = None
        if self.context.param_server == self.name:
            self._params = ParamServer(self.name, self.context, self._answer_with_params, io=self._io)
        self._device_memory.pause()
        self.dataset = PreparedDataset.open(self.spec.dataset_dir, "train")
        self._evaluation = evaluation_groups(self.spec)

    def _start(self) -> None:
        release_team()  # the calling thread's OpenMP team; from here on, only the compute thread needs one
        if not self.device.is_cuda:
            compute_on_cpu()
        others = (*self._feed.loops, *self._grads.loops, self._states.run)
        self._threads.start(others, niceness=0 if self.device.is_cuda else NICENESS_BESIDE_COMPUTE)
        self._threads.start((self._run_compute,))

    def post(self, message: Message) -> None:
        """Processes or queues a message and returns at once."""
        match message:
            case ComputeBlocks():
                with self._lock:
                    for operation in message.operations:  # before their turn, because networks are slow
                        self._edges.expect(operation, self._num_microbatches_of(operation))
                        self._shared.expect(operation)
                    self._begin(self._window.grant(message.operations))
            case CommitReached():
                self._grads.commit_reached(message.step)
            case UpdateStep() | SkipStep() | FlushBlock() | RestoreStates():
                self._states.post(message)
            case ChunkIoDone() | ActivationIoDone():
                self._io.take(message)
            case ParamsArrived():
                self._feed.take(message)
            case SumPassed():
                self._grads.take_sum(message)
            case OfferSpan():
                self._shared.take(message)
            case SpanPulled() | OfferTaken():
                if isinstance(message, SpanPulled):
                    self._spans.note_pulled(message)
                (self._shared if message.crossing.is_shared else self._edges).take(message)
            case SumTaken():
                self._grads.sum_taken(message)
            case GradSlotsReleased():
                self._grads.release_slots(message.spans)
            case DescribeStatus():
                self._threads.report_status(self._io.describe_pending())
            case _:
                raise ValueError(f"{self.name} has no handler for {type(message).__name__}")

    def _require_room(self) -> None:
        """Checks the device memory budget and the GPU's memory, before the job allocates device memory.

        Raises:
            PlanError: the budget, or the GPU, is too small.
        """
        try:
            device = self.device.device
            require_device_room(self.context, self.partition, device=device.type, gpu_nbytes=gpu_memory_nbytes(device))
        except DeviceNeedUnknownError as error:
            self._announce(f"the budget of device memory could not be checked: {error}")

    def _check_activations(self) -> None:
        """Checks that the plan's choices compute the model correctly, and that there are enough activation slots.

        Raises:
            UnsupportedArchitectureError: a tiny model of the same class is computed incorrectly.
            ActivationMemoryError: there are too few activation slots.
        """
        config, plan, stage = self.partition.model.config, self.context.plan, self.context.stage
        if 0 < stage.first < self.partition.head:
            self.runner.require_independent_calls()
        is_cut = self.hyper.cut_matrices is not None
        if is_cut and self.context.layout.divisible_names != self.partition.layout.divisible_names:
            raise UnsupportedArchitectureError(
                "the job was prepared by an earlier version, which cut other matrices or none; submit it again, or "
                "with cut_matrices off"
            )
        all_choices = set(plan.layer_activations) or {RECOMPUTE_ALL}
        if plan.streamed_blocks:
            check_architecture(config, all_choices, True, is_cut, plan.streams_ends)
        choices = all_choices - {RECOMPUTE_ALL}
        # The job's preparation has checked the default choice, with whole matrices.
        if is_cut or choices:
            check_architecture(config, all_choices if is_cut else choices, False, is_cut)
        if not choices:
            return
        shapes = self.dataset.largest_shapes(self.hyper.batch_size, self.hyper.num_microbatches)
        try:
            require_activation_room(self.context, self.runner, shapes[: plan.group_size])
            for block, names in unknown_operators(self.context, self.runner, shapes[0]).items():
                calls = ", ".join(names)
                self._announce(f"layers like block {block} do not call {calls} on this device: results are recomputed")
        except ActivationNeedUnknownError as error:
            self._announce(f"{error}. If there are too few activation slots, the job fails in its first step")

    def _announce(self, text: str) -> None:
        if self.spec.num_ranks > 1:
            text = f"GPU {self.rank}: {text}"
        self.send(SCHEDULER, UserMessage(job=self.spec.job, step=Step(0), text=text, box=self.spec.box))

    def _params_here(self, block: BlockIndex) -> torch.Tensor | None:
        """Returns params that need no prefetch: they are resident on the device, or come from another box."""
        shared = self._shared.params(block)
        return self._states.params(block) if shared is None else shared

    def _ask_for_params(self, message: Message) -> None:
        if self._params is None:
            self.send(self.context.param_server, message)
        else:
            self._params.post(message)

    def _answer_with_params(self, to: ActorName, message: Message) -> None:
        """Takes a message of the param server in this process, which has no other GPU worker."""
        self.post(message)

    # --- reports ----------------------------------------------------------------------------------------------------

    def _begin(self, operations: Sequence[ComputeBlock]) -> None:
        """Queues operations whose turn has come. The caller holds the lock, so that they stay in order."""
        for operation in operations:
            self._feed.request(operation)
            self._grads.expect(operation)
            self._to_compute.put(operation)

    def _report_computed(self, computed: BlockComputed) -> None:
        """Reports a finished operation, now or later, and begins those whose turn has come."""
        with self._lock:
            self._begin(self._window.computed())
            # The next operation may wait for another box, and the scheduler must know that this one does not hang.
            is_due = self._window.is_empty or self._ends_pass(computed)
            report = self._reports.computed(computed, time.monotonic(), is_idle=is_due)
            if report is not None:
                self.send(SCHEDULER, report)

    def _report_grad(self, operation: ComputeBlock, sq_sums: tuple[float, ...]) -> None:
        """Reports a gradient that is stored in its final place, now or later. `operation` completed it."""
        with self._lock:
            report = self._reports.gradient(operation, sq_sums, time.monotonic(), is_idle=self._window.is_empty)
            if report is not None:
                self.send(SCHEDULER, report)

    # --- compute ----------------------------------------------------------------------------------------------------

    def _run_compute(self) -> None:
        if not self.device.is_cuda:
            self.device.compute.run(lambda: torch.set_num_threads(self.spec.compute_threads))
        start_s = time.monotonic()
        while (message := self._to_compute.take()) is not None:
            works_at(message)
            self._device_memory.begin()
            self._load_batch(message)
            operation = LaunchedOperation(
                message,
                self.device,
                self._num_targets,
                is_last=self._is_last(message),
                is_sent=self._is_sent(message),
            )
            operation.waited(SpanKind.WAIT_OPERATION, message.block, start_s)
            self._launch(operation)
            start_s = time.monotonic()

    def _launch(self, operation: LaunchedOperation) -> None:
        """Queues an operation on the compute stream. Waits until its params' copies are queued, not until they end."""
        message, compute = operation.message, self.device.compute
        fetches = [self._wait_for_params(operation, block) for block in message.blocks]
        flats = {fetch.request.block: fetch.params for fetch in fetches}
        grads = self._grad_buffers(operation) if operation.goes_backward else {}
        received = self._receive(operation)
        self._launched.append(message)
        with compute.turn():
            operation.begun = compute.record()
            for fetch in fetches:
                self._feed.round_master(fetch)
            compute.run(functools.partial(self._computation.compute, operation, self._batch, flats, grads, received))
            del received
            operation.computed = compute.record()
            self._shared.send_params(message, flats[message.block])
            for fetch in fetches:
                self._feed.release(fetch)
            if operation.goes_backward:
                self._grads.end_lanes(message)
            if operation.goes_backward and operation.is_last:
                sums_of_others = self._shared.received_sums(message)
                self._grads.complete(message.block, functools.partial(self._sum_squares, operation), sums_of_others)
                self._grads.hand_over(message, functools.partial(self._shared.send_sum, message))
            elif operation.goes_backward:
                self._grads.queue_partial_sums(message)
            compute.run(operation.download)
            operation.ended = compute.record()
        if operation.is_sent:
            self._send_results(operation)
        compute.then(working_at(message, functools.partial(self._has_ended, operation)))

    def _has_ended(self, operation: LaunchedOperation) -> None:
        """Reports an operation that the device has finished."""
        message = operation.message
        self._launched.pop(0)
        operation.note(self._spans)
        stage = self.context.stage
        if stage.ends_group(message.phase, message.block) and self._is_last_here(message):
            if self._activations is not None:
                self._activations.flush()
            self._grads.backward_over(message.step)
            self._report_memory(message)
        elif self._ends_evaluation(message) and not has_group(self.rank, self.context.plan.num_groups):
            self._spans.tell(message.step)
            self._report_memory(message)
        self._report_computed(operation.report())
        if not (sq_sums := operation.grad_sq_sums):
            return
        if message.block in self._states:
            self._report_grad(message, sq_sums)
            self._states.gradient_came(message.step, message.block)
        else:
            self._grads.computed(message, sq_sums)

    def _sum_squares(self, operation: LaunchedOperation, grad: torch.Tensor | NormInParts | ChunkNorms) -> None:
        """Computes the sums of squares of a complete gradient, on the compute stream."""
        if isinstance(grad, ChunkNorms):
            operation.sq_sums = grad.total()
            return
        if isinstance(grad, NormInParts):
            operation.sq_sums = [grad.total()]
            return
        if self.hyper.lanes == 1:
            operation.sq_sums = [squared_norm(grad)]
            return
        # Any process may add these up: they have the same bits on a GPU and on a CPU, and the order is the scheduler's.
        operation.sq_sums = portable_squared_norms(grad, self.context.layout.chunk_numel)

    def _report_memory(self, message: ComputeBlock) -> None:
        """Reports the peaks of memory that have grown; called once per step, or per group of an evaluation."""
        peaks = self._device_memory.peaks()
        with contextlib.suppress(OSError):  # the arena's file was removed: no reason to fail the job
            peaks[MemoryKind.HOST] = self._arena.held_nbytes
        for kind, nbytes in peaks.items():
            if nbytes > self._reported_nbytes.get(kind, 0):
                self._reported_nbytes[kind] = nbytes
                self.send(
                    SCHEDULER,
                    MemoryReported(job=message.job, step=message.step, actor=self.name, kind=kind, nbytes=nbytes),
                )

    def _load_batch(self, message: ComputeBlock) -> None:
        """Loads the micro-batches at the first operation of a step or of an evaluation's group."""
        if not self.context.stage.begins_group(message.phase, message.block):
            return
        hyper = self.hyper
        if message.phase in (Phase.EVALUATE, Phase.EVALUATE_HEAD):
            self._batch_of = (True, message.group)
            self._batch = self._evaluation[message.group]
        elif self._batch_of != (False, message.step):
            self._batch_of = (False, message.step)
            step = message.step - 1
            self._batch = self.dataset.batch(step, hyper.batch_size, hyper.num_microbatches, hyper.seed)
        self._num_targets = sum(microbatch.num_targets for microbatch in self._batch)

    def _num_microbatches_of(self, message: ComputeBlock) -> int:
        """Returns the number of micro-batches of an operation's group, before the group is loaded."""
        if message.phase in (Phase.EVALUATE, Phase.EVALUATE_HEAD):
            return len(self._evaluation[message.group])
        hyper, size = self.hyper, self.context.plan.group_size
        total = self.dataset.num_microbatches_of(message.step - 1, hyper.batch_size, hyper.num_microbatches)
        return max(0, min(size, total - message.group * size))

    def _shapes_of(self, message: ComputeBlock) -> list[tuple[int, int]]:
        """Returns the examples and tokens of the micro-batches of an operation's group, which is loaded."""
        batch, size = self._batch, self.context.plan.group_size
        if message.phase not in (Phase.EVALUATE, Phase.EVALUATE_HEAD):
            batch = batch[message.group * size :][:size]
        return [(microbatch.input_ids.shape[0], microbatch.input_ids.shape[1]) for microbatch in batch]

    def _is_sent(self, message: ComputeBlock) -> bool:
        """Returns whether another box takes the results of an operation."""
        taker = self.context.stage.taker_of(message.phase, message.block, self.partition.num_blocks)
        return taker is not None

    def _ends_evaluation(self, message: ComputeBlock) -> bool:
        """Returns whether an operation is the last one of an evaluation's group here."""
        is_evaluating = message.phase in (Phase.EVALUATE, Phase.EVALUATE_HEAD)
        return is_evaluating and message.block == self.context.stage.stop - 1

    def _ends_pass(self, computed: BlockComputed) -> bool:
        """Returns whether an operation is the last one of a group's pass through one stage of several."""
        stage = self.context.stage
        last = stage.first if computed.phase is Phase.BACKWARD else stage.stop - 1
        return len(self.spec.stages) > 1 and computed.block == last

    def _receive(self, operation: LaunchedOperation) -> list[torch.Tensor]:
        """Returns what an operation takes from another box: hidden states, or their gradients.

        What it takes of shared params stays in its buffer.
        """
        message, received = operation.message, list[torch.Tensor]()
        if (source := self._edges.source_of(message)) is not None:
            start_s = time.monotonic()
            received = self._edges.receive(message, self._shapes_of(message))
            operation.waited(SpanKind.WAIT_BOX, message.block, start_s, box=source)
        if (source := self._shared.source_of(message)) is not None:
            start_s = time.monotonic()
            self._shared.wait_for(message)
            operation.waited(SpanKind.WAIT_BOX, message.block, start_s, box=source)
        return received

    def _send_results(self, operation: LaunchedOperation) -> None:
        """Sends what another box takes of an operation."""
        message, start_s = operation.message, time.monotonic()
        awaited = self._edges.send(message, operation.results, self._shapes_of(message))
        operation.results = []
        if awaited is not None:
            operation.waited(SpanKind.WAIT_BOX, message.block, start_s, box=awaited, after=operation.ended)

    def _is_last(self, message: ComputeBlock) -> bool:
        """Returns whether an operation belongs to the last group of its step; true for evaluations."""
        is_training = message.phase in (Phase.FORWARD, Phase.HEAD, Phase.BACKWARD)
        return not is_training or message.group == self.context.plan.num_groups - 1

    def _is_last_here(self, message: ComputeBlock) -> bool:
        """Returns whether an operation belongs to the last group of its step that this worker computes."""
        return ends_rank(message.group, self.context.plan.num_groups, self.spec.num_ranks)

    def _wait_for_params(self, operation: LaunchedOperation, block: BlockIndex) -> Fetch:
        start_s = time.monotonic()
        fetch = self._feed.wait_for(operation.message, block)
        operation.waited(SpanKind.WAIT_PARAMS, block, start_s)
        return fetch

    def _grad_buffers(self, operation: LaunchedOperation) -> dict[BlockIndex, GradSink]:
        """Acquires the gradient buffers to which an operation adds."""
        start_s, message = time.monotonic(), operation.message
        in_fp32 = self.runner.summed_in_fp32(self._batch[0].targets.numel())
        buffers = {}
        for block in message.blocks:
            dtype = torch.float32 if block in in_fp32 else TORCH_DTYPE[grad_precision(self.spec)]
            buffers[block] = self._grads.buffer(message, block, dtype)
        operation.waited(SpanKind.WAIT_GRAD_BUFFER, message.block, start_s)
        return buffers


def evaluation_groups(spec: JobSpec) -> list[list[MicroBatch]]:
    """Returns the validation data in groups of as many micro-batches as a training step; empty without such data."""
    if not spec.has_validation:
        return []
    dataset = PreparedDataset.open(spec.dataset_dir, "validation")
    num_microbatches = spec.training.num_microbatches
    microbatches = list(dataset.evaluation_batches(evaluation_batch_size(spec)))
    return [microbatches[i : i + num_microbatches] for i in range(0, len(microbatches), num_microbatches)]
