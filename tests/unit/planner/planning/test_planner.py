"""Plans of jobs that do not exist yet, on machines that are only described."""

import itertools
import math
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.papers.published.models import RATEL_SHAPES
from windlass.amounts import GIB
from windlass.engine.memory_plan.allocator_reserve import allocatable_nbytes, reserved_nbytes
from windlass.engine.memory_plan.memory_tier import MemoryTier
from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.engine.optimizer.scratch_sizes import update_scratch_nbytes
from windlass.engine.training_config.training_config import TrainingConfig
from windlass.planner.cost.rates import speeds_of
from windlass.planner.feasibility import feasibility
from windlass.planner.feasibility.feasibility import with_part
from windlass.planner.hardware.hardware import Gpus, Hardware, Host, Pcie, Ssds, example_machines
from windlass.planner.hardware.model_shape import ModelShape, published_models
from windlass.planner.hardware.named_machines import machine_of
from windlass.planner.hardware.yaml_files import load
from windlass.planner.planning import planner as planning
from windlass.planner.planning import simulated_search
from windlass.planner.profiling.model_config import ShapeConfig
from windlass.planner.profiling.model_profiler import Profiler
from windlass.planner.question.exact_search import counted, solve_exactly
from windlass.planner.question.kept_shapes import KeptShapes
from windlass.planner.question.profiles import Profiles, planned_job
from windlass.planner.question.question import PlanQuestion
from windlass.planner.question.report import PlanReport
from windlass.planner.solver.memory_limits import DRIVER_NBYTES, limits_of, processes_nbytes
from windlass.planner.solver.placement_search import search
from windlass.planner.solver.solution import Solution
from windlass.storage.ids import Precision, StatePrecision

SHAPE = ModelShape(
    num_layers=24, hidden_size=2048, num_heads=16, num_kv_heads=4, intermediate_size=5632, vocab_size=32000
)
MACHINE = load(Hardware, example_machines()["rtx4090-server"])


def machine(**memory_gib: float) -> Hardware:
    """The example machine with less memory: `host`, `gpus` in GiB, `ssds` each."""
    changes = {}
    for part, gib in memory_gib.items():
        key = "capacity_gib" if part == "ssds" else "memory_gib"
        changes[part] = getattr(MACHINE, part).model_copy(update={key: gib})
    return MACHINE.model_copy(update=changes)


def question(hardware: Hardware = MACHINE, **changes: Any) -> PlanQuestion:
    """A question. `changes`: its fields or those of its training config.

    Without a number of micro-batches, the planner chooses one.
    """
    names = [field.name for field in fields(TrainingConfig)]
    settings: dict[str, Any] = {"batch_size": 8, "sequence_length": 512, "total_steps": 1}
    settings |= {name: changes.pop(name) for name in names if name in changes}
    options = {"config": ShapeConfig(shape=SHAPE, num_tokens=512), **changes}
    chooses = "num_microbatches" not in settings
    return PlanQuestion(hardware=hardware, training=TrainingConfig(**settings), chooses_microbatches=chooses, **options)


def answer(asked: PlanQuestion) -> PlanReport:
    return planning.answer(asked).report


def test_a_plan_says_what_a_step_takes_and_needs() -> None:
    report = answer(question())
    assert report.feasible
    assert report.step_s is not None
    assert report.peak_gib is not None
    assert report.busy_s is not None
    assert report.choices is not None
    assert report.tokens_per_s == pytest.approx(8 * 512 / report.step_s)
    profile = Profiler(question().config.load(), Precision.BF16).profile(8, 512)
    assert report.tflops == pytest.approx(3 * profile.num_flops / report.step_s / 1e12)
    assert report.tflops <= MACHINE.gpus.tflops
    assert report.peak_gib["gpu"] <= MACHINE.gpus.memory_gib
    assert report.peak_gib["host"] <= MACHINE.host.memory_gib
    assert report.bottleneck == max(report.busy_s, key=lambda name: report.busy_s[name])  # type: ignore[index]
    states = {tier: report.choices[f"states_on_{tier}"] for tier in ("gpu", "host", "ssd")}
    assert sum(states.values()) == 26
    counted = dict.fromkeys(states, 0)
    for run in report.choices["states"]:
        first, *last = map(int, run["blocks"].split("-"))
        counted[run["rest_on"]] += last[0] - first + 1 if last else 1
    assert counted == states
    for run in report.choices["activations"]:
        sizes = run["kept_mib"], run["swapped_mib"], run["recomputed_mib"]
        assert min(sizes) >= 0
        assert (run["rest"] == "recomputed") == (sizes[2] > 0)
        assert (run["input"] == "swapped" or "swapped" in run or run["rest"] == "swapped") == (sizes[1] > 0)
    assert "bound by" in report.reasons[0]


@pytest.mark.parametrize("has_gpu", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_promise_is_the_simulated_step_of_the_fastest(has_gpu: bool) -> None:
    hardware = machine(host=8)
    if not has_gpu:
        hardware = with_part(hardware, gpus=with_part(hardware.gpus, count=0))
    few_layers = ShapeConfig(shape=SHAPE.model_copy(update={"num_layers": 4}), num_tokens=512)
    asked = question(hardware, config=few_layers)
    profiles = Profiles(asked)
    _, fastest, step_s = simulated_search.fastest_plan(asked, profiles)
    _, least_bound = simulated_search.best_plan(asked, profiles)
    assert step_s is not None
    assert fastest.step_s >= least_bound.step_s * (1 - 1e-3)

    assert step_s == simulated_search.promised_step_s(asked, profiles, fastest)
    assert step_s <= simulated_search.promised_step_s(asked, profiles, least_bound)
    report = answer(asked)
    assert (report.step_s, report.bound_s) == (step_s, fastest.step_s)


@pytest.mark.long
def test_plans_swap_less_to_the_ssds_where_compute_would_wait_for_them() -> None:
    """By the cost model alone both are busy all the time. Simulated, each waits for the other."""
    hardware = with_part(machine(host=32), ssds=with_part(MACHINE.ssds, count=4))
    few_layers = ShapeConfig(shape=RATEL_SHAPES[6].model_copy(update={"num_layers": 12}), num_tokens=1024)
    asked = question(
        hardware, config=few_layers, batch_size=32, sequence_length=1024, num_microbatches=2, clip_norm=None
    ).changed(commit_minutes=0.0)
    profiles = Profiles(asked)
    _, least_bound = simulated_search.best_plan(asked, profiles)
    _, fastest, step_s = simulated_search.fastest_plan(asked, profiles)
    busy_s = simulated_search.promised_step_s(asked, profiles, least_bound)
    assert step_s is not None
    assert step_s < 0.95 * busy_s
    assert fastest.placement.ssd_activation_nbytes < least_bound.placement.ssd_activation_nbytes
    assert counted(asked, profiles, fastest)[1] <= 0


def test_kept_gradients_are_planned_where_updates_during_the_backward_pass_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few_layers = ShapeConfig(shape=SHAPE.model_copy(update={"num_layers": 2}), num_tokens=512)
    asked = question(machine(host=8), config=few_layers, clip_norm=None, num_microbatches=2, chooses_order=True)

    def promised_step_s(_: PlanQuestion, __: Profiles, solution: Solution, **___: float) -> float:
        return solution.step_s * (1000 if solution.costs.job.update_order is UpdateOrder.ACTIVE else 1)

    monkeypatch.setattr(simulated_search, "promised_step_s", promised_step_s)
    job, fastest, _ = simulated_search.fastest_plan(asked, Profiles(asked))
    assert job.update_order is fastest.costs.job.update_order is UpdateOrder.KEPT


@pytest.mark.long
@pytest.mark.parametrize("size", [6, 13])
def test_a_step_without_clipping_is_not_slower_in_the_simulation(size: int) -> None:
    shape = ShapeConfig(shape=RATEL_SHAPES[size], num_tokens=1024)
    clipped = question(config=shape, sequence_length=1024)
    free = question(config=shape, sequence_length=1024, clip_norm=None, chooses_order=True)
    profiles = Profiles(clipped)
    clipped_s, free_s = (simulated_search.fastest_plan(asked, profiles)[2] for asked in (clipped, free))
    assert clipped_s is not None
    assert free_s is not None
    assert free_s <= clipped_s


@pytest.mark.long
@pytest.mark.parametrize(
    ("billions", "host_gib", "num_ssds"), [(13, 64, 2), (70, 128, 2), (70, 128, 8), (70, 128, 12), (175, 256, 12)]
)
def test_a_simulated_step_is_hardly_longer_than_the_bound_it_was_chosen_by(
    billions: int, host_gib: int, num_ssds: int
) -> None:
    """Errors of the cost model would make the simulated step several times longer than its bound."""
    hardware = machine(host=host_gib)
    hardware = with_part(hardware, ssds=with_part(hardware.ssds, count=num_ssds))
    config = ShapeConfig(shape=RATEL_SHAPES[billions], num_tokens=1024)
    asked = question(hardware, config=config, batch_size=32, sequence_length=1024)
    profiles = Profiles(asked)
    for number in (4, 32):
        job = profiles.job(asked, number)
        found = search((job,), asked.speeds, asked.limits, num_others=3, near=0.02)
        for solution in [found.best, *found.others][:4]:
            assert simulated_search.promised_step_s(asked, profiles, solution) < 1.4 * solution.step_s


@pytest.mark.long
def test_layers_are_told_in_runs_that_do_the_same() -> None:
    config = ShapeConfig(
        shape=ModelShape(num_layers=8, hidden_size=1024, num_heads=16, vocab_size=8000), num_tokens=512
    )
    report = answer(question(machine(gpus=2), config=config, num_microbatches=2))
    assert report.choices is not None
    numbers = [each["layers"].split("-") for each in report.choices["activations"]]
    covered = [n for first_last in numbers for n in range(int(first_last[0]), int(first_last[-1]) + 1)]
    assert covered == list(range(8))
    assert len(numbers) > 1


@pytest.mark.long
def test_the_states_number_format_is_what_the_ssds_are_asked_for() -> None:
    small = machine(host=8)
    fp32, bf16 = (answer(question(small, state_precision=each)) for each in (StatePrecision.FP32, StatePrecision.BF16))
    assert fp32.peak_gib is not None
    assert bf16.peak_gib is not None
    assert bf16.ssd_write_gb_per_step is not None
    assert fp32.ssd_write_gb_per_step is not None
    assert bf16.peak_gib["ssd"] == pytest.approx(fp32.peak_gib["ssd"] * 6 / 14, rel=0.02)
    assert bf16.ssd_write_gb_per_step < fp32.ssd_write_gb_per_step


def test_clipping_keeps_gradients() -> None:
    profile = Profiler(question().config.load(), Precision.BF16).profile(8, 512)
    assert planned_job(question(), profile, 1).keeps_grads
    assert not planned_job(question(clip_norm=None), profile, 1).keeps_grads
    assert planned_job(question(clip_norm=None, precision=Precision.FP16), profile, 1).keeps_grads
    assert planned_job(question(), profile, 4).grad_itemsize == 4


def test_device_need_with_validation_examples_has_room_for_an_evaluation() -> None:
    """A step processes its micro-batches one by one, an evaluation as many together as fit."""
    config = ShapeConfig(shape=ModelShape(num_layers=1, hidden_size=256, num_heads=4, vocab_size=100), num_tokens=512)
    asked = question(config=config, batch_size=64, num_microbatches=64)
    profiles = Profiles(asked)
    solution = solve_exactly(asked, 64, profiles)
    plan = replace(solution.plan, group_size=1, num_groups=64)
    one_by_one, job = replace(solution, plan=plan), profiles.job(asked, 64)
    hidden_nbytes = 512 * 256 * 2

    def needed_nbytes(num_validation_examples: int) -> int:
        validated = replace(asked, num_validation_examples=num_validation_examples)
        return profiles.device_need(validated, job, one_by_one).nbytes

    assert needed_nbytes(1) == needed_nbytes(0)
    more_nbytes = needed_nbytes(64) - needed_nbytes(32)
    assert more_nbytes >= 32 * hidden_nbytes
    assert needed_nbytes(1000) == needed_nbytes(64)


@pytest.mark.long
def test_device_need_of_a_tied_model_has_room_to_round_a_sum_in_place() -> None:
    """The gradient of both uses of the embedding is summed in fp32, and leaves the device in 16 bits."""
    shape = ModelShape(num_layers=1, hidden_size=256, num_heads=4, vocab_size=100)
    constants = []
    for is_tied in (True, False):
        tied = shape.model_copy(update={"tied_embeddings": is_tied})
        asked = question(config=ShapeConfig(shape=tied, num_tokens=512), num_microbatches=1)
        profiles = Profiles(asked)
        solution = solve_exactly(asked, 1, profiles)
        constants.append(profiles.device_need(asked, profiles.job(asked, 1), solution).constants_nbytes)
    numels = [block.numel for block in profiles.layout.blocks]
    # And for parts of a gradient in fp32, which a CPU adds to that sum.
    assert constants[0] - constants[1] == 2 * numels[0] + 4 * max(numels)


def test_device_need_on_a_gpu_has_room_for_an_update_that_is_not_compiled() -> None:
    config = ShapeConfig(shape=ModelShape(num_layers=1, hidden_size=256, num_heads=4, vocab_size=100), num_tokens=512)
    asked = question(config=config)
    on_cpu = replace(asked, hardware=with_part(MACHINE, gpus=with_part(MACHINE.gpus, count=0)))
    profiles = Profiles(asked)
    solution = solve_exactly(asked, 1, profiles)
    job = profiles.job(asked, 1)

    def more_nbytes(*device_blocks: int) -> int:
        plan = replace(solution.plan, device_blocks=device_blocks)
        need, need_on_cpu = (profiles.device_need_of_plan(each, job, plan).nbytes for each in (asked, on_cpu))
        return need - need_on_cpu

    assert more_nbytes() == 0  # the parts of gradients that a CPU converts are counted for both
    rounded_nbytes = 2 * profiles.layout.chunk_numel
    assert more_nbytes(1) - more_nbytes() == update_scratch_nbytes(job.training.formats.states) + rounded_nbytes


@pytest.mark.parametrize(
    ("lanes", "num_ranks", "expected"),
    [(1, 1, [1, 2, 4, 8]), (3, 1, [3, 6]), (2, 3, [4, 8]), (3, 8, [8]), (1, 3, [3, 6])],
)
def test_numbers_of_microbatches_to_try_have_equal_lanes_and_one_for_each_gpu(
    lanes: int, num_ranks: int, expected: list[int]
) -> None:
    asked = replace(question(), num_ranks=num_ranks)
    asked = replace(asked, training=replace(asked.training, num_microbatches=8, lanes=lanes))
    assert list(feasibility.numbers_of_microbatches(asked)) == expected


@pytest.mark.long
def test_with_more_host_memory_a_job_that_fits_still_fits_and_is_hardly_slower() -> None:
    """Swapped activations are on the GPU until they are copied out: with more space to swap to, fewer may fit there."""
    config = ShapeConfig(
        shape=ModelShape(num_layers=8, hidden_size=1024, num_heads=16, vocab_size=8000), num_tokens=512
    )
    small = Hardware(
        gpus=Gpus(count=1, memory_gib=(reserved_nbytes(5 * GIB // 4) + DRIVER_NBYTES) / GIB, tflops=20),
        host=Host(memory_gib=6.0, memory_gb_per_s=40, adam_params_per_s=1e9),
        pcie=Pcie(h2d_gb_per_s=12, d2h_gb_per_s=12),
        ssds=Ssds(count=2, read_gb_per_s=8, write_gb_per_s=8, capacity_gib=100),
    )
    asked = question(small, config=config, num_microbatches=1, clip_norm=None)
    profiles, best_s = Profiles(asked), float("inf")
    for host_mib in (800, 1200, 1600, 2400):
        limited = replace(asked, host_memory_nbytes=host_mib << 20)
        _, solution = simulated_search.best_plan(limited, profiles)
        assert solution.nbytes[MemoryTier.DEVICE] <= limited.limits.device_nbytes
        assert solution.nbytes[MemoryTier.HOST] <= host_mib << 20
        assert solution.step_s <= 1.01 * best_s
        best_s = min(best_s, solution.step_s)


@pytest.mark.long
def test_a_smaller_batch_or_shorter_sequences_are_named_where_the_gpu_is_too_small() -> None:
    small = machine(gpus=1.2)
    report = answer(question(small, num_microbatches=1, batch_size=64, sequence_length=2048))
    assert not report.feasible
    assert any("GiB of GPU memory" in reason for reason in report.reasons)


@pytest.mark.long
def test_plan_names_changes_that_would_be_faster() -> None:
    """One SSD instead of twelve and little memory: a step waits for the SSD."""
    slow = machine(host=8)
    slow = slow.model_copy(
        update={"ssds": slow.ssds.model_copy(update={"count": 1, "combined_gb_per_s": None, "read_gb_per_s": 2.0})}
    )
    report = answer(question(slow).changed(commit_minutes=0.0))
    assert report.bottleneck == "ssd"
    assert any("twice as many SSDs" in reason for reason in report.reasons)


@pytest.mark.long
def test_more_ssds_are_not_faster_where_all_share_a_limit() -> None:
    """Twelve SSDs behind a link of 2 GB/s, and little memory: a step waits for the link."""
    slow = machine(host=8)
    slow = slow.model_copy(update={"ssds": slow.ssds.model_copy(update={"combined_gb_per_s": 2.0})})
    report = answer(question(slow).changed(commit_minutes=0.0))
    assert report.bottleneck == "ssd"
    assert not any("twice as many SSDs" in reason for reason in report.reasons)


def test_plan_leaves_memory_to_processes_and_drivers() -> None:
    limits = limits_of(MACHINE)
    assert limits.host_nbytes == MACHINE.host.memory_gib * GIB - processes_nbytes(1)
    assert limits.device_nbytes == MACHINE.gpus.memory_gib * GIB - DRIVER_NBYTES
    assert limits.ssd_nbytes == 12 * MACHINE.ssds.capacity_gib * GIB
    cpu = MACHINE.model_copy(update={"gpus": MACHINE.gpus.model_copy(update={"count": 0})})
    assert limits_of(cpu).device_nbytes == limits_of(cpu).host_nbytes


def test_plan_leaves_host_memory_to_the_processes_of_each_gpu() -> None:
    further_nbytes = processes_nbytes(2) - processes_nbytes(1)
    assert further_nbytes > GIB / 4
    alone, several = (question(num_ranks=num_ranks).limits for num_ranks in (1, 4))
    assert alone.host_nbytes - several.host_nbytes == 3 * further_nbytes
    assert alone.device_nbytes == several.device_nbytes


def test_plan_leaves_a_gpus_memory_to_its_allocator() -> None:
    budget_nbytes = 3 * GIB
    limited = question(device_memory_nbytes=budget_nbytes)
    assert limited.limits.device_nbytes == allocatable_nbytes(budget_nbytes) < budget_nbytes
    assert question().limits.device_nbytes == allocatable_nbytes(limits_of(MACHINE).device_nbytes)
    on_cpu = replace(limited, hardware=with_part(MACHINE, gpus=with_part(MACHINE.gpus, count=0)))
    assert on_cpu.limits.device_nbytes == budget_nbytes


@pytest.mark.long
def test_plan_and_the_reserve_of_the_allocator_fit_a_gpus_budget() -> None:
    config = ShapeConfig(shape=ModelShape(num_layers=2, hidden_size=512, num_heads=4, vocab_size=1000), num_tokens=512)
    budget_nbytes = 256 << 20
    report = answer(question(config=config, device_memory_nbytes=budget_nbytes, num_microbatches=1))
    assert report.engine_gib is not None
    assert report.limit_gib is not None
    assert report.peak_gib is not None
    planned_nbytes = round(report.engine_gib["gpu"] * GIB)
    assert budget_nbytes / 2 < reserved_nbytes(planned_nbytes) <= budget_nbytes
    assert report.limit_gib["gpu"] * GIB == budget_nbytes
    assert report.peak_gib["gpu"] * GIB == reserved_nbytes(planned_nbytes) + DRIVER_NBYTES


def of_ranks(num_ranks: int, **changes: Any) -> PlanReport:
    config = ShapeConfig(shape=SHAPE.model_copy(update={"num_layers": 4}), num_tokens=512)
    return answer(question(config=config, num_ranks=num_ranks, **changes))


@pytest.mark.long
def test_plan_of_several_gpus_names_them_and_computes_in_rounds() -> None:
    report, alone = of_ranks(4, num_microbatches=8), of_ranks(1, num_microbatches=8)
    assert report.choices is not None
    assert report.busy_s is not None
    assert alone.choices is not None
    assert alone.busy_s is not None
    assert (report.choices["gpus"], alone.choices["gpus"]) == (4, 1)
    for each, num_ranks in ((report, 4), (alone, 1)):
        assert each.peak_gib is not None
        assert each.engine_gib is not None
        beside_gib = each.peak_gib["host"] - each.engine_gib["host"]
        assert beside_gib == pytest.approx(processes_nbytes(num_ranks) / GIB)
    assert report.choices["states_on_gpu"] == 0
    assert report.choices["group_size"] <= 2
    assert report.busy_s["compute"] < 0.3 * alone.busy_s["compute"]
    assert not any("GPUs" in reason for reason in report.reasons[:2])


@pytest.mark.short("5-3 of 4 GPUs wait*")
@pytest.mark.parametrize(
    ("num_microbatches", "expected"),
    [(5, "3 of 4 GPUs wait in the last of 2 rounds: a step has 5 groups of micro-batches"), (4, None)],
)
def test_plan_says_which_gpus_wait_in_the_last_round(num_microbatches: int, expected: str | None) -> None:
    report = of_ranks(4, num_microbatches=num_microbatches)
    assert report.choices is not None
    if report.choices["group_size"] == 1:
        assert [reason for reason in report.reasons if "rounds" in reason] == ([expected] if expected else [])
    else:
        assert "1 of 4 GPUs compute nothing: a step has only 3 groups of micro-batches" in report.reasons


@pytest.mark.parametrize(
    ("num_ranks", "uplinks", "num_sharing"), [(4, None, 1), (1, 1, 1), (2, 2, 2), (4, 2, 2), (4, 3, 2), (4, 4, 1)]
)
def test_gpus_behind_one_uplink_share_its_rate(num_ranks: int, uplinks: int | None, num_sharing: int) -> None:
    """A job on two of four GPUs may have both of them behind the same of two uplinks."""
    pcie = MACHINE.pcie.model_copy(update={"uplinks": uplinks, "duplex_gb_per_s": 1.5 * MACHINE.pcie.h2d_gb_per_s})
    gpus = MACHINE.gpus.model_copy(update={"count": 4})
    hardware = MACHINE.model_copy(update={"pcie": pcie, "gpus": gpus})
    speeds = question(hardware, num_ranks=num_ranks, num_microbatches=4).speeds
    assert speeds.h2d_bytes == pytest.approx(pcie.h2d_gb_per_s * 1e9 / num_sharing)
    assert speeds.d2h_bytes == pytest.approx(pcie.d2h_gb_per_s * 1e9 / num_sharing)
    alone = speeds_of(MACHINE.model_copy(update={"pcie": pcie}))
    assert speeds.duplex_share == pytest.approx(alone.duplex_share)


def test_what_would_fit_leaves_out_gpus_without_a_micro_batch() -> None:
    asked = question(machine(gpus=1.62), num_ranks=4, batch_size=8, num_microbatches=8, lanes=4)
    assert asked.changed(batch_size=2, num_microbatches=2).num_ranks == 2
    assert asked.changed(sequence_length=64).num_ranks == 4


def test_no_plan_is_simulated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of several kinds may become the same one, because free memory goes to deeper queues."""
    few_layers = ShapeConfig(shape=SHAPE.model_copy(update={"num_layers": 2}), num_tokens=512)
    asked = question(machine(host=8), config=few_layers, clip_norm=None, num_microbatches=2, chooses_order=True)
    plans = []

    def promised_step_s(_: PlanQuestion, __: Profiles, solution: Solution, **___: float) -> float:
        job = solution.costs.job
        plans.append((job.num_microbatches, job.update_order, solution.placement, solution.plan))
        return 2 * solution.step_s

    monkeypatch.setattr(simulated_search, "promised_step_s", promised_step_s)
    simulated_search.fastest_plan(asked, Profiles(asked))
    assert plans
    assert all(one != other for one, other in itertools.combinations(plans, 2))


def test_a_simulation_that_ended_early_counts_for_no_larger_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says only that the step takes longer than its limit. A whole simulation counts for all."""
    asked = question(machine(host=8), batch_size=8, num_microbatches=2)
    profiles = Profiles(asked)
    solution = solve_exactly(asked, 2, profiles)
    whole_s = 2 * solution.step_s
    limits_s = []

    def promised_step_s(*_: object, most_s: float) -> float:
        limits_s.append(most_s / whole_s)
        return min(whole_s, 1.001 * most_s)

    monkeypatch.setattr(simulated_search, "promised_step_s", promised_step_s)
    simulations = simulated_search._Simulations(question=asked, profiles=profiles, watcher=simulated_search.NOBODY)

    def step_s(share: float) -> float:
        return simulations.step_of(solution, share * whole_s)

    assert step_s(0.8) < 0.9 * whole_s
    assert step_s(0.7) < 0.9 * whole_s
    assert len(limits_s) == 1
    assert step_s(1.1) == whole_s
    assert step_s(math.inf) == whole_s
    assert len(limits_s) == 2


def test_a_far_slower_plan_with_the_smallest_bound_does_not_hide_a_faster_one_of_its_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = question(machine(host=8), batch_size=8, clip_norm=None, chooses_order=True)
    kept_s = itertools.chain((2e3, 9e2), itertools.repeat(3e3))

    def promised_step_s(_: PlanQuestion, __: Profiles, solution: Solution, **___: float) -> float:
        return next(kept_s) if solution.costs.job.update_order is UpdateOrder.KEPT else 1e3

    monkeypatch.setattr(simulated_search, "promised_step_s", promised_step_s)
    assert simulated_search.fastest_plan(asked, Profiles(asked))[2] == 9e2


def test_plans_of_both_places_of_kept_gradients_are_tried_with_fewer_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ShapeConfig(shape=load(ModelShape, published_models()["llama-3.1-70b"]), num_tokens=1024)
    asked = question(config=config, batch_size=64, sequence_length=1024, clip_norm=1.0, kept_shapes=KeptShapes())
    tried = []

    def with_fewer_waits(busy: Solution, simulations: simulated_search._Simulations) -> tuple[Solution, float]:
        tried.append(busy.costs.spills)
        return busy, simulations.step_of(busy)

    monkeypatch.setattr(simulated_search, "promised_step_s", lambda _, __, solution, **___: 1.2 * solution.step_s)
    monkeypatch.setattr(simulated_search, "_with_fewer_waits", with_fewer_waits)
    simulated_search.fastest_plan(asked, Profiles(asked))
    assert len(tried) == len(set(tried)) == 2


@pytest.mark.parametrize("spills", [False, True])
@pytest.mark.parametrize("order", [UpdateOrder.ACTIVE, UpdateOrder.KEPT])
def test_the_other_place_of_kept_gradients_is_tried_whatever_order_the_smallest_bound_has(
    spills: bool, order: UpdateOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(order: UpdateOrder, spills: bool) -> SimpleNamespace:
        job = SimpleNamespace(update_order=order, keeps_grads=order.keeps_grads)
        return SimpleNamespace(costs=SimpleNamespace(job=job, spills=spills), step_s=1.0)

    fastest, wanted = (plan(UpdateOrder.KEPT, spills), 1.05), []
    best = fastest[0] if order is UpdateOrder.KEPT else plan(order, spills=False)
    found = SimpleNamespace(best=best, of_kind=lambda order, spills, _: wanted.append((order, spills)))
    monkeypatch.setattr(simulated_search, "_search", lambda *_, **__: found)
    monkeypatch.setattr(simulated_search, "_fastest_of", lambda *_: fastest)
    monkeypatch.setattr(simulated_search, "_with_fewer_waits", lambda *_: fastest)
    simulated_search.fastest_plan(question(clip_norm=None, chooses_order=True), SimpleNamespace())  # type: ignore[arg-type]
    assert wanted == [(UpdateOrder.KEPT, not spills), (UpdateOrder.ACTIVE, None)]


@pytest.mark.parametrize("kept_share", [2.0, 1.01])
def test_plans_of_which_none_is_faster_are_not_simulated(kept_share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that take equally long show what bounds all of them."""
    asked = question(machine(host=8), batch_size=8, clip_norm=None, chooses_order=True)
    orders = []

    def promised_step_s(_: PlanQuestion, __: Profiles, solution: Solution, **___: float) -> float:
        order = solution.costs.job.update_order
        orders.append(order)
        return 1e3 * (kept_share if order is UpdateOrder.KEPT else 1.0)

    monkeypatch.setattr(simulated_search, "promised_step_s", promised_step_s)
    simulated_search.fastest_plan(asked, Profiles(asked))
    # The third one has more slots for states, and in the fourth one more gradients may wait for their update. The last
    # two use the links less.
    assert orders.count(UpdateOrder.ACTIVE) == 6
    assert orders.count(UpdateOrder.KEPT) == (2 if kept_share > 1.1 else 5)


def test_plan_whose_links_are_busy_all_the_time_is_tried_with_idle_ones() -> None:
    """By the bound, all activations that fit into host memory are swapped: a step of 3.35 s, and 3.9 by simulation."""
    asked = on_a_desktop("gpt2-xl", "rtx3090:ram=128,ssds=4", batch_size=16, clip_norm=1.0)
    _, solution, step_s = simulated_search.fastest_plan(asked, Profiles(asked))
    best = simulated_search.best_plan(asked, Profiles(asked))[1]
    assert step_s is not None
    assert best.step_s < solution.step_s < step_s < 1.07 * best.step_s
    assert solution.busy_s["d2h"] < 0.7 * best.busy_s["d2h"]


def test_plan_that_updates_meanwhile_has_room_for_gradients_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the bound two blocks are enough, and by simulation such plans wait. Those with more cost little more."""
    asked = on_a_desktop("qwen2.5-32b", "rtx3090:ram=128,ssds=4", batch_size=8, clip_norm=None)
    simulated = []

    def promised_step_s(_: PlanQuestion, __: Profiles, solution: Solution, **___: float) -> float:
        simulated.append(solution.placement.num_passing_blocks)
        return solution.step_s

    assert simulated_search.best_plan(asked, Profiles(asked))[1].placement.num_passing_blocks == 2
    monkeypatch.setattr(simulated_search, "promised_step_s", promised_step_s)
    simulated_search.fastest_plan(asked, Profiles(asked))
    assert simulated[0] == 8
    assert simulated[-1] == 2  # its bound is smaller


def on_a_desktop(model: str, desktop: str, **training: Any) -> PlanQuestion:
    """The question for 1024 tokens an example, with everything left to the planner."""
    config = ShapeConfig(shape=load(ModelShape, published_models()[model]), num_tokens=1024)
    told = {"sequence_length": 1024, "chooses_order": True, "chooses_cut": True, "kept_shapes": KeptShapes()}
    return question(machine_of(desktop), config=config, **told, **training)


@pytest.mark.long
def test_program_whose_presolve_does_not_end_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = machine_of("rtx4090:gpus=1,ram=128,ssds=2")
    hardware = with_part(hardware, host=with_part(hardware.host, memory_gib=0.8 * hardware.host.memory_gib))
    config = ShapeConfig(shape=load(ModelShape, published_models()["llama-3.1-8b"]), num_tokens=1024)
    asked = question(hardware, config=config, sequence_length=1024, clip_norm=None, chooses_order=True)
    monkeypatch.setattr(simulated_search, "promised_step_s", lambda _, __, solution, **___: 1.05 * solution.step_s)
    simulated_search.fastest_plan(asked, Profiles(asked))


def llama_8b(**settings: Any) -> PlanQuestion:
    """The question for a model of known shape, with everything left to the planner."""
    config = ShapeConfig(shape=load(ModelShape, published_models()["llama-3.1-8b"]), num_tokens=2048)
    hardware = machine_of("rtx4090:gpus=1,ram=128,ssds=3")
    told = {"sequence_length": 2048, "kept_shapes": KeptShapes(), **settings}
    return question(hardware, config=config, chooses_order=True, chooses_cut=True, **told)


def test_listed_counts_begin_with_what_is_left_to_the_limit_by_rounding() -> None:
    """A share that was left was a little less than nothing here, so a number of blocks was negative."""
    assert answer(llama_8b(batch_size=44)).feasible


def test_examples_that_micro_batches_lack_count_for_no_rate() -> None:
    """Five examples in four micro-batches take as long as eight."""
    few, all_ = (answer(llama_8b(batch_size=number, num_microbatches=4)) for number in (5, 8))
    assert few.step_s == all_.step_s
    assert few.tokens_per_s is not None
    assert all_.tokens_per_s is not None
    assert few.tokens_per_s == pytest.approx(5 / 8 * all_.tokens_per_s)
