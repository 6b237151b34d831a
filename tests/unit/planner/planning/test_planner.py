"""Plans of jobs that do not exist yet, on machines that are only described."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.planner.questions import MACHINE, SHAPE, answer, machine, question
from windlass.amounts import GIB
from windlass.engine.memory_plan.allocator_reserve import allocatable_nbytes, reserved_nbytes
from windlass.engine.memory_plan.memory_tier import MemoryTier
from windlass.engine.optimizer.scratch_sizes import update_scratch_nbytes
from windlass.planner.cost.rates import speeds_of
from windlass.planner.feasibility import feasibility
from windlass.planner.feasibility.feasibility import with_part
from windlass.planner.hardware.hardware import Gpus, Hardware, Host, Pcie, Ssds
from windlass.planner.hardware.model_shape import ModelShape, published_models
from windlass.planner.hardware.named_machines import machine_of
from windlass.planner.hardware.yaml_files import load
from windlass.planner.planning import simulated_search
from windlass.planner.profiling.model_config import ShapeConfig
from windlass.planner.profiling.model_profiler import Profiler
from windlass.planner.question.exact_search import search_exactly
from windlass.planner.question.kept_shapes import KeptShapes
from windlass.planner.question.profiles import Profiles, planned_job
from windlass.planner.question.question import PlanQuestion
from windlass.planner.question.report import PlanReport
from windlass.planner.solver.memory_limits import DRIVER_NBYTES, limits_of, processes_nbytes
from windlass.storage.ids import Precision, StatePrecision


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
    solution = search_exactly(asked, (64,), profiles).best
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
        solution = search_exactly(asked, (1,), profiles).best
        constants.append(profiles.device_need(asked, profiles.job(asked, 1), solution).constants_nbytes)
    numels = [block.numel for block in profiles.layout.blocks]
    # And for parts of a gradient in fp32, which a CPU adds to that sum.
    assert constants[0] - constants[1] == 2 * numels[0] + 4 * max(numels)


def test_device_need_on_a_gpu_has_room_for_an_update_that_is_not_compiled() -> None:
    config = ShapeConfig(shape=ModelShape(num_layers=1, hidden_size=256, num_heads=4, vocab_size=100), num_tokens=512)
    asked = question(config=config)
    on_cpu = replace(asked, hardware=with_part(MACHINE, gpus=with_part(MACHINE.gpus, count=0)))
    profiles = Profiles(asked)
    solution = search_exactly(asked, (1,), profiles).best
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
