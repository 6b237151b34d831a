"""The update formulas, run as plain PyTorch, in every format."""

import itertools
from dataclasses import replace

import pytest
import torch

from tests.support.engine.adam_reference import ADAM, ADAMW, Adam64, random_states
from windlass.engine.optimizer.adam_formulas import AdamSettings, Format, Scalar, formula, pair_words, scalars_of
from windlass.engine.optimizer.adam_kernel import ChunkStates
from windlass.engine.optimizer.split_states import join_master
from windlass.engine.optimizer.stochastic_rounding import rounding_keys
from windlass.storage.ids import StatePrecision

NUMEL = 2000
GRAD_DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FORMATS = [
    Format(grad=grad, param=param, states=states, decoupled=decoupled)
    for states, param in [
        (StatePrecision.FP32, torch.bfloat16),
        (StatePrecision.FP32, torch.float16),
        (StatePrecision.FP32, None),
        (StatePrecision.SPLIT, torch.bfloat16),
        (StatePrecision.BF16, torch.bfloat16),
    ]
    for grad, decoupled in itertools.product(GRAD_DTYPES, (True, False))
]


def scalars(settings: AdamSettings, learning_rate: float, step: int, grad_scale: float) -> torch.Tensor:
    """The kernel's scalars if all elements decay."""
    decay = 1 - learning_rate * settings.weight_decay if settings.decoupled else settings.weight_decay
    return scalars_of(
        {
            Scalar.GRAD_SCALE: grad_scale,
            Scalar.DECAY: decay,
            Scalar.ODD_DECAY: decay,
            Scalar.ONE_MINUS_BETA1: 1 - settings.beta1,
            Scalar.BETA2: settings.beta2,
            Scalar.ONE_MINUS_BETA2: 1 - settings.beta2,
            Scalar.ROOT_OF_CORRECTION2: (1 - settings.beta2**step) ** 0.5,
            Scalar.EPSILON: settings.epsilon,
            Scalar.STEP_SIZE: learning_rate / (1 - settings.beta1**step),
        }
    )


# An epsilon as large as the moments shows the place where it is added.
@pytest.mark.parametrize("epsilon", [1e-8, 0.2])
@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("kernel", FORMATS, ids=str)
def test_one_step_is_that_of_the_papers(kernel: Format, step: int, epsilon: float) -> None:
    settings = replace(ADAMW if kernel.decoupled else ADAM, epsilon=epsilon)
    states = random_states(NUMEL, kernel.states, kernel.grad, kernel.param, seed=3)
    weights = states.master if states.master is not None else states.param
    if states.residual is not None:
        weights = join_master(states.param, states.residual, states.exp_avg_sq)
    reference = Adam64(settings, weights.double(), states.exp_avg.double(), states.exp_avg_sq.abs().double())
    reference.step(states.grad.double() * 0.3, 1e-2, step, NUMEL)
    named = {"grad": states.grad, "exp_avg": states.exp_avg, "exp_avg_sq": states.exp_avg_sq}
    orders = {
        StatePrecision.FP32: ["grad", "master", "exp_avg", "exp_avg_sq", *(["param"] if kernel.param else [])],
        StatePrecision.SPLIT: ["grad", "param", "residual", "exp_avg", "exp_avg_sq"],
        StatePrecision.BF16: ["grad", "param", "exp_avg", "exp_avg_sq"],
    }
    named |= {"param": states.param, "master": states.master, "residual": states.residual}
    tensors = [named[name] for name in orders[kernel.states]]
    assert [tensor.dtype for tensor in tensors] == kernel.operand_dtypes()
    arguments = pair_words(tensors) if kernel.in_pairs else tensors
    constants = [scalars(settings, 1e-2, step, 0.3)]
    if kernel.num_integers:
        constants.append(torch.tensor([*rounding_keys(1, step, 0), 0], dtype=torch.int32))
    formula(kernel)(*arguments, *constants)
    check(kernel, states, reference)


def check(kernel: Format, states: ChunkStates, reference: Adam64) -> None:
    """Compares all states with the reference: up to the last bits of fp32, or to the next number of bf16."""
    close = {"rtol": 2**-7, "atol": 0.0} if kernel.states is StatePrecision.BF16 else {"rtol": 2e-6, "atol": 1e-7}
    weights = states.param.float() if states.master is None else states.master
    if states.residual is not None:
        weights = join_master(states.param, states.residual, states.exp_avg_sq)
    if states.param is not None and kernel.states is not StatePrecision.BF16:
        assert torch.equal(states.param, weights.to(states.param.dtype))
    torch.testing.assert_close(weights.double(), reference.weights, **close)
    torch.testing.assert_close(states.exp_avg.double(), reference.exp_avg, **close)
    torch.testing.assert_close(states.exp_avg_sq.abs().double(), reference.exp_avg_sq, **close)


def test_every_fp16_gradient_is_read_exactly() -> None:
    """The mean after the gradient's first step with beta1 = 0 is the gradient."""
    grad = torch.arange(2**16).to(torch.int16).view(torch.float16)
    settings = AdamSettings(beta1=0.0, beta2=0.5, epsilon=1e-8, weight_decay=0.0, decoupled=True)
    kernel = Format(grad=torch.float16, param=torch.bfloat16, states=StatePrecision.SPLIT, decoupled=True)
    param, residual = torch.zeros(2**16, dtype=torch.bfloat16), torch.zeros(2**16, dtype=torch.int16)
    exp_avg, exp_avg_sq = torch.zeros(2**16), torch.zeros(2**16)
    words = pair_words([grad, param, residual, exp_avg, exp_avg_sq])
    formula(kernel)(*words, scalars(settings, 1e-3, 1, 1.0))
    torch.testing.assert_close(exp_avg, grad.float(), rtol=0, atol=0, equal_nan=True)
