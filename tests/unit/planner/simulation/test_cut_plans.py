"""Plans whose blocks come in pieces: the cost model counts the bytes that are simulated, and takes no longer."""

import contextlib

import pytest

from windlass.engine.training_config.training_config import TrainingConfig
from windlass.planner.hardware.model_shape import ModelShape, published_models
from windlass.planner.hardware.named_machines import machine_of
from windlass.planner.hardware.yaml_files import load
from windlass.planner.profiling.model_config import ShapeConfig
from windlass.planner.question.kept_shapes import KeptShapes
from windlass.planner.question.profiles import Profiles
from windlass.planner.question.question import PlanQuestion
from windlass.planner.simulation.planned_job import simulate_planned
from windlass.planner.solver.family import bases_of, cut_bases_of, kinds_of
from windlass.planner.solver.solution import DoesNotFitError, Solution, solved
from windlass.planner.solver.step_bounds import Part

KEPT = KeptShapes()
NUM_TOKENS = 512
# A share. The cost model counts norms and biases as if they came in pieces, too.
NEAR = 1e-3
# The same for a step whose SSDs are the slowest. Blocks at the turns of a pass are read once less: see
# `StepCosts._fetches`.
NEAR_STEP = 4e-3


def solutions(
    model: str,
    num_microbatches: int,
    clip_norm: float | None,
    num_layers: int,
    machine: str,
    *,
    streams_grads: bool = True,
    spills: bool = False,
) -> list[tuple[Solution, Profiles]]:
    """The best plan with each group size and a single buffer for gradients, without a cut and with each one.

    `streams_grads`: gradients leave in pieces. `spills`: kept gradients may go to the SSDs.
    """
    shape = load(ModelShape, published_models()[model]).model_copy(update={"num_layers": num_layers})
    training = TrainingConfig(batch_size=8, sequence_length=NUM_TOKENS, clip_norm=clip_norm, total_steps=1)
    question = PlanQuestion(
        config=ShapeConfig(shape=shape, num_tokens=NUM_TOKENS),
        hardware=machine_of(machine),
        training=training,
        chooses_cut=True,
        kept_shapes=KEPT,
    )
    profiles = Profiles(question)
    job = profiles.job(question, num_microbatches)
    bases = [base for base in bases_of(job, question.speeds, question.limits) if base.num_grad_buffers == 1]
    bases = [base for base in bases if base.streams_grads is streams_grads and base.spills is spills]
    cut = [each for base in bases for each in (base, *cut_bases_of(base))]
    found = []
    for base in cut:
        with contextlib.suppress(DoesNotFitError):
            found.append(solved(next(kinds_of(base))))
    return [(solution, profiles) for solution in found if solution is not None]


def check(solution: Solution, profiles: Profiles) -> None:
    costs, simulated = solution.costs, simulate_planned(solution, profiles.layout, num_cores=2)
    moved, seconds, speeds = simulated.steps[-1].summary["moved_bytes"], solution.seconds, costs.speeds
    to_device = (seconds[Part.H2D_FORWARD] + seconds[Part.H2D_BACKWARD]) * speeds.h2d_bytes
    from_device = (seconds[Part.D2H_FORWARD] + seconds[Part.D2H_BACKWARD]) * speeds.d2h_bytes
    what = costs.group_size, costs.job.cut, costs.streams_ends
    assert from_device == pytest.approx(moved["gpu-0/d2h"], rel=NEAR), what
    assert moved["gpu-0/h2d"] == pytest.approx(to_device, rel=NEAR), what
    # Commits are rarer than the few steps that are simulated.
    assert solution.step_s - seconds[Part.SSD_FLUSH] <= (1 + NEAR_STEP) * simulated.step_s, what


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_cut_plans_move_the_planned_bytes_and_take_no_less_than_the_bound(
    num_microbatches: int, clip_norm: float | None
) -> None:
    found = solutions("llama-3.1-8b", num_microbatches, clip_norm, 4, "rtx4090:ram=64")
    assert {solution.costs.streams_ends for solution, _ in found} == {False, True}
    for solution, profiles in found:
        check(solution, profiles)


def test_gradients_for_which_memory_is_left_do_not_spill_and_are_not_counted_so() -> None:
    plans = [plan for plan, _ in solutions("llama-3.1-8b", 2, 1.0, 4, "rtx4090:ram=64", spills=True)]
    assert {plan.plan.spilled_blocks for plan in plans} == {()}
    for plan in plans:
        costs = plan.costs
        read_and_written_s = costs.job.model.numel * (
            costs.job.read_itemsize / costs.speeds.read_bytes + costs.job.state_itemsize / costs.speeds.write_bytes
        )
        assert plan.seconds[Part.SSD_UPDATE] <= (1 + NEAR) * read_and_written_s, "no gradients"
        assert plan.cost >= plan.step_s


@pytest.mark.long
@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_plans_with_a_single_buffer_for_whole_gradients_take_no_less_than_the_bound(
    num_microbatches: int, clip_norm: float | None
) -> None:
    """Compute does not wait for the buffer where layers have states on the device, or there are several groups."""
    found = solutions("llama-3.1-8b", num_microbatches, clip_norm, 32, "rtx4090-server", streams_grads=False)
    waiting = {solution.costs._copies_beside_s is not None for solution, _ in found}
    assert waiting == ({True} if num_microbatches == 1 else {True, False})
    for solution, profiles in found:
        step_s = simulate_planned(solution, profiles.layout, num_cores=2).step_s
        assert solution.step_s - solution.seconds[Part.SSD_FLUSH] <= (1 + NEAR_STEP) * step_s


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "num_layers", "machine"),
    [
        ("llama-3.1-8b", 4, "rtx4090:ram=64"),
        ("llama-3.1-8b", 32, "rtx4090:ram=64"),
        ("llama-3.1-70b", 16, "rtx4090:ram=128"),
    ],
)
def test_cut_plans_whose_gradients_may_spill_take_no_less_than_the_bound(
    model: str, num_layers: int, machine: str
) -> None:
    found = solutions(model, 2, 1.0, num_layers, machine, spills=True)
    assert found
    for solution, profiles in found:
        check(solution, profiles)


@pytest.mark.long
@pytest.mark.parametrize("machine", ["rtx4090-server", "rtx4090:ram=256,ssds=4", "rtx5090:ram=128"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("num_microbatches", [2, 8])
@pytest.mark.parametrize(("model", "num_layers"), [("llama-3.1-8b", 32), ("llama-3.1-70b", 16), ("llama-3.1-405b", 6)])
def test_cut_plans_of_large_models_take_no_less_than_the_bound(
    model: str, num_layers: int, num_microbatches: int, clip_norm: float | None, machine: str
) -> None:
    for solution, profiles in solutions(model, num_microbatches, clip_norm, num_layers, machine):
        check(solution, profiles)
