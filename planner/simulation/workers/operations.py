"""Simulates the operations of the GPU worker, each for all micro-batches of a group.

An operation computes one micro-batch after the other. Within a micro-batch it waits for activations and for pieces of
params. Their times in a layer are approximated. Tensors leave, and are needed again, at equal intervals, the first one
at the beginning. A piece is in use for a time proportional to its elements.
"""

import functools
from collections.abc import Callable
from operator import itemgetter

from windlass.actors.activations import Moment
from windlass.actors.messages import BlockComputed, ComputeBlock, Loss, ParamRequest, Phase, SpanKind
from windlass.engine.memory_plan import RECOMPUTE_ALL, BlockActivations
from windlass.planner.simulation import Future, Process, Queue, SimulatedGpu
from windlass.planner.simulation.workers.activations import Activations, Away
from windlass.planner.simulation.workers.edges import SharedParams, StageEdges
from windlass.planner.simulation.workers.grads import Grads
from windlass.planner.simulation.workers.params import Fetch, ParamFeed
from windlass.planner.simulation.workers.pieces import Pieces
from windlass.storage.ids import BlockIndex

# An action within a micro-batch: seconds since its beginning, and the action. It returns what to wait for.
_Point = tuple[float, Callable[[], Process | tuple[Future, ...]]]

_HEAD_FORWARD = 1 / 3  # share of a head's time in which it goes forward

_HELD = "activations held"
_RUNNING = "running operation"


class Operations:
    """Computes one operation after the other."""

    def __init__(
        self,
        gpu: SimulatedGpu,
        feed: ParamFeed,
        grads: Grads,
        pieces: Pieces,
        edges: StageEdges,
        shared: SharedParams,
        computed: Callable[[BlockComputed], None],
    ) -> None:
        """`computed` is called with each finished operation."""
        self.gpu, self.world = gpu, gpu.world
        self._computed = computed
        self._feed = feed
        self._grads = grads
        self._pieces = pieces
        self._edges, self._shared = edges, shared
        self._completes_grads = gpu.name == gpu.world.context.grads_worker
        self._activations = Activations(gpu)
        self._away: dict[tuple[int, int, int], list[Away]] = {}  # by group, block and micro-batch of the group
        self._to_compute: Queue[ComputeBlock] = Queue(gpu.world.clock)
        gpu.world.clock.process(self._run())

    def compute(self, operation: ComputeBlock) -> None:
        """Queues an operation."""
        self._to_compute.put(operation)

    def begin_pieces(self, request: ParamRequest) -> None:
        """Queues the pieces of an operation on a streamed block."""
        operation = request.operation
        passes = self._passes(operation.phase, request.block, 1.0)
        unit = [piece for is_back, _ in passes for piece in self._pieces.order(request.block, is_back=is_back)]
        if unit:
            self._pieces.begin(request, unit * self.num_microbatches(operation.group))

    def _run(self) -> Process:
        world = self.world
        while True:
            start_s = world.clock.now
            operation = yield from self._to_compute.get()
            self._note(SpanKind.WAIT_OPERATION, operation, operation.block, start_s)
            fetches: list[Fetch] = []
            for block in operation.blocks:
                start_s = world.clock.now
                fetches.append((yield from self._feed.wait_for(operation, block)))
                self._note(SpanKind.WAIT_PARAMS, operation, block, start_s)
            goes_backward = _goes_backward(operation)
            if goes_backward:
                start_s = world.clock.now
                yield from self._grads.take(operation)
                self._note(SpanKind.WAIT_GRAD_BUFFER, operation, operation.block, start_s)
            num_microbatches = self.num_microbatches(operation.group)
            if self._edges.source_of(operation) is not None or self._shared.takes(operation):
                start_s = world.clock.now
                yield from self._edges.receive(operation, num_microbatches)
                yield from self._shared.wait_for(operation)
                self._note(SpanKind.WAIT_BOX, operation, operation.block, start_s)
            computing = self._compute(operation, fetches)
            yield from self.gpu.compute.carry_out(computing, SpanKind(operation.phase), operation.step, operation.block)
            self._note_end(operation)
            yield from self._shared.send_params(operation)
            for fetch in fetches:
                self._feed.release(fetch)
            yield from self._edges.send(operation, num_microbatches)
            is_head = operation.phase in (Phase.HEAD, Phase.EVALUATE_HEAD)
            self._computed(
                BlockComputed(
                    job=operation.job,
                    step=operation.step,
                    op=operation.op,
                    phase=operation.phase,
                    block=operation.block,
                    group=operation.group,
                    compute_s=self._compute_s(operation),
                    is_finite=True,
                    loss=Loss((1.0,), 1, 0) if is_head else None,
                )
            )
            if goes_backward:
                self._grads.end_lanes(operation)
            if goes_backward and self._is_in_last_group(operation):
                self._grads.complete(operation)
                self._shared.send_sum(operation)
                self._grads.hand_over(operation)
            elif goes_backward:
                self._grads.queue_partial_sums(operation)

    def num_microbatches(self, group: int) -> int:
        """Returns the number of micro-batches of a group."""
        group_size = self.world.context.plan.group_size
        return min(group_size, self.world.context.spec.training.num_microbatches - group * group_size)

    def _is_in_last_group(self, operation: ComputeBlock) -> bool:
        return operation.group == self.world.context.plan.num_groups - 1

    def _note_end(self, operation: ComputeBlock) -> None:
        if not self._completes_grads:
            return
        self.world.operation_ended()
        last = Phase.BACKWARD if self.world.shape.num_blocks > 1 else Phase.HEAD
        if operation.block == 0 and operation.phase is last:
            self.world.end_round(is_last=self._is_in_last_group(operation))

    def _note(self, kind: SpanKind, operation: ComputeBlock, block: int, start_s: float) -> None:
        self.gpu.note(kind, operation.step, block, start_s)

    def _compute(self, operation: ComputeBlock, fetches: list[Fetch]) -> Process:
        world, block, request = self.world, operation.block, fetches[0].request
        num_rounded = sum(fetch.num_rounded for fetch in fetches)
        if num_rounded:
            yield from world.spend(num_rounded / world.rates.device_rounded_params)
        num_microbatches = self.num_microbatches(operation.group)
        peak_nbytes = world.work.peak_nbytes.get(block, 0)
        self._activations.begin(Moment(operation.step, block))
        is_streamed = bool(self._pieces.shares(block))
        if is_streamed and not world.rates.launches_ahead:
            self.begin_pieces(request)
        if operation.phase is Phase.HEAD:
            self._prefetch(operation.group, block - 1, 0)
        self.gpu.level(_RUNNING, peak_nbytes)
        is_plain = not (world.keeps_spans or is_streamed or world.work.swapped_nbytes.get(block))
        if is_plain:
            yield from self._all_microbatches(operation, num_microbatches)
        for microbatch in range(0 if is_plain else num_microbatches):
            if operation.phase is Phase.BACKWARD:
                is_last = microbatch + 1 == num_microbatches
                self._prefetch(operation.group, *((block - 1, 0) if is_last else (block, microbatch + 1)))
            yield from self._microbatch(operation, microbatch, self._compute_s(operation) / num_microbatches)
        yield from self._grads.bring_totals(operation)
        if num_added := self._grads.num_added(operation):
            yield from world.spend(num_added / world.rates.device_added_params)
        if _goes_backward(operation) and self._is_in_last_group(operation):
            yield from world.spend(world.work.norms_s.get(block, 0.0))
        self.gpu.level(_RUNNING, -peak_nbytes)
        if is_streamed:
            self._pieces.end(operation)

    def _all_microbatches(self, operation: ComputeBlock, number: int) -> Process:
        """Computes all micro-batches of a group at once, where nothing moves while a block is computed.

        Only the tensors of the block below are prefetched when the last one begins.
        """
        compute_s, share = self._compute_s(operation), (number - 1) / number
        if operation.phase is Phase.BACKWARD and self.world.work.swapped_nbytes.get(operation.block - 1):
            yield from self.world.spend(compute_s * share)
            self._prefetch(operation.group, operation.block - 1, 0)
            compute_s *= 1 - share
        yield from self.world.spend(compute_s)

    def _microbatch(self, operation: ComputeBlock, microbatch: int, compute_s: float) -> Process:
        passed_s, back, spend = 0.0, list[Away](), self.world.spend
        passes = self._passes(operation.phase, operation.block, compute_s)
        points = self._points_of_pieces(operation, passes)
        if _goes_backward(operation) and operation.block in self._grads.pieces.blocks:
            points += self._points_of_grads(operation, microbatch, passes)
        if operation.phase is Phase.FORWARD:
            points += self._points_out(operation, microbatch, compute_s)
        elif operation.phase is Phase.BACKWARD:
            back = self._away.pop((operation.group, operation.block, microbatch), [])
            points += self._points_back(operation.block, back, passes[0][1])
        points.sort(key=itemgetter(0))
        for at_s, act in points:
            if at_s > passed_s:
                yield from spend(at_s - passed_s)
                passed_s = at_s
            yield from act()
        if compute_s > passed_s:
            yield from spend(compute_s - passed_s)
        held_nbytes = self.world.work.held_nbytes.get(operation.block, 0)
        if operation.phase is Phase.FORWARD:
            self.gpu.level(_HELD, held_nbytes)
        elif operation.phase is Phase.BACKWARD:
            self.gpu.level(_HELD, -held_nbytes)
            for tensor in back:
                self._activations.drop(tensor)

    def _passes(self, phase: Phase, block: int, compute_s: float) -> list[tuple[bool, float]]:
        """Returns the passes of a micro-batch through a block: whether backward, and the seconds of each."""
        if phase is Phase.HEAD and self._pieces.shares(BlockIndex(block)):
            number = self.world.work.head_slices
            slice_s = compute_s / number
            return number * [(False, _HEAD_FORWARD * slice_s), (True, (1.0 - _HEAD_FORWARD) * slice_s)]
        if phase is not Phase.BACKWARD:
            return [(False, compute_s)]
        if not self._choice(block).recompute:
            return [(True, compute_s)]
        per_operation = self.world.work.compute_s
        backward_s = per_operation[(Phase.BACKWARD, block)]
        share = min(1.0, per_operation[(Phase.FORWARD, block)] / backward_s) if backward_s else 0.0
        return [(False, compute_s * share), (True, compute_s * (1.0 - share))]

    def _points_of_pieces(self, operation: ComputeBlock, passes: list[tuple[bool, float]]) -> list[_Point]:
        points: list[_Point] = []
        shares, start_s = self._pieces.shares(operation.block), 0.0

        def hold() -> tuple[Future, ...]:
            copied = self._pieces.hold(operation)
            return () if copied.is_done else (copied,)

        for is_back, seconds in passes:
            at_s = start_s
            for piece, _ in self._pieces.order(operation.block, is_back=is_back):
                points.append((at_s, hold))
                at_s += seconds * shares[piece]
            start_s += seconds
        return points

    def _points_of_grads(
        self, operation: ComputeBlock, microbatch: int, passes: list[tuple[bool, float]]
    ) -> list[_Point]:
        """Returns the beginning of each slice of a micro-batch, and the ends of the pieces' shares of its last pass."""
        pieces, shares = self._grads.pieces, self._pieces.shares(operation.block)
        points, begin_s, at_s = list[_Point](), 0.0, 0.0
        num_slices = 0
        for is_back, seconds in passes:
            if not is_back:
                at_s += seconds
                continue
            begin = functools.partial(pieces.begin, operation, microbatch, num_slices)
            points.append((begin_s, begin))
            for piece in reversed(range(len(shares))):
                at_s += seconds * shares[piece]
                points.append((at_s, functools.partial(pieces.leave, operation, piece)))
            begin_s, num_slices = at_s, num_slices + 1
        return points

    def _points_out(self, operation: ComputeBlock, microbatch: int, compute_s: float) -> list[_Point]:
        swapped = self.world.work.swapped_nbytes.get(operation.block, ())
        away = self._away[(operation.group, operation.block, microbatch)] = []

        def put(nbytes: int) -> Process:
            away.append((yield from self._activations.put(nbytes)))

        return [(i * compute_s / len(swapped), functools.partial(put, nbytes)) for i, nbytes in enumerate(swapped)]

    def _points_back(self, block: int, away: list[Away], compute_s: float) -> list[_Point]:
        """Returns the times at which swapped tensors are needed. `compute_s`: of the first pass, which uses them."""
        away = self._in_order_of_use(block, away)
        get = self._activations.get
        return [(i * compute_s / len(away), functools.partial(get, tensor)) for i, tensor in enumerate(away)]

    def _prefetch(self, group: int, block: int, microbatch: int) -> None:
        for tensor in self._in_order_of_use(block, self._away.get((group, block, microbatch), [])):
            self._activations.prefetch(tensor)

    def _in_order_of_use(self, block: int, away: list[Away]) -> list[Away]:
        """Returns tensors in the order of use: autograd uses the latest first, recomputation the first one first."""
        return away if self._choice(block).recompute else away[::-1]

    def _choice(self, block: int) -> BlockActivations:
        layers = self.world.context.plan.layer_activations
        return layers[block - 1] if 1 <= block <= len(layers) else RECOMPUTE_ALL

    def _compute_s(self, operation: ComputeBlock) -> float:
        group_size = self.world.context.plan.group_size
        share = self.num_microbatches(operation.group) / group_size
        return self.world.work.compute_s[(operation.phase, operation.block)] * share


def _goes_backward(operation: ComputeBlock) -> bool:
    return operation.phase in (Phase.HEAD, Phase.BACKWARD)
