"""Planned jobs, simulated unchanged and in larger pieces."""

from dataclasses import replace

import pytest

from tests.support.planner.profiles import make_job, make_speeds
from tests.support.planner.questions import SHAPE, machine, question
from windlass.engine.memory_plan.memory_tier import MemoryTier
from windlass.engine.memory_plan.queue_depths import QueueDepths
from windlass.engine.model.layout import ModelLayout
from windlass.planner.hardware import ModelShape, load, machine_of, published_models
from windlass.planner.hardware.hardware import Hardware
from windlass.planner.planning.simulated_search import best_plan
from windlass.planner.profiling import ShapeConfig
from windlass.planner.profiling.model_profiler import config_of_shape
from windlass.planner.question.profiles import Profiles
from windlass.planner.question.question import PlanQuestion
from windlass.planner.simulation import planned_job
from windlass.planner.simulation.planned_job import simulate_planned
from windlass.planner.simulation.resources import Work
from windlass.planner.solver.placement_search import solve_job
from windlass.planner.solver.planned_job import Limits
from windlass.planner.solver.solution import Solution, solution_of
from windlass.planner.solver.step_bounds import Part


def simulated_step_s(solution: Solution, layout: ModelLayout) -> float:
    return simulate_planned(solution, layout, num_cores=2).step_s


def planned(hardware: Hardware, **changes: object) -> tuple[Solution, ModelLayout]:
    asked: PlanQuestion = question(hardware, **changes)
    profiles = Profiles(asked)
    return best_plan(asked, profiles)[1], profiles.layout


@pytest.mark.short("hardware0-changes0")
@pytest.mark.parametrize(
    ("hardware", "changes"),
    [
        (machine(), {"num_microbatches": 2}),
        (machine(), {"num_microbatches": 6, "batch_size": 12, "num_ranks": 3}),
        (machine(gpus=4, host=4.2), {"batch_size": 32, "num_microbatches": 2}),  # swaps, to the SSDs too
        pytest.param(machine(gpus=2.3, host=4), {"batch_size": 4, "num_microbatches": 4}, marks=pytest.mark.long),
    ],
)
def test_levels_of_memory_are_within_the_plan(
    hardware: Hardware, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is made larger for the simulation, so that its pools are the plan's.
    monkeypatch.setattr(planned_job, "_MAX_ACTIVATION_SLOTS", 1 << 30)
    monkeypatch.setattr(planned_job, "_MAX_CHUNKS", 1 << 30)
    config = config_of_shape(SHAPE.model_copy(update={"num_layers": 4}), num_tokens=512)
    asked = question(hardware, config=config, **changes)
    profiles = Profiles(asked)
    job, solution = best_plan(asked, profiles)
    simulated = simulate_planned(solution, profiles.layout, num_cores=2)
    memory, levels = simulated.memory, {(each.tier, each.what): each for each in simulated.steps[-1].levels}

    def on_device(*kinds: str) -> int:
        return sum(
            levels[MemoryTier.DEVICE, what].allocated_nbytes or 0
            for what in kinds
            if (MemoryTier.DEVICE, what) in levels
        )

    need = profiles.device_need(asked, job, solution)
    assert on_device("params", "pieces of params") == need.params_nbytes
    assert on_device("gradients") == need.grads_nbytes
    assert on_device("states") == need.states_nbytes
    assert need.states_nbytes < memory[MemoryTier.DEVICE].peak_nbytes <= solution.nbytes[MemoryTier.DEVICE]
    assert memory[MemoryTier.HOST].allocated_nbytes == solution.plan.arena_nbytes
    assert memory[MemoryTier.SSD].allocated_nbytes == solution.nbytes[MemoryTier.SSD]
    for each in levels.values():
        most = max(nbytes for _, nbytes in each.points)
        assert 0 <= most <= (most if each.allocated_nbytes is None else each.allocated_nbytes)


@pytest.mark.long
def test_all_gpus_of_a_plan_are_simulated() -> None:
    config = config_of_shape(SHAPE.model_copy(update={"num_layers": 8}), num_tokens=512)
    options = {"config": config, "batch_size": 24, "num_microbatches": 12}
    slow = machine()
    slow = slow.model_copy(update={"gpus": slow.gpus.model_copy(update={"tflops": slow.gpus.tflops / 20})})
    one_s, three_s = (simulated_step_s(*planned(slow, num_ranks=num_ranks, **options)) for num_ranks in (1, 3))
    assert one_s / 3 < three_s < one_s / 1.5


@pytest.mark.short("3")
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_bytes_in_host_memory_are_those_that_the_simulated_job_moves(num_ranks: int) -> None:
    """The costs count them; here they are counted from the spans of copies, of SSDs and of updates."""
    config = config_of_shape(SHAPE.model_copy(update={"num_layers": 4}), num_tokens=512)
    hardware = machine(gpus=4, host=6)
    solution, layout = planned(
        hardware, config=config, batch_size=24, num_microbatches=2 * num_ranks, num_ranks=num_ranks
    )
    job, step = solution.costs.job, simulate_planned(solution, layout, num_cores=2).steps[-2]
    update_nbytes = job.read_itemsize + job.grad_itemsize + job.state_itemsize
    moved = sum(span.nbytes for span in step.spans if step.start_s < span.end_s <= step.end_s)
    updated = sum(block.numel for block in layout.blocks)
    planned_nbytes = solution.busy_s["host_memory"] * hardware.host.memory_gb_per_s * 1e9
    assert planned_nbytes == pytest.approx(moved + update_nbytes * updated, rel=0.08)


@pytest.mark.long
def test_slow_host_memory_is_named_as_the_bound_and_slows_the_simulated_job() -> None:
    config = config_of_shape(SHAPE.model_copy(update={"num_layers": 4}), num_tokens=512)
    fast = machine()
    slow = fast.model_copy(update={"host": fast.host.model_copy(update={"memory_gb_per_s": 10.0})})
    options = {"config": config, "batch_size": 24, "num_microbatches": 3, "num_ranks": 3}
    (one, layout), (other, _) = planned(fast, **options), planned(slow, **options)
    assert (one.bottleneck != "host_memory", other.bottleneck) == (True, "host_memory")
    assert other.step_s == pytest.approx(other.busy_s["host_memory"])
    # The costs do not count that a pass finds the last params of the one before on the device.
    assert 2 * one.step_s < 0.9 * other.step_s < simulated_step_s(other, layout) < 1.5 * other.step_s
    alone, _ = planned(slow, **{**options, "num_ranks": 1})
    assert alone.busy_s["host_memory"] < other.busy_s["host_memory"]


@pytest.mark.long
def test_a_quarter_as_many_slots_take_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of_shape(SHAPE.model_copy(update={"num_layers": 4}), num_tokens=512)
    solution, layout = planned(machine(gpus=4, host=4.2), config=config, batch_size=32, num_microbatches=2)
    assert solution.plan.num_ssd_activations > 0
    monkeypatch.setattr(planned_job, "_MAX_ACTIVATION_SLOTS", 1 << 30)
    exact_s = simulated_step_s(solution, layout)
    assert exact_s >= 0.99 * solution.step_s
    num_slots = solution.plan.num_host_activations + solution.plan.num_ssd_activations
    monkeypatch.setattr(planned_job, "_MAX_ACTIVATION_SLOTS", num_slots // 5)  # each is four times as large
    assert simulated_step_s(solution, layout) == pytest.approx(exact_s, rel=0.03)


@pytest.mark.long
@pytest.mark.short("2-128-None")
@pytest.mark.parametrize(
    ("num_ssds", "ram", "clip_norm"), [(2, 128, None), (2, 128, 1.0), (4, 64, None), (4, 64, 1.0), (1, 128, None)]
)
def test_fewer_chunks_on_one_merged_ssd_take_as_long_as_the_real_ones(
    num_ssds: int, ram: int, clip_norm: float | None
) -> None:
    """States of some layers are in host memory, those of others on SSDs: what is in flight decides what waits."""
    config = ShapeConfig(shape=load(ModelShape, published_models()["qwen2.5-14b"]), num_tokens=1024)
    hardware = machine_of(f"rtx4090:gpus=1,ram={ram},ssds={num_ssds}")
    solution, layout = planned(hardware, config=config, sequence_length=1024, clip_norm=clip_norm)
    assert 0 < solution.plan.host_states.num_slots < sum(map(layout.num_chunks, range(len(layout.blocks))))
    simulated_s = planned_job.simulated_step_s(solution, layout, num_cores=2)
    real = planned_job.box_of_plan(solution, layout, num_cores=2, merges_ssds=False)
    assert len(real.context.ssds) == num_ssds
    assert real.context.layout.chunk_numel == solution.costs.job.model.chunk_numel
    assert simulated_s == pytest.approx(planned_job.simulated_step_s_of_boxes([real]), rel=0.05)


def test_in_larger_slots_tensors_of_a_layer_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes to one SSD. If they had different sizes, some SSDs could have all the large ones in turn."""
    config = config_of_shape(SHAPE.model_copy(update={"num_layers": 4}), num_tokens=512)
    solution, layout = planned(machine(gpus=4, host=4.2), config=config, batch_size=32, num_microbatches=2)
    monkeypatch.setattr(planned_job, "_MAX_ACTIVATION_SLOTS", 1 << 30)
    usual = planned_job.box_of_plan(solution, layout, num_cores=2, merges_ssds=False).work.swapped_nbytes
    assert any(len(set(tensors)) > 1 for tensors in usual.values())
    monkeypatch.setattr(planned_job, "_MAX_ACTIVATION_SLOTS", 20)
    box = planned_job.box_of_plan(solution, layout, num_cores=2, merges_ssds=False)
    for block, tensors in box.work.swapped_nbytes.items():
        assert len(tensors) == len(usual[block])
        assert len(set(tensors)) == 1
        assert sum(tensors) == pytest.approx(sum(usual[block]), abs=len(tensors))
    # A layer whose choice names small tensors only swaps nothing.
    work_of = planned_job.work_of
    monkeypatch.setattr(planned_job, "work_of", lambda solution: with_nothing_swapped(work_of(solution), block=1))
    box = planned_job.box_of_plan(solution, layout, num_cores=2, merges_ssds=False)
    assert not box.work.swapped_nbytes[1]
    assert planned_job.simulated_step_s_of_boxes([box]) > 0


def with_nothing_swapped(work: Work, *, block: int) -> Work:
    return replace(work, swapped_nbytes={**work.swapped_nbytes, block: ()})


@pytest.mark.long
def test_with_many_ssds_deeper_buffers_are_faster() -> None:
    solution, layout = planned(machine(host=6, gpus=6))
    assert solution.placement.depths.states > QueueDepths().states
    depths = QueueDepths()
    shallow = solution_of(replace(solution.costs, depths=depths), replace(solution.placement, depths=depths))
    assert simulated_step_s(solution, layout) < 0.8 * simulated_step_s(shallow, layout)


@pytest.mark.parametrize(("num_slots", "share"), [(3, 2.5 * 0.87 / 12), (13, 0.87), (97, 1.0)])
def test_ssds_that_are_simulated_as_one_are_slower_only_for_states_in_few_slots(num_slots: int, share: float) -> None:
    limits = Limits(device_nbytes=1000 * 2**20, host_nbytes=1e10, ssd_nbytes=1e12)
    solution = solve_job(make_job(12), make_speeds(num_ssds=12), limits)
    plan = replace(solution.plan, states=(replace(solution.plan.states[0], num_slots=num_slots),))
    solution = replace(solution, plan=plan)

    def busy_share(update_s: float, forward_s: float, backward_s: float) -> float:
        seconds = {Part.SSD_UPDATE: update_s, Part.SSD_FORWARD: forward_s, Part.SSD_BACKWARD: backward_s}
        merged = planned_job._with_one_ssd(replace(solution, seconds=seconds)).costs.speeds
        return merged.read_bytes / solution.costs.speeds.read_bytes

    assert busy_share(5.0, 0.0, 0.0) == pytest.approx(share, rel=1e-3)
    assert busy_share(0.0, 3.0, 4.0) == 1.0  # all states are in memory
    assert busy_share(5.0, 3.0, 4.0) == pytest.approx(12 / (5 / share + 7), rel=1e-3)


@pytest.mark.parametrize(("hidden_size", "depth", "merges"), [(512, 3, False), (4096, 3, False), (4096, 65, True)])
def test_ssds_are_simulated_as_one_only_if_that_saves_chunks_and_each_has_a_slot(
    hidden_size: int, depth: int, merges: bool
) -> None:
    """A layer of the small model is one chunk, and one of the large model 26. There are twelve SSDs."""
    shape = SHAPE.model_copy(
        update={"num_layers": 4, "hidden_size": hidden_size, "intermediate_size": hidden_size * 7 // 2}
    )
    solution, layout = planned(machine(host=10), config=ShapeConfig(shape=shape, num_tokens=512), num_microbatches=1)
    depths = replace(solution.placement.depths, states=depth)
    solution = solution_of(replace(solution.costs, depths=depths), replace(solution.placement, depths=depths))
    assert planned_job.may_merge_ssds(layout, [solution]) == merges
    apart = planned_job.box_of_plan(solution, layout, num_cores=2, merges_ssds=False)
    apart_s = planned_job.simulated_step_s_of_boxes([apart])
    simulated_s = planned_job.simulated_step_s(solution, layout, num_cores=2)
    assert simulated_s == (pytest.approx(apart_s, rel=0.05) if merges else apart_s)
