"""The memory of a job to the byte, and its division into slots.

This is arithmetic only. Sizes follow from the model's blocks and the machine's budget (`arena/`). The engine allocates
exactly the memory of the plan.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from windlass.engine.memory_plan.activation_policy import BlockActivations
from windlass.engine.memory_plan.buffer_counts import MAX_GRAD_BUFFERS
from windlass.engine.memory_plan.queue_depths import QueueDepths
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
# Minimum number of typical blocks whose gradients fit in host memory: one arrives while another is updated.
MIN_PASSING_BLOCKS = 2
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
    # By block: the blocks whose params its operations use, itself first. Empty: each block uses its own only.
    shared: tuple[tuple[int, ...], ...] = ()
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

    @cached_property
    def shared_blocks(self) -> tuple[int, ...]:
        """The blocks whose params other blocks use as well, once for each such use."""
        return tuple(block for blocks in self.shared for block in blocks[1:])

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
    # pieces: for a layer's lane between micro-batches, for the total of embedding or head between lanes, or for the
    # head's sum between slices, if the gradient that leaves has 16 bits.
    running_sums: Pool
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
    # Embedding and head are among `streamed_blocks`, unless their states are on the device. Where they are tied, only
    # the embedding is: it has the head's matrix.
    streams_ends: bool
    # Of `grad_streamed_blocks`, the tied embedding. The head adds to its gradient in pieces, too. The sum of that use
    # waits in slots of `partial_grads` for the embedding's operation.
    tied_in_pieces: tuple[int, ...]
    # Of `grad_streamed_blocks`, those with buffers of their own for sums in fp32: a tied embedding; and a head in
    # several slices, if the gradient that leaves has 16 bits. Its pieces are rounded when they are complete.
    fp32_in_pieces: tuple[int, ...]
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
