"""A stand-in for the package liger_kernel: functions of the same form, and a norm that runs on a CPU."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.models.qwen2 import modeling_qwen2


class FakeLiger:
    """Replaces the norms of a Qwen2 and, as Liger does, also the class in its module."""

    def __init__(self) -> None:
        self.model_types = {"qwen2"}
        self.calls: list[dict[str, Any]] = []
        self.num_norms = 0  # norms computed
        self.change_grad: Callable[[torch.Tensor], torch.Tensor] = lambda grad: grad

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Installs the fake package until the test is over."""
        patches = ModuleType("liger_kernel.transformers.monkey_patch")
        patches.MODEL_TYPE_TO_APPLY_LIGER_FN = self  # type: ignore[attr-defined]
        for name, module in (
            ("liger_kernel", ModuleType("liger_kernel")),
            ("liger_kernel.transformers", ModuleType("liger_kernel.transformers")),
            (patches.__name__, patches),
        ):
            monkeypatch.setitem(sys.modules, name, module)

    def __contains__(self, model_type: str) -> bool:
        return model_type in self.model_types

    def __getitem__(self, model_type: str) -> Callable[..., None]:
        return self.apply

    def apply(
        self,
        rope: bool = True,
        cross_entropy: bool = False,
        fused_linear_cross_entropy: bool = True,
        rms_norm: bool = True,
        model: Any = None,
    ) -> None:
        """Has the parameters of `apply_liger_kernel_to_qwen2`."""
        self.calls.append(
            {
                "rope": rope,
                "cross_entropy": cross_entropy,
                "fused_linear_cross_entropy": fused_linear_cross_entropy,
            }
        )
        norm_class = modeling_qwen2.Qwen2RMSNorm
        modeling_qwen2.Qwen2RMSNorm = type("LigerRMSNorm", (norm_class,), {})
        for norm in (module for module in model.modules() if type(module) is norm_class):
            norm.forward = self._forward_of(norm)

    def _forward_of(self, norm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(hidden: torch.Tensor) -> torch.Tensor:
            self.num_norms += 1
            output: torch.Tensor = _Norm.apply(hidden, norm.weight, norm.variance_epsilon, self)
            return output

        return forward


class _Norm(torch.autograd.Function):
    """A Python autograd function, as Liger's are."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float, liger: FakeLiger) -> torch.Tensor:
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(hidden, weight, scale)
        ctx.liger = liger
        return weight * (wide * scale).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        hidden, weight, scale = ctx.saved_tensors
        normed = hidden.float() * scale
        of_normed = grad.float() * weight.float()
        of_hidden = scale * (of_normed - normed * (of_normed * normed).mean(-1, keepdim=True))
        of_weight = (grad.float() * normed).flatten(0, -2).sum(0)
        return ctx.liger.change_grad(of_hidden.to(hidden.dtype)), of_weight.to(weight.dtype), None, None
