"""Simulates the GPU worker: params in, compute, gradients out, and states resident on the device."""

from collections.abc import Callable, Sequence

from windlass.actors.messages import (
    BlockComputed,
    BlockFlushed,
    BlockUpdated,
    CommitReached,
    ComputeBlock,
    ComputeBlocks,
    FlushBlock,
    GradOffloaded,
    Message,
    OfferSpan,
    OfferTaken,
    ParamChunk,
    ParamsCopied,
    ParamUse,
    Phase,
    RequestParams,
    SpanKind,
    SumPassed,
    SumTaken,
    UpdateBlock,
    UpdateStep,
)
from windlass.actors.worker_policy import ComputeReports, OperationWindow, UpdateActions, UpdateQueue
from windlass.planner.simulation import Process, Queue, SimulatedGpu
from windlass.planner.simulation.workers.edges import SharedParams, StageEdges
from windlass.planner.simulation.workers.grads import Grads
from windlass.planner.simulation.workers.operations import Operations
from windlass.planner.simulation.workers.params import Fetch, ParamFeed
from windlass.planner.simulation.workers.pieces import Pieces
from windlass.storage.ids import ChunkKey


class Worker:
    """The simulated counterpart of `GpuWorker`."""

    def __init__(self, gpu: SimulatedGpu, ask_for_params: Callable[[RequestParams | ParamsCopied], None]) -> None:
        """`ask_for_params` sends a message to the param server."""
        self.gpu, self.world = gpu, gpu.world
        world = gpu.world
        self._feed = ParamFeed(gpu, ask_for_params, self._on_params_ready)
        self._grads = Grads(gpu, self._report_grad)
        self._edges, self._shared = StageEdges(gpu), SharedParams(gpu)
        self._operations = Operations(
            gpu, self._feed, self._grads, Pieces(gpu), self._edges, self._shared, self._report_computed
        )
        self._window = OperationWindow(world.shape.ordering)
        self._reports = ComputeReports(world.shape.job, gpu.name)
        ordering, num_blocks = world.shape.ordering, len(world.context.plan.device_blocks)
        self._update_queue = UpdateQueue(ordering.queues, ordering.max_updating_on_device, num_blocks)
        self._commands: Queue[UpdateBlock | FlushBlock] = Queue(world.clock)
        self._transit = world.pool("states in transit", world.context.plan.transit)
        world.clock.process(self._run_commands())

    def post(self, message: Message) -> None:
        """Handles a message from the scheduler."""
        match message:
            case ComputeBlocks():
                for operation in message.operations:  # before their turn, because networks are slow
                    self._edges.expect(operation, self._operations.num_microbatches(operation.group))
                    self._shared.expect(operation)
                self._begin(self._window.grant(message.operations))
            case CommitReached():
                self._grads.commit_reached(message.step)
            case SumPassed():
                self._grads.take_sum(message)
            case SumTaken():
                self._grads.release_slots(message)
            case OfferSpan() | OfferTaken():
                self._shared.take(message)
            case UpdateStep():
                self._carry_out(self._update_queue.add(message))
            case FlushBlock():
                self._commands.put(message)

    def take_params(self, use: ParamUse, chunks: Sequence[ParamChunk]) -> None:
        """Takes note of params in host memory."""
        self._feed.take(use, chunks)

    def _carry_out(self, actions: UpdateActions) -> None:
        for update in actions.begin:
            self._commands.put(update)

    def _begin(self, operations: Sequence[ComputeBlock]) -> None:
        for operation in operations:
            self._feed.request(operation)
            self._grads.expect(operation)
            self._operations.compute(operation)

    def _report_computed(self, computed: BlockComputed) -> None:
        self._begin(self._window.computed())
        # The next operation may wait for another box.
        is_due = self._window.is_empty or self._ends_pass(computed)
        report = self._reports.computed(computed, self.world.clock.now, is_idle=is_due)
        if report is not None:
            self.world.send_to_scheduler(report)

    def _ends_pass(self, computed: BlockComputed) -> bool:
        """Returns whether an operation is the last one of a group's pass through one stage of several."""
        context = self.world.context
        last = context.stage.first if computed.phase is Phase.BACKWARD else context.stage.stop - 1
        return len(context.spec.stages) > 1 and computed.block == last

    def _report_grad(self, operation: ComputeBlock) -> None:
        report = self._reports.gradient(operation, (1.0,), self.world.clock.now, is_idle=self._window.is_empty)
        if report is not None:
            self.world.send_to_scheduler(report)
        job, step, block = operation.job, operation.step, operation.block
        if block in self.world.shape.device_blocks:
            self._carry_out(self._update_queue.add(GradOffloaded(job=job, step=step, block=block, chunks=())))

    def _on_params_ready(self, fetch: Fetch) -> None:
        if self.world.rates.launches_ahead and fetch.request.block in self.world.bounds:
            self._operations.begin_pieces(fetch.request)

    def _run_commands(self) -> Process:
        """Updates and flushes blocks whose states are resident on the device, one at a time, as `DeviceStates` does."""
        world, name = self.world, self.gpu.name
        while True:
            command = yield from self._commands.get()
            block = command.block
            if isinstance(command, UpdateBlock):
                duration_s = world.numels[block] / world.rates.device_params
                yield from self.gpu.compute.work(duration_s, SpanKind.UPDATE, command.step, block)
                self._grads.updated(block)
                world.send_to_scheduler(BlockUpdated(job=command.job, step=command.step, block=block, actor=name))
                self._carry_out(self._update_queue.updated(command.step))
            else:
                keys = world.chunk_keys[block]
                yield from [world.clock.process(self._flush(command, key)) for key in keys]
                world.send_to_scheduler(BlockFlushed(job=command.job, step=command.step, block=block, actor=name))

    def _flush(self, command: FlushBlock, key: ChunkKey) -> Process:
        world, step = self.world, command.step
        nbytes = world.state_itemsize * world.chunk_numel(key)
        yield from self._transit.take()
        yield from self.gpu.copy_out(nbytes, SpanKind.COPY_STATES_OUT, step, key.block, key.chunk)
        yield world.chunk_move(key, nbytes, SpanKind.WRITE_STATES, step, (step, key.block))
        self._transit.give_back()
