"""Simulates the GPU worker: params in, compute, gradients out, and states resident on the device."""

from windlass.actors.messages import (
    BlockFlushed,
    BlockUpdated,
    ComputeBlock,
    FlushBlock,
    Message,
    OffloadGrad,
    PrefetchParams,
    SpanKind,
    UpdateBlock,
)
from windlass.planner.simulation import Process, Queue, SimulatedMachine
from windlass.planner.simulation.workers.grads import Grads
from windlass.planner.simulation.workers.operations import Operations
from windlass.planner.simulation.workers.params import Fetch, ParamFeed
from windlass.planner.simulation.workers.pieces import Pieces
from windlass.storage.ids import ChunkKey


class Worker:
    """The simulated counterpart of `GpuWorker`."""

    def __init__(self, world: SimulatedMachine) -> None:
        self.world = world
        self._feed = ParamFeed(world, self._is_ready)
        self._grads = Grads(world)
        self._operations = Operations(world, self._feed, self._grads, Pieces(world))
        self._commands: Queue[UpdateBlock | FlushBlock] = Queue(world.env)
        self._transit = world.pool("states in transit", world.context.plan.transit)
        world.env.process(self._run_commands())

    def post(self, message: Message) -> None:
        """Handles a message from the scheduler."""
        match message:
            case PrefetchParams():
                self._feed.request(message)
            case ComputeBlock():
                self._grads.expect(message)
                self._operations.compute(message)
            case OffloadGrad():
                self._grads.request(message)
            case UpdateBlock() | FlushBlock():
                self._commands.put(message)

    def _is_ready(self, fetch: Fetch) -> None:
        if self.world.rates.gives_ahead and fetch.request.block in self.world.bounds:
            self._operations.begin_pieces(fetch.request)

    def _run_commands(self) -> Process:
        """Updates and flushes blocks whose states are resident on the device, one at a time, as `DeviceStates` does."""
        world, name = self.world, self.world.shape.gpu_worker
        while True:
            command = yield from self._commands.get()
            block = command.block
            if isinstance(command, UpdateBlock):
                duration_s = world.context.layout.blocks[block].numel / world.rates.device_params
                yield from world.compute.work(duration_s, SpanKind.UPDATE, command.step, block)
                self._grads.updated(block)
                world.tell(BlockUpdated(job=command.job, step=command.step, block=block, actor=name))
            else:
                keys = world.context.layout.chunk_keys(block)
                yield world.env.all_of([world.env.process(self._flush(command, key)) for key in keys])
                world.tell(BlockFlushed(job=command.job, step=command.step, block=block, actor=name))

    def _flush(self, command: FlushBlock, key: ChunkKey) -> Process:
        world, step = self.world, command.step
        nbytes = world.state_itemsize * world.chunk_numel(key)
        copied_nbytes = world.context.formats.update_itemsize * world.chunk_numel(key)
        yield from self._transit.take()
        yield from world.copy_out(copied_nbytes, SpanKind.COPY_STATES_OUT, step, key.block, key.chunk)
        yield from world.chunk_move(key, nbytes, SpanKind.WRITE_STATES, step, (step, key.block))
        self._transit.give_back()
