"""The choices of a kind of plan, and what follows from them alone: counts, pieces, and the times of operations."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from windlass.engine.memory_plan import (
    COMMIT_EVERY,
    MAX_GRAD_BUFFERS,
    NUM_PIECE_BUFFERS,
    PARTIAL_GRAD_ITEMSIZE,
    QueueDepths,
    may_stream_tied,
)
from windlass.planner.cost import ActivationOption, BlockProfile, LayerProfile, Speeds, Work, holding_ways
from windlass.planner.solver.planned_job import Limits, PlannedJob

_MOST_COMMIT_EVERY = 1000  # steps between commits of states in memory

_Any = TypeVar("_Any")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoices:
    """The choices that all plans of one kind share, for a job on a machine.

    `streams`: all layers are copied to the device in pieces. `streams_grads`: their gradients leave it in pieces, too,
    and come back for each further micro-batch. `streams_ends`: both also for embedding and head. `spills`: kept
    gradients go to the SSDs; then no states are resident in memory. `num_host_grad_blocks`: the first blocks whose
    gradients stay in host memory in spite of `spills`, because a plan leaves it free. `has_resident_layers`: a plan has
    states of layers on the device, whose buffers for gradients are free until their turn. `overflows`: swapped
    activations may continue to the SSDs, so staging buffers exist. `num_passing_blocks`: typical blocks whose gradients
    may wait for their update, if gradients are not kept; None: as many as are useful.

    `num_host_grad_blocks` and `has_resident_layers` are known of a plan only. Searches leave them out.
    """

    job: PlannedJob
    speeds: Speeds
    limits: Limits
    group_size: int
    streams: bool = False
    spills: bool = False
    num_host_grad_blocks: int = 0
    has_resident_layers: bool = False
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
        key = (self.speeds, self.group_size, pieces, self.spills, self.num_host_grad_blocks, self.commit_every)
        object.__setattr__(self, "_shared", self.job.known.setdefault(key, {}))

    def _once_known(self, what: object, compute: Callable[[], _Any]) -> _Any:
        """Returns a part of `_shared`. `what` names it, with all else that it depends on."""
        return known_or_new(self._shared, what, compute)

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
        return -(-self.num_sums // self.job.num_ranks)

    @property
    def num_sums_beside_gradient(self) -> int:
        """The number of those sums that the GPU worker of the last group passes on. It copies the gradient out, too."""
        return self.num_sums // self.job.num_ranks

    @property
    def num_sums(self) -> int:
        """The number of sums of each element that all GPU workers pass on in a step."""
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

    @property
    def commit_every(self) -> int:
        """The steps from one commit to the next, if states rest in memory.

        A commit writes all of them to the SSDs, and the next updates wait for it. So commits are as rare as a loss of
        `commit_minutes` allows, if the machine fails.
        """
        if self.given_commit_every is not None:
            return self.given_commit_every
        return known_or_new(self.job.known, ("commit_every", self.speeds, self.limits.host_nbytes), self._commit_every)

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

    @property
    def streamed_layers(self) -> tuple[int, ...]:
        """The layers that are copied in pieces."""
        return self.job.model.unshared_layers if self.streams else ()

    @property
    def streamed_blocks(self) -> tuple[int, ...]:
        """The blocks that are copied in pieces."""
        return self._once_known("streamed blocks", lambda: (*self.streamed_layers, *self.streamed_ends))

    @property
    def streamed_ends(self) -> tuple[int, ...]:
        """The embedding and the head, if they are copied in pieces. A tied head has no matrix of its own."""
        shared = self.job.model.shared_blocks
        return tuple(block for block in self.own_ends if not shared or block in shared) if self.streams_ends else ()

    @property
    def tied_in_pieces(self) -> tuple[int, ...]:
        """See `Plan.tied_in_pieces`."""
        return self._once_known("tied in pieces", self._tied_in_pieces)

    def _tied_in_pieces(self) -> tuple[int, ...]:
        streamed = self.streamed_ends if self.streams_grads else ()
        return tuple(block for block in streamed if block in self.job.model.shared_blocks)

    @property
    def fp32_in_pieces(self) -> tuple[int, ...]:
        """See `Plan.fp32_in_pieces`."""
        return self._once_known("fp32 in pieces", self._fp32_in_pieces)

    def _fp32_in_pieces(self) -> tuple[int, ...]:
        job = self.job
        sums_slices = self.streams_grads and job.is_sliced and job.grad_itemsize < PARTIAL_GRAD_ITEMSIZE
        return (*self.tied_in_pieces, *(filter(self._is_head, self.streamed_ends) if sums_slices else ()))

    @property
    def own_ends(self) -> tuple[int, ...]:
        """The embedding and the head, as far as the box computes them."""
        return tuple(block for block in (0, len(self.job.model.layers) + 1) if self.job.model.is_own(block))

    @property
    def lacks_room_for_layers(self) -> bool:
        """True if the device has room for parts of layers only, or for one buffer of gradients."""
        return self.streams or self.num_grad_buffers == 1

    @property
    def may_stream_ends(self) -> bool:
        """True if embedding and head can come in pieces, and their gradients leave in pieces, as those of layers do."""
        job = self.job
        if not self.streams_grads or job.crossings.num_lent_chunks:
            return False
        if job.model.shared_blocks:
            return may_stream_tied(job.size, num_lanes=job.lanes.num_lanes, num_ranks=job.num_ranks)
        return True

    @property
    def is_in_pieces(self) -> bool:
        """True if gradients leave in pieces, and there are layers whose gradients can."""
        return self.streams_grads and bool(self.streamed_blocks)

    @property
    def overlaid_blocks(self) -> tuple[int, ...]:
        """The blocks whose gradients lie in the memory of gradients in pieces: see `Plan.grad_overlaid_blocks`."""
        return self.own_ends if self.is_in_pieces and not self.streams_ends else ()

    @property
    def ends_share_params(self) -> bool:
        """See `Plan.ends_share_params`."""
        return len(self.overlaid_blocks) == 2 and not self.job.model.shared_blocks

    def _uses(self, block: int) -> tuple[int, int]:
        """Returns how often a block's params are copied to the device in the forward and in the backward pass.

        Without those for recomputation: see `_uses_again`. All of the head's are in the forward pass, as its compute.
        """
        if block not in self.streamed_blocks:
            return self._fetches(block)
        number = self.num_rounds if self._stays_in_pieces(block) else self.num_successive
        # Each slice of a micro-batch uses rows, and then columns.
        of_head = number if self._stays_in_pieces(block) else 2 * self.job.num_head_slices * number
        if self.is_streamed_head(block):
            return of_head, 0
        return number + (of_head if block in self.tied_in_pieces else 0), number

    def _uses_again(self, layer: LayerProfile) -> float:
        """Returns how often a streamed layer's params are copied for the recomputation in the backward pass.

        Whole matrices are used again from the end. So the last pieces are still on the device, and after them the first
        ones for the next micro-batch of a group. Of a matrix that is cut, backward uses other parts.
        """
        number, numel = self.num_successive, layer.numel
        if self.job.cut is not None or not numel:
            return number
        if layer.first_pieces_numel == numel:
            return 0.0
        turned_numel = number * layer.last_pieces_numel + (number - self.num_rounds) * layer.first_pieces_numel
        return number - turned_numel / numel

    def _stays_in_pieces(self, block: int) -> bool:
        """True if the piece buffers have all pieces of a streamed block at once; then it is copied once for a group.

        Without a cut, embedding and head count as if they stayed. That is a bound for each cut.
        """
        model, cut = self.job.model, self.job.cut
        if 0 < block <= len(model.layers):
            layer = model.layers[block - 1]
            return cut is None and layer.numel > 0 and layer.first_pieces_numel == layer.numel
        # The backward pass of a head that is cut uses other parts.
        return cut is None or model.blocks[block].numel <= (cut if self._is_head(block) else NUM_PIECE_BUFFERS * cut)

    def is_streamed_head(self, block: int) -> bool:
        """True for a head that comes in pieces. What it moves is a part of the forward pass, as its compute."""
        return self.streams_ends and self._is_head(block)

    def _fetches(self, block: int) -> tuple[int, int]:
        """Returns how often a block's params are fetched in the forward and in the backward pass; an upper bound.

        The bound is exact for the embedding and the head. A block of a size of its own has a device buffer of its own,
        where all operations of a step find its params. Of other blocks, those in the buffers at the turns of a pass are
        fetched once less (`BlockBuffers`). That depends on the order in which blocks are placed, so it is not counted.
        """
        is_head = self._is_head(block)
        if self.ends_share_params and (block == 0 or is_head):
            # The embedding stays there from a group's backward pass to the next one's forward pass.
            return (self.num_rounds, 0) if is_head else (1, self.num_rounds)
        if block not in self.streamed_blocks and block in self.job.blocks_of_own_size:
            return 1, 0
        return self.num_rounds, 0 if is_head else self.num_rounds

    def _is_head(self, block: int) -> bool:
        return block == len(self.job.model.layers) + 1

    @property
    def num_leaving(self) -> int:
        """The number of tensors that may be leaving the device, however large they are.

        With one, the thread that launches kernels would wait for each copy. A single one is always admitted, because
        plans may have to save device memory. If activations go to SSDs too, each of the two stores admits one.
        """
        return 2 if self.depths.leaving_nbytes else 1

    def compute_s(self, block: BlockProfile) -> tuple[float, float]:
        """Returns seconds of one micro-batch: forward, and backward without recomputation."""
        forward_s = self._roofline_s(block.work) if block.forward_s is None else block.forward_s
        if block.backward_s is not None:
            return forward_s, block.backward_s
        moved_s = block.moved_nbytes / self.speeds.device_memory_bytes if self.speeds.shares_cores else 0.0
        return forward_s, 2 * forward_s + moved_s

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
        """Returns seconds for the FLOPs of matrix products, and for writing and reading all outputs.

        On a CPU also for what attention takes longer than matrix products, and for the calls of operators.
        """
        speeds = self.speeds
        moved_nbytes = 2 * self.job.model.size_share * work.nbytes
        products_s = work.num_flops / speeds.device_flops + moved_nbytes / speeds.device_memory_bytes
        attention_s = (1 / speeds.attention_share - 1) * work.num_attention_flops / speeds.device_flops
        return products_s + attention_s + work.num_operators * speeds.operator_s


def known_or_new(known: dict[object, Any], key: object, compute: Callable[[], _Any]) -> _Any:
    """Returns a part of a cost model that is computed once. `known`: those so far, `key`: all that it depends on."""
    if key not in known:
        known[key] = compute()
    value: _Any = known[key]
    return value
