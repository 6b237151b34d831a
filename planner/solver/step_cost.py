"""The cost model of a step: seconds of each part, bytes on each tier, and the bounds of the step time.

The parts are those of one step in steady state. Without clipping, updates run during both passes, so each resource's
bound is the sum of its work. Activation transfers must overlap with their own pass. With clipping, all gradients are
needed first, so updates overlap only with the next step's forward pass. Then the bounds are per pass.

Sources: Ratel, equations 1 to 8 (a stage takes as long as its slowest resource); AutoHete, equations 1 to 6.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, TypeVar

from windlass.engine.lanes import LaneDivision
from windlass.engine.memory_plan import (
    ACTIVATION_SLOT_NBYTES,
    COMMIT_EVERY,
    MAX_GRAD_BUFFERS,
    NO_CROSSINGS,
    NUM_PIECE_BUFFERS,
    PARTIAL_GRAD_ITEMSIZE,
    TRANSIT_DEPTH,
    Crossings,
    MemoryTier,
    ModelSize,
    Placement,
    QueueDepths,
    UpdateOrder,
    grad_buffers,
    grad_overlay_of_job,
    lane_buffers,
    make_plan,
    most_passing_blocks,
    overlay_nbytes,
    param_buffer_numels,
    param_buffers,
)
from windlass.engine.training_config import TrainingConfig
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
from windlass.planner.solver.program import BlockGroup, Bound, Buffer, Option, Overflow, Program
from windlass.planner.solver.step_bounds import (
    HOST_PARTS,
    Part,
    WaitingUpdates,
    bounding_parts,
    host_bounding_parts,
    once,
)

_MOST_COMMIT_EVERY = 1000  # steps between commits of states in memory

_Any = TypeVar("_Any")


# Numbers of the tiers in the program.
TIER_INDEX = {tier: index for index, tier in enumerate(MemoryTier)}


def values_by_tier(values: Sequence[float]) -> dict[MemoryTier, float]:
    """Returns the program's values for all tiers by tier."""
    return dict(zip(MemoryTier, values, strict=True))


class StateTier(IntEnum):
    """The tier on which a block's model states are resident, the fastest first."""

    DEVICE = 0
    HOST = 1
    CACHED = 2  # states on the SSDs; the params also stay in host memory between uses
    SSD = 3


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """The planner's view of a job."""

    model: ModelProfile  # for one micro-batch
    training: TrainingConfig
    num_ranks: int = 1  # GPU workers, each with a GPU of its own
    num_optimizers: int = 1
    num_prefetched: int = 2  # operations whose params are on the device at once
    ways: Ways = ways_of_layer  # options for activations
    # The planner may choose the order of updates, of those that give the same parameters; else it is the config's.
    chooses_order: bool = False
    group_size: int | None = None  # micro-batches that a GPU worker computes together; None: the planner chooses
    # Of a box that has a stage of the model only: what it exchanges with others, and how many groups of a GPU worker
    # have their activations on the device at once.
    crossings: Crossings = NO_CROSSINGS
    num_groups_in_flight: int = 1
    spills: bool | None = None  # kept gradients go to the SSDs; None: the planner chooses
    num_head_slices: int = 1  # parts of a micro-batch that go through the head one after the other
    # The elements of a part of a matrix, of which the planner may choose one, the largest first; none: it is that of
    # the training config. `with_cut`: makes the model of a job without a cut that of one with it.
    cuts: tuple[int, ...] = ()
    with_cut: Callable[[ModelProfile, int], ModelProfile] = lambda model, cut: model
    # Bytes of device memory that every plan with the same buffers and group size needs beyond the cost model's formula.
    left_out_nbytes: "Callable[[StepCosts], float]" = lambda costs: 0.0

    @cached_property
    def by_order(self) -> "tuple[PlannedJob, ...]":
        """The job with each order of updates that the planner may choose. Each of them has only one order."""
        if not self.chooses_order:
            return (self,)
        orders = dict.fromkeys((self.update_order, UpdateOrder.KEPT))
        return tuple(
            replace(self, training=replace(self.training, update_order=order), chooses_order=False) for order in orders
        )

    @property
    def cut(self) -> int | None:
        """The most elements of a part of a matrix; None: no matrix is cut."""
        return self.training.cut_matrices

    @cached_property
    def by_cut(self) -> "tuple[PlannedJob, ...]":
        """The job with each of `cuts`, the largest first."""
        return tuple(
            replace(
                self,
                model=self.with_cut(self.model, cut),
                training=replace(self.training, cut_matrices=cut),
                cuts=(),
            )
            for cut in self.cuts
        )

    @cached_property
    def known(self) -> dict[Any, Any]:
        """Parts of cost models that several plans share, so that they are computed once; see `StepCosts`."""
        return {}

    @cached_property
    def blocks_of_own_size(self) -> frozenset[int]:
        """The blocks of which no other one has the same size."""
        numels = [block.numel for block in self.model.blocks]
        number = Counter(numels)
        return frozenset(block for block, numel in enumerate(numels) if number[numel] == 1)

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of a step."""
        return self.training.num_microbatches

    @property
    def largest_group(self) -> int:
        """The most micro-batches that a GPU worker may compute together, so that each has a group if possible."""
        return -(-self.num_microbatches // self.num_ranks)

    @cached_property
    def lanes(self) -> LaneDivision:
        """The lanes of a step."""
        return self.training.lane_division

    @cached_property
    def update_order(self) -> UpdateOrder:
        """The order of the blocks' updates."""
        return self.training.order_of_updates

    @property
    def keeps_grads(self) -> bool:
        """True if all gradients must be known before any block is updated."""
        return self.update_order.keeps_grads

    @property
    def commit_period_s(self) -> float:
        """The seconds from one commit to the next, if states rest in memory. Checkpoints are made of commits, too."""
        return 60 * min(self.training.commit_minutes, self.training.checkpoint_minutes or math.inf)

    @cached_property
    def param_itemsize(self) -> int:
        """The bytes of a parameter."""
        formats = self.training.formats
        return formats.itemsizes[formats.param_kind]

    @cached_property
    def state_itemsize(self) -> int:
        """The bytes of all stored states of one parameter."""
        return sum(self.training.formats.itemsizes.values())

    @cached_property
    def read_itemsize(self) -> int:
        """The bytes of those states that an update reads. Only these are resident on a device."""
        return self.training.formats.update_itemsize

    @cached_property
    def grad_itemsize(self) -> int:
        """The bytes of an element of a gradient in transit to the optimizer."""
        return self.training.grad_itemsize

    @cached_property
    def size(self) -> ModelSize:
        """The sizes that the arena depends on."""
        return ModelSize(
            block_numels=tuple(block.numel for block in self.model.blocks),
            chunk_numel=self.model.chunk_numel,
            param_itemsize=self.param_itemsize,
            state_itemsize=self.state_itemsize,
            shared_blocks=self.model.shared_blocks,
            own=self.model.own,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bytes that a job may use on each tier."""

    device_nbytes: float
    host_nbytes: float
    ssd_nbytes: float

    @property
    def by_tier(self) -> dict[MemoryTier, float]:
        """The limits, in the order of the tiers."""
        return values_by_tier((self.device_nbytes, self.host_nbytes, self.ssd_nbytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A group of equal blocks, with the meaning of its columns in the program."""

    blocks: tuple[int, ...]
    tiers: tuple[StateTier, ...] = ()
    activations: tuple[ActivationOption, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _MovedSums:
    """The bytes that a step moves for a block's gradient and its unfinished sums."""

    in_nbytes: float  # to one device
    out_nbytes: float  # from one device
    between_nbytes: float  # of these, in either direction: totals between two lanes of a group
    in_host_nbytes: float  # read and written in host memory, of all GPU workers


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """The costs of a job on a machine, for one group size.

    Compute, and all that passes a link, are those of one GPU worker: several compute at the same time, and each has its
    own link. The params that a round of groups needs are read from the SSDs once. All else is as with one GPU worker.

    `streams`: all layers are copied to the device in pieces. `streams_grads`: their gradients leave it in pieces, too,
    and come back for each further micro-batch. `streams_ends`: both also for embedding and head. `spills`: kept
    gradients go to the SSDs; then no states are resident in memory. `overflows`: swapped activations may continue to
    the SSDs, so staging buffers exist. `num_passing_blocks`: typical blocks whose gradients may wait for their update,
    if gradients are not kept; None: as many as are useful.
    """

    job: PlannedJob
    speeds: Speeds
    limits: Limits
    group_size: int
    streams: bool = False
    spills: bool = False
    overflows: bool = True
    num_grad_buffers: int = MAX_GRAD_BUFFERS
    streams_grads: bool = False
    streams_ends: bool = False
    num_passing_blocks: int | None = None
    depths: QueueDepths = field(default_factory=QueueDepths)
    given_commit_every: int | None = None  # steps between commits of states in memory; None: see `commit_every`
    # Parts of the cost model that depend on the group size, what streams and what spills only.
    _shared: dict[object, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pieces = self.streams, self.streams_grads, self.streams_ends
        key = (self.speeds, self.group_size, pieces, self.spills, self.commit_every)
        object.__setattr__(self, "_shared", self.job.known.setdefault(key, {}))

    def _once_known(self, what: object, compute: Callable[[], _Any]) -> _Any:
        """Returns a part of `_shared`. `what` names it, with all else that it depends on."""
        return _known(self._shared, what, compute)

    @property
    def saver_of_device_memory(self) -> tuple[bool, bool, bool, int, int | None]:
        """The choices of pieces for layers, gradients and ends, the number of buffers for gradients, and the cut."""
        return self.streams, self.streams_grads, self.streams_ends, self.num_grad_buffers, self.job.cut

    @property
    def num_groups(self) -> int:
        """The number of groups in a step."""
        return -(-self.job.num_microbatches // self.group_size)

    @property
    def num_rounds(self) -> int:
        """The number of groups that the first GPU worker computes in a step."""
        return -(-self.num_groups // self.job.num_ranks)

    @property
    def num_successive(self) -> int:
        """The number of micro-batches that the first GPU worker computes in a step."""
        return min(self.job.num_microbatches, self.num_rounds * self.group_size)

    @property
    def microbatches_of_ranks(self) -> tuple[int, ...]:
        """The number of micro-batches of a step that each GPU worker computes."""
        num_microbatches, num_ranks = self.job.num_microbatches, self.job.num_ranks
        starts = range(0, num_microbatches, self.group_size)
        sizes = [min(self.group_size, num_microbatches - start) for start in starts]
        return tuple(sum(sizes[rank::num_ranks]) for rank in range(num_ranks))

    @property
    def num_devices_in_host(self) -> int:
        """The number of devices whose memory is the host's."""
        return self.job.num_ranks if self.speeds.shares_cores else 0

    @property
    def num_partial_sums(self) -> int:
        """The number of sums of each element that one GPU worker passes on in a step: totals, and unfinished lanes."""
        return -(-self._num_sums // self.job.num_ranks)

    @property
    def num_sums_beside_gradient(self) -> int:
        """The number of those sums that the GPU worker of the last group passes on. It copies the gradient out, too."""
        return self._num_sums // self.job.num_ranks

    @property
    def _num_sums(self) -> int:
        return self.num_groups - 1 + self.job.lanes.num_open_lanes(self.group_size)

    @property
    def lag(self) -> float:
        """The time by which the last GPU worker's backward pass ends after that of the first, as a share of it.

        Each begins one block after the one before, because it continues the gradient sum of the block.
        """
        num_behind = min(self.job.num_ranks, self.num_groups) - 1
        return num_behind / (self.num_rounds * max(1, self.job.model.num_own_layers))

    @property
    def num_held_microbatches(self) -> int:
        """The micro-batches of one GPU worker whose activations are held at once."""
        return self.group_size * self.job.num_groups_in_flight

    @property
    def num_flats(self) -> int:
        """The number of sums of an element that may exist at once between two groups."""
        return 2 if self.job.lanes.num_open_lanes(self.group_size) else 1

    def kinds(self) -> list[Kind]:
        """Returns the groups of blocks in the program's order: first by states, then by activations."""
        return self._once_known("kinds", self._kinds)

    def _kinds(self) -> list[Kind]:
        layers = self.job.model.blocks_of_layers
        head = len(self.job.model.layers) + 1
        groups = [blocks for blocks in ((0,), *layers.values(), (head,)) if self.job.model.is_own(blocks[0])]
        in_memory = self._tiers()
        by_states = [Kind(blocks=blocks, tiers=in_memory) for blocks in groups]
        by_activations = [
            Kind(blocks=blocks, activations=tuple(self.job.ways(layer))) for layer, blocks in layers.items()
        ]
        return [*by_states, *by_activations]

    def program(self, kinds: list[Kind]) -> Program:
        """Builds the integer program."""
        return self._program(kinds, self._always_nbytes())

    def program_without_buffers(self, kinds: list[Kind]) -> Program:
        """Builds the integer program as if the job's buffers took no memory."""
        return self._program(kinds, (0.0,) * len(MemoryTier))

    def _program(self, kinds: list[Kind], nbytes: tuple[float, ...]) -> Program:
        # They do not depend on what streams or spills, except for a single buffer of whole gradients.
        buffers = self._waits_for_copies, self.depths.states, self.num_passing_blocks
        of_bounds = "bounds", self.speeds, self.group_size, buffers
        return Program(
            blocks=self._once_known("blocks", lambda: tuple(self._block_group(kind) for kind in kinds)),
            seconds=self._once_known("seconds", lambda: self._seconds(dict(self._always()))),
            nbytes=nbytes,
            limits=(self.limits.device_nbytes, self.limits.host_nbytes, self.limits.ssd_nbytes),
            bounds=_known(self.job.known, of_bounds, lambda: tuple(self._bounds())),
            uncounted_parts=HOST_PARTS,
            overflow=self._once_known("overflow", self._overflow) if self.overflows else None,
            buffers=(
                Buffer(tier=TIER_INDEX[MemoryTier.DEVICE], most_nbytes=self._most_leaving_nbytes()),
                Buffer(tier=TIER_INDEX[MemoryTier.HOST], most_nbytes=self._transit_nbytes),
            ),
        )

    @property
    def commit_every(self) -> int:
        """The steps from one commit to the next, if states rest in memory.

        A commit writes all of them to the SSDs, and the next updates wait for it. So commits are as rare as a loss of
        `commit_minutes` allows, if the machine fails.
        """
        if self.given_commit_every is not None:
            return self.given_commit_every
        return _known(self.job.known, ("commit_every", self.speeds, self.limits.host_nbytes), self._commit_every)

    def _commit_every(self) -> int:
        step_s = self._likely_step_s()
        most = self.job.commit_period_s / step_s if step_s > 0 else _MOST_COMMIT_EVERY
        return max(COMMIT_EVERY, int(min(most, _MOST_COMMIT_EVERY)))

    def _likely_step_s(self) -> float:
        """Returns the longest of what a step takes at least if host memory holds as many states as it can.

        It does not depend on the plan: what is computed, updated by CPUs, and moved by a link and the SSDs.
        """
        job, speeds, numel = self.job, self.speeds, self.job.model.numel
        computed_s = sum(sum(self.compute_s(block)) for block in job.model.blocks)
        num_on_ssds = max(0.0, numel - self.limits.host_nbytes / job.state_itemsize)
        return max(
            job.num_microbatches / job.num_ranks * computed_s,
            numel / speeds.optimizer_params,
            2 * numel * job.param_itemsize / speeds.h2d_bytes,
            num_on_ssds * job.state_itemsize * (1 / speeds.read_bytes + 1 / speeds.write_bytes),
        )

    # --- options ----------------------------------------------------------------------------------------------------

    def _tiers(self) -> tuple[StateTier, ...]:
        if self.spills:
            return (StateTier.CACHED, StateTier.SSD)
        if self.streams or self.job.num_ranks > 1:  # then no states are resident on a device
            return (StateTier.HOST, StateTier.CACHED, StateTier.SSD)
        return tuple(StateTier)

    def _block_group(self, kind: Kind) -> BlockGroup:
        if kind.tiers:
            block = kind.blocks[0]
            options = tuple(self._state_option(block, tier) for tier in kind.tiers)
            return BlockGroup(count=len(kind.blocks), options=options)
        # They do not depend on what streams or spills.
        key = ("activations", self.speeds, self.group_size, kind.blocks[0])
        return _known(self.job.known, key, lambda: self._activation_group(kind))

    def _activation_group(self, kind: Kind) -> BlockGroup:
        layer = self.job.model.layers[kind.blocks[0] - 1]
        options = tuple(self._activation_option(layer, way) for way in kind.activations)
        return BlockGroup(count=len(kind.blocks), options=options)

    def _state_option(self, block: int, tier: StateTier) -> Option:
        job, speeds = self.job, self.speeds
        numel, chunks = job.model.blocks[block].numel, job.size.num_chunks(block)
        param_nbytes, grad_nbytes = numel * job.param_itemsize, numel * job.grad_itemsize
        num_uses = 1 + job.model.shared_blocks.count(block)
        lanes_s = num_uses * self.adding_lanes_s(block) + self.norms_s(block)
        seconds: dict[Part, float] = {Part.BACKWARD: lanes_s} if lanes_s else {}
        device = host = 0.0
        if tier in (StateTier.DEVICE, StateTier.HOST):
            seconds[Part.SSD_FLUSH] = numel * job.state_itemsize / self.commit_every / speeds.write_bytes
        if tier is StateTier.DEVICE:
            uses_forward, uses_backward = self._uses(block)
            round_s = numel / speeds.device_rounded_params if job.read_itemsize < job.state_itemsize else 0.0
            seconds[Part.FORWARD] = uses_forward * round_s
            seconds[Part.BACKWARD] = numel / speeds.device_params + uses_backward * round_s + lanes_s
            # All states: params that are not resident there are rounded on the device, and copied too.
            seconds[Part.D2H_BACKWARD] = numel * job.state_itemsize / self.commit_every / speeds.d2h_bytes
            seconds[Part.HOST_MEMORY] = 2 * numel * job.state_itemsize / self.commit_every / speeds.host_memory_bytes
            device = numel * (job.read_itemsize + self.num_flats * job.grad_itemsize)
            return self._way(seconds, device=device, in_transit=self._transit_nbytes)
        uses_forward, uses_backward = self._uses(block)
        seconds[Part.H2D_FORWARD] = uses_forward * param_nbytes / speeds.h2d_bytes
        seconds[Part.H2D_BACKWARD] = uses_backward * param_nbytes / speeds.h2d_bytes
        sums = self._sums_of(block)
        in_nbytes, out_nbytes = sums.in_nbytes, sums.out_nbytes
        seconds[Part.H2D_BACKWARD] += in_nbytes / speeds.h2d_bytes
        seconds[Part.D2H_BACKWARD] = out_nbytes / speeds.d2h_bytes
        seconds[Part.OPTIMIZER] = numel / speeds.optimizer_params
        if tier is StateTier.SSD:
            reads_forward, reads_backward = self._fetches(block)
            seconds[Part.SSD_FORWARD] = reads_forward * param_nbytes / speeds.read_bytes
            seconds[Part.SSD_BACKWARD] = reads_backward * param_nbytes / speeds.read_bytes
        if tier in (StateTier.CACHED, StateTier.SSD):
            read_s = numel * (job.read_itemsize - self._read_from_memory(tier)) / speeds.read_bytes
            seconds[Part.SSD_UPDATE] = read_s + numel * job.state_itemsize / speeds.write_bytes
        if self.spills:
            seconds[Part.SSD_BACKWARD] = seconds.get(Part.SSD_BACKWARD, 0.0) + grad_nbytes / speeds.write_bytes
            seconds[Part.SSD_UPDATE] += grad_nbytes / speeds.read_bytes
        for part, nbytes in self._in_host_memory(block, tier, sums.in_host_nbytes).items():
            seconds[part] = nbytes / speeds.host_memory_bytes
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
        if self.num_groups > job.num_ranks:
            host += self.num_flats * num_uses * chunks * chunk_numel * PARTIAL_GRAD_ITEMSIZE
        return self._way(seconds, device=device, host=host)

    def _sums_of(self, block: int) -> "_MovedSums":
        """Returns the bytes that a step moves for a block's gradient and its unfinished sums."""
        job, numel = self.job, self.job.model.blocks[block].numel
        num_all, num_partial, num_beside = self._num_sums, self.num_partial_sums, self.num_sums_beside_gradient
        num_between = 0
        if self._is_in_pieces and block in self.streamed_blocks:
            # A sum comes for each micro-batch but the step's first one: that of its lane, or at a lane's end the total.
            # The head's comes for each slice.
            num_slices = job.num_head_slices if self._is_head(block) else 1
            num_all = num_slices * job.num_microbatches - 1
            num_partial = num_slices * self.num_successive - (1 if job.num_ranks == 1 else 0)
            num_beside = num_slices * self.num_successive - 1
        elif block in self._overlaid_blocks:
            # There is room for one sum, so the total goes out and in between two lanes of a group.
            num_lanes_more = max(0, job.lanes.num_lanes - self.num_groups)
            num_between = -(-num_lanes_more // job.num_ranks)
            num_all += num_lanes_more
            num_partial, num_beside = num_partial + num_between, num_beside + num_between
        # Gradients of tied params are summed in fp32, whatever type they travel in.
        is_tied = block in job.model.shared_blocks
        sum_nbytes = numel * (PARTIAL_GRAD_ITEMSIZE if is_tied else job.grad_itemsize)
        grad_nbytes = numel * job.grad_itemsize
        return _MovedSums(
            in_nbytes=num_partial * sum_nbytes,
            out_nbytes=max(num_partial * sum_nbytes, num_beside * sum_nbytes + grad_nbytes),
            between_nbytes=num_between * sum_nbytes,
            in_host_nbytes=2 * num_all * sum_nbytes + grad_nbytes,
        )

    def _in_host_memory(self, block: int, tier: StateTier, grads_nbytes: float) -> dict[Part, float]:
        """Returns the bytes that a step reads and writes in host memory for a block whose states are not on a device.

        `grads_nbytes`: of its gradient and of unfinished sums, in and out, of all GPU workers.
        """
        job, numel = self.job, self.job.model.blocks[block].numel
        param_nbytes = numel * job.param_itemsize
        # The copies of all GPU workers. The last round may be without some of them.
        workers = (
            job.num_microbatches / self.num_successive
            if block in self.streamed_blocks
            else self.num_groups / self.num_rounds
        )
        forward_nbytes, backward_nbytes = (workers * number * param_nbytes for number in self._uses(block))
        backward_nbytes += grads_nbytes
        update_nbytes: float = numel * (job.read_itemsize + job.grad_itemsize + job.state_itemsize)
        flushed_nbytes = 0.0
        if tier is StateTier.HOST:
            flushed_nbytes = numel * job.state_itemsize / self.commit_every
        else:
            update_nbytes += numel * (job.read_itemsize - self._read_from_memory(tier) + job.state_itemsize)
            if tier is StateTier.SSD:
                reads_forward, reads_backward = self._fetches(block)
                forward_nbytes += reads_forward * param_nbytes
                backward_nbytes += reads_backward * param_nbytes
            if self.spills:
                backward_nbytes += numel * job.grad_itemsize
                update_nbytes += numel * job.grad_itemsize
        return {
            Part.HOST_MEMORY: forward_nbytes + backward_nbytes + update_nbytes + flushed_nbytes,
            # Kept gradients are updated before the head.
            Part.HOST_FORWARD: forward_nbytes + (update_nbytes if job.keeps_grads else 0.0),
            Part.HOST_BACKWARD: backward_nbytes,
        }

    def _read_from_memory(self, tier: StateTier) -> int:
        """Returns the bytes of a param that an update finds in host memory: cached params that are part of the master.

        The saving is left out where gradients spill or updates start with them. There the params would take memory from
        waiting gradients, which the program does not count, and simulated steps were slower than planned ones.
        """
        job = self.job
        counts = job.keeps_grads and not self.spills and job.read_itemsize == job.state_itemsize
        return job.param_itemsize if tier is StateTier.CACHED and counts else 0

    def _uses(self, block: int) -> tuple[int, int]:
        """Returns how often a block's params are copied to the device in the forward and in the backward pass."""
        if self.streams_ends and not 0 < block <= len(self.job.model.layers):
            number = self.num_successive * (self.job.num_head_slices if self._is_head(block) else 1)
            return number, number
        if block in self.streamed_blocks:
            # Once for each micro-batch. The backward pass recomputes, and then uses the matrices again from the end.
            return self.num_successive, 2 * self.num_successive
        return self._fetches(block)

    def _fetches(self, block: int) -> tuple[int, int]:
        """Returns how often a block's params are fetched in the forward and in the backward pass; an upper bound.

        The bound is exact for the embedding and the head. A block of a size of its own has a device buffer of its own,
        where all operations of a step find its params. Of other blocks, those in the buffers at the turns of a pass are
        fetched once less (`BlockBuffers`). That depends on the order in which blocks are placed, so it is not counted.
        """
        is_head = self._is_head(block)
        if self._ends_share_params and (block == 0 or is_head):
            # The embedding stays there from a group's backward pass to the next one's forward pass.
            return (self.num_rounds, 0) if is_head else (1, self.num_rounds)
        if block not in self.streamed_blocks and block in self.job.blocks_of_own_size:
            return 1, 0
        return self.num_rounds, 0 if is_head else self.num_rounds

    def _is_head(self, block: int) -> bool:
        return block == len(self.job.model.layers) + 1

    def _activation_option(self, layer: LayerProfile, way: ActivationOption) -> Option:
        job, speeds, num = self.job, self.speeds, self.num_successive
        swapped_nbytes = num * job.model.size_share * way.swapped_nbytes
        seconds = {
            Part.FORWARD: num * self.compute_s(layer)[0],
            Part.BACKWARD: num * self.backward_s(layer, way),
            Part.D2H_FORWARD: swapped_nbytes / speeds.d2h_bytes,
            Part.H2D_BACKWARD: swapped_nbytes / speeds.h2d_bytes,
        }
        # Of all GPU workers, out and in.
        passed_s = job.num_microbatches / num * swapped_nbytes / speeds.host_memory_bytes
        seconds |= {Part.HOST_MEMORY: 2 * passed_s, Part.HOST_FORWARD: passed_s, Part.HOST_BACKWARD: passed_s}
        host = job.num_ranks * self.num_held_microbatches * way.num_slots * ACTIVATION_SLOT_NBYTES
        # The CPU finishes its copies before it computes the next layer.
        leaving = 0.0 if self.speeds.shares_cores else self.group_size * way.swapped_nbytes
        # While the head computes, the last layer's swapped activations return. Layers may differ, so take their mean.
        held = self.num_held_microbatches * way.held_nbytes + way.swapped_nbytes / job.model.num_own_layers
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
    ) -> Option:
        host += self.num_devices_in_host * device
        return Option(
            seconds=self._seconds(seconds),
            nbytes=(device, host, 0.0),
            movable_nbytes=movable,
            buffered_nbytes=(leaving, in_transit),
        )

    def _most_leaving_nbytes(self) -> float:
        """Returns the maximum bytes of swapped activations that have not left the device yet.

        The result has room for the largest tensors of the option whose tensors are smallest: see `num_leaving`.
        """
        largest = self._once_known("least leaving", self._least_leaving_nbytes)
        return max(self.depths.leaving_nbytes, self.num_leaving * largest)

    def _least_leaving_nbytes(self) -> int:
        ways = (way for layer in self.job.model.blocks_of_layers for way in self.job.ways(layer))
        return min((max(way.out_nbytes) for way in ways if way.out_nbytes), default=0)

    @property
    def num_leaving(self) -> int:
        """The number of tensors that may be leaving the device, however large they are.

        With one, the thread that launches kernels would wait for each copy. A single one is always admitted, because
        plans may have to save device memory. If activations go to SSDs too, each of the two stores admits one.
        """
        return 2 if self.depths.leaving_nbytes else 1

    @property
    def _transit_nbytes(self) -> float:
        """The size of the buffer for states resident on the device. It exists if at least one block's states are."""
        return TRANSIT_DEPTH * self.job.size.chunk_numel * self.job.state_itemsize

    # --- independent of the options ---------------------------------------------------------------------------------

    def _always(self) -> Iterator[tuple[Part, float]]:
        model, num = self.job.model, self.num_successive
        embedding, head = self.compute_s(model.embedding), self.compute_s(model.head)
        yield Part.FORWARD, num * (embedding[0] + sum(head))
        # The layers' backward pass waits until the head's gradient has left the memory that both use. Sums of embedding
        # and head come to it during their operations.
        waiting_s = 0.0
        for block in self._overlaid_blocks:
            sums = self._sums_of(block)
            leaving_nbytes = sums.out_nbytes if block > 0 else sums.between_nbytes
            waiting_s += sums.in_nbytes / self.speeds.h2d_bytes + leaving_nbytes / self.speeds.d2h_bytes
        yield Part.BACKWARD, num * embedding[1] + waiting_s

    def _always_nbytes(self) -> tuple[float, ...]:
        depths = self.depths.params, self.depths.states, self.depths.staged_activations
        of_host = "host", depths, self.overflows, self.num_passing_blocks
        host, ssd = self._once_known(of_host, self._count_always_on_host)
        device = self.always_on_device
        return (device, host + self.num_devices_in_host * device, ssd)

    def _count_always_on_host(self) -> tuple[float, float]:
        """Returns the bytes of the arena's buffers, and of all states on the SSDs."""
        job = self.job
        plan = make_plan(
            job.size,
            num_optimizers=job.num_optimizers,
            grad_itemsize=job.grad_itemsize,
            keep_grads=job.keeps_grads,
            is_naive=job.update_order.is_naive,
            host_memory_nbytes=None,
            num_microbatches=job.num_microbatches,
            num_lanes=job.lanes.num_lanes,
            num_ranks=job.num_ranks,
            placement=Placement(
                group_size=self.group_size,
                num_cached_params=0,
                num_host_grad_blocks=0 if self.spills else None,
                num_passing_blocks=self.num_passing_blocks,
                streamed_blocks=self.streamed_layers,
                streams_grads=self.streams_grads,
                streams_ends=self.streams_ends,
                depths=self.depths,
                # The staging buffers do not depend on the amount.
                ssd_activation_nbytes=2**40 if self.overflows else 0,
            ),
            crossings=job.crossings,
        )
        host = plan.arena_nbytes
        if not plan.passes_sums_at_once:
            host -= plan.partial_grads.nbytes + plan.open_lanes.nbytes
            # Those of own blocks are counted with their states.
            num_passed = job.crossings.num_passed_chunks(job.num_ranks)
            host += self.num_flats * num_passed * plan.partial_grads.slot_nbytes
        if job.keeps_grads and not self.spills:
            host -= plan.grads.nbytes
        return host, plan.ssd_nbytes

    @property
    def streamed_layers(self) -> tuple[int, ...]:
        """The layers that are copied in pieces."""
        return self.job.model.unshared_layers if self.streams else ()

    @property
    def streamed_blocks(self) -> tuple[int, ...]:
        """The blocks that are copied in pieces."""
        return (*self.streamed_layers, *self._own_ends) if self.streams_ends else self.streamed_layers

    @property
    def _own_ends(self) -> tuple[int, ...]:
        """The embedding and the head, as far as the box computes them."""
        return tuple(block for block in (0, len(self.job.model.layers) + 1) if self.job.model.is_own(block))

    @property
    def may_stream_ends(self) -> bool:
        """True if embedding and head can come in pieces, and their gradients leave in pieces, as those of layers do."""
        job = self.job
        is_rounded = job.grad_itemsize < PARTIAL_GRAD_ITEMSIZE and job.num_head_slices > 1
        is_alone = not job.model.shared_blocks and not job.crossings.num_lent_chunks
        return self.streams_grads and is_alone and not is_rounded

    @property
    def _is_in_pieces(self) -> bool:
        """True if gradients leave in pieces, and there are layers whose gradients can."""
        return self.streams_grads and bool(self.streamed_blocks)

    @property
    def always_on_device(self) -> float:
        """The bytes of the device's buffers and of the largest operation."""
        nbytes = self._once_known(("device", self.num_grad_buffers), self._count_always_on_device)
        return nbytes + self.job.left_out_nbytes(self)

    @property
    def least_on_device_if_cut(self) -> float:
        """A lower bound of the same for all cuts of matrices: without pieces and operations."""
        least = replace(self, streams_ends=True) if self.may_stream_ends else self
        return self._once_known(("cut", self.num_grad_buffers), lambda: least._buffers_on_device(piece=0))

    def _count_always_on_device(self) -> float:
        model, cut = self.job.model, self.job.cut
        piece = max((model.layers[block - 1].largest_param_numel for block in self.streamed_layers), default=0)
        if self.streams_ends:
            piece = max(piece, model.embedding.numel, model.head.numel)
        peak = max(block.peak_nbytes for block in model.blocks)
        return self._buffers_on_device(piece=piece if cut is None else min(piece, cut)) + peak

    def _buffers_on_device(self, *, piece: int) -> float:
        """Returns the bytes of the device's buffers. `piece`: elements of the largest piece."""
        job, model = self.job, self.job.model
        numels = [block.numel for block in model.blocks]
        resident = self.streamed_blocks  # streamed layers have no buffers of their own
        of_params = param_buffer_numels(numels, ends_share=self._ends_share_params)
        params = param_buffers(of_params, model.shared, resident=resident, num_ahead=job.num_prefetched)
        num_waiting = self.num_grad_buffers + (1 if self.num_groups > 1 else 0)
        elsewhere = {*resident, *self._overlaid_blocks} if self._is_in_pieces else ()
        whole = {block: numel for block, numel in enumerate(numels) if block not in elsewhere}
        grads = grad_buffers(whole, resident=(), num_waiting=num_waiting)
        grads += lane_buffers(
            numels, model.shared, grads, lanes=job.lanes, group_size=self.group_size, elsewhere=elsewhere
        )
        param_numel = sum(numel * count for numel, count in params.items()) + NUM_PIECE_BUFFERS * piece
        grad_numel = sum(numel * count for numel, count in grads.items())
        overlay = self._overlay_nbytes(piece) if self._is_in_pieces else 0
        return param_numel * job.param_itemsize + grad_numel * job.grad_itemsize + overlay

    @property
    def _overlaid_blocks(self) -> tuple[int, ...]:
        """The blocks whose gradients lie in the memory of gradients in pieces: see `Plan.grad_overlaid_blocks`."""
        return self._own_ends if self._is_in_pieces and not self.streams_ends else ()

    @property
    def _ends_share_params(self) -> bool:
        """See `Plan.ends_share_params`."""
        return len(self._overlaid_blocks) == 2 and not self.job.model.shared_blocks

    def _overlay_nbytes(self, piece: int) -> int:
        """Returns the bytes of that memory. `piece`: elements of the largest one."""
        job, layer = self.job, self.streamed_layers[0]
        users = grad_overlay_of_job(
            [piece if block == layer else profile.numel for block, profile in enumerate(job.model.blocks)],
            {layer: (0, piece)},
            self._overlaid_blocks,
            itemsize=job.grad_itemsize,
            summed_in_fp32=job.model.shared_blocks,
            is_summed=job.num_microbatches > 1,
            has_lanes=job.lanes.num_lanes > 1,
        )
        return overlay_nbytes([numel * itemsize for numel, itemsize in buffers] for buffers in users.values())

    def compute_s(self, block: BlockProfile) -> tuple[float, float]:
        """Returns seconds of one micro-batch: forward, and backward without recomputation."""
        forward_s = self._roofline_s(block.work) if block.forward_s is None else block.forward_s
        return forward_s, 2 * forward_s if block.backward_s is None else block.backward_s

    def adding_lanes_s(self, block: int) -> float:
        """Returns the seconds of a step in which the lanes of one use of a block are added."""
        return (self.job.lanes.num_lanes - 1) * self.job.model.blocks[block].numel / self.speeds.device_added_params

    def norms_s(self, block: int) -> float:
        """Returns the seconds of a step for the norms of a gradient's chunks. With one lane, backward includes them."""
        profile = self.job.model.blocks[block]
        if self.job.lanes.num_lanes == 1:
            return 0.0
        return profile.numel / self.speeds.device_squared_params if profile.norms_s is None else profile.norms_s

    def backward_s(self, layer: LayerProfile, way: ActivationOption) -> float:
        """Returns seconds of one micro-batch's backward pass, with recomputation."""
        return self.compute_s(layer)[1] + self.again_s(layer, way)

    def again_s(self, layer: LayerProfile, way: ActivationOption) -> float:
        """Returns the additional seconds of one micro-batch that recomputation takes."""
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
        """Returns seconds for the FLOPs of matrix products, and for writing and reading all outputs."""
        moved_nbytes = 2 * self.job.model.size_share * work.nbytes
        return work.num_flops / self.speeds.device_flops + moved_nbytes / self.speeds.device_memory_bytes

    def _overflow(self) -> Overflow:
        # The program moves the activations of all GPU workers, which are those of the rounds in flight.
        num_held = self.job.num_ranks * self.job.num_groups_in_flight
        share = self.num_groups / num_held * self.job.model.size_share
        seconds = {
            Part.SSD_FORWARD: share / self.speeds.write_bytes,
            Part.SSD_BACKWARD: share / self.speeds.read_bytes,
        }
        passed_s = share / self.speeds.host_memory_bytes
        seconds |= {Part.HOST_MEMORY: 2 * passed_s, Part.HOST_BACKWARD: passed_s}
        if self.job.keeps_grads:  # else writes may go on in the backward pass
            seconds[Part.HOST_FORWARD] = passed_s
        source, target = TIER_INDEX[MemoryTier.HOST], TIER_INDEX[MemoryTier.SSD]
        return Overflow(source=source, target=target, seconds=self._seconds(seconds))

    @staticmethod
    def _seconds(seconds: dict[Part, float]) -> tuple[float, ...]:
        by_part = [0.0] * len(Part)
        for part, value in seconds.items():
            by_part[part] = value
        return tuple(by_part)

    # --- bounds -----------------------------------------------------------------------------------------------------

    def _bounds(self) -> Iterator[Bound]:
        head_s = self.num_successive * sum(self.compute_s(self.job.model.head))
        for parts, constant_s in bounding_parts(
            head_s,
            self.slots_of_updates(),
            order=self.job.update_order,
            ssd_cores=self._ssd_cores() if self.speeds.shares_cores else None,
            slowed_by_other_way=1 / self.speeds.duplex_share - 1,
            num_rounds=self.num_rounds,
            waiting=self._waiting,
            waits_for_copies=self._waits_for_copies,
        ):
            yield self._bound(parts, constant_s)
        passes = host_bounding_parts(waits_for_copies=self._waits_for_copies)
        # Several GPU workers drift apart, so one's forward pass may be beside another's backward pass.
        for parts in (once(Part.HOST_MEMORY), *(passes if self.job.num_ranks == 1 else ())):
            yield replace(self._bound(parts), is_rare=True)

    def _bound(self, parts: dict[Part, float], constant_s: float = 0.0) -> Bound:
        """Returns a bound. The backward pass ends with that of the last GPU worker."""
        if Part.BACKWARD in parts:
            parts = {**parts, Part.BACKWARD: parts[Part.BACKWARD] * (1.0 + self.lag)}
        return Bound(weights=self._seconds(parts), constant_s=constant_s)

    @property
    def _waits_for_copies(self) -> bool:
        """True if the backward pass waits while a gradient is copied out."""
        return self.num_grad_buffers == 1 and not self._is_in_pieces

    @property
    def _waiting(self) -> WaitingUpdates | None:
        """The updates whose gradients have room while they wait. None: all gradients wait."""
        job, size, speeds, number = self.job, self.job.size, self.speeds, self.num_passing_blocks
        if job.keeps_grads:
            return None
        if number is None:
            number = most_passing_blocks(job.model.num_own_blocks)
        numel = size.chunk_numel * max(max(map(size.num_chunks, size.blocks)), number * size.typical_chunks)
        optimizer_s = numel / speeds.optimizer_params
        ssd_s = numel * (job.read_itemsize / speeds.read_bytes + job.state_itemsize / speeds.write_bytes)
        slots = self.slots_of_updates()
        slots_s = slots[Part.OPTIMIZER] * optimizer_s + slots[Part.SSD_UPDATE] * ssd_s
        return WaitingUpdates(optimizer_s=optimizer_s, slots_s=slots_s, ssd_s=ssd_s)

    def _ssd_cores(self) -> float:
        """Returns the core time that the SSDs take while all of them are busy, as a share of that time."""
        return self.speeds.ssd_cpu_s_per_byte * (self.speeds.read_bytes + self.speeds.write_bytes) / 2

    def slots_of_updates(self) -> dict[Part, float]:
        """Returns the weights of parts in the time that state slots are occupied.

        It is all chunks' time at one SSD and at one optimizer, divided by the number of slots.
        """
        depth = 1 if self.job.update_order.is_naive else self.depths.states
        num_slots = self.job.num_optimizers * depth
        return {
            Part.SSD_UPDATE: self.speeds.num_ssds / num_slots,
            Part.OPTIMIZER: self.job.num_optimizers / num_slots,
        }


def _known(known: dict[object, Any], key: object, compute: Callable[[], _Any]) -> _Any:
    """Returns a value that is computed once."""
    if key not in known:
        known[key] = compute()
    value: _Any = known[key]
    return value
