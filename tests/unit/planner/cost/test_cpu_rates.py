"""The times that follow from rates where the device is the CPU, and that are as before on a GPU."""

from dataclasses import replace

import pytest

from tests.support.planner.profiles import make_job, make_speeds, operator
from windlass.engine.memory_plan.activation_policy import ATTENTION
from windlass.planner.cost.model_profile import BlockProfile, LayerProfile
from windlass.planner.cost.rates import Speeds, speeds_of
from windlass.planner.feasibility.feasibility import with_part
from windlass.planner.hardware.hardware import Hardware, example_machines
from windlass.planner.hardware.yaml_files import load
from windlass.planner.solver.placement_search import solve_job
from windlass.planner.solver.planned_job import Limits
from windlass.storage.ids import Precision

MACHINE = load(Hardware, example_machines()["rtx4090-server"])
LAYER = LayerProfile(
    numel=10,
    num_flops=3 * 10**9,
    moved_nbytes=10**6,
    input_nbytes=0,
    operators=(
        operator("mm#0", 10**6, 2 * 10**9, ()),
        operator("view#0", 0, 0, (0,)),
        operator(f"{ATTENTION}#0", 10**6, 10**9, (1,)),
    ),
)


def on_cpu(fp32_tflops: float | None) -> Hardware:
    return with_part(MACHINE, gpus=with_part(MACHINE.gpus, count=0, tflops=0.4, fp32_tflops=fp32_tflops))


@pytest.mark.parametrize(
    ("fp32_tflops", "precision", "flops", "attention_flops"),
    [
        (0.1, Precision.BF16, 0.4e12, 0.07e12),
        (0.1, Precision.FP32, 0.1e12, 0.07e12),
        (0.1, None, 0.4e12, 0.07e12),
        (0.8, Precision.BF16, 0.4e12, 0.4e12),  # a CPU without instructions for bf16
        (None, Precision.FP32, 0.4e12, 0.28e12),
    ],
)
def test_cpu_computes_in_the_precision_of_the_job_and_attention_in_fp32(
    fp32_tflops: float | None, precision: Precision | None, flops: float, attention_flops: float
) -> None:
    speeds = speeds_of(on_cpu(fp32_tflops), precision=precision)
    assert speeds.device_flops == pytest.approx(flops)
    assert speeds.attention_share * speeds.device_flops == pytest.approx(attention_flops)
    assert speeds.operator_s > 0


@pytest.mark.parametrize("precision", Precision)
def test_gpu_computes_jobs_in_fp32_at_its_rate_in_fp32(precision: Precision) -> None:
    gpu = with_part(MACHINE, gpus=with_part(MACHINE.gpus, fp32_tflops=1.0))
    slower = {"device_flops": 1e12} if precision is Precision.FP32 else {}
    assert speeds_of(gpu, precision=precision) == replace(speeds_of(MACHINE), **slower)


def seconds(speeds: Speeds, block: BlockProfile) -> tuple[float, float]:
    limits = Limits(device_nbytes=1e12, host_nbytes=1e12, ssd_nbytes=1e12)
    return solve_job(make_job(), speeds, limits).costs.compute_s(block)


def test_operators_attention_and_gradients_take_time_on_a_cpu() -> None:
    rates = {"device_flops": 1e12, "device_memory_bytes": 1e9}
    gpu = make_speeds(**rates)
    assert seconds(gpu, LAYER) == pytest.approx((3e-3 + 4e-3, 2 * (3e-3 + 4e-3)))
    cpu = replace(gpu, shares_cores=True, attention_share=0.25, operator_s=0.5e-3)
    forward_s = 2e-3 + 4e-3 + 4e-3 + 2 * 0.5e-3
    assert seconds(cpu, LAYER) == pytest.approx((forward_s, 2 * forward_s + 1e-3))
    assert seconds(cpu.with_slower_cpu(1.5), LAYER)[1] == pytest.approx(1.5 * (2 * forward_s + 1e-3))
    measured = replace(LAYER, forward_s=0.25, backward_s=0.5)
    assert seconds(cpu, measured) == (0.25, 0.5)
