"""The optimizer of an offloaded model, as torch's loops and learning rate schedulers know optimizers."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from windlass.actors.offload.engine import OffloadEngine
from windlass.actors.offload.errors import CannotOffloadError, OffloadMisuseError
from windlass.actors.offload.layers import OffloadedParameter
from windlass.actors.offload.settings import Hyper, OffloadStatistics
from windlass.engine.optimizer import AdamSettings


class OffloadedOptimizer(torch.optim.Optimizer):
    """AdamW or Adam. Its `param_groups` are those it was made of: settings may change from step to step."""

    def __init__(self, optimizer: torch.optim.Optimizer, engine: OffloadEngine) -> None:
        """`optimizer`: checked by `require_adam`, with the layers' stand-ins among its parameters."""
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._engine = engine
        self.grad_norm: float | None = None  # of the last step, before clipping; None without clipping

    @property
    def statistics(self) -> OffloadStatistics:
        """What has moved so far."""
        return self._engine.statistics

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient, and drops the gradients. Layers are updated in the background.

        Raises:
            OffloadMisuseError: the result would not be plain PyTorch's.
            OffloadFailedError: a disk or a thread failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        outside = {
            param: hyper_of_group(group)
            for group in self.param_groups
            for param in group["params"]
            if not isinstance(param, OffloadedParameter)
        }
        with torch.no_grad():
            self.grad_norm = self._engine.step(outside)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients, as `step` has done already. Raises OffloadMisuseError where updates have begun."""
        self._engine.zero_grad()

    def close(self) -> None:
        """Gives memory and SSD space back. The layers' parameters are gone: save `model.state_dict()` before."""
        self._engine.close()

    def state_dict(self) -> NoReturn:
        """Not there yet: the states of layers are on the SSDs."""
        raise OffloadMisuseError("the optimizer's states are on the SSDs and cannot be saved yet; save the model's")

    def load_state_dict(self, state_dict: dict[str, Any]) -> NoReturn:
        """Not there yet."""
        raise OffloadMisuseError("an offloaded optimizer begins with fresh states; its own cannot be loaded yet")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """For torch's constructor only. Raises OffloadMisuseError."""
        if hasattr(self, "_engine"):
            raise OffloadMisuseError("parameters cannot be added to an offloaded optimizer; offload again with all")
        super().add_param_group(param_group)


def hyper_of_group(group: dict[str, Any]) -> Hyper:
    """How a group of parameters is to be updated now."""
    beta1, beta2 = group["betas"]
    settings = AdamSettings(
        beta1=float(beta1),
        beta2=float(beta2),
        epsilon=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(group["decoupled_weight_decay"]),
    )
    return Hyper(settings, float(group["lr"]))


def require_adam(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuses what the update kernels do not do.

    Raises:
        CannotOffloadError: another optimizer than AdamW or Adam, one that has begun, or of another model.
    """
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        raise CannotOffloadError(
            f"the optimizer is {type(optimizer).__name__}; only torch.optim.AdamW and torch.optim.Adam can be offloaded"
        )
    if optimizer.state:
        raise CannotOffloadError("the optimizer has made steps already; offload before the first one")
    known = {id(param) for param in model.parameters()}
    for group in optimizer.param_groups:
        for option in ("amsgrad", "maximize", "differentiable"):
            if group.get(option):
                raise CannotOffloadError(f"the optimizer has {option} set, which cannot be offloaded")
        if any(id(param) not in known for param in group["params"]):
            raise CannotOffloadError("the optimizer holds parameters that are not the model's; offload them together")
