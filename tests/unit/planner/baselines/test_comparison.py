"""The estimates of other systems, on a machine and with a model of round numbers."""

from typing import Any

import pytest

from tests.unit.planner.baselines.test_system_stages import HARDWARE, PROFILE
from windlass.amounts import GIB
from windlass.planner.baselines.comparison import ComparedSystem, compare, least_nbytes
from windlass.planner.baselines.system_stages import POLICIES

GB = 10**9


def compared(**memory_gib: float) -> dict[str, ComparedSystem]:
    changes: dict[str, Any] = {
        part: getattr(HARDWARE, part).model_copy(update={"capacity_gib" if part == "ssds" else "memory_gib": gib})
        for part, gib in memory_gib.items()
    }
    return {each.system: each for each in compare(HARDWARE.model_copy(update=changes), PROFILE)}


def test_every_system_is_told_with_its_step_and_what_is_busiest() -> None:
    found = compared()
    assert list(found) == list(POLICIES)
    infinity = found["ZeRO-Infinity"]
    # 24 s of compute, 22 s of SSDs, and no overlap (see the test of the stages).
    assert (infinity.step_s, infinity.bottleneck) == (64, "compute")
    assert infinity.tokens_per_s == 1 / 64
    # States of 24 GB read and written: 20 s of an optimizer stage, 2 s of the passes.
    assert found["G10"].bottleneck == "h2d"  # params twice, states, activations: 44 GB at 1 GB/s
    assert found["Ratel"].updates_in_backward
    assert not infinity.updates_in_backward


def test_system_that_does_not_fit_reports_missing_memory() -> None:
    found = compared(gpus=24, host=100, ssds=1000)
    assert found["ZeRO-Infinity"].fits
    # FlashNeuron's states have 32 GB, one layer's activations 4 GB.
    assert found["FlashNeuron"].missing_gib == {"gpu": pytest.approx(36 * GB / GIB - 24)}
    small = compared(host=5, ssds=6)
    # States and gradients of 28 GB, activations between layers of 2 GB.
    assert small["ZeRO-Offload"].missing_gib == {"host": pytest.approx(30 * GB / GIB - 5)}
    assert small["G10"].missing_gib == {"ssd": pytest.approx((32 + 8) * GB / GIB - 4 * 6)}
    assert not small["G10"].fits


def test_swapped_activations_count_in_the_policys_tier() -> None:
    def least(name: str, swapped_nbytes: int) -> dict[str, int]:
        return least_nbytes(POLICIES[name], HARDWARE, PROFILE, swapped_nbytes)

    # On the GPU: a layer's params of 2 GB and its activations of 4 GB; for ZeRO-Offload all params, 4 GB.
    assert least("Ratel", 200 * GB) == {"gpu": 6 * GB, "host": 100 * GIB, "ssd": 28 * GB + 200 * GB - 100 * GIB}
    assert least("Ratel", 8 * GB) == {"gpu": 6 * GB, "host": 8 * GB, "ssd": 28 * GB}
    assert least("ZeRO-Offload", 2 * GB) == {"gpu": 8 * GB, "host": 30 * GB, "ssd": 0}
    assert least("FlashNeuron", 8 * GB) == {"gpu": 36 * GB, "host": 0, "ssd": 8 * GB}


def test_without_a_gpu_there_is_nothing_to_compare() -> None:
    cpu = HARDWARE.model_copy(update={"gpus": HARDWARE.gpus.model_copy(update={"count": 0})})
    with pytest.raises(ValueError, match="this machine has none"):
        compare(cpu, PROFILE)
