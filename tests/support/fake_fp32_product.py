"""A stand-in for PyTorch's products of 16-bit factors with an fp32 result, which exist on CUDA only."""

from typing import Any

import pytest
import torch


class FakeFp32Product:
    """Lets `torch.mm` and `torch.addmm` take `out_dtype` on a CPU, until the test is over."""

    def __init__(self) -> None:
        self.num_products = 0
        self.is_wrong = False  # it forgets what it should add to
        self.rounds = False  # it rounds products to the type of the factors

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replaces both functions."""
        mm, addmm = torch.mm, torch.addmm

        def fake_mm(left: Any, right: Any, *, out_dtype: torch.dtype | None = None, out: Any = None) -> Any:
            if out_dtype is None:
                return mm(left, right, out=out)
            return self._product(left, right, out_dtype, out)

        def fake_addmm(sums: Any, left: Any, right: Any, *, out_dtype: torch.dtype | None = None, out: Any) -> Any:
            if out_dtype is None:
                return addmm(sums, left, right, out=out)
            assert out is sums, "PyTorch would copy the sums"
            before = 0.0 if self.is_wrong else sums.clone()
            self._product(left, right, out_dtype, out)
            return out.add_(before)

        monkeypatch.setattr(torch, "mm", fake_mm)
        monkeypatch.setattr(torch, "addmm", fake_addmm)

    def _product(self, left: torch.Tensor, right: torch.Tensor, out_dtype: torch.dtype, out: torch.Tensor) -> Any:
        assert left.dtype is right.dtype
        assert left.dtype in (torch.bfloat16, torch.float16)
        assert out.dtype is out_dtype is torch.float32
        self.num_products += 1
        product = left.float() @ right.float()
        return out.copy_(product.to(left.dtype) if self.rounds else product)
