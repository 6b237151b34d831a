"""More of anything never makes a plan slower by the cost model, and a job that fits still fits."""

import math
import os
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given, settings

from tests.support.examples import LONG_VARIABLE
from tests.support.planner.profiles import make_job, make_speeds, with_cuts
from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.planner.cost.rates import Speeds
from windlass.planner.solver.placement_search import search, solve_job
from windlass.planner.solver.planned_job import Limits, PlannedJob
from windlass.planner.solver.solution import DoesNotFitError

MIB = 2**20
# Each example solves for two plans or more.
EXAMPLES = 150 if os.environ.get(LONG_VARIABLE) == "1" else 3
# Relative error of a cost: programs are solved, and bounds are compared, to some ten-thousandths.
NEAR = 1.001

FACTORS = st.sampled_from([1.02, 1.3, 2.0, 5.0])
LIMITS = st.builds(
    lambda device, host, ssd: Limits(device_nbytes=device * MIB, host_nbytes=host * MIB, ssd_nbytes=ssd * MIB),
    st.integers(40, 500),
    st.integers(60, 900),
    st.sampled_from([1000, 4000, 100000]),
)
SPEEDS = st.builds(
    lambda link, ssd, optimizer, num_ssds: make_speeds(
        h2d_bytes=link,
        d2h_bytes=link,
        ssd_read_bytes=ssd,
        ssd_write_bytes=ssd / 2,
        optimizer_params=optimizer,
        num_ssds=num_ssds,
    ),
    st.sampled_from([1e8, 1e9, 1e10]),
    st.sampled_from([1e8, 2e9, 2e10]),
    st.sampled_from([1e7, 1e8, 1e9]),
    st.integers(1, 4),
)
CUTS = st.sampled_from([(), (2**20,), (2**21, 2**20, 2**19)])
JOBS = st.builds(
    lambda num_layers, num_microbatches, keeps, cuts: with_cuts(
        make_job(num_layers, num_microbatches=num_microbatches, keeps_grads=keeps), *cuts
    ),
    st.integers(1, 12),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    CUTS,
)


def cost_of(job: PlannedJob, speeds: Speeds, limits: Limits) -> float:
    """Returns the cost of the best plan; inf: the job does not fit."""
    try:
        return solve_job(job, speeds, limits).cost
    except DoesNotFitError:
        return math.inf


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(JOBS, SPEEDS, LIMITS, st.sampled_from(["device_nbytes", "host_nbytes", "ssd_nbytes"]), FACTORS)
def test_more_memory_of_one_kind_is_never_slower(
    job: PlannedJob, speeds: Speeds, limits: Limits, tier: str, factor: float
) -> None:
    more = replace(limits, **{tier: factor * getattr(limits, tier)})
    assert cost_of(job, speeds, more) <= cost_of(job, speeds, limits) * NEAR


RATES = ["h2d_bytes", "d2h_bytes", "ssd_read_bytes", "ssd_write_bytes", "optimizer_params", "device_flops"]


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(JOBS, SPEEDS, LIMITS, st.sampled_from([*RATES, "num_ssds"]), FACTORS)
def test_a_faster_resource_or_more_ssds_are_never_slower(
    job: PlannedJob, speeds: Speeds, limits: Limits, rate: str, factor: float
) -> None:
    value = getattr(speeds, rate)
    faster = replace(speeds, **{rate: value + max(1, int(factor)) if rate == "num_ssds" else factor * value})
    assert cost_of(job, faster, limits) <= cost_of(job, speeds, limits) * NEAR


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(st.integers(1, 10), st.sampled_from([1, 4]), st.booleans(), SPEEDS, LIMITS)
def test_a_model_with_fewer_layers_is_never_slower(
    num_layers: int, num_microbatches: int, keeps: bool, speeds: Speeds, limits: Limits
) -> None:
    smaller, larger = (
        make_job(number, num_microbatches=num_microbatches, keeps_grads=keeps)
        for number in (num_layers, num_layers + 2)
    )
    assert cost_of(smaller, speeds, limits) <= cost_of(larger, speeds, limits) * NEAR


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(JOBS, SPEEDS, LIMITS)
def test_a_job_whose_order_is_open_is_never_slower_than_with_either_order(
    job: PlannedJob, speeds: Speeds, limits: Limits
) -> None:
    """So it has every plan that it would have with clipping, which keeps gradients."""
    costs = [
        cost_of(replace(job, training=replace(job.training, update_order=order)), speeds, limits)
        for order in (UpdateOrder.ACTIVE, UpdateOrder.KEPT)
    ]
    active = replace(job, training=replace(job.training, update_order=UpdateOrder.ACTIVE), chooses_order=True)
    assert cost_of(active, speeds, limits) <= min(costs) * NEAR


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(st.integers(1, 8), st.booleans(), SPEEDS, LIMITS)
def test_no_fixed_number_of_microbatches_is_faster_than_the_chosen_one(
    num_layers: int, keeps: bool, speeds: Speeds, limits: Limits
) -> None:
    jobs = [make_job(num_layers, num_microbatches=number, keeps_grads=keeps) for number in (1, 2, 4)]
    costs = [cost_of(job, speeds, limits) for job in jobs]
    try:
        chosen = search(jobs, speeds, limits).best.cost
    except DoesNotFitError:
        chosen = math.inf
    assert chosen <= min(costs) * NEAR


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(
    st.integers(1, 8),
    st.sampled_from([1, 2]),
    st.booleans(),
    SPEEDS,
    st.integers(30, 120),
    st.integers(60, 900),
    FACTORS,
)
def test_near_the_border_more_device_memory_is_never_slower_with_cuts(
    num_layers: int, num_microbatches: int, keeps: bool, speeds: Speeds, device: int, host: int, factor: float
) -> None:
    """A lesser device has cut matrices, a better one has not, and the plans of both are among those of the better."""
    job = make_job(num_layers, num_microbatches=num_microbatches, keeps_grads=keeps)
    cuts = with_cuts(job, 2**21, 2**20)
    limits = Limits(device_nbytes=device * MIB, host_nbytes=host * MIB, ssd_nbytes=1e5 * MIB)
    more = replace(limits, device_nbytes=factor * limits.device_nbytes)
    cost = cost_of(cuts, speeds, limits)
    assert cost_of(cuts, speeds, more) <= cost * NEAR
    assert cost <= cost_of(job, speeds, limits) * NEAR, "as if no matrix could be cut"


def test_gradients_that_do_not_wait_need_room_for_two_blocks_only() -> None:
    """With less host memory than a third of all gradients take, the updates hold the backward pass back."""
    job, speeds = make_job(60), make_speeds(optimizer_params=2e8)
    limits = Limits(device_nbytes=150 * MIB, host_nbytes=120 * MIB, ssd_nbytes=1e6 * MIB)
    tight = solve_job(job, speeds, limits)
    assert tight.placement.num_passing_blocks == 2
    assert tight.plan.arena_nbytes <= limits.host_nbytes
    roomy = solve_job(job, speeds, replace(limits, host_nbytes=2000 * MIB))
    assert roomy.placement.num_passing_blocks is not None
    assert roomy.placement.num_passing_blocks > 2
    assert roomy.cost < tight.cost


def test_memory_that_a_plan_leaves_free_goes_to_deeper_queues() -> None:
    job, speeds = make_job(12), make_speeds(num_ssds=4)
    limits = Limits(device_nbytes=1000 * MIB, host_nbytes=3000 * MIB, ssd_nbytes=1e6 * MIB)
    solution = solve_job(job, speeds, limits)
    assert solution.placement.depths.states == 8 * 4 + 1
    assert solution.plan.arena_nbytes <= limits.host_nbytes
