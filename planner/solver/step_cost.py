"""What a step costs by where everything is: seconds of each part, bytes on each tier, and what bounds the step.

The parts are those of one step in steady state. Without clipping updates run beside both passes, so every resource's
bound is all its work; what activations move must go beside the pass that it belongs to. Where every gradient is needed
first, updates run beside the next step's forward pass only: there the bounds are of each pass by itself.
Sources: Ratel, equations 1 to 8 (a stage takes what its slowest resource takes); AutoHete, equations 1 to 6.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from windlass.engine.memory_plan import (
    ACTIVATION_SLOT_NBYTES,
    COMMIT_EVERY,
    MAX_GRAD_BUFFERS,
    PARTIAL_GRAD_ITEMSIZE,
    TRANSIT_DEPTH,
    ModelSize,
    Placement,
    QueueDepths,
    UpdateOrder,
    grad_buffers,
    make_plan,
    param_buffers,
)
from windlass.planner.cost import (
    ActivationOption,
    BlockProfile,
    LayerProfile,
    ModelProfile,
    Speeds,
    Ways,
    Work,
    holding_ways,
    ways_of_layer,
)
from windlass.planner.solver.integer_program import BlockGroup, Bound, Buffer, Overflow, Program, Way


class Part(IntEnum):
    """Of a step's time. The link has a way to the device and one from it; each SSD does one thing at a time."""

    FORWARD = 0  # computing; the head's forward and backward as well
    BACKWARD = 1
    H2D_FORWARD = 2
    H2D_BACKWARD = 3
    D2H_FORWARD = 4
    D2H_BACKWARD = 5
    SSD_FORWARD = 6  # reading params, writing activations
    SSD_BACKWARD = 7  # reading params and activations, writing gradients that are kept
    SSD_UPDATE = 8  # reading and writing states, in an optimizer's slots
    OPTIMIZER = 9
    FIRST_UPDATE = 10  # from the last gradient to the first block's new params: nothing is computed meanwhile
    SSD_FLUSH = 11  # writing states that rest in memory, for a commit


class Tier(IntEnum):
    """Of memory."""

    DEVICE = 0
    HOST = 1
    SSD = 2


class StateTier(IntEnum):
    """Where a block's model states rest, the fastest first."""

    DEVICE = 0
    HOST = 1
    CACHED = 2  # on the SSDs, and the params in host memory from one use to the next as well
    SSD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """A job as the planner sees it."""

    model: ModelProfile  # for one micro-batch
    num_microbatches: int  # of a step
    update_order: UpdateOrder
    param_itemsize: int
    state_itemsize: int  # of all states of one parameter at rest
    read_itemsize: int  # ... and of those that an update reads, which are all that rests on a device
    grad_itemsize: int  # on their way to the optimizer
    num_optimizers: int = 1
    num_prefetched: int = 2  # operations whose params are on the device
    ways: Ways = ways_of_layer  # of activations, among which to choose

    @property
    def keeps_grads(self) -> bool:
        """Whether no block is updated before all gradients are known."""
        return self.update_order.keeps_grads

    @property
    def size(self) -> ModelSize:
        """For the arena."""
        return ModelSize(
            block_numels=tuple(block.numel for block in self.model.blocks),
            chunk_numel=self.model.chunk_numel,
            param_itemsize=self.param_itemsize,
            state_itemsize=self.state_itemsize,
            shared_blocks=self.model.shared_blocks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes that a job may take."""

    device_nbytes: float
    host_nbytes: float
    ssd_nbytes: float

    @property
    def by_tier(self) -> tuple[float, ...]:
        """In the order of `Tier`."""
        return (self.device_nbytes, self.host_nbytes, self.ssd_nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Blocks that are alike, and what their columns of the program mean."""

    blocks: tuple[int, ...]
    tiers: tuple[StateTier, ...] = ()
    activations: tuple[ActivationOption, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """A job on a machine, with groups of so many micro-batches.

    `streams`: all layers come to the device in pieces. `spills`: gradients that are kept go to the SSDs; then no states
    rest in memory. `overflows`: swapped activations may go on to the SSDs, for which staging buffers are there.
    """

    job: PlannedJob
    speeds: Speeds
    limits: Limits
    group_size: int
    streams: bool = False
    spills: bool = False
    overflows: bool = True
    num_grad_buffers: int = MAX_GRAD_BUFFERS
    depths: QueueDepths = field(default_factory=QueueDepths)

    @property
    def num_groups(self) -> int:
        """Of a step."""
        return -(-self.job.num_microbatches // self.group_size)

    def kinds(self) -> list[Kind]:
        """First by the states, then by the activations; in the order of the program's blocks."""
        layers = self.job.model.blocks_of_layers
        head = len(self.job.model.layers) + 1
        groups = [(0,), *layers.values(), (head,)]
        in_memory = self._tiers()
        by_states = [Kind(blocks=blocks, tiers=in_memory) for blocks in groups]
        by_activations = [
            Kind(blocks=blocks, activations=tuple(self.job.ways(layer))) for layer, blocks in layers.items()
        ]
        return [*by_states, *by_activations]

    def program(self, kinds: list[Kind]) -> Program:
        """To be solved."""
        return Program(
            blocks=tuple(self._alike(kind) for kind in kinds),
            seconds=self._seconds(dict(self._always())),
            nbytes=self._always_nbytes(),
            limits=self.limits.by_tier,
            bounds=tuple(self._bounds()),
            overflow=Overflow(source=Tier.HOST, target=Tier.SSD, seconds=self._overflow_seconds())
            if self.overflows
            else None,
            buffers=(
                Buffer(tier=Tier.DEVICE, most_nbytes=self._most_leaving_nbytes()),
                Buffer(tier=Tier.HOST, most_nbytes=self._transit_nbytes),
            ),
        )

    # --- ways -------------------------------------------------------------------------------------------------------

    def _tiers(self) -> tuple[StateTier, ...]:
        if self.spills:
            return (StateTier.CACHED, StateTier.SSD)
        if self.streams:  # what comes in pieces does not rest on the device
            return (StateTier.HOST, StateTier.CACHED, StateTier.SSD)
        return tuple(StateTier)

    def _alike(self, kind: Kind) -> BlockGroup:
        if kind.tiers:
            block = kind.blocks[0]
            ways = tuple(self._state_way(block, tier) for tier in kind.tiers)
        else:
            layer = self.job.model.layers[kind.blocks[0] - 1]
            ways = tuple(self._activation_way(layer, way) for way in kind.activations)
        return BlockGroup(count=len(kind.blocks), ways=ways)

    def _state_way(self, block: int, tier: StateTier) -> Way:
        job, speeds = self.job, self.speeds
        numel, chunks = job.model.blocks[block].numel, job.size.num_chunks(block)
        param_nbytes, grad_nbytes = numel * job.param_itemsize, numel * job.grad_itemsize
        seconds: dict[Part, float] = {}
        device = host = 0.0
        if tier in (StateTier.DEVICE, StateTier.HOST):
            seconds[Part.SSD_FLUSH] = numel * job.state_itemsize / COMMIT_EVERY / speeds.write_bytes
        if tier is StateTier.DEVICE:
            uses_forward, uses_backward = self._uses(block)
            round_s = numel / speeds.device_rounded_params if job.read_itemsize < job.state_itemsize else 0.0
            seconds[Part.FORWARD] = uses_forward * round_s
            seconds[Part.BACKWARD] = numel / speeds.device_params + uses_backward * round_s
            seconds[Part.D2H_BACKWARD] = numel * job.read_itemsize / COMMIT_EVERY / speeds.d2h_bytes
            device = numel * (job.read_itemsize + job.grad_itemsize)
            return self._way(seconds, device=device, in_transit=self._transit_nbytes)
        uses_forward, uses_backward = self._uses(block)
        seconds[Part.H2D_FORWARD] = uses_forward * param_nbytes / speeds.h2d_bytes
        seconds[Part.H2D_BACKWARD] = uses_backward * param_nbytes / speeds.h2d_bytes
        # Sums over tied uses are fp32, whatever gradients travel in.
        is_tied = block in job.model.shared_blocks
        partial_itemsize = PARTIAL_GRAD_ITEMSIZE if is_tied else job.grad_itemsize
        partial_nbytes = (self.num_groups - 1) * numel * partial_itemsize
        seconds[Part.H2D_BACKWARD] += partial_nbytes / speeds.h2d_bytes
        seconds[Part.D2H_BACKWARD] = (grad_nbytes + partial_nbytes) / speeds.d2h_bytes
        seconds[Part.OPTIMIZER] = numel / speeds.optimizer_params
        if tier is StateTier.SSD:
            seconds[Part.SSD_FORWARD] = self.num_groups * param_nbytes / speeds.read_bytes
            is_head = block == len(job.model.layers) + 1
            seconds[Part.SSD_BACKWARD] = 0.0 if is_head else self.num_groups * param_nbytes / speeds.read_bytes
        if tier in (StateTier.CACHED, StateTier.SSD):
            read_s = numel * job.read_itemsize / speeds.read_bytes
            seconds[Part.SSD_UPDATE] = read_s + numel * job.state_itemsize / speeds.write_bytes
        if self.spills:
            seconds[Part.SSD_BACKWARD] = seconds.get(Part.SSD_BACKWARD, 0.0) + grad_nbytes / speeds.write_bytes
            seconds[Part.SSD_UPDATE] += grad_nbytes / speeds.read_bytes
        if block == 0:
            read_s = seconds.get(Part.SSD_UPDATE, 0.0) / 2
            seconds[Part.FIRST_UPDATE] = max(
                grad_nbytes / speeds.d2h_bytes, seconds[Part.OPTIMIZER], param_nbytes / speeds.h2d_bytes, read_s
            )
        chunk_numel = job.size.chunk_numel
        if tier is StateTier.HOST:
            host += chunks * chunk_numel * job.state_itemsize
        if tier is StateTier.CACHED:
            host += chunks * chunk_numel * job.param_itemsize
        if job.keeps_grads and not self.spills:
            host += chunks * chunk_numel * job.grad_itemsize
        if self.num_groups > 1:
            num_uses = 1 + job.model.shared_blocks.count(block)
            host += num_uses * chunks * chunk_numel * PARTIAL_GRAD_ITEMSIZE
        return self._way(seconds, device=device, host=host)

    def _uses(self, block: int) -> tuple[int, int]:
        """How often a block's params come to the device for the forward pass and for the backward pass."""
        head = len(self.job.model.layers) + 1
        if block == head:
            return self.num_groups, 0
        if self.streams and block:
            # For each micro-batch anew; the backward pass computes again, and goes through the matrices from the end.
            return self.job.num_microbatches, 2 * self.job.num_microbatches
        return self.num_groups, self.num_groups

    def _activation_way(self, layer: LayerProfile, way: ActivationOption) -> Way:
        job, speeds = self.job, self.speeds
        swapped_nbytes = job.num_microbatches * job.model.size_share * way.swapped_nbytes
        seconds = {
            Part.FORWARD: job.num_microbatches * self.compute_s(layer)[0],
            Part.BACKWARD: job.num_microbatches * self.backward_s(layer, way),
            Part.D2H_FORWARD: swapped_nbytes / speeds.d2h_bytes,
            Part.H2D_BACKWARD: swapped_nbytes / speeds.h2d_bytes,
        }
        host = self.group_size * way.num_slots * ACTIVATION_SLOT_NBYTES
        # Copies by the cores that compute are done before the next layer is.
        leaving = 0.0 if self.speeds.shares_cores else self.group_size * way.swapped_nbytes
        # While the head computes, what the last layer swapped comes back; layers may differ, so this is the mean's.
        held = self.group_size * way.held_nbytes + way.swapped_nbytes / len(job.model.layers)
        return self._way(seconds, device=held, host=host, movable=host, leaving=leaving)

    def _way(
        self,
        seconds: dict[Part, float],
        *,
        device: float = 0.0,
        host: float = 0.0,
        movable: float = 0.0,
        leaving: float = 0.0,
        in_transit: float = 0.0,
    ) -> Way:
        host += device if self.speeds.shares_cores else 0.0
        return Way(
            seconds=self._seconds(seconds),
            nbytes=(device, host, 0.0),
            movable_nbytes=movable,
            buffered_nbytes=(leaving, in_transit),
        )

    def _most_leaving_nbytes(self) -> float:
        """Of what was swapped, still on the device: at least so much where it is more, as a tensor is let through."""
        ways = (way for layer in self.job.model.blocks_of_layers for way in self.job.ways(layer))
        largest = min((max(way.out_nbytes) for way in ways if way.out_nbytes), default=0)
        return max(self.depths.leaving_nbytes, largest)

    @property
    def _transit_nbytes(self) -> float:
        """Of the buffer for states that rest on the device, which is there as soon as one block's do."""
        return TRANSIT_DEPTH * self.job.size.chunk_numel * self.job.state_itemsize

    # --- what does not depend on choices ----------------------------------------------------------------------------

    def _always(self) -> Iterator[tuple[Part, float]]:
        model, num = self.job.model, self.job.num_microbatches
        embedding, head = self.compute_s(model.embedding), self.compute_s(model.head)
        yield Part.FORWARD, num * (embedding[0] + sum(head))
        yield Part.BACKWARD, num * embedding[1]

    def _always_nbytes(self) -> tuple[float, ...]:
        job = self.job
        plan = make_plan(
            job.size,
            num_optimizers=job.num_optimizers,
            grad_itemsize=job.grad_itemsize,
            keep_grads=job.keeps_grads,
            is_naive=job.update_order.is_naive,
            host_memory_nbytes=None,
            num_microbatches=job.num_microbatches,
            placement=Placement(
                group_size=self.group_size,
                num_cached_params=0,
                num_host_grad_blocks=0 if self.spills else None,
                streamed_blocks=self.streamed_blocks,
                depths=self.depths,
                # However much it is, what is staged takes the same.
                ssd_activation_nbytes=2**40 if self.overflows else 0,
            ),
        )
        host = plan.arena_nbytes - plan.partial_grads.nbytes
        if job.keeps_grads and not self.spills:
            host -= plan.grads.nbytes
        device = self._always_on_device()
        return (device, host + (device if self.speeds.shares_cores else 0.0), plan.ssd_nbytes)

    @property
    def streamed_blocks(self) -> tuple[int, ...]:
        """Layers that come in pieces."""
        layers = range(1, len(self.job.model.layers) + 1)
        return tuple(set(layers).difference(self.job.model.shared_blocks)) if self.streams else ()

    def _always_on_device(self) -> float:
        """Buffers for what passes through, and the most that one operation has alive."""
        job, model = self.job, self.job.model
        numels = [block.numel for block in model.blocks]
        resident = self.streamed_blocks  # what comes in pieces has no buffers of its own
        params = param_buffers(numels, model.shared, resident=resident, num_ahead=job.num_prefetched)
        num_waiting = self.num_grad_buffers + (1 if self.num_groups > 1 else 0)
        grads = grad_buffers(dict(enumerate(numels)), resident=(), num_waiting=num_waiting)
        pieces = 2 * max((model.layers[block - 1].largest_param_numel for block in self.streamed_blocks), default=0)
        param_numel = sum(numel * count for numel, count in params.items()) + pieces
        grad_numel = sum(numel * count for numel, count in grads.items())
        peak = max(block.peak_nbytes for block in model.blocks)
        return param_numel * job.param_itemsize + grad_numel * job.grad_itemsize + peak

    def compute_s(self, block: BlockProfile) -> tuple[float, float]:
        """Of one micro-batch forward, and backward without computing anything again."""
        forward_s = self._roofline_s(block.work) if block.forward_s is None else block.forward_s
        return forward_s, 2 * forward_s if block.backward_s is None else block.backward_s

    def backward_s(self, layer: LayerProfile, way: ActivationOption) -> float:
        """Of one micro-batch, with what is computed again."""
        return self.compute_s(layer)[1] + self.again_s(layer, way)

    def again_s(self, layer: LayerProfile, way: ActivationOption) -> float:
        """By what a layer takes longer than where nothing is computed again."""
        times, choice = layer.again, way.choice
        if times is None:
            return self.compute_s(layer)[0] * self._roofline_s(way.again) / self._roofline_s(layer.work)
        if not choice.recompute:
            return 0.0
        if not choice.kept and not choice.swapped:
            return times.all_s
        one, most = (self._roofline_s(end.again) for end in holding_ways(layer))
        share = (self._roofline_s(way.again) - most) / (one - most) if one > most else 0.0
        return times.most_held_s + share * (times.one_held_s - times.most_held_s)

    def _roofline_s(self, work: Work) -> float:
        """Products, and everything's outputs written and read."""
        moved_nbytes = 2 * self.job.model.size_share * work.nbytes
        return work.num_flops / self.speeds.device_flops + moved_nbytes / self.speeds.device_memory_bytes

    def _overflow_seconds(self) -> tuple[float, ...]:
        share = self.num_groups * self.job.model.size_share
        return self._seconds(
            {Part.SSD_FORWARD: share / self.speeds.write_bytes, Part.SSD_BACKWARD: share / self.speeds.read_bytes}
        )

    @staticmethod
    def _seconds(seconds: dict[Part, float]) -> tuple[float, ...]:
        return tuple(seconds.get(part, 0.0) for part in Part)

    # --- bounds -----------------------------------------------------------------------------------------------------

    def _bounds(self) -> Iterator[Bound]:
        head_s = self.job.num_microbatches * sum(self.compute_s(self.job.model.head))
        if self.num_grad_buffers == 1:  # nothing goes backward while a gradient is copied out
            alone = (Part.FORWARD, Part.BACKWARD, Part.D2H_BACKWARD)
            yield Bound(weights=self._seconds(dict.fromkeys(alone, 1.0)))
        for parts, constant_s in _bounding_parts(
            head_s,
            self._slots_of_updates(),
            order=self.job.update_order,
            ssd_cores=self._ssd_cores() if self.speeds.shares_cores else None,
            slowed_by_other_way=1 / self.speeds.duplex_share - 1,
        ):
            yield Bound(weights=self._seconds(parts), constant_s=constant_s)

    def _ssd_cores(self) -> float:
        """What a core does for the SSDs while they are all busy, as a share of that time."""
        return self.speeds.ssd_cpu_s_per_byte * (self.speeds.read_bytes + self.speeds.write_bytes) / 2

    def _slots_of_updates(self) -> dict[Part, float]:
        """How long a slot for states is taken: all chunks' time at one SSD and at one optimizer, by the slots."""
        depth = 1 if self.job.update_order.is_naive else self.depths.states
        num_slots = self.job.num_optimizers * depth
        return {
            Part.SSD_UPDATE: self.speeds.num_ssds / num_slots,
            Part.OPTIMIZER: self.job.num_optimizers / num_slots,
        }


def _bounding_parts(
    head_s: float,
    slots_of_updates: dict[Part, float],
    *,
    order: UpdateOrder,
    ssd_cores: float | None,
    slowed_by_other_way: float,
) -> Iterator[tuple[dict[Part, float], float]]:
    """Weights of parts, and seconds to add. `ssd_cores`: where the device is the CPU, see `_ssd_cores`.

    `slowed_by_other_way`: seconds by which one way of the link takes longer for each in which the other one is busy.
    """
    p = Part
    compute, ssd = (p.FORWARD, p.BACKWARD), (p.SSD_FORWARD, p.SSD_BACKWARD, p.SSD_UPDATE, p.SSD_FLUSH)
    h2d, d2h = (p.H2D_FORWARD, p.H2D_BACKWARD), (p.D2H_FORWARD, p.D2H_BACKWARD)
    for busy in (ssd, (p.OPTIMIZER,)):
        yield _once(*busy), 0.0
    # The best is that whatever takes the less busy way does so beside the other one.
    for way, other in ((h2d, d2h), (d2h, h2d)):
        yield _once(*way) | dict.fromkeys(other, slowed_by_other_way), 0.0
    yield _once(*compute, p.FIRST_UPDATE), 0.0
    if ssd_cores is not None:
        # Products are split evenly: while one core is taken by something else, all wait for it.
        yield _once(*compute, *h2d, *d2h, p.OPTIMIZER) | dict.fromkeys(ssd, ssd_cores), 0.0
    of_forward = [p.FORWARD, p.D2H_FORWARD]
    of_backward = [p.BACKWARD, p.H2D_BACKWARD]
    # The last update is of what the head needs, as what is needed first goes first.
    updates = [_once(p.OPTIMIZER), slots_of_updates]
    if order.keeps_grads:
        of_forward.append(p.H2D_FORWARD)
        of_backward += [p.D2H_BACKWARD, p.SSD_BACKWARD]
        updates.append(_once(p.SSD_FORWARD, p.SSD_UPDATE, p.SSD_FLUSH))
    else:
        updates.append(_once(p.SSD_UPDATE, p.SSD_FLUSH))
        for update in updates:
            yield update, head_s
    for backward in of_backward:
        for forward in of_forward:
            yield _once(forward, backward), 0.0
        if order.keeps_grads:
            for update in updates:
                yield update | _once(backward), head_s
    if not order.overlaps_steps:
        # The next forward pass waits for all updates, and they for all gradients: each of the three is alone.
        passes = itertools.product((*of_forward, p.SSD_FORWARD), of_backward)
        alone = (_once(p.OPTIMIZER), _once(p.SSD_UPDATE), slots_of_updates)
        for (forward, backward), update in itertools.product(passes, alone):
            yield update | _once(forward, backward), 0.0


def _once(*parts: Part) -> dict[Part, float]:
    return dict.fromkeys(parts, 1.0)
