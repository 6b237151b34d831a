"""Other systems' steps on simulated resources, compared with the sums of their stages."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.planner.baselines.test_system_stages import HARDWARE, PROFILE
from windlass.planner.baselines.system_stages import POLICIES, stage_times
from windlass.planner.hardware.hardware import Hardware
from windlass.planner.simulation.compared import simulate_policy

MACHINES = st.builds(
    lambda tflops, link, ssd, cpu, host: HARDWARE.model_copy(
        update={
            "gpus": HARDWARE.gpus.model_copy(update={"tflops": tflops}),
            "pcie": HARDWARE.pcie.model_copy(update={"h2d_gb_per_s": link, "d2h_gb_per_s": link}),
            "ssds": HARDWARE.ssds.model_copy(update={"read_gb_per_s": ssd}),
            "host": HARDWARE.host.model_copy(update={"adam_params_per_s": cpu, "memory_gib": host}),
        }
    ),
    st.floats(0.1, 100),
    st.floats(0.1, 100),
    st.floats(0.1, 10),
    st.floats(1e8, 1e11),
    st.floats(40, 200),
)


@settings(max_examples=50)
@given(st.sampled_from(list(POLICIES)), MACHINES, st.integers(1, 8))
def test_simulated_system_is_not_faster_than_its_stages(name: str, hardware: Hardware, num_layers: int) -> None:
    policy, profile = POLICIES[name], PROFILE.with_num_layers(num_layers)
    least_s = stage_times(policy, hardware, profile).iteration_s
    found = simulate_policy(policy, hardware, profile)
    assert found.step_s >= least_s * (1 - 1e-6)
    if not policy.overlaps:
        assert found.step_s == pytest.approx(least_s)


@pytest.mark.parametrize("name", list(POLICIES))
def test_simulated_system_with_many_layers_takes_little_more_than_stages(name: str) -> None:
    """Overlapped work waits for the first block, for the last block, and for an SSD that is busy."""
    profile = PROFILE.with_num_layers(100)
    least_s = stage_times(POLICIES[name], HARDWARE, profile).iteration_s
    assert simulate_policy(POLICIES[name], HARDWARE, profile).step_s <= 1.15 * least_s


@pytest.mark.parametrize("name", list(POLICIES))
def test_resources_are_busy_as_long_as_the_stages_say(name: str) -> None:
    profile = PROFILE.with_num_layers(5)
    times = stage_times(POLICIES[name], HARDWARE, profile)
    found = simulate_policy(POLICIES[name], HARDWARE, profile)
    busy = dict.fromkeys(("gpu-0/compute", "gpu-0/h2d", "gpu-0/d2h", "ssds", "optimizer"), 0.0)
    for span in found.spans:
        busy[span.resource] += span.end_s - span.start_s
    stages = zip(times.forward.busy_s, times.backward.busy_s, times.optimizer.busy_s, strict=True)
    assert list(busy.values()) == pytest.approx([sum(parts) for parts in stages], rel=1e-6)
    assert found.gpu_share == pytest.approx(busy["gpu-0/compute"] / found.step_s)


def test_overlap_saves_the_hidden_time() -> None:
    profile = PROFILE.with_num_layers(20)
    infinity = POLICIES["ZeRO-Infinity"]
    alone = simulate_policy(infinity, HARDWARE, profile).step_s
    beside = simulate_policy(replace(infinity, overlaps=True), HARDWARE, profile).step_s
    within = simulate_policy(replace(infinity, overlaps=True, updates_in_backward=True), HARDWARE, profile).step_s
    assert within < beside < alone
