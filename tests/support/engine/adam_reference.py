"""Adam in fp64, written from the papers, and states to test with."""

from dataclasses import dataclass

import torch

from windlass.engine.optimizer.adam_formulas import AdamSettings
from windlass.engine.optimizer.adam_kernel import ChunkStates
from windlass.engine.optimizer.split_states import split_master
from windlass.storage.ids import StatePrecision

ADAMW = AdamSettings(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, decoupled=True)
ADAM = AdamSettings(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, decoupled=False)


@dataclass
class Adam64:
    """A vector with its moments, all in fp64."""

    settings: AdamSettings
    weights: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    def step(self, grad: torch.Tensor, learning_rate: float, step: int, decay_numel: int) -> None:
        """One step. Source: Kingma and Ba, algorithm 1; Loshchilov and Hutter, algorithm 2."""
        settings = self.settings
        decay = torch.zeros_like(self.weights)
        decay[:decay_numel] = settings.weight_decay
        if settings.decoupled:
            self.weights = self.weights - learning_rate * decay * self.weights
        else:
            grad = grad + decay * self.weights
        self.exp_avg = settings.beta1 * self.exp_avg + (1 - settings.beta1) * grad
        self.exp_avg_sq = settings.beta2 * self.exp_avg_sq + (1 - settings.beta2) * grad**2
        mean = self.exp_avg / (1 - settings.beta1**step)
        variance = self.exp_avg_sq / (1 - settings.beta2**step)
        self.weights = self.weights - learning_rate * mean / (variance.sqrt() + settings.epsilon)


def random_states(
    numel: int, states: StatePrecision, grad_dtype: torch.dtype, param_dtype: torch.dtype | None, seed: int
) -> ChunkStates:
    """The states of a chunk in the middle of training. The numbers are the same for fp32 and split states."""
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(numel, generator=generator).to(grad_dtype)
    master = torch.randn(numel, generator=generator)
    exp_avg = torch.randn(numel, generator=generator) * 0.1
    exp_avg_sq = torch.rand(numel, generator=generator) * 0.1
    match states:
        case StatePrecision.FP32:
            param = None if param_dtype is None else master.to(param_dtype)
            return ChunkStates(grad=grad, master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, param=param)
        case StatePrecision.SPLIT:
            param, residual, exp_avg_sq = split_master(master, exp_avg_sq)
            return ChunkStates(grad=grad, param=param, residual=residual, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
        case StatePrecision.BF16:
            low = [state.to(torch.bfloat16) for state in (master, exp_avg, exp_avg_sq)]
            return ChunkStates(grad=grad, param=low[0], exp_avg=low[1], exp_avg_sq=low[2])
