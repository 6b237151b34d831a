"""A set creates one kernel for each settings, all of one kind."""

import pytest
import torch

from windlass.engine.optimizer import kernel_set
from windlass.engine.optimizer.adam_formulas import AdamSettings
from windlass.engine.optimizer.kernel_set import KernelSet
from windlass.storage.ids import Formats, Kernel, Precision, StatePrecision

BF16 = Formats(Precision.BF16, StatePrecision.FP32)


def settings(weight_decay: float) -> AdamSettings:
    return AdamSettings(beta1=0.9, beta2=0.99, epsilon=1e-8, weight_decay=weight_decay, decoupled=True)


def test_set_creates_kernel_once_for_each_settings() -> None:
    kernels = KernelSet(BF16, torch.bfloat16, Kernel.FUSED)
    first = kernels.of(settings(0.0))
    assert kernels.of(settings(0.0)) is first
    assert kernels.of(settings(0.1)) is not first
    assert first.format.param is torch.bfloat16


def test_set_in_fp32_has_master_as_param() -> None:
    kernels = KernelSet(Formats(Precision.FP32, StatePrecision.FP32), torch.float32, Kernel.FUSED)
    assert kernels.of(settings(0.0)).format.param is None


def test_set_without_kind_keeps_kind_of_first_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[Kernel | None] = []
    create = kernel_set.OptimizerKernel

    def noted(*args: object, kernel: Kernel | None, **others: object) -> object:
        kinds.append(kernel)
        return create(*args, kernel=Kernel.FUSED, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(kernel_set, "OptimizerKernel", noted)
    kernels = KernelSet(BF16, torch.bfloat16, None)
    for weight_decay in (0.0, 0.1):
        kernels.of(settings(weight_decay))
    assert kinds == [None, Kernel.FUSED]
