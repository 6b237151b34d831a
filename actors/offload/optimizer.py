"""The optimizer of an offloaded model, for PyTorch training loops and learning rate schedulers."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from windlass.actors.offload.config import Hyper, OffloadStatistics
from windlass.actors.offload.engine import OffloadEngine
from windlass.actors.offload.errors import CannotOffloadError, OffloadMisuseError
from windlass.actors.offload.layers import OffloadedParameter
from windlass.engine.optimizer import AdamSettings


class OffloadedOptimizer(torch.optim.Optimizer):
    """AdamW or Adam for an offloaded model.

    It has the `param_groups` of the original optimizer, whose settings may change between steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: OffloadEngine) -> None:
        """`optimizer` must have passed `require_adam` and have the layers' stand-ins among its parameters."""
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._engine = engine
        self.grad_norm: float | None = None  # of the last step, before clipping; None without clipping

    @property
    def statistics(self) -> OffloadStatistics:
        """The traffic and the memory so far."""
        return self._engine.statistics

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient, and discards the gradients. Layers update in the background.

        Raises:
            OffloadMisuseError: the result would differ from plain PyTorch's.
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
        """Discards gradients. After `step` it has no effect. Raises OffloadMisuseError if updates have begun."""
        self._engine.zero_grad()

    def close(self) -> None:
        """Releases memory and SSD space. The layers' parameters are lost: save `model.state_dict()` first."""
        self._engine.close()

    def state_dict(self) -> NoReturn:
        """Is not supported: the states of layers are on the SSDs. Raises OffloadMisuseError."""
        raise OffloadMisuseError("the optimizer's states are on the SSDs and cannot be saved yet; save the model's")

    def load_state_dict(self, state_dict: dict[str, Any]) -> NoReturn:
        """Is not supported. Raises OffloadMisuseError."""
        raise OffloadMisuseError("an offloaded optimizer begins with fresh states; its own cannot be loaded yet")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; only torch's constructor may call it. Raises OffloadMisuseError afterwards."""
        if hasattr(self, "_engine"):
            raise OffloadMisuseError("parameters cannot be added to an offloaded optimizer; offload again with all")
        super().add_param_group(param_group)


def hyper_of_group(group: dict[str, Any]) -> Hyper:
    """Returns the present update settings of a parameter group."""
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
    """Checks that the update kernels support the optimizer.

    Raises:
        CannotOffloadError: it is not AdamW or Adam, it has unsupported options, it has made steps, or it belongs to
            another model.
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
