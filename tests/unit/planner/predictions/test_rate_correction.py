"""Rates of a machine from measured steps, with numbers by hand."""

from dataclasses import asdict, replace

import pytest

from tests.support.planner.profiles import make_job, make_speeds
from windlass.engine.memory_plan.activation_policy import BlockActivations
from windlass.engine.memory_plan.plan import Placement
from windlass.planner.cost.activation_options import holding_ways, ways_of_layer
from windlass.planner.cost.model_profile import AgainTimes
from windlass.planner.predictions.rate_correction import Correction, MeasuredStep, WorkDone, correction_of
from windlass.planner.solver.placement_search import solve_job
from windlass.planner.solver.planned_job import Limits
from windlass.planner.solver.solution import solution_of
from windlass.planner.solver.step_cost import StepCosts

PLENTY = Limits(device_nbytes=1e12, host_nbytes=1e12, ssd_nbytes=1e12)
GB = 10**9
NUM_LAYERS = 6
HEAD = NUM_LAYERS + 1
KEEP, AGAIN = BlockActivations(recompute=False), BlockActivations()
# A layer's 100 GFLOP at 1e12 a second, the head's 20 and both its passes.
PLANNED_COMPUTE_S = NUM_LAYERS * 0.3 + 3 * 0.02


def costs(num_microbatches: int = 1) -> StepCosts:
    job = make_job(NUM_LAYERS, num_microbatches=num_microbatches)
    return StepCosts(job=job, speeds=make_speeds(), limits=PLENTY, group_size=num_microbatches)


def step(
    *, forward_s: float = 0.1, backward_s: float = 0.2, head_s: float = 0.06, period_s: float = 2.0, **done: WorkDone
) -> MeasuredStep:
    layers = range(1, HEAD)
    return MeasuredStep(
        period_s=period_s,
        done=done,
        forward_s={0: 0.0, HEAD: head_s} | dict.fromkeys(layers, forward_s),
        backward_s={0: 0.0} | dict.fromkeys(layers, backward_s),
    )


def correct(*steps: MeasuredStep, choice: BlockActivations = KEEP, num_microbatches: int = 1) -> Correction:
    return correction_of(
        steps,
        costs(num_microbatches),
        Placement(activations=(choice,) * NUM_LAYERS),
        planned_compute_s=PLANNED_COMPUTE_S,
    )


def test_a_machine_that_does_what_was_said_is_not_corrected() -> None:
    found = correct(step(ssd_read_bytes=WorkDone(amount=2 * GB, busy_s=1.0)))
    assert found.factors == {"ssd_read_bytes": 1.0}
    assert found.in_words == ()
    assert found.of_speeds(make_speeds()) == make_speeds()


def test_rates_are_amounts_over_the_time_of_work() -> None:
    """The profile has 2 and 1 GB/s, and 1e8 parameters a second."""
    found = correct(
        step(
            ssd_read_bytes=WorkDone(amount=1.8 * GB, busy_s=1.5),
            h2d_bytes=WorkDone(amount=1 * GB, busy_s=0.5),
            optimizer_params=WorkDone(amount=3e7, busy_s=0.6),
        )
    )
    speeds = found.of_speeds(make_speeds())
    assert speeds.ssd_read_bytes == pytest.approx(1.2 * GB)
    assert speeds.h2d_bytes == pytest.approx(2 * GB)
    assert speeds.optimizer_params == pytest.approx(5e7)
    assert speeds.ssd_write_bytes == make_speeds().ssd_write_bytes
    assert found.in_words == (
        "copies to the device move 2 GB/s, the profile said 1 GB/s",
        "each SSD reads 1.2 GB/s, the profile said 2 GB/s",
        "the CPU updates 5e+07 parameters a second, the profile said 1e+08",
    )


def test_cpu_time_for_ssds_does_not_slow_layers() -> None:
    """2 GB are read and 1 GB is written, each with a tenth of a second of CPU time while the cores compute."""
    ssds = {
        "ssd_read_bytes": WorkDone(amount=2 * GB, busy_s=1.0),
        "ssd_write_bytes": WorkDone(amount=GB, busy_s=make_speeds().ssd_write_bytes / GB),
    }
    longer = 1 + 0.3 / PLANNED_COMPUTE_S
    taken = step(forward_s=0.1 * longer, backward_s=0.2 * longer, head_s=0.06 * longer, **ssds)
    shared = replace(costs(), speeds=replace(make_speeds(), shares_cores=True, ssd_cpu_s_per_byte=0.1 / GB))
    placement = Placement(activations=(KEEP,) * NUM_LAYERS)
    found = correction_of([taken], shared, placement, planned_compute_s=PLANNED_COMPUTE_S)
    assert found.block_s[1] == pytest.approx((0.1, 0.2))
    assert not [words for words in found.in_words if "computes" in words]
    assert correct(taken).block_s[1] == pytest.approx((0.1 * longer, 0.2 * longer))  # for a GPU


@pytest.mark.parametrize(
    "done",
    [
        WorkDone(amount=3 << 20, busy_s=1.0),  # hardly any bytes moved, however long it waited
        WorkDone(amount=1 * GB, busy_s=0.05),  # too fast to matter
        WorkDone(),
    ],
)
def test_resource_with_little_work_keeps_its_rate(done: WorkDone) -> None:
    found = correct(step(d2h_bytes=done))
    assert found.factors == {}
    assert found.of_speeds(make_speeds()) == make_speeds()


def test_one_step_that_was_disturbed_decides_nothing() -> None:
    usual, hangs = WorkDone(amount=GB, busy_s=0.5), WorkDone(amount=GB, busy_s=50.0)
    found = correct(*(step(ssd_read_bytes=each) for each in (usual, hangs, usual)))
    assert found.factors == {"ssd_read_bytes": 1.0}


def test_steps_without_a_commit_say_nothing_of_writes() -> None:
    """Resident states are written only every few steps."""
    nothing, written = WorkDone(amount=1 << 20, busy_s=0.5), WorkDone(amount=0.5 * GB, busy_s=1.0)
    found = correct(*(step(ssd_write_bytes=each) for each in (nothing, nothing, written)))
    assert found.factors == {"ssd_write_bytes": 0.5}


def test_no_rate_is_believed_that_is_out_of_any_sane_range() -> None:
    found = correct(
        step(
            ssd_read_bytes=WorkDone(amount=10 << 20, busy_s=2.0),
            h2d_bytes=WorkDone(amount=1000 * GB, busy_s=1.0),
        )
    )
    assert found.factors == {"ssd_read_bytes": pytest.approx(1 / 30), "h2d_bytes": 30.0}


def test_recompute_is_not_counted_in_backward_time() -> None:
    kept = correct(step(forward_s=0.2, backward_s=0.5))
    again = correct(step(forward_s=0.2, backward_s=0.7), choice=AGAIN)
    for found in (kept, again):
        assert found.block_s[1] == pytest.approx((0.2, 0.5))
        assert {found.block_s[block] for block in range(1, HEAD)} == {found.block_s[1]}
        assert found.block_s[HEAD] == (0.06, 0.0)
    layer = make_job().model.layers[0]
    some = next(way for way in ways_of_layer(layer) if way.choice.kept)
    share = costs().again_s(layer, some) / costs().compute_s(layer)[0]
    assert 0 < share < 1
    found = correct(step(forward_s=0.2, backward_s=0.6), choice=some.choice)
    assert found.block_s[1] == pytest.approx((0.2, 0.6 - 0.2 * share))


def test_recompute_time_is_the_one_measured_before_the_job() -> None:
    job = make_job(NUM_LAYERS)
    again = AgainTimes(all_s=0.05, one_held_s=0.04, most_held_s=0.02)
    layers = tuple(replace(layer, forward_s=0.1, backward_s=0.2, again=again) for layer in job.model.layers)
    measured = replace(costs(), job=replace(job, model=replace(job.model, layers=layers)))
    takes = {way.choice: measured.backward_s(layers[0], way) for way in ways_of_layer(layers[0])}
    assert takes[KEEP] == pytest.approx(0.2)
    assert takes[AGAIN] == pytest.approx(0.25)
    one, most = holding_ways(layers[0])
    assert one.choice != most.choice
    assert (takes[one.choice], takes[most.choice]) == pytest.approx((0.24, 0.22))
    assert all(0.2199 < seconds < 0.2401 for choice, seconds in takes.items() if choice.kept)
    placement = Placement(activations=(AGAIN,) * NUM_LAYERS)
    found = correction_of(
        [step(forward_s=0.2, backward_s=0.7)], measured, placement, planned_compute_s=PLANNED_COMPUTE_S
    )
    assert found.block_s[1] == pytest.approx((0.2, 0.6))
    corrected = found.of_model(measured.job.model).layers[0].again
    assert corrected is not None
    assert asdict(corrected) == pytest.approx(asdict(again.sped_up(0.5)))


def test_times_are_of_one_microbatch() -> None:
    found = correct(step(forward_s=0.4, backward_s=0.8), num_microbatches=4)
    assert found.block_s[1] == pytest.approx((0.1, 0.2))


def test_layers_that_are_alike_stay_alike() -> None:
    uneven = step()
    uneven = replace(uneven, forward_s={**uneven.forward_s, 1: 0.4})
    found = correct(uneven)
    assert len({found.block_s[block] for block in range(1, HEAD)}) == 1
    assert found.block_s[1][0] == pytest.approx(0.9 / 6)
    assert len(set(found.of_model(make_job(NUM_LAYERS).model).layers)) == 1


def test_what_a_step_computes_is_told_and_bounded() -> None:
    found = correct(step(forward_s=0.2, backward_s=0.4, head_s=0.12))
    assert found.in_words == ("a step computes for 3.72 s, the plan said 1.86 s",)
    found = correct(step(forward_s=20.0, backward_s=40.0, head_s=12.0))
    taken = sum(map(sum, found.block_s.values()))
    assert taken == pytest.approx(30 * PLANNED_COMPUTE_S)


def test_layers_in_pieces_keep_their_times() -> None:
    """They wait for their params while they compute."""
    placement = Placement(activations=(AGAIN,) * NUM_LAYERS, streamed_blocks=tuple(range(1, HEAD)))
    found = correction_of([step()], costs(), placement, planned_compute_s=PLANNED_COMPUTE_S)
    assert set(found.block_s) == {0, HEAD}


def test_without_steps_nothing_can_be_said() -> None:
    with pytest.raises(ValueError, match="no steps were measured"):
        correct()


def test_a_plan_is_worth_what_it_was_solved_for() -> None:
    job, limits = make_job(), Limits(device_nbytes=130 * 2**20, host_nbytes=260 * 2**20, ssd_nbytes=1e12)
    best = solve_job(job, make_speeds(), limits)
    again = solution_of(best.costs, best.placement, best.plan.arena_nbytes)
    assert again.plan == best.plan
    assert again.step_s == pytest.approx(best.step_s, rel=0.02)


def test_a_plan_made_for_a_fast_ssd_is_slower_on_a_slow_one_than_the_one_made_for_that() -> None:
    job = make_job(num_microbatches=4)
    limits = Limits(device_nbytes=130 * 2**20, host_nbytes=300 * 2**20, ssd_nbytes=1e12)
    links = {"h2d_bytes": 1e12, "d2h_bytes": 1e12}
    wrong = solve_job(job, make_speeds(ssd_read_bytes=1e12, ssd_write_bytes=1e12, **links), limits)
    assert wrong.placement.ssd_activation_nbytes > 0
    slow = make_speeds(ssd_read_bytes=2e8, ssd_write_bytes=1e8, **links)
    right = solve_job(job, slow, limits)
    costs = replace(wrong.costs, speeds=slow)
    assert solution_of(costs, wrong.placement, wrong.plan.arena_nbytes).step_s > 1.02 * right.step_s


def test_the_time_of_lanes_is_not_counted_in_the_passes() -> None:
    """Every plan adds it: half of it is the addition of one lane to the total, half the norms."""
    plain = costs(num_microbatches=2)
    model = plain.job.model
    layers = tuple(replace(layer, norms_s=0.01) for layer in model.layers)
    job = replace(
        plain.job,
        model=replace(model, layers=layers, head=replace(model.head, norms_s=0.01)),
        training=replace(plain.job.training, lanes=2),
    )
    speeds = replace(plain.speeds, device_memory_bytes=12 * layers[0].numel / 0.01)
    lanes = replace(plain, job=job, speeds=speeds)
    assert lanes.adding_lanes_s(1) == pytest.approx(0.01)
    head_s = 0.01 + lanes.adding_lanes_s(HEAD)
    taken = step(forward_s=0.2, backward_s=0.42, head_s=0.12 + head_s)
    placement = Placement(activations=(KEEP,) * NUM_LAYERS)
    found = correction_of(
        [taken], lanes, placement, planned_compute_s=2 * PLANNED_COMPUTE_S + NUM_LAYERS * 0.02 + head_s
    )
    assert found.block_s[1] == pytest.approx((0.1, 0.2))
    assert found.block_s[HEAD] == pytest.approx((0.06, 0.0))
    assert found.in_words == ()
