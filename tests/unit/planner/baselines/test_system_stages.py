"""Stages computed by hand, on a machine and a model of round numbers."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.amounts import GIB
from windlass.planner.baselines.system_stages import (
    POLICIES,
    Rest,
    Stage,
    SwapTo,
    best_amount,
    resting_nbytes,
    stage_times,
)
from windlass.planner.cost.model_profile import BlockProfile, LayerProfile, ModelProfile, OperatorProfile, shared_of
from windlass.planner.hardware.hardware import Hardware
from windlass.planner.hardware.yaml_files import parse

# One second for: 10^12 operations, 1 GB on each way of PCIe, 4 GB read, 2 GB written, 10^9 params updated.
HARDWARE = parse(
    Hardware,
    {
        "gpus": {"count": 1, "memory_gib": 24, "tflops": 1},
        "host": {"memory_gib": 100, "memory_gb_per_s": 60, "adam_params_per_s": 1e9},
        "pcie": {"h2d_gb_per_s": 1, "d2h_gb_per_s": 1},
        "ssds": {"count": 4, "read_gb_per_s": 1, "write_gb_per_s": 0.5, "capacity_gib": 1000},
    },
    "here",
)
END = BlockProfile(numel=0, num_flops=0)
LAYER = LayerProfile(
    numel=10**9,
    num_flops=3 * 10**12,
    input_nbytes=10**9,
    operators=(
        OperatorProfile(name="dear", outputs_nbytes=(10**9,), num_flops=2 * 10**12, is_saved=True, reads=()),
        OperatorProfile(name="cheap", outputs_nbytes=(2 * 10**9,), num_flops=10**12, is_saved=True, reads=()),
    ),
)
# P: 2 x 10^9. Activations: 2 GB between layers, 6 GB within.
PROFILE = ModelProfile(
    name="two layers",
    num_examples=1,
    num_tokens=1,
    embedding=END,
    layers=(LAYER,) * 2,
    head=END,
    shared=shared_of(2, is_tied=False),
    chunk_numel=1,
)


def seconds(name: str, **changes: Any) -> tuple[float, ...]:
    return stage_times(replace(POLICIES[name], **changes), HARDWARE, PROFILE).seconds


def stage(**busy: float) -> Stage:
    return Stage(**{f"{resource}_s": value for resource, value in busy.items()})


def test_states_on_ssds_and_updates_after_backward() -> None:
    times = stage_times(POLICIES["ZeRO-Infinity"], HARDWARE, PROFILE)
    # 4 GB of params; 2 GB of activations out and back; gradients of 4 GB out; states of 24 GB in and out, params out.
    assert times.forward == stage(gpu=6, h2d=4, d2h=2, ssd=1)
    assert times.backward == stage(gpu=12 + 6, h2d=4 + 2, d2h=4, ssd=1)
    assert times.optimizer == stage(cpu=2, ssd=24 / 4 + 28 / 2)
    assert times.seconds == (13, 29, 22)
    assert (times.iteration_s, times.gpu_share) == (64, 24 / 64)
    assert (times.swapped_nbytes, times.recompute_s) == (2 * 10**9, 6)


def test_overlapped_stages_take_as_long_as_their_busiest_resource() -> None:
    assert seconds("ZeRO-Infinity", overlaps=True) == (6, 18, 20)
    assert seconds("ZeRO-Infinity", overlaps=True, updates_in_backward=True) == (6, 21, 0)
    assert seconds("ZeRO-Infinity", updates_in_backward=True) == (13, 51, 0)


def test_params_read_one_by_one_are_slow_for_systems_without_overlap() -> None:
    for name, forward_s in (("ZeRO-Infinity", 12 + 8), ("Ratel", 6)):
        times = stage_times(POLICIES[name], HARDWARE, PROFILE, one_by_one_gb_per_s=0.5)
        assert times.seconds[0] == forward_s


def test_all_to_ssds_and_updates_on_the_gpu() -> None:
    times = stage_times(POLICIES["G10"], HARDWARE, PROFILE)
    assert times.forward == stage(gpu=6, h2d=4, d2h=8, ssd=4 / 4 + 8 / 2)
    assert times.backward == stage(gpu=12, h2d=4 + 8, d2h=4, ssd=(4 + 8) / 4 + 4 / 2)
    assert times.optimizer == stage(h2d=28, d2h=28, ssd=28 / 4 + 28 / 2)
    assert times.recompute_s == 0


def test_states_in_memory() -> None:
    assert stage_times(POLICIES["ZeRO-Offload"], HARDWARE, PROFILE).optimizer == stage(cpu=2, h2d=4)
    assert stage_times(POLICIES["StrongHold, L2L"], HARDWARE, PROFILE).backward == stage(gpu=18, h2d=6, d2h=4, cpu=2)
    times = stage_times(POLICIES["FlashNeuron"], HARDWARE, PROFILE)
    assert (times.forward, times.backward) == (stage(gpu=6, d2h=8, ssd=4), stage(gpu=12, h2d=8, ssd=2))
    assert times.optimizer == Stage()


def test_a_limit_of_all_ssds_holds_for_reads_and_writes_in_turn() -> None:
    ssds = HARDWARE.ssds.model_copy(update={"combined_gb_per_s": 1.0})
    times = stage_times(POLICIES["G10"], HARDWARE.model_copy(update={"ssds": ssds}), PROFILE)
    assert times.optimizer.ssd_s == 56


def test_activations_beyond_host_memory_spill_to_ssds() -> None:
    host = HARDWARE.host.model_copy(update={"memory_gib": 3e9 / GIB})
    small = HARDWARE.model_copy(update={"host": host})
    times = stage_times(POLICIES["Ratel"], small, PROFILE, swapped_nbytes=5 * 10**9)
    assert times.forward == stage(gpu=6, h2d=4, d2h=5, ssd=4 / 4 + 2 / 2)
    # The first candidates in full, and half of another one: 0.5 of 10^12 operations saved beside their 4.
    assert times.recompute_s == pytest.approx(1.5)
    assert times.backward.ssd_s == (4 + 2 + 24) / 4 + 28 / 2


def test_less_than_what_is_between_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="give more"):
        stage_times(POLICIES["Ratel"], HARDWARE, PROFILE, swapped_nbytes=10**9)


def test_the_best_amount_counts_model_states_or_does_not() -> None:
    # With states on the SSDs, backward takes 21 s for any swapped amount. Without, it is limited by compute until PCIe
    # is as busy in the forward pass.
    ratel, alone = (best_amount(POLICIES[name], HARDWARE, PROFILE) for name in ("Ratel", "Capuchin, Checkmate"))
    assert (ratel.nbytes, alone.nbytes) == (2 * 10**9, 6 * 10**9)
    assert alone.iteration_s == 6 + 13
    assert stage_times(POLICIES["Capuchin, Checkmate"], HARDWARE, PROFILE).iteration_s == 6 + 21


def test_swapping_to_host_memory_only_ends_where_it_is_full() -> None:
    host = HARDWARE.host.model_copy(update={"memory_gib": 3.5e9 / GIB})
    small = HARDWARE.model_copy(update={"host": host})
    assert best_amount(POLICIES["Capuchin, Checkmate"], small, PROFILE).nbytes == 3 * 10**9


def test_resident_bytes_of_each_system() -> None:
    nbytes = {name: [resting_nbytes(policy, PROFILE, rest) for rest in Rest] for name, policy in POLICIES.items()}
    gb = 10**9
    assert nbytes["ZeRO-Offload"] == [4 * gb, 28 * gb, 0]
    assert nbytes["ZeRO-Infinity"] == [0, 4 * gb, 28 * gb]
    assert nbytes["FlashNeuron"] == [32 * gb, 0, 0]
    assert nbytes["G10"] == [0, 0, 32 * gb]
    assert nbytes["Ratel"] == [0, 0, 28 * gb]  # gradients are used as they arrive


@settings(deadline=None)
@given(
    swapped=st.integers(2 * 10**9, 8 * 10**9),
    more=st.integers(0, 10**9),
    to=st.sampled_from(SwapTo),
    limit=st.floats(0.05, 100),
)
def test_a_step_is_convex_in_the_swapped_amount(swapped: int, more: int, to: SwapTo, limit: float) -> None:
    ssds = HARDWARE.ssds.model_copy(update={"combined_gb_per_s": limit})
    hardware = HARDWARE.model_copy(update={"ssds": ssds})

    def iteration_s(nbytes: int) -> float:
        policy = replace(POLICIES["Ratel"], swap_to=to)
        return stage_times(policy, hardware, PROFILE, swapped_nbytes=nbytes).iteration_s

    middle = iteration_s(swapped + more)
    assert middle <= (iteration_s(swapped) + iteration_s(swapped + 2 * more)) / 2 * (1 + 1e-9)
