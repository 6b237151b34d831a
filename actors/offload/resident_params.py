"""The parameters outside of the layers. They stay on the device with their states and are updated there."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from windlass.actors.offload.errors import OffloadMisuseError
from windlass.engine.device import TORCH_DTYPE, state_dtype
from windlass.engine.optimizer import (
    AdamSettings,
    ChunkStates,
    KernelSet,
    SavedStates,
    from_saved,
    squared_norm,
    to_saved,
)
from windlass.storage.ids import Formats, Kernel, Precision, StateKind, StatePrecision

# Element position of the first of these parameters, for the random rounding of bf16 states; beyond all blocks.
_FIRST_POSITION = 1 << 62


@dataclass(slots=True, eq=False)
class _Outside:
    """One parameter and its states, which are created at its first update, as in torch."""

    name: str
    param: nn.Parameter
    position: int
    states: dict[StateKind, torch.Tensor] | None = None
    num_updates: int = 0
    grad_version: int | None = None  # the gradient's version after autograd wrote it


class OutsideParams:
    """Updates parameters with torch's fused kernel, which runs on every device, each in its own precision."""

    def __init__(self, params: Mapping[str, nn.Parameter], states: StatePrecision, device: torch.device) -> None:
        """Moves the parameters to `device` in place, so that tied parameters stay tied."""
        self._state_precision = states
        self._device = device
        self._kernels = {
            dtype: KernelSet(self._formats(dtype), dtype, Kernel.FUSED, device=device)
            for dtype in {param.dtype for param in params.values()}
        }
        self._params: dict[int, _Outside] = {}
        position = _FIRST_POSITION
        for name, param in params.items():
            param.data = param.data.to(device).contiguous()
            outside = self._params[id(param)] = _Outside(name, param, position)
            position += param.numel() + param.numel() % 2
            if param.requires_grad:

                def note(p: torch.Tensor, outside: _Outside = outside) -> None:
                    outside.grad_version = None if p.grad is None else p.grad._version

                param.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    @property
    def has_grads(self) -> bool:
        """True if any parameter has a gradient."""
        return any(outside.param.grad is not None for outside in self._params.values())

    def squared_norm(self) -> float:
        """Returns the squared norm of all their gradients."""
        grads = [outside.param.grad for outside in self._params.values() if outside.param.grad is not None]
        return float(sum(squared_norm(grad.reshape(-1)) for grad in grads))

    def check_grads(self) -> None:
        """Raises OffloadMisuseError if gradients were changed between the backward and the step."""
        for outside in self._params.values():
            grad = outside.param.grad
            if grad is not None and outside.grad_version is not None and grad._version != outside.grad_version:
                raise OffloadMisuseError(
                    f"the gradient of {outside.name} was changed after the backward, by torch.nn.utils.clip_grad_norm_ "
                    "or the like, which cannot reach the gradients of offloaded layers; clip by `clip_norm` of "
                    "`windlass.offload`"
                )

    def update(self, param: nn.Parameter, settings: AdamSettings, learning_rate: float, grad_scale: float) -> None:
        """Updates a parameter and discards its gradient; does nothing without a gradient."""
        outside, grad = self._params[id(param)], param.grad
        if grad is None:
            return
        states = self._all_states(outside)
        outside.num_updates += 1
        self._kernels[param.dtype].of(settings).update(
            ChunkStates.of(grad.detach().reshape(-1).contiguous(), states),
            learning_rate=learning_rate,
            step=outside.num_updates,
            grad_scale=grad_scale,
            decay_numel=param.numel(),
            position=outside.position,
        )
        param.grad = None

    def name_of(self, param: torch.Tensor) -> str:
        """Returns the name in the model of a parameter."""
        return self._params[id(param)].name

    @property
    def num_updates(self) -> dict[str, int]:
        """The number of updates of each parameter that was updated, by name."""
        return {outside.name: outside.num_updates for outside in self._params.values() if outside.num_updates}

    def states(self) -> dict[str, SavedStates]:
        """Returns the states of the updated parameters, by name. They share memory with those in use."""
        return {
            outside.name: to_saved(self._formats(outside.param.dtype), self._all_states(outside))
            for outside in self._params.values()
            if outside.num_updates
        }

    def load_states(self, states: Mapping[str, SavedStates], num_updates: Mapping[str, int]) -> None:
        """Replaces all states, by name. Parameters that have none there begin anew; their weights stay."""
        for outside in self._params.values():
            outside.states, outside.num_updates = None, num_updates.get(outside.name, 0)
            if outside.name in states:
                from_saved(self._formats(outside.param.dtype), self._all_states(outside), states[outside.name])

    def drop_grads(self) -> None:
        """Discards all gradients, as torch's zero_grad does."""
        for outside in self._params.values():
            outside.param.grad = None

    def _all_states(self, outside: _Outside) -> dict[StateKind, torch.Tensor]:
        """Returns a parameter's states, itself included, as flat tensors. They are created at first use."""
        param = outside.param.detach()
        formats = self._formats(param.dtype)
        if outside.states is None:
            outside.states = _first_states(param, formats)
        return {**outside.states, formats.param_kind: param.view(-1)}

    def _formats(self, dtype: torch.dtype) -> Formats:
        precision = next(precision for precision, known in TORCH_DTYPE.items() if known is dtype)
        return Formats(precision, self._state_precision if precision is Precision.BF16 else StatePrecision.FP32)


def _first_states(param: torch.Tensor, formats: Formats) -> dict[StateKind, torch.Tensor]:
    """Returns the first states, without the parameter: moments of zero, and a master equal to the parameter."""
    states = {
        kind: torch.zeros(param.numel(), dtype=state_dtype(formats, kind), device=param.device)
        for kind in formats.itemsizes
        if kind is not formats.param_kind
    }
    if StateKind.MASTER in states:
        states[StateKind.MASTER].copy_(param.view(-1))
    return states
