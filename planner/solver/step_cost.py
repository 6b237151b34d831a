"""The cost model of a step: seconds of each part, bytes on each tier, and the bounds of the step time.

The parts are those of one step in steady state. Without clipping, updates run during both passes, so each resource's
bound is the sum of its work. Activation transfers must overlap with their own pass. With clipping, all gradients are
needed first, so updates overlap only with the next step's forward pass. Then the bounds are per pass.

Sources: Ratel, equations 1 to 8 (a stage takes as long as its slowest resource); AutoHete, equations 1 to 6.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

from windlass.engine.memory_plan import (
    ACTIVATION_SLOT_NBYTES,
    PARTIAL_GRAD_ITEMSIZE,
    TRANSIT_DEPTH,
    MemoryTier,
    Placement,
    make_plan,
    most_passing_blocks,
)
from windlass.planner.cost import ActivationOption, LayerProfile
from windlass.planner.solver.device_buffers import always_on_device, least_on_device_if_cut
from windlass.planner.solver.plan_choices import PlanChoices, known_or_new
from windlass.planner.solver.planned_job import TIER_INDEX
from windlass.planner.solver.program import BlockGroup, Bound, Buffer, Option, Overflow, Program
from windlass.planner.solver.step_bounds import (
    HOST_PARTS,
    Part,
    WaitingUpdates,
    bounding_parts,
    host_bounding_parts,
    once,
)


class StateTier(IntEnum):
    """The tier on which a block's model states are resident, the fastest first."""

    DEVICE = 0
    HOST = 1
    CACHED = 2  # states on the SSDs; the params also stay in host memory between uses
    SSD = 3


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
class StepCosts(PlanChoices):
    """The costs of a job on a machine, for one group size.

    Compute, and all that passes a link, are those of one GPU worker: several compute at the same time, and each has its
    own link. The params that a round of groups needs are read from the SSDs once. All else is as with one GPU worker.
    """

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
        buffers = self._copies_beside_s, self.depths.states, self.num_passing_blocks
        of_bounds = "bounds", self.speeds, self.group_size, buffers
        return Program(
            blocks=self._once_known("blocks", lambda: tuple(self._block_group(kind) for kind in kinds)),
            seconds=self._once_known("seconds", lambda: self._seconds(dict(self._always()))),
            nbytes=nbytes,
            limits=(self.limits.device_nbytes, self.limits.host_nbytes, self.limits.ssd_nbytes),
            bounds=known_or_new(self.job.known, of_bounds, lambda: tuple(self._bounds())),
            uncounted_parts=HOST_PARTS,
            overflow=self._once_known("overflow", self._overflow) if self.overflows else None,
            buffers=(
                Buffer(tier=TIER_INDEX[MemoryTier.DEVICE], most_nbytes=self._most_leaving_nbytes()),
                Buffer(tier=TIER_INDEX[MemoryTier.HOST], most_nbytes=self._transit_nbytes),
            ),
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
            spilled = sum(self._spills_gradient(each) for each in kind.blocks) / len(kind.blocks)
            options = tuple(self._state_option(block, tier, spilled) for tier in kind.tiers)
            return BlockGroup(count=len(kind.blocks), options=options)
        # They do not depend on what spills.
        key = ("activations", self.speeds, self.group_size, self.streams, kind.blocks[0])
        return known_or_new(self.job.known, key, lambda: self._activation_group(kind))

    def _activation_group(self, kind: Kind) -> BlockGroup:
        layer = self.job.model.layers[kind.blocks[0] - 1]
        again = self._uses_again(layer) if kind.blocks[0] in self.streamed_blocks else 0.0
        again_nbytes = again * layer.numel * self.job.param_itemsize
        options = tuple(self._activation_option(layer, way, again_nbytes) for way in kind.activations)
        return BlockGroup(count=len(kind.blocks), options=options)

    def _spills_gradient(self, block: int) -> bool:
        return self.spills and block >= self.num_host_grad_blocks

    def _state_option(self, block: int, tier: StateTier, spilled: float = 0.0) -> Option:
        """`spilled`: the share of blocks like this one whose gradients go to the SSDs."""
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
        to_device, from_device = Part.H2D_BACKWARD, Part.D2H_BACKWARD
        if self.is_streamed_head(block):
            to_device, from_device = Part.H2D_FORWARD, Part.D2H_FORWARD
        seconds[to_device] += in_nbytes / speeds.h2d_bytes
        seconds[from_device] = out_nbytes / speeds.d2h_bytes
        seconds[Part.OPTIMIZER] = numel / speeds.optimizer_params
        if tier is StateTier.SSD:
            reads_forward, reads_backward = self._fetches(block)
            seconds[Part.SSD_FORWARD] = reads_forward * param_nbytes / speeds.read_bytes
            seconds[Part.SSD_BACKWARD] = reads_backward * param_nbytes / speeds.read_bytes
        if tier in (StateTier.CACHED, StateTier.SSD):
            read_s = numel * (job.read_itemsize - self._read_from_memory(tier)) / speeds.read_bytes
            seconds[Part.SSD_UPDATE] = read_s + numel * job.state_itemsize / speeds.write_bytes
        spilled_nbytes = spilled * grad_nbytes
        if spilled_nbytes:
            seconds[Part.SSD_BACKWARD] = seconds.get(Part.SSD_BACKWARD, 0.0) + spilled_nbytes / speeds.write_bytes
            seconds[Part.SSD_UPDATE] += spilled_nbytes / speeds.read_bytes
        for part, nbytes in self._in_host_memory(block, tier, sums.in_host_nbytes, spilled_nbytes).items():
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
        if self.num_groups > job.num_ranks or block in self.tied_in_pieces:
            num_uses -= self.num_groups == job.num_microbatches == 1  # the own sum does not wait
            host += self.num_flats * num_uses * chunks * chunk_numel * PARTIAL_GRAD_ITEMSIZE
        return self._way(seconds, device=device, host=host)

    def _sums_of(self, block: int) -> "_MovedSums":
        """Returns the bytes that a step moves for a block's gradient and its unfinished sums."""
        job, numel = self.job, self.job.model.blocks[block].numel
        num_all, num_partial, num_beside = self.num_sums, self.num_partial_sums, self.num_sums_beside_gradient
        num_between = 0
        if self.is_in_pieces and block in self.streamed_blocks:
            # A sum comes for each micro-batch but the step's first one: that of its lane, or at a lane's end the total.
            # The head's comes for each slice.
            num_slices = job.num_head_slices if self._is_head(block) else 1
            # A tied one has a sum for each use. The last sum of one of them comes to be added to that of the other.
            num_slices += job.num_head_slices if block in self.tied_in_pieces else 0
            num_all = num_slices * job.num_microbatches - 1
            num_partial = num_slices * self.num_successive - (1 if job.num_ranks == 1 else 0)
            num_beside = num_slices * self.num_successive - 1
        elif block in self.overlaid_blocks:
            # There is room for one sum, so the total goes out and in between two lanes of a group.
            num_lanes_more = max(0, job.lanes.num_lanes - self.num_groups)
            num_between = -(-num_lanes_more // job.num_ranks)
            num_all += num_lanes_more
            num_partial, num_beside = num_partial + num_between, num_beside + num_between
        # Gradients of tied params, and those of slices in pieces, are summed in fp32, whatever type they travel in.
        in_fp32 = block in job.model.shared_blocks or block in self.fp32_in_pieces
        sum_nbytes = numel * (PARTIAL_GRAD_ITEMSIZE if in_fp32 else job.grad_itemsize)
        grad_nbytes = numel * job.grad_itemsize
        return _MovedSums(
            in_nbytes=num_partial * sum_nbytes,
            out_nbytes=max(num_partial * sum_nbytes, num_beside * sum_nbytes + grad_nbytes),
            between_nbytes=num_between * sum_nbytes,
            in_host_nbytes=2 * num_all * sum_nbytes + grad_nbytes,
        )

    def _in_host_memory(
        self, block: int, tier: StateTier, grads_nbytes: float, spilled_nbytes: float
    ) -> dict[Part, float]:
        """Returns the bytes that a step reads and writes in host memory for a block whose states are not on a device.

        `grads_nbytes`: of its gradient and of unfinished sums, in and out, of all GPU workers. `spilled_nbytes`: of its
        gradient, to an SSD and from it.
        """
        job, numel = self.job, self.job.model.blocks[block].numel
        param_nbytes = numel * job.param_itemsize
        # The copies of all GPU workers. The last round may be without some of them.
        workers = self.num_groups / self.num_rounds
        if block in self.streamed_blocks:
            workers = min(workers, job.num_microbatches / self.num_successive)
        forward_nbytes, backward_nbytes = (workers * number * param_nbytes for number in self._uses(block))
        if self.is_streamed_head(block):
            forward_nbytes += grads_nbytes
        else:
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
            backward_nbytes += spilled_nbytes
            update_nbytes += spilled_nbytes
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

    def _activation_option(self, layer: LayerProfile, way: ActivationOption, again_nbytes: float) -> Option:
        """`again_nbytes`: of params in pieces, which a step copies to the device for recomputation."""
        job, speeds, num = self.job, self.speeds, self.num_successive
        swapped_nbytes = num * job.model.size_share * way.swapped_nbytes
        params_nbytes = again_nbytes if way.choice.recompute else 0.0
        seconds = {
            Part.FORWARD: num * self.compute_s(layer)[0],
            Part.BACKWARD: num * self.backward_s(layer, way),
            Part.D2H_FORWARD: swapped_nbytes / speeds.d2h_bytes,
            Part.H2D_BACKWARD: (swapped_nbytes + params_nbytes) / speeds.h2d_bytes,
        }
        # Of all GPU workers: activations out and in, and params in.
        workers_s = job.num_microbatches / num / speeds.host_memory_bytes
        passed_s, params_s = workers_s * swapped_nbytes, workers_s * params_nbytes
        seconds |= {
            Part.HOST_MEMORY: 2 * passed_s + params_s,
            Part.HOST_FORWARD: passed_s,
            Part.HOST_BACKWARD: passed_s + params_s,
        }
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
        for block in self.overlaid_blocks:
            sums = self._sums_of(block)
            leaving_nbytes = sums.out_nbytes if block > 0 else sums.between_nbytes
            waiting_s += sums.in_nbytes / self.speeds.h2d_bytes + leaving_nbytes / self.speeds.d2h_bytes
        yield Part.BACKWARD, num * embedding[1] + waiting_s

    @property
    def always_on_device(self) -> float:
        """The bytes of the device's buffers and of the largest operation."""
        return self.formula_on_device + self.job.left_out_nbytes(self)

    @property
    def formula_on_device(self) -> float:
        """The same without what the formula leaves out, which takes longer to count."""
        return self._once_known(("device", self.num_grad_buffers), lambda: always_on_device(self))

    @property
    def least_on_device_if_cut(self) -> float:
        """A lower bound of the same for all cuts of matrices: without pieces and operations."""
        return self._once_known(("cut", self.num_grad_buffers), lambda: least_on_device_if_cut(self))

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
            is_sliced=job.is_sliced,
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
            copies_beside_s=self._copies_beside_s,
        ):
            yield self._bound(parts, constant_s)
        passes = host_bounding_parts(self._copies_beside_s)
        # Several GPU workers drift apart, so one's forward pass may be beside another's backward pass.
        for parts, constant_s in ((once(Part.HOST_MEMORY), 0.0), *(passes if self.job.num_ranks == 1 else ())):
            yield replace(self._bound(parts, constant_s), is_rare=True)

    def _bound(self, parts: dict[Part, float], constant_s: float = 0.0) -> Bound:
        """Returns a bound. The backward pass ends with that of the last GPU worker."""
        if Part.BACKWARD in parts:
            parts = {**parts, Part.BACKWARD: parts[Part.BACKWARD] * (1.0 + self.lag)}
        return Bound(weights=self._seconds(parts), constant_s=constant_s)

    @property
    def _copies_beside_s(self) -> float | None:
        """The seconds of the gradients' copies beside which others are computed, where compute waits for the other
        copies: layers have a single buffer. None: it does not wait.

        Embedding and head have buffers of their own, and no layer follows the last one. With several groups there is a
        second buffer, for sums that return.
        """
        if self.num_grad_buffers > 1 or self.num_groups > 1 or self.is_in_pieces or self.has_resident_layers:
            return None
        blocks = self.job.model.blocks
        numel = sum(blocks[block].numel for block in self.own_ends) + max(
            (block.numel for block in blocks[1:-1]), default=0
        )
        return numel * self.job.grad_itemsize / self.speeds.d2h_bytes

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
