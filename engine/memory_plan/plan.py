"""How much memory a job takes, to the byte, and how it is cut into slots.

Arithmetic only. Sizes follow from the model's blocks and the machine's budget; the engine allocates what the plan says.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from windlass.amounts import bytes_text, describe_largest, least_gib
from windlass.engine.memory_plan.activation_policy import BlockActivations
from windlass.engine.memory_plan.buffer_counts import MAX_GRAD_BUFFERS
from windlass.engine.memory_plan.queue_depths import MIN_STATE_DEPTH, QueueDepths

# Chunks of states that rest on the device, on their way to or from the SSDs: one is copied while one is written.
TRANSIT_DEPTH = 2
# What activations in host memory take is a multiple of this. Small beside a layer's input of any size worth swapping;
# large enough for an SSD to be fast.
ACTIVATION_SLOT_NBYTES = 2**20
# Of these, what an SSD moves of a tensor at once, at most: with a few megabytes it is as fast as it can be.
ACTIVATION_PART_SLOTS = 4
# Of a sum that one group of micro-batches leaves to the next: fp32, as sums of tied uses and slices of the head always
# are, and those over micro-batches unless the job wants less.
PARTIAL_GRAD_ITEMSIZE = 4
# Typical blocks whose params stay in host memory from one use to the next, where nobody says otherwise.
CACHED_BLOCKS = 2
# Typical blocks whose gradients have room on their way through host memory, at least: one comes, one is updated.
MIN_PASSING_BLOCKS = 2
# Steps between commits where states rest in memory: each writes all of them, and a crash loses what is not committed.
COMMIT_EVERY = 10


class PlanError(ValueError):
    """No plan fits, or a placement is impossible; the text says what is missing and what to change.

    `param`: the field of a request that says how much there may be, where that is too little.
    """

    code = "does_not_fit"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A model as the planner sees it: elements of each block's flat vector, embedding first, head last."""

    block_numels: tuple[int, ...]
    chunk_numel: int
    param_itemsize: int  # bytes: 2 in bf16, 4 in fp32
    state_itemsize: int  # bytes of all states of one parameter at rest: 14 in bf16, 12 in fp32
    shared_blocks: tuple[int, ...] = ()  # that other blocks' operations use as well: named once for each of these

    def num_chunks(self, block: int) -> int:
        """Chunks of a block."""
        return max(1, -(-self.block_numels[block] // self.chunk_numel))

    @property
    def total_chunks(self) -> int:
        """Chunks of the model."""
        return sum(self.num_chunks(block) for block in self.blocks)

    @property
    def blocks(self) -> range:
        """All blocks."""
        return range(len(self.block_numels))

    @property
    def typical_chunks(self) -> int:
        """Chunks of a block as most are."""
        return sorted(self.num_chunks(block) for block in self.blocks)[len(self.block_numels) // 2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where things rest; what is None, the budget decides. Blocks that are not named rest on the SSDs."""

    host_blocks: tuple[int, ...] = ()  # whose model states rest in host memory
    device_blocks: tuple[int, ...] = ()  # whose model states rest on the device
    streamed_blocks: tuple[int, ...] = ()  # layers whose params come to the device in pieces: two whole ones do not fit
    num_host_grad_blocks: int | None = None  # kept gradients: the first so many blocks' in host memory, else on SSDs
    num_cached_params: int | None = None  # chunks of params that stay in host memory from one use to the next
    commit_every: int | None = None  # steps; None: 1, or COMMIT_EVERY where states rest in memory
    group_size: int | None = None  # micro-batches that go through the blocks together; None: all of a step
    # Of each layer in order; (): a layer's input stays on the device, and the rest is computed again.
    activations: tuple[BlockActivations, ...] = ()
    host_activation_nbytes: int = 0  # what is swapped goes to so much host memory first,
    ssd_activation_nbytes: int = 0  # and then to so much space on the SSDs together
    num_grad_buffers: int = MAX_GRAD_BUFFERS  # blocks whose gradients may lie on the device on their way out
    depths: QueueDepths = field(default_factory=QueueDepths)  # of the buffers that things pass through


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A range of the arena, cut into slots of one size."""

    offset: int
    slot_nbytes: int
    num_slots: int

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.slot_nbytes * self.num_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The arena of a job, its share of the SSDs, and where each block's things rest."""

    params: Pool  # the GPU worker's: params on their way to the device, and those that stay
    grads: Pool  # the GPU worker's, lent to the optimizers with each gradient
    states: tuple[Pool, ...]  # one for each optimizer: all states of a chunk in one slot, then a gradient if any spill
    host_states: Pool  # all states of a chunk in one slot, of the chunks of `host_blocks` in order
    transit: Pool  # the GPU worker's: all states of a chunk in one slot, on their way between device and SSDs
    partial_grads: Pool  # the GPU worker's: a slot for each use of a chunk whose sum one group leaves to the next
    num_cached_params: int  # of the slots of `params`
    host_blocks: tuple[int, ...]
    device_blocks: tuple[int, ...]
    streamed_blocks: tuple[int, ...]  # whose params come to the device in pieces; until they are used they stay in host
    # memory, in slots of `params`, or where they rest
    spilled_blocks: tuple[int, ...]  # whose kept gradients go to the SSDs
    commit_every: int  # steps
    group_size: int  # micro-batches that go through the blocks together
    num_groups: int  # of a step
    ssd_nbytes: int  # model states on all SSDs, both generations
    layer_activations: tuple[BlockActivations, ...]  # of each layer in order, or none: the default
    activations: Pool  # the GPU worker's: those that stay in host memory, then those on their way to or from the SSDs
    num_staged_activations: int  # of the slots of `activations`
    num_ssd_activations: int  # slots of the same size on all SSDs together
    num_grad_buffers: int  # blocks whose gradients may lie on the device on their way out
    num_fetched_params: int  # chunks that may be on their way from the SSDs at once: so many slots of `params`
    leaving_nbytes: int  # swapped activations that may still lie on the device

    @property
    def fetch_batch(self) -> int:
        """Chunks of params asked for at a time: so many that the next ones are on their way while these are copied."""
        return max(1, self.num_fetched_params // 2)

    @property
    def num_host_activations(self) -> int:
        """Slots of `activations` whose contents stay in host memory; the first ones."""
        return self.activations.num_slots - self.num_staged_activations

    @property
    def max_leaving_nbytes(self) -> int:
        """Activations on their way to host memory that may still lie on the device; as many more on theirs to SSDs."""
        return self.leaving_nbytes // (2 if self.num_ssd_activations else 1)

    @property
    def arena_nbytes(self) -> int:
        """Size of the shared memory."""
        return self.activations.offset + self.activations.nbytes


def make_plan(
    model: ModelSize,
    *,
    num_optimizers: int,
    grad_itemsize: int,
    keep_grads: bool,
    host_memory_nbytes: int | None,
    num_microbatches: int = 1,
    free_nbytes: int | None = None,
    is_naive: bool = False,
    placement: Placement | None = None,
) -> Plan:
    """The arena of a job: what fits into the budget, the fastest first.

    `keep_grads`: every gradient is needed before the first update. `is_naive`: an optimizer has one chunk at a time.
    `num_microbatches`: of a step.
    `free_nbytes`: what may be taken where there is no budget; what is not needed then is left to others.

    Raises:
        PlanError: the budget is smaller than the least that the job needs, or the placement is impossible.
    """
    placement = placement or Placement()
    limit_nbytes = free_nbytes if host_memory_nbytes is None else host_memory_nbytes
    _check(model, placement, keep_grads)
    for choice in _choices(model, placement, keep_grads=keep_grads, is_naive=is_naive):
        plan = _lay_out(model, placement, num_optimizers, grad_itemsize, num_microbatches, choice)
        if limit_nbytes is None or plan.arena_nbytes <= limit_nbytes:
            if host_memory_nbytes is None or placement.num_cached_params is not None or is_naive:
                return plan
            num_free = (host_memory_nbytes - plan.arena_nbytes) // plan.params.slot_nbytes
            choice = replace(choice, num_cached=min(choice.num_cached + num_free, model.total_chunks))
            return _lay_out(model, placement, num_optimizers, grad_itemsize, num_microbatches, choice)
    assert limit_nbytes is not None, "without a limit the first choice fits"
    raise _too_little_host_memory(plan, limit_nbytes, is_budget=host_memory_nbytes is not None)


def _too_little_host_memory(plan: "Plan", limit_nbytes: int, *, is_budget: bool) -> PlanError:
    """`plan`: the smallest one."""
    parts = {
        "params": plan.params.nbytes,
        "gradients": plan.grads.nbytes + plan.partial_grads.nbytes,
        "states at the optimizers": sum(pool.nbytes for pool in plan.states),
        "states that rest in it": plan.host_states.nbytes,
        "states on their way to or from the device": plan.transit.nbytes,
        "activations": plan.activations.nbytes,
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
    there = bytes_text(max(0, limit_nbytes))
    return PlanError(f"{takes}the {there} that the machine has to spare; close other programs, or stop other jobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """What a budget decides."""

    depth: int  # chunks at an optimizer
    num_cached: int  # chunks of params
    num_host_grad_blocks: int | None  # None: gradients are not kept
    num_held_blocks: int = 2  # streamed ones whose params are in host memory at once
    num_passing_blocks: int = MIN_PASSING_BLOCKS  # typical ones, whose gradients that are not kept have room


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
    room_nbytes = placement.host_activation_nbytes + placement.ssd_activation_nbytes
    if not room_nbytes and any(choice.swaps for choice in placement.activations):
        raise PlanError(
            "activations are to be swapped, and there is no room for them: give host_activation_nbytes or "
            "ssd_activation_nbytes"
        )
    in_memory = [*placement.host_blocks, *placement.device_blocks]
    if len(set(in_memory)) < len(in_memory) or not set(in_memory) <= set(model.blocks):
        raise PlanError(
            f"host_blocks {placement.host_blocks} and device_blocks {placement.device_blocks} must name different "
            f"blocks of 0 to {len(model.blocks) - 1}"
        )
    streamed = set(placement.streamed_blocks)
    layers = set(model.blocks[1:-1]).difference(placement.device_blocks, model.shared_blocks)
    if len(streamed) < len(placement.streamed_blocks) or not streamed <= layers:
        raise PlanError(
            f"streamed_blocks {placement.streamed_blocks} must name layers, each once: not the embedding (0), the head "
            f"({len(model.blocks) - 1}), blocks that rest on the device, nor those whose params others use as well; "
            f"leave out {sorted(streamed - layers) or 'what is named twice'}"
        )
    num_kept = placement.num_host_grad_blocks
    if num_kept is not None and num_kept < len(model.blocks) and not _may_spill(placement, keep_grads=keep_grads):
        raise PlanError(
            f"num_host_grad_blocks is {num_kept} of {len(model.blocks)}: the others' gradients would go to the SSDs, "
            "but they do only where they are kept until all are known, every step is committed, and no states rest in "
            "memory; leave it out"
        )


def _may_spill(placement: Placement, *, keep_grads: bool) -> bool:
    """A gradient lies where the next states of its chunk will be written: that place must be free."""
    return (
        keep_grads and not placement.host_blocks and not placement.device_blocks and placement.commit_every in (None, 1)
    )


def _choices(model: ModelSize, placement: Placement, *, keep_grads: bool, is_naive: bool) -> Iterator[_Choice]:
    """From the fastest to the smallest.

    First fewer gradients wait for their update, then params stay no longer, then buffers shrink, then gradients spill.
    """
    num_blocks = len(model.blocks)
    kept = placement.num_host_grad_blocks if placement.num_host_grad_blocks is not None else num_blocks
    deepest = placement.depths.states
    depths = (1,) if is_naive else range(deepest, min(deepest, MIN_STATE_DEPTH) - 1, -1)
    asked, total = placement.num_cached_params, model.total_chunks
    wanted = asked if asked is not None else 0 if is_naive else CACHED_BLOCKS * model.typical_chunks
    has_room = keep_grads or placement.num_host_grad_blocks is not None
    choice = _Choice(depth=depths[0], num_cached=min(wanted, total), num_host_grad_blocks=kept if has_room else None)
    if not has_room:
        for num_passing in range(most_passing_blocks(num_blocks), MIN_PASSING_BLOCKS, -1):
            yield replace(choice, num_passing_blocks=num_passing)
    yield choice
    choice = replace(choice, num_cached=min(asked or 0, total))
    for depth in depths:
        choice = replace(choice, depth=depth)
        yield choice
    if placement.streamed_blocks:
        choice = replace(choice, num_held_blocks=1)
        yield choice
    if placement.num_host_grad_blocks is None and _may_spill(placement, keep_grads=keep_grads):
        for kept in range(num_blocks - 1, -1, -1):
            yield replace(choice, num_host_grad_blocks=kept)


def most_passing_blocks(num_blocks: int) -> int:
    """Typical blocks whose gradients may wait for their update, where nothing is faster with more.

    No gradient comes while the next forward pass runs: what waits then keeps the optimizers busy until the next one
    does. A forward pass takes at most a third of a step's compute. So where the updates take as long as the compute, a
    third of the blocks is enough; where they take longer, less is, and where they take less, they are no bottleneck.
    What is beyond are gradients on their way and in the update.
    """
    return -(-num_blocks // 3) + MIN_PASSING_BLOCKS


def _num_grads(model: ModelSize, placement: Placement, choice: _Choice) -> int:
    """Slots for gradients: all that are kept, and of those that pass through some typical blocks or the largest one."""
    num_host_grad_blocks = choice.num_host_grad_blocks
    offloaded = [block for block in model.blocks if block not in placement.device_blocks]
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
    """Slots for params that are copied from host memory again and again while their block is computed.

    Who asks for a block's chunks does so in the operations' order, so a block that has none to itself waits for those
    before it and for nothing else.
    """
    streamed = (model.num_chunks(block) for block in placement.streamed_blocks if block not in placement.host_blocks)
    return sum(sorted(streamed)[-choice.num_held_blocks :])


def _num_partial_grads(model: ModelSize, placement: Placement) -> int:
    """Slots for the sums of one group: of what rests on the device they stay there."""
    uses = (*model.blocks, *model.shared_blocks)
    return sum(model.num_chunks(block) for block in uses if block not in placement.device_blocks)


def _lay_out(
    model: ModelSize,
    placement: Placement,
    num_optimizers: int,
    grad_itemsize: int,
    num_microbatches: int,
    choice: _Choice,
) -> Plan:
    chunk, total = model.chunk_numel, model.total_chunks
    num_kept = choice.num_host_grad_blocks
    spilled = () if num_kept is None else tuple(model.blocks[num_kept:])
    in_memory = placement.host_blocks or placement.device_blocks
    num_fetched = min(placement.depths.params, total)
    num_params = num_fetched + _num_held(model, placement, choice) + choice.num_cached
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
    group_size = min(placement.group_size or num_microbatches, num_microbatches)
    num_groups = -(-num_microbatches // group_size)
    partial_grads = Pool(
        offset=transit.offset + transit.nbytes,
        slot_nbytes=chunk * PARTIAL_GRAD_ITEMSIZE,
        num_slots=_num_partial_grads(model, placement) if num_groups > 1 else 0,
    )
    num_ssd_activations = -(-placement.ssd_activation_nbytes // ACTIVATION_SLOT_NBYTES)
    num_staged = min(placement.depths.staged_activations, num_ssd_activations)
    activations = Pool(
        offset=partial_grads.offset + partial_grads.nbytes,
        slot_nbytes=ACTIVATION_SLOT_NBYTES,
        num_slots=-(-placement.host_activation_nbytes // ACTIVATION_SLOT_NBYTES) + num_staged,
    )
    return Plan(
        params=params,
        grads=grads,
        states=tuple(states),
        host_states=host_states,
        transit=transit,
        partial_grads=partial_grads,
        num_cached_params=choice.num_cached,
        host_blocks=tuple(sorted(placement.host_blocks)),
        device_blocks=tuple(sorted(placement.device_blocks)),
        streamed_blocks=tuple(sorted(placement.streamed_blocks)),
        spilled_blocks=spilled,
        commit_every=placement.commit_every or (COMMIT_EVERY if in_memory else 1),
        group_size=group_size,
        num_groups=num_groups,
        ssd_nbytes=2 * total * state_nbytes,
        layer_activations=placement.activations,
        activations=activations,
        num_staged_activations=num_staged,
        num_ssd_activations=num_ssd_activations,
        num_grad_buffers=placement.num_grad_buffers,
        num_fetched_params=num_fetched,
        leaving_nbytes=placement.depths.leaving_nbytes,
    )
