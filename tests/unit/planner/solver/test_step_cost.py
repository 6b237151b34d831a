"""Fetches of params in a step's costs are those that the buffers on the device leave to do, or more."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.support.planner.profiles import make_job, make_speeds
from windlass.engine.memory_plan.block_buffers import BlockBuffers
from windlass.engine.memory_plan.buffer_counts import param_buffers
from windlass.engine.memory_plan.memory_tier import MemoryTier
from windlass.planner.solver.family import bases_of
from windlass.planner.solver.placement_search import solve_job
from windlass.planner.solver.planned_job import TIER_INDEX, Limits
from windlass.planner.solver.step_bounds import Part
from windlass.planner.solver.step_cost import StateTier, StepCosts

PLENTY = Limits(device_nbytes=1e12, host_nbytes=1e12, ssd_nbytes=1e12)
NUM_LAYERS, HEAD = 6, 7
EMBEDDING_NUMEL = 5 << 20


def costs_of(*, group_size: int, is_tied: bool, is_own_size: bool) -> StepCosts:
    job = make_job(NUM_LAYERS, num_microbatches=4, is_tied=is_tied)
    if is_own_size:
        embedding = replace(job.model.embedding, numel=EMBEDDING_NUMEL)
        job = replace(job, model=replace(job.model, embedding=embedding))
    return StepCosts(job=job, speeds=make_speeds(), limits=PLENTY, group_size=group_size)


def loads_of(costs: StepCosts) -> Counter[tuple[int, bool]]:
    """The loads of each block in a step, in the forward or the backward pass."""
    model, num_ahead = costs.job.model, costs.job.num_prefetched
    numels = [block.numel for block in model.blocks]
    buffers: BlockBuffers[int, int] = BlockBuffers(
        param_buffers(numels, model.shared, resident=(), num_ahead=num_ahead)
    )
    loads = Counter[tuple[int, bool]]()
    forward = [(block, False) for block in range(HEAD + 1)]
    for operation, is_backward in (forward + [(block, True) for block in reversed(range(HEAD))]) * costs.num_groups:
        held = []
        for block in model.shared[operation]:
            acquired = buffers.acquire(numels[block], block)
            assert acquired is not None
            loads[block, is_backward] += not acquired.has_contents
            held.append(acquired.buffer)
        for buffer in held:
            buffers.release(buffer)
    return loads


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("group_size", [4, 2, 1])
def test_fetches_of_blocks_of_their_own_size_are_exact(group_size: int, is_tied: bool) -> None:
    costs = costs_of(group_size=group_size, is_tied=is_tied, is_own_size=True)
    loads = loads_of(costs)
    for block in (0, HEAD):
        assert costs._fetches(block) == (loads[block, False], loads[block, True]) == (1, 0)


@pytest.mark.parametrize("is_own_size", [False, True])
@pytest.mark.parametrize("group_size", [4, 2, 1])
def test_fetches_are_never_more_than_counted(group_size: int, is_own_size: bool) -> None:
    costs = costs_of(group_size=group_size, is_tied=False, is_own_size=is_own_size)
    loads = loads_of(costs)
    for block in range(HEAD + 1):
        forward, backward = costs._fetches(block)
        assert loads[block, False] <= forward
        assert loads[block, True] <= backward
    layers = range(1, NUM_LAYERS + 1)
    counted, num_loads = (
        sum(sum(costs._fetches(block)) for block in layers),
        sum(loads[block, is_backward] for block in layers for is_backward in (False, True)),
    )
    # The two layers at each turn of a pass.
    assert counted - num_loads == 2 * (2 * costs.num_groups - 1)


@pytest.mark.parametrize(("group_size", "num_flats", "num_moved"), [(4, 1, 0), (2, 1, 1), (1, 2, 3 + 1)])
def test_lanes_take_the_time_of_adding_and_the_room_of_sums_that_groups_cut(
    group_size: int, num_flats: int, num_moved: int
) -> None:
    plain = costs_of(group_size=group_size, is_tied=True, is_own_size=True)
    training = replace(plain.job.training, lanes=2)
    lanes = replace(plain, job=replace(plain.job, training=training))
    options = [costs._state_option(0, StateTier.SSD) for costs in (plain, lanes)]
    seconds = [dict(zip(Part, option.seconds, strict=True)) for option in options]
    # Two uses, one lane added to the total of each, and the norm of the gradient.
    adding_s = 2 * EMBEDDING_NUMEL / plain.speeds.device_added_params
    norms_s = EMBEDDING_NUMEL / plain.speeds.device_squared_params
    assert seconds[1][Part.BACKWARD] == pytest.approx(seconds[0][Part.BACKWARD] + adding_s + norms_s)
    moved_s = num_moved * 4 * EMBEDDING_NUMEL / plain.speeds.h2d_bytes
    assert seconds[1][Part.H2D_BACKWARD] == pytest.approx(moved_s)
    host = MemoryTier.HOST
    chunks = lanes.job.size.num_chunks(0) * lanes.job.size.chunk_numel
    of_sums = options[1].nbytes[TIER_INDEX[host]] - (num_flats - 1) * 2 * 4 * chunks
    assert of_sums == options[0].nbytes[TIER_INDEX[host]]
    more = lanes.always_on_device - plain.always_on_device
    assert more >= 4 * (EMBEDDING_NUMEL + max(block.numel for block in lanes.job.model.blocks[1:]))


def test_states_on_the_device_are_copied_out_for_a_commit_with_their_params() -> None:
    costs = costs_of(group_size=4, is_tied=False, is_own_size=True)
    seconds = dict(zip(Part, costs._state_option(0, StateTier.DEVICE).seconds, strict=True))
    assert (costs.job.read_itemsize, costs.job.state_itemsize) == (12, 14)
    flushed_s = 14 * EMBEDDING_NUMEL / costs.commit_every / costs.speeds.d2h_bytes
    assert seconds[Part.D2H_BACKWARD] == pytest.approx(flushed_s)


def test_compute_waits_for_copies_where_layers_have_a_single_buffer_for_gradients() -> None:
    costs = replace(costs_of(group_size=4, is_tied=False, is_own_size=True), num_grad_buffers=1)
    numels = [block.numel for block in costs.job.model.blocks]
    # Those of embedding and head, and of the last layer.
    beside_s = 4 * (numels[0] + numels[1] + numels[HEAD]) / costs.speeds.d2h_bytes
    assert costs._copies_beside_s == pytest.approx(beside_s)
    waiting = [
        bound for bound in costs._bounds() if bound.weights[Part.BACKWARD] == bound.weights[Part.D2H_BACKWARD] == 1.0
    ]
    assert {bound.constant_s for bound in waiting} == {-costs._copies_beside_s}
    others = (
        replace(costs, group_size=2),  # sums return to a second one
        replace(costs, num_grad_buffers=2),
        replace(costs, has_resident_layers=True),
        replace(costs, streams=True, streams_grads=True),
    )
    assert [each._copies_beside_s for each in others] == [None] * 4


@pytest.mark.parametrize(("device_nbytes", "expected"), [(1e12, True), (60 * 2**20, False)])
def test_solution_tells_whether_layers_have_states_on_the_device(device_nbytes: float, expected: bool) -> None:
    limits = replace(PLENTY, device_nbytes=device_nbytes)
    solution = solve_job(make_job(NUM_LAYERS, num_microbatches=1), make_speeds(optimizer_params=1e6), limits)
    assert bool(set(solution.plan.device_blocks) - {0, HEAD}) is expected
    assert solution.costs.has_resident_layers is expected


@pytest.mark.parametrize("tier", [StateTier.DEVICE, StateTier.HOST])
def test_measured_norms_of_lanes_are_counted_once_a_step(tier: StateTier) -> None:
    plain = costs_of(group_size=1, is_tied=False, is_own_size=True)
    model = replace(plain.job.model, embedding=replace(plain.job.model.embedding, norms_s=0.25))
    training = replace(plain.job.training, lanes=2)
    lanes = replace(plain, job=replace(plain.job, model=model, training=training))
    seconds = [dict(zip(Part, costs._state_option(0, tier).seconds, strict=True)) for costs in (plain, lanes)]
    assert seconds[1][Part.BACKWARD] - seconds[0][Part.BACKWARD] == pytest.approx(0.25 + lanes.adding_lanes_s(0))
    one_lane = replace(plain, job=replace(plain.job, model=model))
    assert one_lane.norms_s(0) == 0.0  # the measured backward pass includes it


@pytest.mark.parametrize(
    ("num_microbatches", "group_size", "num_ranks", "num_rounds", "num_successive"),
    [(8, 2, 1, 4, 8), (8, 2, 4, 1, 2), (8, 1, 4, 2, 2), (6, 1, 4, 2, 2), (3, 1, 2, 2, 2), (5, 3, 1, 2, 5)],
)
def test_ranks_compute_groups_in_rounds(
    num_microbatches: int, group_size: int, num_ranks: int, num_rounds: int, num_successive: int
) -> None:
    job = replace(make_job(NUM_LAYERS, num_microbatches=num_microbatches), num_ranks=num_ranks)
    costs = StepCosts(job=job, speeds=make_speeds(), limits=PLENTY, group_size=group_size)
    assert (costs.num_rounds, costs.num_successive) == (num_rounds, num_successive)
    middle = 3
    assert costs._fetches(middle) == (num_rounds, num_rounds)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_groups", [2, 3, 4, 5, 8, 9])
def test_sums_are_those_of_the_busiest_link(num_groups: int, num_ranks: int) -> None:
    job = replace(make_job(NUM_LAYERS, num_microbatches=num_groups), num_ranks=num_ranks)
    costs = StepCosts(job=job, speeds=make_speeds(), limits=PLENTY, group_size=1)
    copied_in, copied_out = Counter[int](), Counter[int]()  # sums and gradients, by GPU worker
    for group in range(num_groups):
        copied_in[group % num_ranks] += group > 0
        copied_out[group % num_ranks] += 1  # that of the last group is the gradient
    seconds = dict(zip(Part, costs._state_option(0, StateTier.SSD).seconds, strict=True))
    nbytes = 4 * job.model.blocks[0].numel
    params_s = costs._fetches(0)[1] * nbytes / 2 / costs.speeds.h2d_bytes
    assert seconds[Part.H2D_BACKWARD] == pytest.approx(
        params_s + max(copied_in.values()) * nbytes / costs.speeds.h2d_bytes
    )
    assert seconds[Part.D2H_BACKWARD] == pytest.approx(max(copied_out.values()) * nbytes / costs.speeds.d2h_bytes)


def test_sums_of_unfinished_lanes_are_shared_by_the_links() -> None:
    job = make_job(NUM_LAYERS, num_microbatches=8)
    job = replace(job, training=replace(job.training, lanes=2))
    alone, shared = (
        StepCosts(job=replace(job, num_ranks=num_ranks), speeds=make_speeds(), limits=PLENTY, group_size=1)
        for num_ranks in (1, 4)
    )
    assert (alone.num_partial_sums, alone.num_sums_beside_gradient) == (7 + 3, 7 + 3)
    assert (shared.num_partial_sums, shared.num_sums_beside_gradient) == (3, 2)


@pytest.mark.parametrize(
    ("num_microbatches", "group_size", "num_ranks", "num_behind"),
    [(8, 8, 1, 0), (8, 1, 1, 0), (8, 2, 4, 3), (8, 1, 4, 3), (3, 1, 4, 2), (4, 2, 3, 1)],
)
def test_a_rank_is_one_block_behind_the_one_before(
    num_microbatches: int, group_size: int, num_ranks: int, num_behind: int
) -> None:
    job = replace(make_job(NUM_LAYERS, num_microbatches=num_microbatches), num_ranks=num_ranks)
    costs = StepCosts(job=job, speeds=make_speeds(), limits=PLENTY, group_size=group_size)
    # In blocks of a group, of which a rank computes all layers in each round.
    assert costs.lag * NUM_LAYERS * costs.num_rounds == pytest.approx(num_behind)
    with_backward = [bound.weights[Part.BACKWARD] for bound in costs._bounds() if bound.weights[Part.BACKWARD]]
    assert with_backward
    # All of the backward passes, or those of the groups before the last one.
    before_last = (costs.num_rounds - 1) / costs.num_rounds
    expected = [pytest.approx(share * (1 + costs.lag)) for share in (1.0, before_last)]
    assert all(any(weight == each for each in expected) for weight in with_backward)


@pytest.mark.parametrize(("num_ranks", "num_sums"), [(1, 7), (2, 4), (4, 2), (8, 1)])
def test_each_rank_passes_on_its_own_sums(num_ranks: int, num_sums: int) -> None:
    job = replace(make_job(NUM_LAYERS, num_microbatches=8), num_ranks=num_ranks)
    costs = StepCosts(job=job, speeds=make_speeds(), limits=PLENTY, group_size=1)
    assert costs.num_partial_sums == num_sums


def test_no_states_rest_on_the_devices_of_several_ranks() -> None:
    job = replace(make_job(NUM_LAYERS, num_microbatches=4), num_ranks=2)
    costs = StepCosts(job=job, speeds=make_speeds(), limits=PLENTY, group_size=1)
    kinds = costs.kinds()
    assert all(StateTier.DEVICE not in kind.tiers for kind in kinds)
    assert any(kind.tiers for kind in kinds)


@pytest.mark.parametrize("streams", [False, True])
def test_gradients_are_counted_whole_where_no_layer_can_be_streamed(streams: bool) -> None:
    """The placement of a running job may ask for gradients in pieces all the same."""
    job = make_job(NUM_LAYERS, num_microbatches=4)
    if streams:  # the head's operation uses the params of all layers, so none comes in pieces
        shared = (*((block,) for block in range(HEAD)), (HEAD, *range(1, HEAD)))
        job = replace(job, model=replace(job.model, shared=shared))
        assert not any(base.streams_grads for base in bases_of(job, make_speeds(), PLENTY))
    whole = StepCosts(job=job, speeds=make_speeds(), limits=PLENTY, group_size=4, streams=streams)
    programs = [costs.program(costs.kinds()) for costs in (whole, replace(whole, streams_grads=True))]
    assert programs[0].nbytes == programs[1].nbytes
    seconds, same = ([[o.seconds for o in group.options] for group in program.blocks] for program in programs)
    assert seconds == same
