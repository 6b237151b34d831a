"""A stand-in for the package liger_kernel: functions of the same form, and kernels that run on a CPU."""

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.models.qwen2 import modeling_qwen2


class FakeLiger:
    """Replaces the norms and MLPs of a Qwen2 and, as Liger does, also the norm's class in its module.

    It has a kernel for cross-entropy, too.
    """

    def __init__(self) -> None:
        self.model_types = {"qwen2"}
        self.calls: list[dict[str, Any]] = []
        self.num_norms = 0  # norms computed
        self.num_products = 0  # of an MLP's two halves
        self.num_losses = 0  # launches of the kernel for cross-entropy
        self.computes = True  # False: that kernel only counts
        self.change_grad: Callable[[torch.Tensor], torch.Tensor] = lambda grad: grad
        self.change_logits_grad: Callable[[torch.Tensor], torch.Tensor] = lambda grad: grad
        self.change_losses: Callable[[torch.Tensor], torch.Tensor] = lambda losses: losses

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Installs the fake package until the test is over."""
        patches = ModuleType("liger_kernel.transformers.monkey_patch")
        patches.MODEL_TYPE_TO_APPLY_LIGER_FN = self  # type: ignore[attr-defined]
        cross_entropy = ModuleType("liger_kernel.ops.cross_entropy")
        cross_entropy.MAX_FUSED_SIZE = 32768  # type: ignore[attr-defined]
        cross_entropy.liger_cross_entropy_kernel = _CrossEntropyKernel(self)  # type: ignore[attr-defined]
        for name, module in (
            ("liger_kernel", ModuleType("liger_kernel")),
            ("liger_kernel.ops", ModuleType("liger_kernel.ops")),
            (cross_entropy.__name__, cross_entropy),
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
        for mlp in (module for module in model.modules() if type(module) is modeling_qwen2.Qwen2MLP):
            mlp.forward = self._forward_of_mlp(mlp)

    def _forward_of(self, norm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(hidden: torch.Tensor) -> torch.Tensor:
            self.num_norms += 1
            output: torch.Tensor = _Norm.apply(hidden, norm.weight, norm.variance_epsilon, self)
            return output

        return forward

    def _forward_of_mlp(self, mlp: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(hidden: torch.Tensor) -> torch.Tensor:
            self.num_products += 1
            output: torch.Tensor = mlp.down_proj(_SiluProduct.apply(mlp.gate_proj(hidden), mlp.up_proj(hidden)))
            return output

        return forward


class _CrossEntropyKernel:
    """Has the parameters of `liger_cross_entropy_kernel`, and is launched as a kernel of Triton is."""

    def __init__(self, liger: FakeLiger) -> None:
        self._liger = liger

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return partial(self._launch, grid[0])

    def _launch(
        self,
        num_rows: int,
        *,
        X_ptr: torch.Tensor,
        X_stride: int,
        Y_ptr: torch.Tensor,
        Y_stride: int,
        weight_ptr: None,
        loss_ptr: torch.Tensor,
        z_loss_ptr: None,
        loss_stride: int,
        token_accuracy_ptr: torch.Tensor,
        token_accuracy_stride: int,
        predicted_tokens_ptr: None,
        predicted_tokens_stride: int,
        n_cols: int,
        n_non_ignore: float,
        sum_non_ignore_weight: float,
        weight_sum: float,
        ignore_index: int,
        lse_square_scale: float,
        label_smoothing: float,
        reduction: str,
        softcap: None,
        RETURN_Z_LOSS: bool,
        RETURN_TOKEN_ACCURACY: bool,
        RETURN_PREDICTED_TOKENS: bool,
        BLOCK_SIZE: int,
        HAS_WEIGHT: bool,
        HAS_SOFTCAPPING: bool,
        HAS_GRADIENTS: bool,
        num_warps: int,
    ) -> None:
        assert (num_rows, n_cols) == X_ptr.shape
        assert (X_stride, 1) == X_ptr.stride()
        assert (Y_stride, loss_stride, token_accuracy_stride) == (1, 1, 1)
        assert loss_ptr.dtype is torch.float32
        assert (weight_ptr, z_loss_ptr, predicted_tokens_ptr, softcap) == (None, None, None, None)
        assert (lse_square_scale, label_smoothing, reduction, RETURN_TOKEN_ACCURACY) == (0.0, 0.0, "mean", True)
        assert not any((RETURN_Z_LOSS, RETURN_PREDICTED_TOKENS, HAS_WEIGHT, HAS_SOFTCAPPING))
        assert BLOCK_SIZE.bit_count() == 1
        assert min(n_cols, 32768) <= BLOCK_SIZE
        self._liger.num_losses += 1
        if not self._liger.computes:
            return
        wide, is_target = X_ptr.float(), Y_ptr != ignore_index
        at = Y_ptr.clamp(min=0)[:, None]
        losses = (wide.logsumexp(-1) - wide.gather(1, at)[:, 0]) / n_non_ignore * is_target
        loss_ptr.copy_(self._liger.change_losses(losses))
        token_accuracy_ptr.copy_((wide.argmax(-1) == Y_ptr).float())
        grad = wide.softmax(-1).scatter_add(1, at, wide.new_full(at.shape, -1.0)) / n_non_ignore
        if HAS_GRADIENTS:
            _overwrite(X_ptr, self._liger.change_logits_grad(grad * is_target[:, None]))
        else:
            _overwrite(X_ptr, X_ptr * is_target[:, None])  # the kernel zeroes ignored tokens also then


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
        _overwrite(grad, ctx.liger.change_grad(of_hidden.to(hidden.dtype)))
        return grad, of_weight.to(weight.dtype), None, None


class _SiluProduct(torch.autograd.Function):
    """The product of an MLP's halves. Like Liger's, its backward pass overwrites the tensors that it saved."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate.float()).to(gate.dtype) * up

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        gate, up = ctx.saved_tensors
        share = torch.sigmoid(gate.float())
        of_up = grad * (gate.float() * share).to(gate.dtype)
        of_gate = (grad.float() * up.float() * share * (1 + gate.float() * (1 - share))).to(gate.dtype)
        _overwrite(gate, of_gate)
        _overwrite(up, of_up)
        return gate, up


def _overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Writes as a kernel of another package does: autograd's version counter does not notice."""
    tensor.data.copy_(values)
