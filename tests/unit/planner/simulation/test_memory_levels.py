"""Levels of memory in simulated jobs: within the plan's allocation, back at their start, and as the work says."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.support.actors.specs import make_layout
from tests.support.planner.simulated import CHUNK, Simulated, job, layers_of, rates
from windlass.actors.job.context import JobContext, grad_itemsize, piece_bounds
from windlass.actors.messages import SpanKind
from windlass.actors.timeline.memory_levels import Level, memory_of
from windlass.actors.timeline.trace_export import TOGETHER, trace_of
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.memory_plan.buffer_counts import grad_buffers_of_job, param_buffers, streamed_grads_nbytes
from windlass.engine.memory_plan.memory_tier import MemoryTier
from windlass.engine.memory_plan.param_slices import NUM_PIECE_BUFFERS, largest_piece
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.memory_plan.queue_depths import QueueDepths
from windlass.planner.simulation.job import SimulatedJob
from windlass.planner.simulation.resources import Log
from windlass.storage.ids import BlockIndex, Precision

pytestmark = pytest.mark.usefixtures("small_activation_slots")

SLOT = 4096
LAYERS = range(1, 5)
NUM_BLOCKS = 6
NUM_MICROBATCHES = 4
TENSORS = (SLOT + 100, SLOT, 2 * SLOT)
NUM_SLOTS = 5 * len(LAYERS) * NUM_MICROBATCHES
SLOW = rates(
    h2d_bytes=1e5,
    d2h_bytes=1e5,
    ssd_read_bytes=(1e5, 1e5),
    ssd_write_bytes=(1e5, 1e5),
    optimizer_params=1e5,
    commit_s=0.3,
)
HELD = {block: 1000 + block for block in LAYERS}
PEAKS = {block: 5000 * (1 + block) for block in range(NUM_BLOCKS)}
IN_PIECES = layers_of((2 * CHUNK,), (CHUNK, CHUNK), (2 * CHUNK,), num_norms=100, num_blocks=NUM_BLOCKS)
PLAIN = make_layout(*[2 * CHUNK] * NUM_BLOCKS, chunk_numel=CHUNK)
TIED = replace(PLAIN, shared=(*PLAIN.shared[:-1], (BlockIndex(NUM_BLOCKS - 1), BlockIndex(0))))
GRADS_IN_PIECES = Placement(streamed_blocks=tuple(LAYERS), streams_grads=True, num_grad_buffers=1)
SWAPS = ActivationChoice.SWAP.of_layers(len(LAYERS))


def swapping(num_host: int, **placement: Any) -> dict[str, Any]:
    rooms = {"host_activation_nbytes": num_host * SLOT, "ssd_activation_nbytes": (NUM_SLOTS - num_host) * SLOT}
    return {
        "swapped_nbytes": dict.fromkeys(LAYERS, TENSORS),
        "placement": Placement(activations=SWAPS, **rooms, **placement),
    }


JOBS: dict[str, dict[str, Any]] = {
    "on SSDs": {"num_cpu_optimizers": 2},
    "params stay": {"placement": Placement(num_cached_params=7)},
    "clipped": {"clips": True, "placement": Placement(num_cached_params=0)},
    "gradients on SSDs": {"clips": True, "placement": Placement(num_host_grad_blocks=1, num_cached_params=2)},
    "swapped": swapping(NUM_SLOTS),
    "swapped to SSDs": swapping(17, depths=QueueDepths(leaving_nbytes=3 * SLOT)),
    "groups": {"layout": TIED, "placement": Placement(group_size=1)},
    "groups of two, swapped, clipped": {"clips": True, **swapping(7, group_size=2)},
    "lanes": {"layout": TIED, "lanes": 2},
    "groups that end inside of lanes": {"layout": TIED, "lanes": 2, "placement": Placement(group_size=1)},
    "lanes in memory": {
        "layout": TIED,
        "lanes": 2,
        "placement": Placement(device_blocks=(0, 3), host_blocks=(1, 2), commit_every=2, group_size=1),
    },
    "in pieces": {"layout": IN_PIECES, "placement": Placement(streamed_blocks=tuple(LAYERS), num_cached_params=0)},
    "in pieces and groups": {
        "layout": IN_PIECES,
        "placement": Placement(streamed_blocks=tuple(LAYERS), group_size=3, num_host_grad_blocks=0),
        "clips": True,
    },
    "gradients in pieces": {"layout": IN_PIECES, "placement": GRADS_IN_PIECES},
    "gradients in pieces and groups": {
        "layout": replace(IN_PIECES, shared=TIED.shared),
        "placement": replace(GRADS_IN_PIECES, group_size=3, num_host_grad_blocks=0),
        "clips": True,
    },
    "gradients in pieces and lanes": {"layout": IN_PIECES, "lanes": 2, "placement": GRADS_IN_PIECES},
    "gradients in pieces, groups and lanes": {
        "layout": replace(IN_PIECES, shared=TIED.shared),
        "lanes": 2,
        "placement": replace(GRADS_IN_PIECES, group_size=2),
    },
    "slices in pieces": {
        "layout": IN_PIECES,
        "placement": replace(GRADS_IN_PIECES, streams_ends=True, group_size=3),
        "accumulation_precision": Precision.BF16,
    },
    "in memory": {
        "layout": TIED,
        "placement": Placement(device_blocks=(0, 3), host_blocks=(1, 2), commit_every=2, group_size=2),
    },
}


def made(
    *,
    clips: bool = False,
    lanes: int = 1,
    accumulation_precision: Precision = Precision.FP32,
    machine: Any = SLOW,
    **options: Any,
) -> Simulated:
    training = {"num_microbatches": NUM_MICROBATCHES, "clip_norm": 1.0 if clips else None, "lanes": lanes}
    training |= {"accumulation_precision": accumulation_precision}
    found = job(**{"compute_s": 0.1, **options}, machine=machine, training=training)
    return replace(found, work=replace(found.work, held_nbytes=HELD, peak_nbytes=PEAKS, head_slices=3))


def levels_of(found: Simulated) -> dict[tuple[MemoryTier, str], Level]:
    """Levels from the beginning to the end of the job."""
    simulated = SimulatedJob(found.context, found.shape, found.machine, found.work)
    simulated.run()
    return {(level.tier, level.what): level for level in simulated.levels}


def peak(level: Level) -> int:
    return max(nbytes for _, nbytes in level.points)


def allocated(context: JobContext) -> dict[tuple[MemoryTier, str], int]:
    """The bytes that the plan allocates, computed without the simulator."""
    plan, layout = context.plan, context.layout
    bounds = piece_bounds(context)
    numels = [block.numel for block in layout.blocks]
    params = param_buffers(
        [numel - bounds[block][-1] if (block := BlockIndex(i)) in bounds else numel for i, numel in enumerate(numels)],
        layout.shared,
        resident=(),
        num_ahead=context.spec.effective_ordering.max_prefetched,
    )
    pieces = NUM_PIECE_BUFFERS * largest_piece(list(bounds.values()))
    found = {
        (MemoryTier.DEVICE, "params"): sum(numel * number for numel, number in params.items()) * 2,
        (MemoryTier.DEVICE, "pieces of params"): pieces * 2,
        (MemoryTier.DEVICE, "gradients"): _grads_nbytes(context, numels, bounds),
        (MemoryTier.DEVICE, "states"): sum(numels[block] for block in plan.device_blocks) * 12,
        (MemoryTier.HOST, "params"): plan.params.nbytes,
        (MemoryTier.HOST, "gradients"): plan.grads.nbytes,
        (MemoryTier.HOST, "states"): plan.host_states.nbytes,
        (MemoryTier.HOST, "states in transit"): plan.transit.nbytes,
        (MemoryTier.HOST, "partial gradients"): sum(
            pool.nbytes for pool in (plan.partial_grads, plan.open_lanes, plan.running_sums)
        ),
        (MemoryTier.HOST, "activations"): plan.num_host_activations * SLOT,
        (MemoryTier.HOST, "activations to and from the SSDs"): plan.num_staged_activations * SLOT,
        (MemoryTier.SSD, "states"): plan.ssd_nbytes,
        (MemoryTier.SSD, "activations"): plan.num_ssd_activations * SLOT,
    }
    found |= {(MemoryTier.HOST, f"states at optimizer-{i}"): pool.nbytes for i, pool in enumerate(plan.states)}
    return {key: nbytes for key, nbytes in found.items() if nbytes}


def _grads_nbytes(context: JobContext, numels: list[int], bounds: dict[BlockIndex, tuple[int, ...]]) -> int:
    buffers = grad_buffers_of_job(
        numels,
        context.layout.shared,
        itemsize=grad_itemsize(context.spec),
        summed_in_fp32=(),
        resident=context.plan.device_blocks,
        num_groups=context.plan.num_groups,
        num_grad_buffers=context.plan.num_grad_buffers,
        elsewhere=(*context.plan.grad_streamed_blocks, *context.plan.grad_overlaid_blocks),
        lanes=context.spec.training.lane_division,
        group_size=context.plan.group_size,
    )
    in_pieces = streamed_grads_nbytes(
        numels,
        {block: bounds[BlockIndex(block)] for block in context.plan.grad_streamed_blocks},
        context.plan.grad_overlaid_blocks,
        itemsize=grad_itemsize(context.spec),
        summed_in_fp32=(),
        is_summed=True,
        fp32_in_pieces=context.plan.fp32_in_pieces,
        has_lanes=context.spec.training.lanes > 1,
        chunk_numel=context.layout.chunk_numel,
    )
    return sum(numel * itemsize * number for (numel, itemsize), number in buffers.items()) + in_pieces


@pytest.mark.parametrize("machine", [SLOW, rates()], ids=["slow", "fast"])
@pytest.mark.parametrize("name", JOBS)
def test_no_more_is_in_use_than_the_plan_allocates(name: str, machine: Any) -> None:
    found = made(**JOBS[name], machine=machine)
    levels = levels_of(found)
    planned = allocated(found.context)
    assert {key: level.allocated_nbytes for key, level in levels.items() if level.allocated_nbytes} == planned
    assert sum(n for (tier, _), n in planned.items() if tier is MemoryTier.HOST) == found.context.plan.arena_nbytes
    for key, level in levels.items():
        assert all(before[0] < after[0] for before, after in pairwise(level.points))
        assert min(nbytes for _, nbytes in level.points) >= 0
        assert peak(level) <= planned.get(key, peak(level)), key


@pytest.mark.parametrize("name", JOBS)
def test_only_resident_memory_is_in_use_at_the_end(name: str) -> None:
    found = made(**JOBS[name])
    plan = found.context.plan
    for (tier, what), level in levels_of(found).items():
        end_nbytes = level.points[-1][1]
        if (tier, what) == (MemoryTier.HOST, "params"):
            assert end_nbytes == plan.num_cached_params * plan.params.slot_nbytes
        elif what == "states":
            assert end_nbytes == level.points[0][1]
            assert end_nbytes == (plan.ssd_nbytes // 2 if tier is MemoryTier.SSD else level.allocated_nbytes)
        else:
            assert end_nbytes == 0, (tier, what)


@pytest.mark.parametrize("name", JOBS)
def test_levels_of_steps_cover_the_whole_time(name: str) -> None:
    found = made(**JOBS[name])
    whole, steps = levels_of(found), found.steps()
    for i, level in enumerate(whole.values()):
        cut = [step.levels[i] for step in steps]
        assert {(each.tier, each.what) for each in cut} == {(level.tier, level.what)}
        assert [each.points[0][0] for each in cut] == [step.start_s for step in steps]
        joined = [point for each in cut for point in each.points]
        # The first point of a step has the level at its start.
        assert [b for a, b in pairwise([(-1.0, -1), *joined]) if a[1] != b[1]] == list(level.points)


@pytest.mark.parametrize("name", JOBS)
def test_a_trace_has_counters_up_to_the_peaks(name: str) -> None:
    step = made(**JOBS[name]).steps()[-1]
    events = trace_of(step.spans, begins_s=step.start_s, about={}, levels=step.levels)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    most: dict[tuple[str, str], int] = {}
    for event in events:
        if event["ph"] == "C":
            key = (names[event["pid"]], event["name"])
            most[key] = max(most.get(key, 0), event["args"]["used"])
    memory = memory_of(step.levels)
    peaks = {(f"{level.tier} memory", level.what): peak(level) for level in step.levels}
    assert most == peaks | {(f"{tier} memory", TOGETHER): each.peak_nbytes for tier, each in memory.items()}
    for tier, each in memory.items():
        assert 0 < each.peak_nbytes <= sum(nbytes for (name, _), nbytes in peaks.items() if name == f"{tier} memory")


# --- memory of the work -------------------------------------------------------------------------------------------


def test_device_levels_contain_held_activations_and_operation_needs() -> None:
    levels = levels_of(made(machine=rates()))
    assert peak(levels[MemoryTier.DEVICE, "activations held"]) == NUM_MICROBATCHES * sum(HELD.values())
    assert {nbytes for _, nbytes in levels[MemoryTier.DEVICE, "running operation"].points} == {0, *PEAKS.values()}


def test_activations_of_one_group_at_a_time_are_held() -> None:
    levels = levels_of(made(machine=rates(), placement=Placement(group_size=1)))
    assert peak(levels[MemoryTier.DEVICE, "activations held"]) == sum(HELD.values())


def test_the_sums_of_all_blocks_wait_between_groups() -> None:
    found = made(layout=TIED, placement=Placement(group_size=2), machine=rates())
    assert peak(levels_of(found)[MemoryTier.HOST, "partial gradients"]) == (NUM_BLOCKS + 1) * 2 * CHUNK * 4


def test_sums_of_tied_uses_are_fp32_also_where_gradients_travel_in_16_bits() -> None:
    layout = make_layout(3 * CHUNK, *[2 * CHUNK] * (NUM_BLOCKS - 1), chunk_numel=CHUNK)
    found = job(
        layout=replace(layout, shared=TIED.shared),
        training={"num_microbatches": NUM_MICROBATCHES, "accumulation_precision": "bf16"},
    )
    gradients = levels_of(found)[MemoryTier.DEVICE, "gradients"]
    # One for the head's sum and one for its sum of the embedding; for all others one in use and one that leaves.
    assert gradients.allocated_nbytes == 2 * 3 * CHUNK * 4 + 2 * 2 * CHUNK * 2
    assert 2 * 3 * CHUNK * 4 <= peak(gradients) <= gradients.allocated_nbytes


def test_gradients_that_are_kept_are_all_there_at_once() -> None:
    levels = levels_of(made(clips=True, machine=rates()))
    assert peak(levels[MemoryTier.HOST, "gradients"]) == NUM_BLOCKS * 2 * CHUNK * 4


def grown_nbytes(level: Level) -> int:
    return sum(b - a for (_, a), (_, b) in pairwise(level.points) if b > a)


def test_spilled_gradients_use_space_of_the_next_states() -> None:
    found = made(clips=True, placement=Placement(num_host_grad_blocks=0, num_cached_params=0), num_steps=1)
    states, spans = levels_of(found)[MemoryTier.SSD, "states"], found.spans()
    assert peak(states) == found.context.plan.ssd_nbytes
    written = Counter(span.kind for span in spans)
    assert written[SpanKind.WRITE_GRAD] == written[SpanKind.WRITE_STATES]
    assert grown_nbytes(states) == CHUNK * 14 * written[SpanKind.WRITE_GRAD]
    first_s = {span.kind: span.start_s for span in sorted(spans, key=lambda span: -span.start_s)}
    assert states.points[1][0] == first_s[SpanKind.WRITE_GRAD] < first_s[SpanKind.WRITE_STATES]


def test_a_second_generation_grows_with_what_is_written_and_ends_with_the_commit() -> None:
    found = made(num_steps=1)
    states, spans = levels_of(found)[MemoryTier.SSD, "states"], found.spans()
    commits_s = {span.end_s for span in spans if span.kind is SpanKind.COMMIT}
    assert [at_s for (_, a), (at_s, b) in pairwise(states.points) if b < a] == sorted(commits_s)
    assert grown_nbytes(states) == CHUNK * 14 * sum(span.kind is SpanKind.WRITE_STATES for span in spans)


@pytest.mark.parametrize("num_host", [NUM_SLOTS, 17, 0])
def test_swapped_activations_use_slots_and_device_memory_in_transfer(num_host: int) -> None:
    levels = levels_of(made(**swapping(num_host), machine=rates()))
    slots = {tier: levels.get((tier, "activations")) for tier in (MemoryTier.HOST, MemoryTier.SSD)}
    taken = {tier: 0 if level is None else peak(level) for tier, level in slots.items()}
    assert taken == {MemoryTier.HOST: num_host * SLOT, MemoryTier.SSD: (NUM_SLOTS - num_host) * SLOT}
    assert ((MemoryTier.HOST, "activations to and from the SSDs") in levels) == (num_host < NUM_SLOTS)
    # One micro-batch is in use, and the next is in flight.
    assert peak(levels[MemoryTier.DEVICE, "activations back, or coming"]) == 2 * sum(TENSORS)
    assert peak(levels[MemoryTier.DEVICE, "activations leaving"]) >= max(TENSORS)


@pytest.mark.parametrize("num_host", [NUM_SLOTS, 0])
def test_no_more_is_leaving_than_the_limit_or_one_tensor(num_host: int) -> None:
    def most(leaving_nbytes: int) -> int:
        found = made(**swapping(num_host, depths=QueueDepths(leaving_nbytes=leaving_nbytes)))
        return peak(levels_of(found)[MemoryTier.DEVICE, "activations leaving"])

    assert most(0) == max(TENSORS)
    limit = 2 * sum(TENSORS)  # of which the SSDs have half
    assert max(TENSORS) < most(limit) <= limit


def test_a_tensor_lies_on_the_device_until_its_last_part_has_left_for_the_ssds() -> None:
    room = {"host_activation_nbytes": 0, "ssd_activation_nbytes": 20 * SLOT * len(LAYERS) * NUM_MICROBATCHES}
    placement = Placement(activations=SWAPS, depths=QueueDepths(leaving_nbytes=0), **room)
    found = made(swapped_nbytes=dict.fromkeys(LAYERS, (20 * SLOT,)), placement=placement)
    copied = {span.nbytes for span in found.spans() if span.kind is SpanKind.COPY_ACTIVATIONS_OUT}
    assert max(copied) < 20 * SLOT
    assert {nbytes for _, nbytes in levels_of(found)[MemoryTier.DEVICE, "activations leaving"].points} == {0, 20 * SLOT}


def test_pieces_are_in_use_until_their_last_use() -> None:
    found = made(**JOBS["in pieces"], machine=rates())
    # One is in use while the other is copied in.
    assert peak(levels_of(found)[MemoryTier.DEVICE, "pieces of params"]) == 2 * 2 * CHUNK * 2


def test_simulation_without_spans_has_no_levels() -> None:
    found = made(**JOBS["groups of two, swapped, clipped"])
    simulated = SimulatedJob(found.context, found.shape, found.machine, found.work, keeps_spans=False)
    simulated.run()
    assert simulated.levels == []
    log = Log(keeps_spans=False)
    log.allocate(MemoryTier.DEVICE, "params", 100)
    log.level(MemoryTier.DEVICE, "params", 10)
    assert log.levels == []
