"""The compiled kernel computes the formulas bit for bit, in every format, for ordinary and for extreme numbers."""

from pathlib import Path

import pytest
import torch

from tests.support.engine.adam_reference import ADAM, ADAMW, random_states
from tests.unit.engine.optimizer.test_adam_formulas import FORMATS, scalars
from windlass.engine.optimizer.adam_formulas import Format, formula, pair_words
from windlass.engine.optimizer.adam_kernel import ChunkStates
from windlass.engine.optimizer.kernel_cache import load_kernel
from windlass.engine.optimizer.stochastic_rounding import NUM_KEYS, rounding_keys
from windlass.storage.ids import StatePrecision

NUMEL = 2**16 + 70  # more than one thread, and no multiple of a vector
LARGE_POSITION = 2**31 - 10  # wraps around within the chunk
EXTREME = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-45, 6e-8, 6e-5, 65504.0, 65520.0, 3e38]
WORDS = {2: torch.int16, 4: torch.int32}


def tensors_of(states: ChunkStates, kernel: Format) -> list[torch.Tensor]:
    held = {
        StatePrecision.FP32: [states.grad, states.master, states.exp_avg, states.exp_avg_sq, states.param],
        StatePrecision.SPLIT: [states.grad, states.param, states.residual, states.exp_avg, states.exp_avg_sq],
        StatePrecision.BF16: [states.grad, states.param, states.exp_avg, states.exp_avg_sq],
    }
    return [tensor for tensor in held[kernel.states] if tensor is not None]


def constants_of(kernel: Format) -> list[torch.Tensor]:
    constants = [scalars(ADAMW if kernel.decoupled else ADAM, 1e-2, 4, 0.3)]
    constants[0][2] *= 0.5  # the odd elements' decay differs
    if kernel.num_integers:
        constants.append(torch.tensor([*rounding_keys(1, 4, 0), LARGE_POSITION], dtype=torch.int32))
        assert constants[1].numel() == NUM_KEYS + 1
    return constants


def updated_by_both(kernel: Format, states: ChunkStates, kernel_dir: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the tensors after the compiled kernel's update, each with the formula's."""
    pairs = [(tensor.clone(), tensor.clone()) for tensor in tensors_of(states, kernel)]
    for update, tensors in zip(
        (load_kernel(kernel, kernel_dir), formula(kernel)), zip(*pairs, strict=True), strict=True
    ):
        update(*(pair_words(tensors) if kernel.in_pairs else tensors), *constants_of(kernel))
    return pairs


@pytest.fixture(autouse=True)
def exact_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's square root of fp32 may be one unit in the last place off; that of fp64, rounded, never is."""
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda tensor: torch.sqrt(tensor.double()).float())


@pytest.mark.short(
    "*grad=torch.bfloat16, param=torch.bfloat16*decoupled=True*",
    "*grad=torch.float32, param=torch.bfloat16*decoupled=False*",
    "*grad=torch.float16, param=torch.float16*decoupled=True*",
)
@pytest.mark.parametrize("kernel", FORMATS, ids=str)
def test_ordinary_numbers(kernel: Format, kernel_dir: Path) -> None:
    states = random_states(NUMEL, kernel.states, kernel.grad, kernel.param, seed=3)
    for ours, formulas in updated_by_both(kernel, states, kernel_dir):
        words = WORDS[ours.element_size()]
        assert torch.equal(ours.view(words), formulas.view(words))


@pytest.mark.short(
    "*grad=torch.bfloat16, param=torch.bfloat16*decoupled=True*",
    "*grad=torch.float32, param=torch.bfloat16*decoupled=False*",
    "*grad=torch.float16, param=torch.float16*decoupled=True*",
)
@pytest.mark.parametrize("kernel", FORMATS, ids=str)
def test_extreme_numbers(kernel: Format, kernel_dir: Path) -> None:
    """Equal, but for the bits of NaN and, in the model's precision, of numbers that PyTorch's cast may take for 0."""
    states = random_states(NUMEL, kernel.states, kernel.grad, kernel.param, seed=4)
    states.grad[: len(EXTREME)] = torch.tensor(EXTREME).to(kernel.grad)
    if kernel.grad is torch.float16:
        states.grad[-(2**16) :] = torch.arange(2**16).to(torch.int16).view(torch.float16)
    if kernel.states is StatePrecision.FP32:
        assert states.master is not None
        states.master[100 : 100 + len(EXTREME)] = torch.tensor(EXTREME)
        states.exp_avg_sq[200 : 200 + len(EXTREME)] = torch.tensor(EXTREME).abs()
    pairs = updated_by_both(kernel, states, kernel_dir)
    if kernel.states is StatePrecision.SPLIT:
        is_number = ~pairs[1][1].isnan()  # the residual of NaN means nothing
        pairs = [(ours[is_number], formulas[is_number]) for ours, formulas in pairs]
    for ours, formulas in pairs:
        torch.testing.assert_close(ours, formulas, rtol=0, atol=1e-38, equal_nan=True)


@pytest.mark.parametrize("param", [torch.bfloat16, torch.float16])
def test_every_rounding_of_a_master_is_pytorchs(param: torch.dtype, kernel_dir: Path) -> None:
    """With a learning rate of 0 the master stays, and the param is the master, rounded."""
    kernel = Format(grad=torch.bfloat16, param=param, states=StatePrecision.FP32, decoupled=True)
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (2**21,), generator=generator).to(torch.int32)
    bits[: 2**19] = (bits[: 2**19] & -0x10000) | 0x8000  # bf16's ties
    bits[2**19 : 2**20] = (bits[2**19 : 2**20] & -0x2000) | 0x1000  # fp16's
    bits[: 2**20 : 2] = (bits[: 2**20 : 2] & -0x78000001) | 0x38000000  # in fp16's range
    master = bits.view(torch.float32)
    master = master[master.isfinite() & ((master.abs() > 2e-38) | (master == 0))].clone()
    grad, moments = torch.zeros(master.numel(), dtype=torch.bfloat16), torch.zeros(2, master.numel())
    rounded = torch.empty(master.numel(), dtype=param)
    constants = torch.tensor([1.0, 1.0, 1.0, 0.1, 0.9, 0.1, 1.0, 1e-8, 0.0])
    load_kernel(kernel, kernel_dir)(grad, master, *moments, rounded, constants)
    assert torch.equal(rounded.view(torch.int16), master.to(param).view(torch.int16))
