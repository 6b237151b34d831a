"""Updates a range of a block's elements, for the CPU optimizers and the GPU worker."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from windlass.actors.job import JobContext, grad_precision
from windlass.actors.messages import UpdateBlock
from windlass.engine.device import TORCH_DTYPE
from windlass.engine.optimizer import AdamSettings, ChunkStates, OptimizerKernel, element_position
from windlass.engine.training_config import Optimizer
from windlass.storage.ids import Kernel, StateKind


class ChunkUpdater:
    """The update kernel for a job's formats, on one device. Not thread-safe."""

    def __init__(
        self,
        context: JobContext,
        device: torch.device | str = "cpu",
        *,
        holds_params: bool = True,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        """`holds_params`: False if params are derived from the master at each use and not stored.

        `announce` is called with a text before long work, such as compiling a kernel.

        Raises:
            KernelUnavailable: the kernel that the job names is not available.
        """
        hyper, formats, kernel_dir = context.spec.training, context.formats, context.spec.kernel_dir
        self._context = context
        is_in_master = formats.param_kind is StateKind.MASTER or (formats.derives_param and not holds_params)
        self._kernel = OptimizerKernel(
            AdamSettings(
                beta1=hyper.beta1,
                beta2=hyper.beta2,
                epsilon=hyper.epsilon,
                weight_decay=hyper.weight_decay,
                decoupled=hyper.optimizer is Optimizer.ADAMW,
            ),
            grad_dtype=TORCH_DTYPE[grad_precision(context.spec)],
            param_dtype=None if is_in_master else TORCH_DTYPE[formats.precision],
            state_precision=formats.states,
            kernel=hyper.kernel,
            cache_dir=None if kernel_dir is None else Path(kernel_dir),
            device=device,
            announce=announce,
        )

    @property
    def kernel(self) -> Kernel:
        """The kernel in use."""
        return self._kernel.kernel

    def update(
        self, update: UpdateBlock, start: int, grad: torch.Tensor, states: Mapping[StateKind, torch.Tensor]
    ) -> None:
        """Updates a range of a block's elements in place, from element `start` on.

        `grad` and all `states` are flat tensors of the same length.
        """
        decay_numel = self._context.layout.blocks[update.block].decay_numel
        self._kernel.update(
            ChunkStates.of(grad, states),
            learning_rate=update.how.learning_rate,
            step=update.how.optimizer_step,
            grad_scale=update.how.grad_scale,
            decay_numel=min(max(decay_numel - start, 0), grad.numel()),
            seed=self._context.spec.training.seed,
            position=element_position(update.block, start),
        )
