"""The shortcuts of the fused update give the bits of the plain functions."""

import pytest
import torch

from tests.support.host_waits import GPU, no_host_waits
from windlass.engine.memory_estimate.live_storages import LiveStorageTracker
from windlass.engine.optimizer.adam_formulas import AdamSettings, Format
from windlass.engine.optimizer.fused_adam import FusedUpdate, write_rounded, write_split
from windlass.engine.optimizer.scratch_sizes import update_scratch_nbytes
from windlass.engine.optimizer.split_states import join_master, split_master
from windlass.engine.optimizer.stochastic_rounding import random_halves, rounded
from windlass.storage.ids import StatePrecision

# Zeros, denormal numbers, ones, ties between an even and an odd neighbour, the last before infinity, infinity.
PATTERNS = (0, 1, 0x8000, 0x18000, 0x7FFFFF, 0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000)
NAN = 0x7FC12345


def numbers(*, nan: bool, infinities: bool) -> torch.Tensor:
    """Random numbers, and both signs of the special ones."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    bits = [pattern for pattern in PATTERNS if infinities or pattern < 0x7F7FFFFF] + [NAN] * nan
    special = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    return torch.cat([values, special, -special])


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("infinities", [False, True])
def test_a_master_is_split_as_by_the_plain_function(nan: bool, infinities: bool) -> None:
    master = numbers(nan=nan, infinities=infinities)
    before = master.clone()
    squares = master.abs()
    squares[::3].neg_()  # the sign of an old value must not matter
    expected = split_master(master, squares)
    param = torch.empty_like(master, dtype=torch.bfloat16)
    residual = torch.empty_like(master, dtype=torch.int16)
    write_split(master, param, residual, squares)
    assert torch.equal(param.view(torch.int16), expected[0].view(torch.int16))
    assert torch.equal(residual, expected[1])
    assert torch.equal(squares.view(torch.int32), expected[2].view(torch.int32))
    assert torch.equal(master.view(torch.int32), before.view(torch.int32))
    if not nan:
        assert torch.equal(join_master(param, residual, squares).view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("infinities", [False, True])
def test_values_are_rounded_as_by_the_plain_function(nan: bool, infinities: bool) -> None:
    values = numbers(nan=nan, infinities=infinities)
    for random in random_halves(1 << 20, values.numel(), 3, 4, values.device):
        target = torch.empty_like(values, dtype=torch.bfloat16)
        write_rounded(values, target, random)
        assert torch.equal(target.view(torch.int16), rounded(values, random).view(torch.int16))


@pytest.mark.parametrize("infinities", [False, True])
def test_without_nan_nothing_is_compared_element_by_element(monkeypatch: pytest.MonkeyPatch, infinities: bool) -> None:
    """Otherwise the tests above would prove nothing. Infinities of both signs sum to NaN and use the slow path."""
    calls: list[str] = []
    for name in ("split_master", "rounded"):
        plain = {"split_master": split_master, "rounded": rounded}[name]

        def counted(*arguments: torch.Tensor, plain=plain, name=name) -> object:  # type: ignore[no-untyped-def]
            calls.append(name)
            return plain(*arguments)

        monkeypatch.setattr(f"windlass.engine.optimizer.fused_adam.{name}", counted)
    values = numbers(nan=False, infinities=infinities)
    param, residual = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    write_split(values, param, residual, values.abs())
    write_rounded(values, param, residual)
    assert calls == (["split_master", "rounded"] if infinities else [])


@pytest.mark.parametrize("states", StatePrecision)
def test_an_update_on_a_gpu_makes_no_host_wait(states: StatePrecision) -> None:
    kernel = Format(grad=torch.bfloat16, param=torch.bfloat16, states=states, decoupled=True)
    settings = AdamSettings(beta1=0.9, beta2=0.99, epsilon=1e-8, weight_decay=0.1, decoupled=True)
    tensors = [torch.empty(2**24 + 5, dtype=dtype, device=GPU) for dtype in kernel.operand_dtypes()]
    tracker = LiveStorageTracker(GPU)
    with no_host_waits() as launches, tracker:
        FusedUpdate(settings, kernel).update(
            tensors, learning_rate=1e-3, step=1, grad_scale=0.5, decay_numel=2**22, seed=1, position=0
        )
    num_slices = 5
    assert launches.num_launches < 70 * num_slices
    assert launches.max_nbytes == 4 * 2**22
    scratch_nbytes = update_scratch_nbytes(states)
    assert 0.9 * scratch_nbytes < tracker.peak_nbytes <= scratch_nbytes + 2**20
