"""AdamW on one chunk, in place: torch's own fused kernel, then the cast to the low-precision param."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings:
    """What does not change during a job."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


@dataclass(slots=True, kw_only=True)
class ChunkStates:
    """Views of one chunk's states, all of the same number of elements. `param` is None where master is the param."""

    grad: torch.Tensor  # bf16 or fp32
    master: torch.Tensor  # fp32
    exp_avg: torch.Tensor  # fp32
    exp_avg_sq: torch.Tensor  # fp32
    param: torch.Tensor | None  # bf16


def adamw_step(
    states: ChunkStates,
    settings: AdamWSettings,
    *,
    learning_rate: float,
    step: int,
    grad_scale: float,
    decay_numel: int,
) -> None:
    """Updates a chunk in place. The first `decay_numel` elements have weight decay; `step` counts from 1.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2.
    """
    grad = states.grad.float()
    if grad_scale != 1.0:
        grad = grad * grad_scale
    numel = grad.numel()
    for start, stop, decay in ((0, decay_numel, settings.weight_decay), (decay_numel, numel, 0.0)):
        if start >= stop:
            continue
        torch._fused_adamw_(
            [states.master[start:stop]],
            [grad[start:stop]],
            [states.exp_avg[start:stop]],
            [states.exp_avg_sq[start:stop]],
            [],
            [torch.tensor(float(step))],
            lr=learning_rate,
            beta1=settings.beta1,
            beta2=settings.beta2,
            weight_decay=decay,
            eps=settings.epsilon,
            amsgrad=False,
            maximize=False,
        )
    if states.param is not None:
        states.param.copy_(states.master)
