"""Facts that every actor of a job derives from its spec in the same way: names, sizes, the plan."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from windlass.actors.job.spec import JobCore, JobSpec
from windlass.actors.worker_policy import Stage, check_stages, num_groups_ahead, rank_of
from windlass.engine.memory_plan import (
    NO_CROSSINGS,
    NUM_PIECE_BUFFERS,
    Crossings,
    ModelSize,
    Plan,
    PlanError,
    Pool,
    cut_layers,
    make_plan,
)
from windlass.engine.model import ModelLayout
from windlass.engine.slices import num_slice_tokens
from windlass.storage.ids import (
    ActorName,
    BlockIndex,
    ChunkKey,
    Formats,
    Precision,
    Rank,
    Span,
    SsdIndex,
    StateKind,
)
from windlass.storage.io import DEFAULT_IO, IoSettings
from windlass.storage.store import StoreGeometry

SCHEDULER = ActorName("scheduler")
GPU_WORKER = ActorName("gpu-0")  # the first one
PARAM_SERVER = ActorName("params-0")
# Between the name of a box and that of an actor on it. The first box has no name.
_ON_BOX = "/"


class ActorKind(StrEnum):
    """The kinds of a job's actors. Names of actors have their kind, after the name of their box."""

    SCHEDULER = "scheduler"
    GPU_WORKER = "gpu"
    PARAM_SERVER = "params"
    OPTIMIZER = "optimizer"
    SSD_SERVER = "ssd"
    LINK = "link"


def _name(kind: ActorKind, index: int, box: int) -> ActorName:
    name = f"{kind}-{index}"
    return ActorName(f"b{box}{_ON_BOX}{name}" if box else name)


def gpu_worker_name(rank: int, box: int = 0) -> ActorName:
    """Returns the name of a GPU worker. `box`: the index of its box."""
    return _name(ActorKind.GPU_WORKER, rank, box)


def optimizer_name(index: int, box: int = 0) -> ActorName:
    """Returns the name of an optimizer of a box's pool."""
    return _name(ActorKind.OPTIMIZER, index, box)


def param_server_name(box: int = 0) -> ActorName:
    """Returns the name of the actor that reads params for several GPU workers of a box."""
    return _name(ActorKind.PARAM_SERVER, 0, box)


def link_name(box: int = 0) -> ActorName:
    """Returns the name of the actor that moves bytes between a box and the others."""
    return _name(ActorKind.LINK, 0, box)


def kind_of(name: ActorName) -> ActorKind:
    """Returns the kind of an actor. Raises ValueError if no actor has such a name."""
    return ActorKind(name.rpartition(_ON_BOX)[2].partition("-")[0])


def index_of(name: ActorName) -> int:
    """Returns an actor's index among those of its kind on its box. The scheduler has none."""
    return int(name.rpartition("-")[2])


def box_of(name: ActorName) -> int:
    """Returns the index of an actor's box. The scheduler is on the first one."""
    box, slash, _ = name.rpartition(_ON_BOX)
    return int(box.removeprefix("b")) if slash else 0


def actor_in_words(name: ActorName, boxes: Sequence[str]) -> str:
    """Returns an actor's name for users. `boxes`: the names of a job's boxes, in order; empty if there is one."""
    if not boxes:
        return name
    box = box_of(name)
    return f"{boxes[box]}{_ON_BOX}{name.removeprefix(f'b{box}{_ON_BOX}')}"


def optimizer_index(name: ActorName) -> int | None:
    """Returns an optimizer's index in the pool; None for other actors."""
    return index_of(name) if kind_of(name) is ActorKind.OPTIMIZER else None


def ssd_name(index: int, box: int = 0) -> ActorName:
    """Returns the name of an SSD's server."""
    return _name(ActorKind.SSD_SERVER, index, box)


def grad_precision(spec: JobCore) -> Precision:
    """Returns the type of gradients on their way to the optimizer; see `TrainingConfig.grad_precision`."""
    return spec.training.grad_precision


def grad_itemsize(spec: JobCore) -> int:
    """Returns the bytes per element of a gradient on its way to the optimizer."""
    return spec.training.grad_itemsize


def evaluation_batch_size(spec: JobCore) -> int:
    """Returns the examples of a micro-batch in evaluation: as many as in training."""
    return spec.training.microbatch_size


def num_evaluation_groups(spec: JobCore) -> int:
    """Returns the number of micro-batch groups of an evaluation; 0 without validation data."""
    num_microbatches = -(-spec.num_validation_examples // evaluation_batch_size(spec))
    return -(-num_microbatches // spec.training.num_microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdFacts:
    """A job's settings for one SSD."""

    io: IoSettings
    weight: int  # its share of the chunks, relative to the weights of the other SSDs


def store_geometry(spec: JobCore, layout: ModelLayout, weights: tuple[int, ...], ssd: int) -> StoreGeometry:
    """Returns the geometry of the store on one of a box's SSDs.

    `layout`: as the box sees it. `weights`: of its SSDs.
    """
    return StoreGeometry(
        job=spec.job,
        rank=Rank(spec.box),
        attempt=spec.attempt,
        ssd=SsdIndex(ssd),
        ssd_weights=weights,
        formats=spec.training.formats,
        chunk_numel=layout.chunk_numel,
        chunks_per_block=tuple(layout.num_chunks(block.index) for block in layout.blocks),
        epoch=spec.layout_epoch,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreContext:
    """The facts about one attempt that follow from its settings, its model and its plan. They name no files."""

    spec: JobCore
    layout: ModelLayout  # as the box sees it: only its own blocks have chunks
    plan: Plan
    ssds: tuple[SsdFacts, ...]  # one for each of the job's SSDs

    @property
    def formats(self) -> Formats:
        """The job's number formats."""
        return self.spec.training.formats

    def geometry(self, ssd: int) -> StoreGeometry:
        """Returns the geometry of the store on one SSD."""
        return store_geometry(self.spec, self.layout, tuple(facts.weight for facts in self.ssds), ssd)

    @property
    def gpu_workers(self) -> tuple[ActorName, ...]:
        """The names of the box's GPU workers, by rank."""
        return tuple(map(self.gpu_worker, range(self.spec.num_ranks)))

    def gpu_worker(self, rank: int) -> ActorName:
        """Returns the name of a GPU worker of the box."""
        return gpu_worker_name(rank, self.spec.box)

    @property
    def optimizers(self) -> tuple[ActorName, ...]:
        """The names of the box's optimizers."""
        return tuple(optimizer_name(index, self.spec.box) for index in range(self.spec.num_cpu_optimizers))

    def ssd_server(self, ssd: int) -> ActorName:
        """Returns the name of the server of one of the box's SSDs."""
        return ssd_name(ssd, self.spec.box)

    @property
    def stage(self) -> Stage:
        """The blocks of the box."""
        return stage_of(self.spec, len(self.layout.blocks))

    @property
    def whole_layout(self) -> ModelLayout:
        """The model's layout with the chunks of all boxes."""
        return self.layout.of_blocks(0, len(self.layout.blocks))

    def box_of_block(self, block: int) -> int:
        """Returns the index of the box that has a block."""
        return next((box for box, stage in enumerate(self.spec.stages) if stage.has(block)), 0)

    @property
    def num_groups_in_flight(self) -> int:
        """The number of a GPU worker's groups whose activations are on the device at once."""
        return num_groups_ahead(self.spec.box, self.spec.ranks, self.plan.num_groups)

    @property
    def param_server(self) -> ActorName:
        """The actor that reads params for all GPU workers. A single GPU worker reads its own."""
        return param_server_name(self.spec.box) if self.spec.num_ranks > 1 else self.gpu_worker(0)

    @property
    def grads_worker(self) -> ActorName:
        """The box's GPU worker that computes a step's last group of micro-batches, and so completes its gradients."""
        return self.gpu_worker(rank_of(self.plan.num_groups - 1, self.spec.num_ranks))

    @property
    def blocks_with_sums_on_device(self) -> frozenset[BlockIndex]:
        """The blocks whose gradient sums stay on the device between groups of micro-batches.

        Their states are on the device. Or they are on another box, to which the sum of a single GPU worker leaves once
        a step. Several GPU workers pass it on.
        """
        borrowed = () if self.spec.num_ranks > 1 else self.layout.borrowed
        return frozenset(map(BlockIndex, (*self.plan.device_blocks, *borrowed)))

    def num_scratch_slots(self, ssd: int) -> int:
        """Returns a GPU worker's activation slots on one SSD: its share of the plan's, in proportion to its weight."""
        weights, num_slots = [facts.weight for facts in self.ssds], self.plan.num_ssd_activations
        stop, start = sum(weights[: ssd + 1]), sum(weights[:ssd])
        return num_slots * stop // sum(weights) - num_slots * start // sum(weights)

    def num_reserved_slots(self, ssd: int) -> int:
        """Returns the activation slots of all GPU workers on one SSD."""
        return self.spec.num_ranks * self.num_scratch_slots(ssd)

    def chunk_numel(self, key: ChunkKey) -> int:
        """Returns the number of elements in a chunk; the last chunk of a block may be shorter."""
        start, stop = self.layout.chunk_range(key)
        return stop - start

    def optimizer_of(self, key: ChunkKey) -> ActorName:
        """Returns the optimizer of a chunk whose block is not resident on the device."""
        return optimizer_name(key.chunk % self.spec.num_cpu_optimizers, self.spec.box)

    def state_offsets(self) -> dict[StateKind, int]:
        """Returns the offset in bytes of each state in a state slot; a gradient that was on an SSD comes last."""
        chunk_numel, formats = self.layout.chunk_numel, self.formats
        return {**formats.offsets(chunk_numel), StateKind.GRAD: chunk_numel * sum(formats.itemsizes.values())}

    def host_slots(self) -> dict[ChunkKey, Span]:
        """Returns the arena span of each chunk whose states are resident in host memory."""
        keys = (key for block in self.plan.host_blocks for key in self.layout.chunk_keys(BlockIndex(block)))
        return self.plan.host_states.slots_of(keys)

    def cached_params(self) -> dict[ChunkKey, Span]:
        """Returns the arena span of each chunk whose params stay in host memory while its states are on the SSDs.

        It is filled when a GPU worker first needs the params in an attempt. Then each update replaces the params.
        """
        plan, num_cached = self.plan, self.plan.num_cached_params
        in_memory = {*plan.host_blocks, *plan.device_blocks}
        blocks = (block.index for block in self.layout.blocks if block.index not in in_memory)
        keys = itertools.islice((key for block in blocks for key in self.layout.chunk_keys(block)), num_cached)
        num_others = plan.params.num_slots - num_cached
        offset = plan.params.offset + num_others * plan.params.slot_nbytes
        return replace(plan.params, offset=offset, num_slots=num_cached).slots_of(keys)

    def chunks_in_param_slots(self) -> list[ChunkKey]:
        """Returns the chunks whose params pass through slots from the SSDs to the devices at each use."""
        in_memory = {*self.plan.host_blocks, *self.plan.device_blocks}
        cached = self.cached_params()
        blocks = (block.index for block in self.layout.blocks if block.index not in in_memory)
        return [key for block in blocks for key in self.layout.chunk_keys(block) if key not in cached]

    def activation_pool(self, rank: int) -> Pool:
        """Returns the activation slots of one GPU worker."""
        pool = self.plan.activations
        return replace(pool, offset=pool.offset + rank * pool.nbytes)

    def crossing_pools(self, rank: int) -> list[Pool]:
        """Returns a GPU worker's slots for what passes between boxes, in pools of equal size.

        For each neighbour, the one before first, there is a pool for what is sent and one for what is received.
        """
        pool = self.plan.crossings
        own = replace(pool, num_slots=self.plan.group_size)
        num_pools = pool.num_slots // self.plan.group_size
        offset = pool.offset + rank * pool.nbytes
        return [replace(own, offset=offset + index * own.nbytes) for index in range(num_pools)]

    def partial_slots(self) -> dict[tuple[BlockIndex, ChunkKey], Span]:
        """Returns the arena spans for gradient sums between two groups of micro-batches; empty if they pass at once.

        The key is the block whose operation computes the sum, with the chunk.
        """
        return self._slots_of_sums(self.plan.partial_grads)

    def open_lane_slots(self) -> dict[tuple[BlockIndex, ChunkKey], Span]:
        """Returns the arena spans for sums of lanes that a group of micro-batches leaves unfinished."""
        return self._slots_of_sums(self.plan.open_lanes)

    def running_sum_pool(self, rank: int) -> Pool:
        """Returns a GPU worker's slots for sums of the running operation, where gradients leave in pieces."""
        pool = self.plan.running_sums
        return replace(pool, offset=pool.offset + rank * pool.nbytes)

    def passing_pools(self, rank: int) -> tuple[Pool, Pool]:
        """Returns a GPU worker's slots for sums, and for unfinished lanes, that the next one takes at once."""
        num_passing = self.plan.num_groups - 1
        pools = []
        for pool in (self.plan.partial_grads, self.plan.open_lanes):
            own = pool.num_slots // num_passing
            pools.append(replace(pool, offset=pool.offset + rank * own * pool.slot_nbytes, num_slots=own))
        return pools[0], pools[1]

    def _slots_of_sums(self, pool: Pool) -> dict[tuple[BlockIndex, ChunkKey], Span]:
        if not pool.num_slots or self.plan.passes_sums_at_once:
            return {}
        users = [(user, block) for user, shared in enumerate(self.layout.shared) for block in shared]
        if self.plan.num_groups == 1:
            # Only tied sums wait. The last slots may be missing: the embedding's operation has one micro-batch.
            users = [use for use in reversed(users) if use[1] in self.plan.tied_in_pieces]
        uses = (
            (BlockIndex(user), key)
            for user, block in users
            if block not in self.blocks_with_sums_on_device
            for key in self.layout.keys_of_sum(block)
        )
        return pool.slots_of(itertools.islice(uses, pool.num_slots))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext(CoreContext):
    """The facts about one attempt that all its actors share."""

    spec: JobSpec
    arena_path: str


def aligned(nbytes: int, alignment: int = 4096) -> int:
    """Rounds `nbytes` up to the alignment of O_DIRECT, to one unit at least.

    The minimum is needed because chunks of blocks without params are transferred too.
    """
    return max(1, -(-nbytes // alignment)) * alignment


def piece_bounds(context: CoreContext) -> dict[BlockIndex, tuple[int, ...]]:
    """Returns the bounds of the pieces into which the plan's streamed blocks are cut; see `cut_layers`.

    Raises:
        PlanError: the params of one module lie in more pieces than there are piece buffers.
    """
    streamed = [BlockIndex(block) for block in context.plan.streamed_blocks]
    cut_matrices = context.spec.training.cut_matrices
    layers = [context.layout.blocks[block].part_numels_by_module(cut_matrices) for block in streamed]
    bounds, ends = dict(zip(streamed, cut_layers(layers), strict=True)), (0, len(context.layout.blocks) - 1)
    for block, modules in zip(streamed, layers, strict=True):
        stop = 0
        for module, matrices in zip(modules, context.layout.blocks[block].part_numels_by_module(None), strict=True):
            start, stop = stop, stop + sum(module)
            if len(matrices) == 1:
                continue  # if it lies in several pieces, it is computed in parts, one after the other
            num_pieces = sum(low < stop and start < high for low, high in itertools.pairwise(bounds[block]))
            if num_pieces > NUM_PIECE_BUFFERS:
                raise PlanError(
                    f"block {block} cannot be streamed: a module of it holds params in {num_pieces} pieces and uses "
                    f"them at once, and there are {NUM_PIECE_BUFFERS} buffers; leave "
                    f"{'streams_ends out' if block in ends else 'it out of streamed_blocks'}"
                )
    return bounds


def stage_of(spec: JobCore, num_blocks: int) -> Stage:
    """Returns the blocks of the specification's box."""
    return spec.stages[spec.box] if spec.stages else Stage(0, num_blocks)


def layout_of_box(spec: JobCore, layout: ModelLayout) -> ModelLayout:
    """Returns the layout as the specification's box sees it.

    Raises:
        PlanError: the stages do not divide the model's blocks, or cut between blocks that share tensors and are not
            the embedding and the head.
    """
    if not spec.stages:
        return layout
    try:
        check_stages(spec.stages, len(layout.blocks))
    except ValueError as error:
        raise PlanError(str(error)) from error
    box_of_block = [box for box, stage in enumerate(spec.stages) for _ in range(*stage)]
    head = len(layout.blocks) - 1
    for blocks in layout.shared:
        if len({box_of_block[block] for block in blocks}) > 1 and tuple(blocks) != (head, 0):
            raise PlanError(
                f"blocks {sorted(blocks)} share tensors, and are on different boxes: only the embedding and the head "
                "may; choose stages that keep these blocks together"
            )
    return layout.of_blocks(*spec.stages[spec.box])


def make_context(
    spec: JobSpec,
    layout: ModelLayout,
    arena_path: str,
    ssds: tuple[SsdFacts, ...] | None = None,
    *,
    free_nbytes: int | None = None,
) -> JobContext:
    """Plans the job.

    Without `ssds`, all SSDs have the default settings and equal weights. `free_nbytes` is the free host memory; it is
    the limit of a job without a budget.

    Raises:
        PlanError: the budget or the free memory is too small, or the job has no SSDs but needs some.
    """
    ssds, layout = ssds or _equal_ssds(len(spec.ssd_dirs)), layout_of_box(spec, layout)
    plan = _plan_of(spec, layout, has_ssds=bool(ssds), free_nbytes=free_nbytes)
    return JobContext(spec=spec, layout=layout, plan=plan, arena_path=arena_path, ssds=ssds)


def make_core_context(spec: JobCore, layout: ModelLayout, num_ssds: int) -> CoreContext:
    """Plans a job that has no files, as `make_context` does."""
    layout = layout_of_box(spec, layout)
    plan = _plan_of(spec, layout, has_ssds=num_ssds > 0)
    return CoreContext(spec=spec, layout=layout, plan=plan, ssds=_equal_ssds(num_ssds))


def _equal_ssds(num_ssds: int) -> tuple[SsdFacts, ...]:
    """Returns the facts about SSDs with the default settings and equal weights."""
    return (SsdFacts(io=DEFAULT_IO, weight=1),) * num_ssds


def _plan_of(spec: JobCore, layout: ModelLayout, *, has_ssds: bool, free_nbytes: int | None = None) -> Plan:
    formats = spec.training.formats
    itemsizes = formats.itemsizes
    size = ModelSize(
        block_numels=tuple(block.numel for block in layout.blocks),
        chunk_numel=layout.chunk_numel,
        param_itemsize=itemsizes[formats.param_kind],
        state_itemsize=sum(itemsizes.values()),
        shared=layout.shared,
        own=layout.own,
    )
    plan = make_plan(
        size,
        num_optimizers=spec.num_cpu_optimizers,
        grad_itemsize=grad_itemsize(spec),
        keep_grads=spec.training.keeps_grads,
        is_naive=spec.training.order_of_updates.is_naive,
        host_memory_nbytes=spec.host_memory_nbytes,
        num_microbatches=spec.training.num_microbatches,
        is_sliced=_is_sliced(spec, layout),
        num_lanes=spec.training.lanes,
        num_ranks=spec.num_ranks,
        free_nbytes=free_nbytes,
        placement=spec.placement,
        crossings=_crossings_of(spec, layout),
    )
    num_own = sum(layout.is_own(block.index) for block in layout.blocks)
    if not has_ssds and (len(plan.host_blocks) < num_own or plan.num_ssd_activations):
        raise PlanError(
            "the job has no SSDs: then the states of all blocks must be resident in host memory, and activations must "
            f"not go to SSDs; host_blocks names {len(plan.host_blocks)} of {num_own} blocks"
        )
    return plan


def _is_sliced(spec: JobCore, layout: ModelLayout) -> bool:
    """Returns whether the head may go over a micro-batch in several slices, also where that is not known."""
    num_tokens = spec.training.microbatch_size * spec.training.sequence_length
    # A layout of an earlier release lacks the vocabulary. It is the longest side of what the head uses. Such a job has
    # the room that was planned, and none for slices that its head does not have.
    of_head = (param for block in layout.shared[-1] for param in layout.blocks[block].params)
    vocab_size = layout.vocab_size or max((size for param in of_head for size in param.shape), default=0)
    return not vocab_size or num_tokens > num_slice_tokens(spec.training.head_slices, vocab_size)


def _crossings_of(spec: JobCore, layout: ModelLayout) -> Crossings:
    """Returns the sizes of what passes between the specification's box and others."""
    if len(spec.stages) <= 1:
        return NO_CROSSINGS
    if not layout.hidden_size:
        raise PlanError("the size of the model's hidden state is not known, so it cannot be trained on several boxes")
    training = spec.training
    num_tokens = training.microbatch_size * training.sequence_length
    return Crossings(
        num_neighbours=(spec.box > 0) + (spec.box + 1 < len(spec.stages)),
        microbatch_nbytes=num_tokens * layout.hidden_size * training.formats.precision.itemsize,
        num_lent_chunks=sum(len(layout.chunk_ranges(block)) for block in layout.lent),
        num_borrowed_chunks=sum(len(layout.chunk_ranges(block)) for block in layout.borrowed),
    )
