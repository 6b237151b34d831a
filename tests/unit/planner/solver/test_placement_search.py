"""Plans: they fit, no faster plan fits, and their costs are reported."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.support.examples import examples
from tests.support.planner.profiles import MIB, PLENTY, limits, make_job, make_profile, make_speeds, with_cuts
from windlass.engine.memory_plan.activation_policy import RECOMPUTE_ALL, BlockActivations
from windlass.engine.memory_plan.memory_tier import MemoryTier
from windlass.engine.memory_plan.plan import ACTIVATION_SLOT_NBYTES
from windlass.engine.memory_plan.queue_depths import (
    LEAVING_ACTIVATION_NBYTES,
    STAGED_ACTIVATIONS,
    STATE_DEPTH,
    QueueDepths,
)
from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.planner.solver import solution as solutions
from windlass.planner.solver.family import bases_of, cut_bases_of, cuts_of, group_sizes, kinds_of
from windlass.planner.solver.placement_search import Solve, _Search, _traits, search, solve_job
from windlass.planner.solver.planned_job import Limits, PlannedJob, values_by_tier
from windlass.planner.solver.program.integer_program import Assignment, outcome_of, solve
from windlass.planner.solver.solution import DoesNotFitError, Solution, solved
from windlass.planner.solver.step_bounds import HOST_PARTS, Part
from windlass.planner.solver.step_cost import StateTier, StepCosts


def test_with_plenty_of_memory_nothing_moves() -> None:
    """The optimizer is the bottleneck here; on the device it is not."""
    solution = solve_job(make_job(), make_speeds(optimizer_params=1e6), PLENTY)
    assert solution.placement.device_blocks == tuple(range(8))
    assert not any(choice.recompute or choice.swaps for choice in solution.placement.activations)
    update_s = 56 * MIB / 1e10
    assert solution.seconds[Part.FORWARD] == pytest.approx(6 * 0.1 + 3 * 0.02)
    assert solution.seconds[Part.BACKWARD] == pytest.approx(6 * 0.2 + update_s)
    assert solution.step_s == pytest.approx(solution.seconds[Part.FORWARD] + solution.seconds[Part.BACKWARD])
    assert solution.bottleneck == "compute"


def test_with_little_memory_states_go_to_the_ssds_and_layers_are_computed_again() -> None:
    job = make_job()
    # Two layers' params and gradients, the embedding's and the head's, six inputs, and the largest operation.
    device = (2 * (8 + 4) * 2 + 2 * (8 + 4) * 2) + 6 * 2 + 12
    with pytest.raises(DoesNotFitError):
        solve_job(job, make_speeds(h2d_bytes=1e6, d2h_bytes=1e6), limits(40, 1000))
    solution = solve_job(job, make_speeds(), limits(device, 160))
    assert not solution.placement.device_blocks
    assert solution.nbytes[MemoryTier.DEVICE] <= device * MIB
    assert solution.nbytes[MemoryTier.HOST] <= 160 * MIB


def test_swapping_pays_where_the_link_is_fast_and_recomputing_where_it_is_slow() -> None:
    fast = solve_job(make_job(), make_speeds(h2d_bytes=1e12, d2h_bytes=1e12), limits(200, 2000))
    slow = solve_job(make_job(), make_speeds(d2h_bytes=1e7), limits(200, 2000))
    assert fast.seconds[Part.BACKWARD] == pytest.approx(6 * 0.2, rel=0.02)
    assert sum(bool(choice.swapped) for choice in fast.placement.activations) > 0
    assert not any(choice.swapped for choice in slow.placement.activations)


@pytest.mark.parametrize(("duplex_bytes", "slowed"), [(math.inf, 0.0), (1.5e7, 1 / 3), (1e6, 1.0)])
def test_directions_of_a_link_slow_each_other_down(duplex_bytes: float, slowed: float) -> None:
    link = {"h2d_bytes": 1e7, "d2h_bytes": 1e7, "duplex_bytes": duplex_bytes}
    found = solve_job(make_job(), make_speeds(**link), limits(100, 2000)).seconds
    there = found[Part.H2D_FORWARD] + found[Part.H2D_BACKWARD]
    back = found[Part.D2H_FORWARD] + found[Part.D2H_BACKWARD]
    solution = solve_job(make_job(), make_speeds(**link), limits(100, 2000))
    assert there > back > 0
    assert solution.step_s == pytest.approx(there + slowed * back)


def test_activations_beyond_host_memory_go_to_the_ssds() -> None:
    job, speeds = make_job(), make_speeds(h2d_bytes=1e12, d2h_bytes=1e12, ssd_read_bytes=1e12, ssd_write_bytes=1e12)
    solution = solve_job(job, speeds, limits(130, 180))
    assert solution.placement.ssd_activation_nbytes > 0
    slots = solution.plan.activations.num_slots
    assert slots * ACTIVATION_SLOT_NBYTES == solution.placement.host_activation_nbytes + STAGED_ACTIVATIONS * MIB
    assert solution.plan.arena_nbytes <= 180 * MIB


def test_staging_takes_memory_only_where_something_goes_to_the_ssds() -> None:
    job = make_job()
    needed = solve_job(job, make_speeds(), limits(130, 1e6)).plan
    assert needed.num_staged_activations == 0
    fast = {"h2d_bytes": 1e12, "d2h_bytes": 1e12}
    exact = solve_job(job, make_speeds(**fast), limits(130, 1e6))
    assert exact.placement.host_activation_nbytes > 0
    # To the last byte: the counted memory is what the engine allocates.
    again = solve_job(job, make_speeds(**fast, ssd_write_bytes=1e6), limits(130, exact.plan.arena_nbytes / MIB))
    assert again.plan.num_staged_activations == 0


@pytest.mark.long
def test_with_more_ssds_buffers_are_deeper_where_memory_allows() -> None:
    job, slow = make_job(), {"ssd_read_bytes": 1e8, "ssd_write_bytes": 1e8, "num_ssds": 8}
    deep = solve_job(job, make_speeds(**slow), limits(150, 2000))
    assert deep.placement.depths.states == 2 * 8 + 1
    assert deep.plan.states[0].num_slots == 2 * 8 + 1
    few = limits(150, 250)
    assert solve_job(job, make_speeds(), few).placement.depths.states == STATE_DEPTH
    shallow = solve_job(job, make_speeds(**slow), few)
    depth = shallow.placement.depths.states
    assert STATE_DEPTH <= depth < 2 * 8 + 1
    # Not all of the eight SSDs are busy at any time.
    assert shallow.step_s >= shallow.seconds[Part.SSD_UPDATE] * 8 / depth


def test_bytes_in_flight_are_a_share_of_available_device_memory() -> None:
    job, fast = make_job(12), make_speeds(h2d_bytes=1e12, d2h_bytes=1e12)

    def leaving_mib(device_mib: float) -> float:
        placement = solve_job(job, fast, limits(device_mib, 2000)).placement
        assert device_mib > 1000 or any(choice.swaps for choice in placement.activations)
        return placement.depths.leaving_nbytes / MIB

    assert leaving_mib(1e6) * MIB == LEAVING_ACTIVATION_NBYTES
    assert leaving_mib(200) == 25
    assert leaving_mib(57) == 2  # a layer's input, which is all that is swapped


def test_two_of_the_largest_tensors_may_leave_unless_device_memory_is_short() -> None:
    """Otherwise the thread that launches kernels would wait for each copy."""
    costs = StepCosts(
        job=make_job(18), speeds=make_speeds(), limits=PLENTY, group_size=1, depths=QueueDepths(leaving_nbytes=MIB)
    )

    def on_device_nbytes(costs: StepCosts) -> float:
        on_device, _ = costs.program(costs.kinds()).buffers
        return on_device.most_nbytes

    input_nbytes = 2 * MIB
    assert on_device_nbytes(costs) == 2 * input_nbytes
    assert on_device_nbytes(replace(costs, depths=QueueDepths(leaving_nbytes=0))) == input_nbytes


def test_swapped_tensors_use_device_memory_until_copied_out() -> None:
    """The maximum number of tensors in flight; and for the head, a layer's share of those that return."""
    costs = StepCosts(
        job=make_job(18), speeds=make_speeds(), limits=PLENTY, group_size=1, depths=QueueDepths(leaving_nbytes=20 * MIB)
    )
    kinds = costs.kinds()
    program, ways = costs.program(kinds), kinds[-1].activations
    swapping = next(way for way in ways if way.choice == BlockActivations(swap_input=True))
    holding = next(way for way in ways if way.choice == RECOMPUTE_ALL)
    assert (swapping.swapped_nbytes, swapping.held_nbytes, holding.held_nbytes) == (2 * MIB, 0, 2 * MIB)
    by_states = [tuple(len(kind.blocks) if tier is StateTier.SSD else 0 for tier in kind.tiers) for kind in kinds[:-1]]

    def beside_buffers(num_swapping: int) -> float:
        counts = {swapping: num_swapping, holding: 18 - num_swapping}
        by_way = tuple(counts.get(way, 0) for way in ways)
        outcome = outcome_of(program, Assignment(counts=(*by_states, by_way), moved_nbytes=0.0))
        return (
            values_by_tier(outcome.nbytes)[MemoryTier.DEVICE] - values_by_tier(program.nbytes)[MemoryTier.DEVICE]
        ) / MIB

    assert beside_buffers(0) == 18 * 2
    assert beside_buffers(3) == pytest.approx(15 * 2 + 3 * 2 + 3 * 2 / 18)
    assert beside_buffers(18) == pytest.approx(20 + 2)


def test_groups_of_microbatches_are_as_large_as_pays() -> None:
    """Each group reads the params again, so there is one group if the activations of all fit."""
    job = make_job(num_microbatches=8)
    assert group_sizes(8) == [1, 2, 4, 8]
    assert group_sizes(1) == [1]
    assert group_sizes(6) == [1, 2, 4, 6]
    assert solve_job(job, make_speeds(), PLENTY).plan.num_groups == 1
    # The inputs of 64 micro-batches need more memory than the partial sums between groups.
    many = make_job(num_microbatches=64)
    assert 1 < solve_job(many, make_speeds(), limits(170, 600, 1600)).plan.group_size < 64


def test_a_job_that_does_not_fit_is_told_what_is_missing() -> None:
    with pytest.raises(DoesNotFitError, match=r"36\.01 MiB of device memory") as caught:
        solve_job(make_job(), make_speeds(), limits(20, 1000))
    missing = caught.value.missing
    assert missing[MemoryTier.DEVICE] > 0
    assert missing[MemoryTier.HOST] == missing[MemoryTier.SSD] == 0
    enough = limits(20 + missing[MemoryTier.DEVICE] / MIB + 1, 1000)
    assert solve_job(make_job(), make_speeds(), enough).step_s > 0
    with pytest.raises(DoesNotFitError, match="GiB of space on the SSDs") as caught:
        solve_job(make_job(), make_speeds(), limits(1000, 1000, 100))
    assert caught.value.missing[MemoryTier.SSD] == pytest.approx(2 * 56 * 14 * MIB - 100 * MIB, rel=0.01)


@pytest.mark.long
def test_search_keeps_its_best_plan_if_no_other_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    job, speeds, given = make_job(keeps_grads=True), make_speeds(), limits(125, 2000)
    best = solve_job(job, speeds, given)
    monkeypatch.setattr(solutions, "_least_arena_nbytes", lambda *_: given.host_nbytes + 1)
    found = search((job,), speeds, given, solve_kind=lambda *_: best, num_others=3, near=1.0)
    assert (found.best, found.others) == (best, [])


def test_on_a_cpu_the_device_lies_in_host_memory_and_has_its_cores() -> None:
    speeds = replace(make_speeds(), shares_cores=True)
    solution = solve_job(make_job(), speeds, limits(1e6, 900))
    assert solution.nbytes[MemoryTier.DEVICE] + solution.nbytes[MemoryTier.HOST] <= 900 * MIB
    seconds = solution.seconds
    on_cores_s = sum(seconds[part] for part in Part if part not in _NOT_ON_CORES)
    assert solution.step_s >= on_cores_s - 1e-9
    # CPU time for SSDs is added.
    slower = replace(speeds, ssd_cpu_s_per_byte=0.5 / speeds.read_bytes)
    beside = solve_job(make_job(), slower, limits(1e6, 900))
    ssds_s = beside.seconds[Part.SSD_FORWARD] + beside.seconds[Part.SSD_BACKWARD] + beside.seconds[Part.SSD_UPDATE]
    assert ssds_s > 0
    on_cores_s = sum(beside.seconds[part] for part in Part if part not in _NOT_ON_CORES)
    cores = slower.ssd_cpu_s_per_byte * (slower.read_bytes + slower.write_bytes) / 2
    assert beside.step_s >= on_cores_s + cores * ssds_s - 1e-9


_NOT_ON_CORES = (Part.SSD_FORWARD, Part.SSD_BACKWARD, Part.SSD_UPDATE, Part.SSD_FLUSH, Part.FIRST_UPDATE, *HOST_PARTS)

JOBS = st.builds(
    lambda layers, microbatches, keeps, tied: make_job(
        layers, num_microbatches=microbatches, keeps_grads=keeps, is_tied=tied
    ),
    st.integers(1, 12),
    st.sampled_from([1, 2, 5]),
    st.booleans(),
    st.booleans(),
)
SPEEDS = st.builds(
    lambda link, ssd, optimizer: make_speeds(
        h2d_bytes=link, d2h_bytes=link, ssd_read_bytes=ssd, ssd_write_bytes=ssd / 2, optimizer_params=optimizer
    ),
    st.sampled_from([1e8, 1e9, 1e10]),
    st.sampled_from([2e8, 2e9, 2e10]),
    st.sampled_from([1e7, 1e8, 1e9]),
)


def try_to_solve(job: PlannedJob, speeds: object, given_limits: Limits) -> Solution | None:
    try:
        return solve_job(job, speeds, given_limits)  # type: ignore[arg-type]
    except DoesNotFitError:
        return None


def test_more_memory_is_not_slower_where_it_is_just_enough_for_the_gradients() -> None:
    """With half the memory, gradients spill and the space holds activations; here gradients take all of it."""
    job = make_job(11, keeps_grads=True)
    speeds = make_speeds(h2d_bytes=1e9, d2h_bytes=1e9, ssd_read_bytes=2e9, ssd_write_bytes=1e9, optimizer_params=1e8)
    tight, roomy = (solve_job(job, speeds, each) for each in (limits(161, 119), limits(322, 238)))
    assert roomy.step_s <= tight.step_s * 1.001


@settings(max_examples=examples(60), deadline=None)
@given(JOBS, SPEEDS, st.integers(80, 600), st.integers(60, 1200))
def test_plans_keep_to_the_limits_and_more_memory_is_never_slower(
    job: PlannedJob, speeds: object, device_mib: int, host_mib: int
) -> None:
    tight = limits(device_mib, host_mib)
    solution = try_to_solve(job, speeds, tight)
    if solution is None:
        return
    assert solution.plan.arena_nbytes <= tight.host_nbytes
    assert solution.nbytes[MemoryTier.DEVICE] <= tight.device_nbytes * (1 + 1e-9)
    # Nothing was reduced after the program's solution.
    plan, placement = solution.plan, solution.placement
    assert {pool.num_slots for pool in plan.states} == {min(placement.depths.states, job.size.total_chunks)}
    assert solution.costs.spills or not plan.spilled_blocks
    more = try_to_solve(job, speeds, limits(2 * device_mib, 2 * host_mib))
    assert more is not None
    assert more.cost <= solution.cost * 1.001


@pytest.mark.long
@settings(max_examples=examples(60), deadline=None)
@given(JOBS, st.integers(80, 600), st.integers(100, 1200))
def test_the_program_counts_the_arena_as_the_engine_lays_it_out(
    job: PlannedJob, device_mib: int, host_mib: int
) -> None:
    """Within the reserve for a staging area that may not be needed, and for the largest block."""
    tight = limits(device_mib, host_mib)
    solution = try_to_solve(job, make_speeds(), tight)
    if solution is None or solution.placement.streamed_blocks:
        return
    costs = replace(solution.costs, limits=tight)
    program = costs.program(costs.kinds())
    assignment = solve(program)
    if assignment is None:
        return  # gradients had to spill to the SSDs
    counted = values_by_tier(outcome_of(program, assignment).nbytes)[MemoryTier.HOST]
    spare = (STAGED_ACTIVATIONS + 8 * 4) * MIB
    needed = replace(solution.plan, num_cached_params=0)
    cached = solution.plan.num_cached_params * solution.plan.params.slot_nbytes
    assert needed.arena_nbytes - cached <= counted + spare


def test_a_large_model_is_solved_in_one_program() -> None:
    costs = StepCosts(job=make_job(128), speeds=make_speeds(), limits=PLENTY, group_size=1)
    program = costs.program(costs.kinds())
    assert len(program.blocks) == 4  # embedding, layers, head; activations of layers
    assert make_profile(128).numel == 128 * 8 * MIB + 8 * MIB


def test_states_on_the_device_need_a_buffer_in_host_memory() -> None:
    """Without space for it, no states are on the device; a plan must still be found."""
    job, speeds = make_job(), make_speeds(h2d_bytes=1e8, d2h_bytes=1e8)
    with pytest.raises(DoesNotFitError) as caught:
        solve_job(job, speeds, limits(1e6, 1))
    least = MIB + caught.value.missing[MemoryTier.HOST]
    transit_mib = 2 * 14  # chunks of 2**20 parameters
    without = solve_job(job, speeds, limits(1e6, least / MIB + transit_mib / 2))
    assert without.placement.device_blocks == ()
    resting = solve_job(job, speeds, limits(1e6, least / MIB + transit_mib + 12))
    assert resting.placement.device_blocks
    assert resting.step_s < without.step_s


@pytest.mark.parametrize("device_mib", [125, 170, 4000])
def test_one_buffer_for_gradients_and_layers_in_pieces_compete_where_the_device_is_full(device_mib: int) -> None:
    """A second gradient buffer, or whole params, may be worth less than another use of the memory."""
    job, speeds, given = make_job(keeps_grads=True), make_speeds(d2h_bytes=1e10), limits(device_mib, 2000)
    best = solve_job(job, speeds, given)
    saves = best.costs.streams or best.costs.num_grad_buffers == 1
    assert saves == (device_mib == 125)


@settings(max_examples=examples(6), deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(), (2**21,), (2**21, 2**19)]),
    st.integers(40, 300),
    st.integers(40, 400),
)
def test_search_equals_a_search_through_all_kinds_of_plans(
    num_layers: int,
    num_microbatches: int,
    keeps_grads: bool,
    chooses: bool,
    cuts: tuple[int, ...],
    device_mib: int,
    host_mib: int,
) -> None:
    job = make_job(num_layers, num_microbatches=num_microbatches, keeps_grads=keeps_grads)
    job = with_cuts(replace(job, chooses_order=chooses), *cuts)
    speeds, given = make_speeds(num_ssds=2), limits(device_mib, host_mib)
    costs = []
    whole = list(bases_of(job, speeds, given))
    assert any(cut_bases_of(base) for base in whole) == bool(cuts)
    bases = (*whole, *(cut for base in whole for cut in cut_bases_of(base)))
    for kind in (kind for base in bases for kind in kinds_of(base)):
        with contextlib.suppress(DoesNotFitError):
            solution = solved(kind)
            assert solution is not None, "without a limit of its cost"
            costs.append(solution.cost)
    found = try_to_solve(job, speeds, given)
    assert (found is None) == (not costs)
    if found is not None:
        assert found.cost <= min(costs) * 1.001


def test_matrices_are_cut_where_whole_ones_do_not_fit_or_leave_too_little_memory() -> None:
    job, speeds = make_job(keeps_grads=True), make_speeds()
    cuts = with_cuts(job, 2**21, 2**20)
    with pytest.raises(DoesNotFitError) as caught:
        solve_job(job, speeds, limits(1, 2000))
    least_mib = 1 + caught.value.missing[MemoryTier.DEVICE] / MIB
    whole = solve_job(cuts, speeds, limits(least_mib + 40, 2000))
    assert whole.costs.job.cut is None
    assert whole.placement == solve_job(job, speeds, limits(least_mib + 40, 2000)).placement
    cut = solve_job(cuts, speeds, limits(least_mib - 1, 2000))
    assert cut.costs.job.cut == cut.costs.job.training.cut_matrices == 2**21, "the largest parts that fit"
    assert cut.costs.streams
    assert not cut.costs.streams_ends, "as long as it fits without"
    with pytest.raises(DoesNotFitError) as caught:
        solve_job(cuts, speeds, limits(1, 2000))
    least_cut_mib = 1 + caught.value.missing[MemoryTier.DEVICE] / MIB
    smallest = solve_job(cuts, speeds, limits(least_cut_mib + 0.1, 2000))
    assert smallest.costs.job.cut == 2**20
    assert smallest.plan.streams_ends
    for num_lanes in (1, 2):
        of_lanes = make_job(keeps_grads=True, is_tied=True, num_microbatches=2)
        of_lanes = replace(of_lanes, training=replace(of_lanes.training, lanes=num_lanes))
        tied = with_cuts(of_lanes, 2**20)
        ends = {cut.streams_ends for base in bases_of(tied, speeds, PLENTY) for cut in cut_bases_of(base)}
        assert ends == ({False, True} if num_lanes == 1 else {False})


def test_ends_come_in_pieces_only_where_no_layer_shares_params() -> None:
    tied = make_job(keeps_grads=True, is_tied=True, num_microbatches=2)
    blocks = range(len(tied.model.shared))
    for user, expected in ((blocks[-1], {False, True}), (1, {False})):
        shared = tuple((block, 0) if block == user else (block,) for block in blocks)
        job = with_cuts(replace(tied, model=replace(tied.model, shared=shared)), 2**20)
        found = {cut.streams_ends for base in bases_of(job, make_speeds(), PLENTY) for cut in cut_bases_of(base)}
        assert found == expected


def test_cuts_are_powers_of_four_below_the_largest_matrix() -> None:
    assert cuts_of(2**24) == ()
    assert cuts_of(2**24 + 1) == cuts_of(2**26) == (2**24,)
    assert cuts_of(2**28 + 1) == (2**28, 2**26, 2**24)
    assert cuts_of(0) == ()


def test_search_where_exact_counts_refuse_fast_plans_tries_one_of_them_before_it_has_a_plan() -> None:
    """Whole layers are faster, but none of their plans fits. With a plan in pieces, the others are hardly solved."""
    job, speeds, given = make_job(keeps_grads=True), make_speeds(d2h_bytes=1e10), limits(4000, 2000)
    without_limit = []

    def solve_kind(costs: StepCosts, below: float) -> Solution | None:
        if below == math.inf:
            without_limit.append(costs.streams)
        if not costs.streams:
            raise DoesNotFitError(lambda: dict.fromkeys(MemoryTier, 0))
        return solved(costs, below)

    best = search((job,), speeds, given, solve_kind=solve_kind).best
    assert best.costs.streams
    assert without_limit == [False, False, True]  # with two buffers for gradients, with one, and in pieces


def in_order(order: UpdateOrder) -> Callable[[StepCosts], bool]:
    return lambda costs: costs.job.update_order is order


@pytest.mark.short("1-memory1", "2-memory2")
@pytest.mark.parametrize("memory", [(4000, 2000), (125, 2000), (90, 260), (110, 600)])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_search_continued_in_one_order_finds_as_good_a_plan_as_a_new_search(
    memory: tuple[int, int], num_microbatches: int
) -> None:
    speeds, given = make_speeds(), limits(*memory)
    job = replace(make_job(num_microbatches=num_microbatches), chooses_order=True)
    found = search((job,), speeds, given, num_others=3, near=0.05)
    for one in job.by_order:
        anew = search((one,), speeds, given)
        continued = found.of_kind(in_order(one.update_order), math.inf)
        assert continued is not None
        assert {plan.costs.job.update_order for plan in (continued.best, *continued.others)} == {one.update_order}
        assert continued.best.cost <= anew.best.cost * 1.001
        # A plan that is known is told whatever it takes; nothing else is solved for.
        below = found.of_kind(in_order(one.update_order), 0.5 * anew.best.step_s)
        assert below is None or below.best.cost >= continued.best.cost


@pytest.mark.parametrize("spills", [False, True])
def test_search_continued_for_one_place_of_kept_gradients_finds_as_good_a_plan(spills: bool) -> None:
    speeds, given = make_speeds(), limits(110, 600)
    job = make_job(keeps_grads=True)
    found = search((job,), speeds, given, num_others=3, near=0.05)
    continued = found.of_kind(lambda costs: costs.spills == spills, math.inf)
    anew = search((replace(job, spills=spills),), speeds, given)
    assert continued is not None
    assert {plan.costs.spills for plan in (continued.best, *continued.others)} == {spills}
    assert continued.best.cost == pytest.approx(anew.best.cost, rel=0.001)


@pytest.mark.parametrize("solve_kind", [None, solved])
def test_only_a_search_with_exact_counts_begins_with_one_of_each_saver(
    solve_kind: Solve | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without these, no plan needs more device memory than it is counted with."""
    begun = []
    monkeypatch.setattr(_Search, "_solve_one_of_each_saver", lambda each: begun.append(each))
    job = make_job(keeps_grads=True)
    found = search((job,), make_speeds(), limits(110, 600), solve_kind=solve_kind)
    for spills in (False, True):
        assert found.of_kind(lambda costs, spills=spills: costs.spills == spills, math.inf) is not None
    assert bool(begun) == (solve_kind is not None)
    assert len(begun) in (0, 2)  # by the search, and for the place of which no plan was known


def test_search_continued_twice_finds_the_same() -> None:
    """The first one must not keep the second from dividing bases by the cuts of their matrices."""
    jobs = [replace(with_cuts(make_job(num_microbatches=m), 2**21, 2**20), chooses_order=True) for m in (1, 2)]

    def is_wanted(costs: StepCosts) -> bool:
        return costs.job.update_order is UpdateOrder.KEPT and costs.job.num_microbatches == 2

    found = search(jobs, make_speeds(num_ssds=2), limits(50, 600), num_others=3, near=0.05)
    first, second = (found.of_kind(is_wanted, math.inf) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.best.costs.job.cut is not None
    assert second.best.step_s == first.best.step_s


def test_search_continued_in_an_order_in_which_nothing_fits_finds_nothing() -> None:
    job, speeds, given = replace(make_job(), chooses_order=True), make_speeds(), limits(4000, 2000)

    def solve_kind(costs: StepCosts, below: float) -> Solution | None:
        if costs.job.keeps_grads:
            raise DoesNotFitError(lambda: dict.fromkeys(MemoryTier, 0))
        return solved(costs, below)

    found = search((job,), speeds, given, solve_kind=solve_kind)
    assert found.of_kind(in_order(UpdateOrder.KEPT), math.inf) is None
    active = found.of_kind(in_order(UpdateOrder.ACTIVE), math.inf)
    assert active is not None
    assert active.best == found.best


def test_gradients_in_pieces_fit_where_whole_ones_do_not_and_are_as_fast_as_two_buffers() -> None:
    job = make_job(keeps_grads=True)
    layers = tuple(replace(layer, largest_param_numel=layer.numel // 8) for layer in job.model.layers)
    job = replace(job, model=replace(job.model, layers=layers))
    smallest = {}
    for streams_grads, num_grad_buffers in ((True, 1), (False, 1), (False, 2)):
        costs = StepCosts(job=job, speeds=make_speeds(), limits=limits(4000, 2000), group_size=1, streams=True)
        costs = replace(costs, streams_grads=streams_grads, num_grad_buffers=num_grad_buffers)
        program = costs.program(costs.kinds())
        assignment = solve(program)
        assert assignment is not None
        smallest[streams_grads, num_grad_buffers] = program.nbytes[0], outcome_of(program, assignment).step_s
    in_pieces, one, two = smallest.values()
    assert in_pieces[0] < one[0] < two[0]
    # The layers' backward pass waits until the head's gradient has left.
    waits_s = job.model.head.numel * job.grad_itemsize / make_speeds().d2h_bytes
    assert in_pieces[1] == pytest.approx(two[1] + waits_s, rel=1e-4)
    with pytest.raises(DoesNotFitError) as caught:
        solve_job(job, make_speeds(), limits(1, 2000))
    tight = solve_job(job, make_speeds(), limits(1.1 + caught.value.missing[MemoryTier.DEVICE] / MIB, 2000))
    assert tight.placement.streams_grads
    assert tight.plan.grad_streamed_blocks == tight.plan.streamed_blocks


def test_several_ranks_divide_the_compute_and_none_keeps_states() -> None:
    job, speeds = (
        make_job(num_microbatches=8),
        make_speeds(optimizer_params=1e9, ssd_read_bytes=1e11, ssd_write_bytes=1e11),
    )
    alone = solve_job(job, speeds, PLENTY)
    solution = solve_job(replace(job, num_ranks=4), speeds, PLENTY)
    assert solution.plan.num_ranks == 4
    assert solution.plan.group_size <= 2
    assert not solution.placement.device_blocks
    assert solution.busy_s["compute"] < 0.3 * alone.busy_s["compute"]


def test_activation_slots_of_each_rank_count() -> None:
    """The program moves activations of all ranks, and a placement names those of one."""
    job, tight = replace(make_job(num_microbatches=4, scale=1 << 16), num_ranks=2), limits(45, 75)
    solution = solve_job(job, make_speeds(), tight)
    plan = solution.plan
    assert solution.placement.host_activation_nbytes or solution.placement.ssd_activation_nbytes
    assert plan.arena_nbytes <= tight.host_nbytes
    ranks_nbytes = 2 * plan.num_ssd_activations * ACTIVATION_SLOT_NBYTES
    assert solution.nbytes[MemoryTier.SSD] == plan.ssd_nbytes + ranks_nbytes


def test_others_differ_in_more_than_the_depth_of_queues_as_long_as_there_are_such() -> None:
    jobs = [make_job(num_microbatches=number) for number in (1, 2, 4, 8)]
    for most in (2, 20):
        found = search(jobs, make_speeds(), limits(110, 600), num_others=most, near=0.05)
        plans = [found.best, *found.others]
        differ = [
            _traits(plan.costs) not in {_traits(other.costs) for other in plans[:i]} for i, plan in enumerate(plans)
        ]
        assert differ == sorted(differ, reverse=True)
        assert all(differ) == (most == 2)
