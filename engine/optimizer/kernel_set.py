"""Update kernels of one format whose settings may change between steps."""

from pathlib import Path

import torch

from windlass.engine.optimizer.adam_formulas import AdamSettings
from windlass.engine.optimizer.adam_kernel import OptimizerKernel
from windlass.storage.ids import Formats, Kernel, StateKind


class KernelSet:
    """The kernels by their settings. Not thread-safe."""

    def __init__(
        self,
        formats: Formats,
        dtype: torch.dtype,
        kernel: Kernel | None,
        cache_dir: Path | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """`dtype` is that of params and gradients, `kernel` the kind of all kernels.

        For None, the kernels are of the kind of the first one, which is compiled if there is a compiler.
        """
        self._formats = formats
        self._dtype = dtype
        self._kernel = kernel
        self._cache_dir = cache_dir
        self._device = device
        self._kernels: dict[AdamSettings, OptimizerKernel] = {}

    def of(self, settings: AdamSettings) -> OptimizerKernel:
        """Returns the kernel for settings, created at first use."""
        if settings not in self._kernels:
            made = OptimizerKernel(
                settings,
                grad_dtype=self._dtype,
                param_dtype=None if self._formats.param_kind is StateKind.MASTER else self._dtype,
                state_precision=self._formats.states,
                kernel=self._kernel,
                cache_dir=self._cache_dir,
                device=self._device,
            )
            self._kernel = made.kernel
            self._kernels[settings] = made
        return self._kernels[settings]
