"""Computes the memory of a job to the byte, and its division into slots.

This is arithmetic only. Sizes follow from the model's blocks and the machine's budget. The engine allocates exactly the
memory of the plan.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from windlass.amounts import bytes_text, describe_largest, least_gib
from windlass.engine.lanes import LaneDivision
from windlass.engine.memory_plan.activation_policy import BlockActivations
from windlass.engine.memory_plan.buffer_counts import MAX_GRAD_BUFFERS
from windlass.engine.memory_plan.queue_depths import MIN_STATE_DEPTH, QueueDepths
from windlass.storage.ids import Span

_Key = TypeVar("_Key")

# Slots for chunks of device-resident states in flight to or from the SSDs: one is copied while another is written.
TRANSIT_DEPTH = 2
# Bytes of a slot for activations. It is small compared with a layer's input, and large enough for SSDs to be fast.
ACTIVATION_SLOT_NBYTES = 2**20
# Slots that an SSD transfers in one request, at most: SSDs reach full speed with a few megabytes.
ACTIVATION_PART_SLOTS = 4
# Bytes of an element of the sums that a group of micro-batches passes to the next one: fp32.
PARTIAL_GRAD_ITEMSIZE = 4
# Default number of typical blocks whose params stay cached in host memory between uses.
CACHED_BLOCKS = 2
# Minimum number of typical blocks whose gradients fit in host memory: one arrives while another is updated.
MIN_PASSING_BLOCKS = 2
# Pools of slots between a box and each neighbour: for what it sends, and for what it receives. Each has room for a
# group of micro-batches. With less, a box that computes groups ahead would wait for the neighbour's compute.
_NUM_CROSSING_POOLS = 2
_CROSSING_UNIT_NBYTES = 4096  # slots of an arena are multiples of it
# Least steps between commits if states are resident in memory. A commit writes all states; a crash loses the steps
# after it.
COMMIT_EVERY = 10


class PlanError(ValueError):
    """No plan fits, or a placement is impossible. The message says what is missing and what to change.

    `param`: the request's field with the budget, if the budget is too small.
    """

    code = "does_not_fit"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The sizes of a model that the planner uses: elements of each block's flat vector, embedding first, head last."""

    block_numels: tuple[int, ...]
    chunk_numel: int
    param_itemsize: int  # bytes: 2 in bf16, 4 in fp32
    state_itemsize: int  # bytes of all stored states of one parameter: 14 in bf16, 12 in fp32
    shared_blocks: tuple[int, ...] = ()  # blocks that other blocks' operations also use, once for each such use
    own: frozenset[int] | None = None  # the blocks whose states this box has; None: all

    def num_chunks(self, block: int) -> int:
        """Returns the number of chunks of a block."""
        return self._nums_chunks[block]

    @cached_property
    def _nums_chunks(self) -> tuple[int, ...]:
        """The number of chunks of each block. Cached, because the planner makes hundreds of plans of a model."""
        return tuple(
            max(1, -(-numel // self.chunk_numel)) if self.is_own(block) else 0
            for block, numel in enumerate(self.block_numels)
        )

    def is_own(self, block: int) -> bool:
        """Returns whether this box has the states of a block. Blocks of other boxes have no chunks."""
        return self.own is None or block in self.own

    @cached_property
    def own_blocks(self) -> frozenset[int]:
        """The blocks whose states this box has."""
        return frozenset(filter(self.is_own, self.blocks))

    @cached_property
    def total_chunks(self) -> int:
        """The number of chunks of the model."""
        return sum(self._nums_chunks)

    @property
    def blocks(self) -> range:
        """The indices of all blocks."""
        return range(len(self.block_numels))

    @cached_property
    def typical_chunks(self) -> int:
        """The median number of chunks of a block that this box has."""
        own = sorted(filter(None, self._nums_chunks))
        return own[len(own) // 2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The places of a job's states and activations. The budget decides fields that are None.

    The states of blocks that are not named rest on the SSDs.
    """

    host_blocks: tuple[int, ...] = ()  # blocks whose model states are resident in host memory
    device_blocks: tuple[int, ...] = ()  # blocks whose model states are resident on the device
    streamed_blocks: tuple[int, ...] = ()  # layers whose params are copied to the device in pieces, to save its memory
    # Embedding and head are streamed, too: their params, and with `streams_grads` their gradients. Not if their states
    # are resident on the device.
    streams_ends: bool = False
    num_host_grad_blocks: int | None = None  # first blocks whose kept gradients stay in host memory; others' spill
    # Typical blocks whose gradients may wait for their update, if gradients are not kept; None: as many as fit.
    num_passing_blocks: int | None = None
    num_cached_params: int | None = None  # first chunks on the SSDs whose params stay in host memory too
    commit_every: int | None = None  # steps; None: 1, or COMMIT_EVERY if states are resident in memory
    group_size: int | None = None  # micro-batches that pass each block together; None: all of a step
    # The policy of each layer in order; (): a layer's input stays on the device, and the rest is recomputed.
    activations: tuple[BlockActivations, ...] = ()
    host_activation_nbytes: int = 0  # host memory for swapped activations, which is filled first
    ssd_activation_nbytes: int = 0  # space for swapped activations on all SSDs together, which is filled second
    num_grad_buffers: int = MAX_GRAD_BUFFERS  # blocks whose gradients may be on the device, in flight to the host
    streams_grads: bool = False  # gradients of streamed blocks leave the device in pieces, during their operation
    depths: QueueDepths = field(default_factory=QueueDepths)  # the sizes of buffers for data in flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossings:
    """The hidden states that pass between this box and its neighbours, and their gradients; and shared params."""

    num_neighbours: int  # boxes with the blocks before and after this box's: 0 to 2
    microbatch_nbytes: int  # hidden states of the largest micro-batch
    # If embedding and head share params and are on different boxes: chunks of the embedding, on the box that has it and
    # on the box with the head.
    num_lent_chunks: int = 0
    num_borrowed_chunks: int = 0

    def num_passed_chunks(self, num_ranks: int) -> int:
        """Returns the chunks of the embedding's gradient that the GPU workers of the head's box pass on.

        The sum of a single one stays on the device until it leaves for the other box.
        """
        return self.num_borrowed_chunks if num_ranks > 1 else 0


NO_CROSSINGS = Crossings(num_neighbours=0, microbatch_nbytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A range of the arena, divided into slots of equal size."""

    offset: int
    slot_nbytes: int
    num_slots: int

    @property
    def nbytes(self) -> int:
        """The bytes of all slots."""
        return self.slot_nbytes * self.num_slots

    @property
    def spans(self) -> list[Span]:
        """All slots, in order."""
        return list(self.slots_of(range(self.num_slots)).values())

    def slots_of(self, keys: Iterable[_Key]) -> dict[_Key, Span]:
        """Assigns the slots to keys in order: the first slot to the first key."""
        return {key: Span(self.offset + i * self.slot_nbytes, self.slot_nbytes) for i, key in enumerate(keys)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The arena of a job, its share of the SSDs, and the place of each block's states."""

    # Owned by the actor that reads params, which is the only GPU worker or the param server: params in flight to the
    # devices. The last slots are those of cached params.
    params: Pool
    grads: Pool  # owned by the GPU worker of the last group; an optimizer holds a gradient's slots until its update
    states: tuple[Pool, ...]  # one for each optimizer: a slot holds a chunk's states, and its gradient if any spill
    host_states: Pool  # a slot holds a chunk's states, for the chunks of `host_blocks` in order
    transit: Pool  # owned by the only GPU worker: a slot holds a chunk's states in flight between device and SSDs
    # Sums that a group passes to the next one. If `passes_sums_at_once`, the GPU worker of each group but the last owns
    # an equal part; else there is a slot for each use of a chunk.
    partial_grads: Pool
    open_lanes: Pool  # as `partial_grads`, for sums of lanes in which a group ends
    # Owned by the first GPU worker; those of the others follow. For the running operation, where gradients leave in
    # pieces: for a layer's lane between micro-batches, or for the total of embedding or head between lanes.
    lane_sums: Pool
    num_cached_params: int  # the first chunks on the SSDs; each has its own slot of `params` between uses
    host_blocks: tuple[int, ...]
    device_blocks: tuple[int, ...]
    # Blocks whose params are copied to the device in pieces, with `streams_ends` also embedding and head. While in use,
    # they stay in slots of `params` or in `host_states`.
    streamed_blocks: tuple[int, ...]
    spilled_blocks: tuple[int, ...]  # blocks whose kept gradients spill to the SSDs
    commit_every: int  # steps
    group_size: int  # micro-batches that pass each block together
    num_groups: int  # groups of a step; the GPU workers take turns in computing them
    num_ranks: int  # GPU workers
    ssd_nbytes: int  # model states on all SSDs, both generations
    layer_activations: tuple[BlockActivations, ...]  # policy of each layer in order; empty: the default
    # Owned by the first GPU worker: slots that stay in host memory, then slots in flight to or from SSDs. Those of the
    # others follow.
    activations: Pool
    num_staged_activations: int  # slots of `activations` in flight to or from the SSDs; the last ones
    num_ssd_activations: int  # slots of the same size on all SSDs together, for each GPU worker
    num_grad_buffers: int  # blocks whose gradients may be on the device, in flight to the host
    # Blocks whose gradients leave the device in pieces while they are computed. They need no buffer of their size.
    grad_streamed_blocks: tuple[int, ...]
    # Blocks whose gradients lie in the memory of those pieces, before and after them: the embedding and the head. With
    # several lanes only a lane's sum does, and the total of the lanes before comes in parts.
    grad_overlaid_blocks: tuple[int, ...]
    # Embedding and head have one buffer for their params on the device: one operates before and after all layers, the
    # other between them.
    ends_share_params: bool
    streams_ends: bool  # embedding and head are among `streamed_blocks`, unless their states are on the device
    num_fetched_params: int  # chunks that may be in flight from the SSDs, and their slots of `params`
    leaving_nbytes: int  # swapped activations that may still be on the device
    # Owned by the first GPU worker: slots for a micro-batch's hidden states, or their gradient, from and to other
    # boxes. Those of the other GPU workers follow.
    crossings: Pool
    # Slots for chunks of params that embedding and head share, on their way to the box with the head: owned by the
    # first GPU worker. And for chunks of the head's sum for them on their way back: owned by that of the last group.
    shared_params: Pool
    shared_sums: Pool

    @property
    def fetch_batch(self) -> int:
        """The chunks of params in one request: half of those in flight, so that the next are read during the copy."""
        return max(1, self.num_fetched_params // 2)

    @property
    def passes_sums_at_once(self) -> bool:
        """True if each GPU worker has one group at most, so that the next one takes its sums during the same pass."""
        return 1 < self.num_groups <= self.num_ranks

    @property
    def num_host_activations(self) -> int:
        """The first slots of `activations`, whose contents stay in host memory."""
        return self.activations.num_slots - self.num_staged_activations

    @property
    def max_leaving_nbytes(self) -> int:
        """The limit of each store for bytes that are leaving the device: host memory, and SSDs if there are any."""
        return self.leaving_nbytes // (2 if self.num_ssd_activations else 1)

    @property
    def arena_nbytes(self) -> int:
        """The bytes of the shared memory."""
        return self.shared_sums.offset + self.shared_sums.nbytes


def make_plan(
    model: ModelSize,
    *,
    num_optimizers: int,
    grad_itemsize: int,
    keep_grads: bool,
    host_memory_nbytes: int | None,
    num_microbatches: int = 1,
    num_lanes: int = 1,
    num_ranks: int = 1,
    free_nbytes: int | None = None,
    is_naive: bool = False,
    placement: Placement | None = None,
    crossings: Crossings = NO_CROSSINGS,
) -> Plan:
    """Makes the plan of a job: the fastest arena that fits the budget.

    Args:
        model: the sizes of the model.
        num_optimizers: the number of optimizer actors.
        grad_itemsize: bytes of an element of a gradient in host memory.
        keep_grads: the first update needs all gradients.
        host_memory_nbytes: the budget; its unused rest caches params. None: no budget.
        num_microbatches: the micro-batches of a step.
        num_lanes: the lanes of a step's micro-batches.
        num_ranks: the number of GPU workers.
        free_nbytes: the limit if there is no budget; the plan uses only as much of it as it needs.
        is_naive: an optimizer has only one chunk at a time.
        placement: the places of states and activations.
        crossings: what passes between this box and others.

    Raises:
        PlanError: the budget is below the minimum for the job, or the placement is impossible.
    """
    placement = placement or Placement()
    limit_nbytes = free_nbytes if host_memory_nbytes is None else host_memory_nbytes
    _check(model, placement, keep_grads)
    if placement.streams_ends and (model.shared_blocks or crossings.num_lent_chunks):
        raise PlanError(
            "streams_ends is set, and blocks share params, such as embedding and head: these come to the device in "
            "pieces only where each has its own; leave streams_ends out"
        )
    _check_ranks(placement, num_ranks, num_microbatches)
    lanes = LaneDivision(num_lanes, num_microbatches)
    group_size = _group_size(placement, lanes, num_ranks)
    if placement.streams_grads and lanes.num_open_lanes(group_size):
        raise PlanError(
            f"streams_grads is set, and groups of {group_size} of {num_microbatches} micro-batches end inside of the "
            f"{num_lanes} lanes: gradients leave the device in pieces only where groups are whole lanes; choose "
            f"group_size={lanes.smallest_uncut_group}, or leave streams_grads out"
        )
    for choice in _choices(model, placement, keep_grads=keep_grads, is_naive=is_naive):
        plan = _lay_out(model, placement, num_optimizers, grad_itemsize, lanes, num_ranks, crossings, choice)
        if limit_nbytes is None or plan.arena_nbytes <= limit_nbytes:
            if host_memory_nbytes is None or placement.num_cached_params is not None or is_naive:
                return plan
            num_free = (host_memory_nbytes - plan.arena_nbytes) // plan.params.slot_nbytes
            choice = replace(choice, num_cached=min(choice.num_cached + num_free, _num_on_ssds(model, placement)))
            return _lay_out(model, placement, num_optimizers, grad_itemsize, lanes, num_ranks, crossings, choice)
    assert limit_nbytes is not None, "without a limit the first choice fits"
    raise _too_little_host_memory(plan, limit_nbytes, is_budget=host_memory_nbytes is not None)


def _too_little_host_memory(plan: "Plan", limit_nbytes: int, *, is_budget: bool) -> PlanError:
    """Returns the error that no plan fits. `plan`: the smallest plan."""
    parts = {
        "params": plan.params.nbytes,
        "gradients": plan.grads.nbytes
        + plan.partial_grads.nbytes
        + plan.open_lanes.nbytes
        + plan.num_ranks * plan.lane_sums.nbytes,
        "states at the optimizers": sum(pool.nbytes for pool in plan.states),
        "resident states": plan.host_states.nbytes,
        "states on their way to or from the device": plan.transit.nbytes,
        "activations": plan.num_ranks * plan.activations.nbytes,
        "hidden states from and to other boxes": plan.num_ranks * plan.crossings.nbytes,
        "shared params from and to other boxes": plan.shared_params.nbytes + plan.shared_sums.nbytes,
    }
    takes = (
        f"the job needs {bytes_text(plan.arena_nbytes)} of host memory for its buffers "
        f"({describe_largest(parts)}), {bytes_text(plan.arena_nbytes - limit_nbytes)} more than "
    )
    if is_budget:
        least = least_gib(plan.arena_nbytes)
        return PlanError(
            f"{takes}its budget of {bytes_text(limit_nbytes)}; set host_memory_gib, in the job's budgets and in the "
            f"settings, to at least {least}",
            param="windlass.budgets.host_memory_gib",
        )
    spare_text = bytes_text(max(0, limit_nbytes))
    return PlanError(f"{takes}the {spare_text} that the machine has to spare; close other programs, or stop other jobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """The sizes that the budget decides."""

    depth: int  # chunks at an optimizer
    num_cached: int  # cached chunks of params
    num_host_grad_blocks: int | None  # None: gradients are not kept
    num_held_blocks: int = 2  # streamed blocks whose params are in host memory at once
    num_passing_blocks: int = MIN_PASSING_BLOCKS  # typical blocks whose gradients fit, if gradients are not kept


def _check(model: ModelSize, placement: Placement, keep_grads: bool) -> None:
    num_layers = len(model.blocks) - 2
    if placement.activations and len(placement.activations) != num_layers:
        raise PlanError(
            f"activations are given for {len(placement.activations)} layers; the model has {num_layers}, and each "
            "needs a choice"
        )
    if placement.group_size is not None and placement.group_size < 1:
        raise PlanError(f"group_size is {placement.group_size}; a group has at least 1 micro-batch, or leave it out")
    if placement.num_grad_buffers < 1:
        raise PlanError(
            f"num_grad_buffers is {placement.num_grad_buffers}; at least 1 block's gradient needs room on the device"
        )
    if placement.num_passing_blocks is not None and placement.num_passing_blocks < MIN_PASSING_BLOCKS:
        raise PlanError(
            f"num_passing_blocks is {placement.num_passing_blocks}; gradients of at least {MIN_PASSING_BLOCKS} blocks "
            "need room in host memory, because one arrives while another is updated"
        )
    room_nbytes = placement.host_activation_nbytes + placement.ssd_activation_nbytes
    if not room_nbytes and any(choice.swaps for choice in placement.activations):
        raise PlanError(
            "activations are to be swapped, and there is no room for them: give host_activation_nbytes or "
            "ssd_activation_nbytes"
        )
    in_memory = [*placement.host_blocks, *placement.device_blocks]
    if len(set(in_memory)) < len(in_memory) or not model.own_blocks.issuperset(in_memory):
        raise PlanError(
            f"host_blocks {placement.host_blocks} and device_blocks {placement.device_blocks} must name different "
            f"blocks of {min(filter(model.is_own, model.blocks))} to {max(filter(model.is_own, model.blocks))}"
        )
    streamed = set(placement.streamed_blocks)
    ends = model.blocks[0], model.blocks[-1]
    layers = model.own_blocks.difference(ends, placement.device_blocks, model.shared_blocks)
    if len(streamed) < len(placement.streamed_blocks) or not streamed <= layers:
        surplus = sorted(streamed - layers)
        raise PlanError(
            f"streamed_blocks {placement.streamed_blocks} must name layers, each once: not the embedding (0), the head "
            f"({len(model.blocks) - 1}), blocks resident on the device, nor those whose params others use as well; "
            f"{f'leave out {surplus}' if surplus else 'remove duplicates'}"
        )
    num_kept = placement.num_host_grad_blocks
    if num_kept is not None and num_kept < len(model.blocks) and not _may_spill(placement, keep_grads=keep_grads):
        raise PlanError(
            f"num_host_grad_blocks is {num_kept} of {len(model.blocks)}: the others' gradients would go to the SSDs, "
            "but they do only where they are kept until all are known, every step is committed, and no states are "
            "resident in memory; leave it out"
        )


def _check_ranks(placement: Placement, num_ranks: int, num_microbatches: int) -> None:
    if num_ranks > num_microbatches:
        raise PlanError(
            f"{num_ranks} GPUs have {num_microbatches} micro-batches a step, and each needs one at least: ask for "
            "fewer GPUs, or for more micro-batches",
            param="windlass.gpus",
        )
    if num_ranks > 1 and placement.device_blocks:
        raise PlanError(
            f"the states of blocks {sorted(placement.device_blocks)} cannot rest on a GPU, because the job has "
            f"{num_ranks} of them: leave out device_blocks"
        )


def _may_spill(placement: Placement, *, keep_grads: bool) -> bool:
    """Checks whether gradients may spill to the SSDs.

    A spilled gradient is stored in the place of its chunk's next states, so that place must be free.
    """
    return (
        keep_grads and not placement.host_blocks and not placement.device_blocks and placement.commit_every in (None, 1)
    )


def _choices(model: ModelSize, placement: Placement, *, keep_grads: bool, is_naive: bool) -> Iterator[_Choice]:
    """Yields choices from the fastest to the smallest.

    First fewer gradients may wait for their update. Then no params are cached, then buffers shrink, then gradients
    spill.
    """
    num_blocks = len(model.blocks)
    kept = placement.num_host_grad_blocks if placement.num_host_grad_blocks is not None else num_blocks
    deepest = placement.depths.states
    depths = (1,) if is_naive else range(deepest, min(deepest, MIN_STATE_DEPTH) - 1, -1)
    requested_cached, total = placement.num_cached_params, _num_on_ssds(model, placement)
    wanted = (
        requested_cached if requested_cached is not None else 0 if is_naive else CACHED_BLOCKS * model.typical_chunks
    )
    has_room = keep_grads or placement.num_host_grad_blocks is not None
    choice = _Choice(depth=depths[0], num_cached=min(wanted, total), num_host_grad_blocks=kept if has_room else None)
    if placement.num_passing_blocks is not None:
        choice = replace(choice, num_passing_blocks=placement.num_passing_blocks)
    elif not has_room:
        for num_passing in range(most_passing_blocks(len(model.own_blocks)), MIN_PASSING_BLOCKS, -1):
            yield replace(choice, num_passing_blocks=num_passing)
    yield choice
    choice = replace(choice, num_cached=min(requested_cached or 0, total))
    for depth in depths:
        choice = replace(choice, depth=depth)
        yield choice
    if _streamed(model, placement):
        choice = replace(choice, num_held_blocks=1)
        yield choice
    if placement.num_host_grad_blocks is None and _may_spill(placement, keep_grads=keep_grads):
        for kept in range(num_blocks - 1, -1, -1):
            yield replace(choice, num_host_grad_blocks=kept)


def _num_on_ssds(model: ModelSize, placement: Placement) -> int:
    """Returns the number of chunks whose states are on the SSDs."""
    in_memory = {*placement.host_blocks, *placement.device_blocks}
    return model.total_chunks - sum(map(model.num_chunks, in_memory))


def most_passing_blocks(num_blocks: int) -> int:
    """Returns the number of typical blocks whose gradients may wait for their update. More would not be faster.

    During the next forward pass no gradients arrive, so the waiting ones keep the optimizers busy. A forward pass takes
    at most a third of a step's compute. If updates take as long as the compute, a third of the blocks is enough. If
    they take longer, fewer are enough; if they take less, updates are no bottleneck. The additional blocks are for
    gradients in flight and in the update.
    """
    return -(-num_blocks // 3) + MIN_PASSING_BLOCKS


def _num_grads(model: ModelSize, placement: Placement, choice: _Choice) -> int:
    """Returns the slots for gradients: all kept ones, and room for some typical blocks or for the largest other one."""
    num_host_grad_blocks = choice.num_host_grad_blocks
    resident = frozenset(placement.device_blocks)
    offloaded = [block for block in model.blocks if block not in resident]
    if num_host_grad_blocks is None:
        kept, passing = [], offloaded
    else:
        kept = [block for block in offloaded if block < num_host_grad_blocks]
        passing = [block for block in offloaded if block >= num_host_grad_blocks]
    largest = max((model.num_chunks(block) for block in passing), default=0)
    wanted = min(choice.num_passing_blocks * model.typical_chunks, sum(map(model.num_chunks, passing)))
    num_passing = max(largest, wanted)
    num_kept = sum(model.num_chunks(block) for block in kept)
    return max(1, num_kept + num_passing)


def _num_held(model: ModelSize, placement: Placement, choice: _Choice) -> int:
    """Returns the slots for params of streamed blocks, which are copied to the device several times while in use.

    The GPU worker requests chunks in the order of operations. So a block without slots of its own waits only for
    earlier blocks, and there is no deadlock.
    """
    streamed = map(model.num_chunks, set(_streamed(model, placement)).difference(placement.host_blocks))
    return sum(sorted(streamed)[-choice.num_held_blocks :])


def _num_partial_grads(
    model: ModelSize,
    placement: Placement,
    num_groups: int,
    num_ranks: int,
    lanes: LaneDivision,
    num_passed: int,
) -> int:
    """Returns the slots for sums that groups pass on. Sums of device-resident blocks stay on the device and need none.

    A sum that waits for a group which the same GPU worker computes later needs slots of its own. One that another GPU
    worker takes at once does not: each passes on those of two typical blocks, or of the operation with most. It takes
    the total of lanes that lies in the memory of pieces at its operation's end (`SumBesideTotal`). Meanwhile this one
    begins a layer. `num_passed`: see `Crossings.num_passed_chunks`.
    """
    if num_groups == 1:
        return 0
    uses = (*model.blocks, *model.shared_blocks)
    num_chunks = [model.num_chunks(block) for block in uses if block not in placement.device_blocks]
    if num_groups > num_ranks:
        return sum(num_chunks) + num_passed
    most = max(map(model.num_chunks, model.blocks))
    if lanes.num_lanes > 1 and (ends := _overlaid(model, placement)):
        layer = max(map(model.num_chunks, placement.streamed_blocks))
        most = max(most, max(map(model.num_chunks, ends)) + layer)
    num_shared = sum(map(model.num_chunks, model.shared_blocks)) + num_passed
    return (num_groups - 1) * max(2 * model.typical_chunks, most + num_shared)


def _group_size(placement: Placement, lanes: LaneDivision, num_ranks: int) -> int:
    """Returns the micro-batches of a group.

    As many GPU workers as possible compute a group. The last ones may have none: 4 micro-batches make 2 groups for 3.
    """
    largest_group = -(-lanes.num_microbatches // num_ranks)
    return min(placement.group_size or largest_group, largest_group)


def _ends(model: ModelSize, placement: Placement) -> tuple[int, ...]:
    """Returns the embedding and the head, if this box has them and their states are not on the device."""
    ends = (model.blocks[0], model.blocks[-1])
    return tuple(block for block in ends if model.is_own(block) and block not in placement.device_blocks)


def _streamed(model: ModelSize, placement: Placement) -> tuple[int, ...]:
    """Returns the blocks whose params come in pieces; see `Plan.streamed_blocks`."""
    return tuple(sorted((*placement.streamed_blocks, *(_ends(model, placement) if placement.streams_ends else ()))))


def _overlaid(model: ModelSize, placement: Placement) -> tuple[int, ...]:
    """Returns the blocks whose gradients lie in the memory of those in pieces; see `Plan.grad_overlaid_blocks`."""
    if not placement.streams_grads or not placement.streamed_blocks or placement.streams_ends:
        return ()
    return _ends(model, placement)


def _num_lane_sums(model: ModelSize, placement: Placement, lanes: LaneDivision, group_size: int) -> int:
    """Returns the slots of one GPU worker in `Plan.lane_sums`."""
    if not placement.streams_grads or lanes.num_lanes == 1:
        return 0
    blocks = _streamed(model, placement)
    if not lanes.has_long_lane:
        # A lane's sum of the head waits between slices of a micro-batch, too. How many there are is not known here.
        blocks = tuple(block for block in blocks if block == model.blocks[-1])
    others = _overlaid(model, placement) if lanes.most_lanes_in_group(group_size) > 1 else ()
    return max(map(model.num_chunks, (*blocks, *others)), default=0)


def _lay_out(
    model: ModelSize,
    placement: Placement,
    num_optimizers: int,
    grad_itemsize: int,
    lanes: LaneDivision,
    num_ranks: int,
    crossings: Crossings,
    choice: _Choice,
) -> Plan:
    chunk, total = model.chunk_numel, model.total_chunks
    num_kept = choice.num_host_grad_blocks
    spilled = () if num_kept is None else tuple(filter(model.is_own, model.blocks[num_kept:]))
    in_memory = placement.host_blocks or placement.device_blocks
    num_fetched = min(placement.depths.params, total)
    # In the backward pass each rank is a block behind the one before. Params stay until all ranks have copied them.
    num_skewed = (num_ranks - 1) * model.typical_chunks
    num_params = num_fetched + num_skewed + _num_held(model, placement, choice) + choice.num_cached
    params = Pool(offset=0, slot_nbytes=chunk * model.param_itemsize, num_slots=num_params)
    grads = Pool(
        offset=params.nbytes,
        slot_nbytes=chunk * grad_itemsize,
        num_slots=_num_grads(model, placement, choice),
    )
    state_nbytes = chunk * model.state_itemsize
    states = []
    offset = grads.offset + grads.nbytes
    for _ in range(num_optimizers):
        slot_nbytes = state_nbytes + (grads.slot_nbytes if spilled else 0)
        pool = Pool(offset=offset, slot_nbytes=slot_nbytes, num_slots=min(choice.depth, total))
        states.append(pool)
        offset += pool.nbytes
    num_host = sum(model.num_chunks(block) for block in placement.host_blocks)
    host_states = Pool(offset=offset, slot_nbytes=state_nbytes, num_slots=num_host)
    transit = Pool(
        offset=offset + host_states.nbytes,
        slot_nbytes=state_nbytes,
        num_slots=TRANSIT_DEPTH if placement.device_blocks else 0,
    )
    group_size = _group_size(placement, lanes, num_ranks)
    num_groups = -(-lanes.num_microbatches // group_size)
    num_passed = crossings.num_passed_chunks(num_ranks)
    partial_grads = Pool(
        offset=transit.offset + transit.nbytes,
        slot_nbytes=chunk * PARTIAL_GRAD_ITEMSIZE,
        num_slots=_num_partial_grads(model, placement, num_groups, num_ranks, lanes, num_passed),
    )
    open_lanes = Pool(
        offset=partial_grads.offset + partial_grads.nbytes,
        slot_nbytes=partial_grads.slot_nbytes,
        num_slots=partial_grads.num_slots if lanes.num_open_lanes(group_size) else 0,
    )
    lane_sums = Pool(
        offset=open_lanes.offset + open_lanes.nbytes,
        slot_nbytes=partial_grads.slot_nbytes,
        num_slots=_num_lane_sums(model, placement, lanes, group_size),
    )
    num_ssd_activations = -(-placement.ssd_activation_nbytes // ACTIVATION_SLOT_NBYTES)
    num_staged = min(placement.depths.staged_activations, num_ssd_activations)
    activations = Pool(
        offset=lane_sums.offset + num_ranks * lane_sums.nbytes,
        slot_nbytes=ACTIVATION_SLOT_NBYTES,
        num_slots=-(-placement.host_activation_nbytes // ACTIVATION_SLOT_NBYTES) + num_staged,
    )
    hidden_states = Pool(
        offset=activations.offset + num_ranks * activations.nbytes,
        slot_nbytes=max(1, -(-crossings.microbatch_nbytes // _CROSSING_UNIT_NBYTES)) * _CROSSING_UNIT_NBYTES,
        num_slots=crossings.num_neighbours * _NUM_CROSSING_POOLS * group_size,
    )
    # What a box sends is a whole block, because its compute must not wait for the other box. What it receives goes on
    # to the device at once.
    num_lent, num_borrowed = crossings.num_lent_chunks, crossings.num_borrowed_chunks
    shared_params = Pool(
        offset=hidden_states.offset + num_ranks * hidden_states.nbytes,
        slot_nbytes=chunk * model.param_itemsize,
        num_slots=num_lent + min(num_borrowed, TRANSIT_DEPTH),
    )
    shared_sums = Pool(
        offset=shared_params.offset + shared_params.nbytes,
        slot_nbytes=chunk * PARTIAL_GRAD_ITEMSIZE,
        num_slots=num_borrowed + min(num_lent, TRANSIT_DEPTH),
    )
    streamed, overlaid = _streamed(model, placement), _overlaid(model, placement)
    return Plan(
        params=params,
        grads=grads,
        states=tuple(states),
        host_states=host_states,
        transit=transit,
        partial_grads=partial_grads,
        open_lanes=open_lanes,
        lane_sums=lane_sums,
        num_cached_params=choice.num_cached,
        host_blocks=tuple(sorted(placement.host_blocks)),
        device_blocks=tuple(sorted(placement.device_blocks)),
        streamed_blocks=streamed,
        spilled_blocks=spilled,
        commit_every=placement.commit_every or (COMMIT_EVERY if in_memory else 1),
        group_size=group_size,
        num_groups=num_groups,
        num_ranks=num_ranks,
        ssd_nbytes=2 * total * state_nbytes,
        layer_activations=placement.activations,
        activations=activations,
        num_staged_activations=num_staged,
        num_ssd_activations=num_ssd_activations,
        num_grad_buffers=placement.num_grad_buffers,
        grad_streamed_blocks=streamed if placement.streams_grads else (),
        grad_overlaid_blocks=overlaid,
        ends_share_params=len(overlaid) == 2 and not model.shared_blocks,  # the head uses a tied embedding
        streams_ends=placement.streams_ends,
        num_fetched_params=num_fetched,
        leaving_nbytes=placement.depths.leaving_nbytes,
        crossings=hidden_states,
        shared_params=shared_params,
        shared_sums=shared_sums,
    )
