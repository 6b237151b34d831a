"""How much memory a job takes, to the byte, and how it is cut into slots.

Arithmetic only. Sizes follow from the model's blocks and the machine's budget; the engine allocates what the plan says.
"""

from dataclasses import dataclass

# Chunks of one block's params that may be on their way from the SSDs at once, beyond those being copied to the device.
FETCH_DEPTH = 4
# Chunks at one optimizer at once: one being read, one updated, one written back.
STATE_DEPTH = 3
MIN_STATE_DEPTH = 2


class PlanError(ValueError):
    """No plan fits; the text gives the shortfall in bytes and what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A model as the planner sees it: elements of each block's flat vector, embedding first, head last."""

    block_numels: tuple[int, ...]
    chunk_numel: int
    param_itemsize: int  # bytes: 2 in bf16, 4 in fp32
    state_itemsize: int  # bytes of all states of one parameter at rest: 14 in bf16, 12 in fp32

    def num_chunks(self, block: int) -> int:
        """Chunks of a block."""
        return max(1, -(-self.block_numels[block] // self.chunk_numel))

    @property
    def total_chunks(self) -> int:
        """Chunks of the model."""
        return sum(self.num_chunks(block) for block in range(len(self.block_numels)))


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
    """The arena of a job and its share of the SSDs."""

    params: Pool  # the GPU worker's: params on their way to the device
    grads: Pool  # the GPU worker's, lent to the optimizers with each gradient
    states: tuple[Pool, ...]  # one for each optimizer: all states of a chunk in one slot
    ssd_nbytes: int  # model states on all SSDs, both generations

    @property
    def arena_nbytes(self) -> int:
        """Size of the shared memory."""
        last = self.states[-1]
        return last.offset + last.nbytes


def make_plan(
    model: ModelSize,
    *,
    num_optimizers: int,
    grad_itemsize: int,
    keep_grads: bool,
    host_memory_nbytes: int | None,
    is_naive: bool = False,
) -> Plan:
    """The arena of a job.

    `keep_grads`: every gradient is needed before the first update. `is_naive`: an optimizer has one chunk at a time.

    Raises:
        PlanError: the budget is smaller than the least that the job needs.
    """
    blocks = range(len(model.block_numels))
    largest = max(model.num_chunks(block) for block in blocks)
    typical = sorted(model.num_chunks(block) for block in blocks)[len(model.block_numels) // 2]
    # Two typical blocks in flight, or the largest one alone.
    num_grads = model.total_chunks if keep_grads else max(largest, 2 * typical)
    for depth in (1,) if is_naive else range(STATE_DEPTH, MIN_STATE_DEPTH - 1, -1):
        plan = _lay_out(model, num_optimizers, grad_itemsize, num_grads, min(depth, model.total_chunks))
        if host_memory_nbytes is None or plan.arena_nbytes <= host_memory_nbytes:
            return plan
    raise PlanError(
        f"the job needs {plan.arena_nbytes} bytes ({plan.arena_nbytes / 2**30:.2f} GiB) of host memory for its "
        f"buffers, and its budget is {host_memory_nbytes} bytes; raise the budget"
        + (
            ", or train in bf16 without clipping (clip_norm: null): otherwise every gradient is kept in memory"
            if keep_grads
            else ""
        )
    )


def _lay_out(model: ModelSize, num_optimizers: int, grad_itemsize: int, num_grads: int, depth: int) -> Plan:
    chunk = model.chunk_numel
    params = Pool(offset=0, slot_nbytes=chunk * model.param_itemsize, num_slots=min(FETCH_DEPTH, model.total_chunks))
    grads = Pool(offset=params.nbytes, slot_nbytes=chunk * grad_itemsize, num_slots=num_grads)
    states = []
    offset = grads.offset + grads.nbytes
    for _ in range(num_optimizers):
        pool = Pool(offset=offset, slot_nbytes=chunk * model.state_itemsize, num_slots=depth)
        states.append(pool)
        offset += pool.nbytes
    ssd_nbytes = 2 * model.total_chunks * chunk * model.state_itemsize
    return Plan(params=params, grads=grads, states=tuple(states), ssd_nbytes=ssd_nbytes)
