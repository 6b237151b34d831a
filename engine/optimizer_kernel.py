"""AdamW on a chunk, in place: torch's own fused kernel, then the cast to the low-precision param."""

from dataclasses import dataclass

import torch

# 1 MiB of fp32: five arrays of it fit the caches. Measured from 2**16 to whole chunks, it was the fastest.
_SLICE_NUMEL = 2**18


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


class AdamW:
    """AdamW over chunks, in one pass: slice by slice, small enough that what one kernel leaves the next finds in cache.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2.
    """

    def __init__(self, settings: AdamWSettings) -> None:
        self.settings = settings
        # Allocated once: chunk-sized temporaries would grow the heap with every update.
        self._grad = torch.empty(_SLICE_NUMEL, dtype=torch.float32)

    def update(
        self, states: ChunkStates, *, learning_rate: float, step: int, grad_scale: float, decay_numel: int
    ) -> None:
        """Updates a chunk in place. The first `decay_numel` elements have weight decay; `step` counts from 1."""
        numel = states.master.numel()
        state_step = torch.tensor(float(step))
        for start, stop, decay in ((0, decay_numel, self.settings.weight_decay), (decay_numel, numel, 0.0)):
            for first in range(start, stop, _SLICE_NUMEL):
                part = slice(first, min(first + _SLICE_NUMEL, stop))
                self._update_slice(states, part, state_step, learning_rate, grad_scale, decay)

    def _update_slice(
        self,
        states: ChunkStates,
        part: slice,
        state_step: torch.Tensor,
        learning_rate: float,
        grad_scale: float,
        decay: float,
    ) -> None:
        grad = self._grad[: part.stop - part.start]
        grad.copy_(states.grad[part])
        if grad_scale != 1.0:
            grad.mul_(grad_scale)
        master = states.master[part]
        torch._fused_adamw_(
            [master],
            [grad],
            [states.exp_avg[part]],
            [states.exp_avg_sq[part]],
            [],
            [state_step],
            lr=learning_rate,
            beta1=self.settings.beta1,
            beta2=self.settings.beta2,
            weight_decay=decay,
            eps=self.settings.epsilon,
            amsgrad=False,
            maximize=False,
        )
        if states.param is not None:
            states.param[part].copy_(master)
