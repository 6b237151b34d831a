"""Computes the head for a micro-batch: its loss and the gradient of its input, slice by slice.

Shapes: B examples, T tokens, H hidden, V vocabulary, S tokens of a slice.
"""

import contextlib
from collections.abc import Collection, Iterator

import torch
from torch.autograd.graph import get_gradient_edge

from windlass.engine.model.fused_kernels import add_fused_loss
from windlass.engine.model.head_slices import LossSums, add_loss, projections_in_place
from windlass.engine.model.installed_params import InstalledParams
from windlass.engine.model.model_forward import ModelForward
from windlass.engine.model.partition import Partition
from windlass.engine.slices import num_piece_tokens, num_slice_tokens
from windlass.storage.ids import HeadSlices, ModelKernel


class Head:
    """The head of a model. Its params must be installed."""

    def __init__(
        self,
        partition: Partition,
        params: InstalledParams,
        model_forward: ModelForward,
        slices: HeadSlices,
        kernels: Collection[ModelKernel],
        *,
        has_lanes: bool,
    ) -> None:
        """`has_lanes`: a step has several lanes."""
        self._sites = partition.sites[partition.head] if slices is HeadSlices.LARGE else []
        self._vocab_size = int(partition.model.config.vocab_size)
        self._params = params
        self._model_forward = model_forward
        self._slices = slices
        self._has_lanes = has_lanes
        self._has_fused_loss = ModelKernel.LIGER_CROSS_ENTROPY in kernels
        self._has_fp32_product = ModelKernel.FP32_PRODUCT in kernels

    @property
    def num_slice_tokens(self) -> int:
        """The number of tokens whose logits exist at the same time."""
        return num_slice_tokens(self._slices, self._vocab_size)

    @contextlib.contextmanager
    def operation(self, *, train: bool) -> Iterator[None]:
        """Returns a context for the micro-batches of one operation. `train`: they have gradients."""
        sites = self._sites if train else []
        try:
            with projections_in_place(sites, self._params.sinks, in_fp32=self._has_fp32_product):
                yield
        finally:
            self._model_forward.end_head()

    def add_microbatch(
        self,
        hidden: torch.Tensor,
        target: torch.Tensor,
        sums: LossSums,
        loss_scale: float | None,
        *,
        ends_operation: bool,
    ) -> torch.Tensor:
        """Adds the loss of a micro-batch to `sums`, and returns the gradient of its hidden state (B, T, H).

        `target`: token ids, (B, T). `loss_scale`: the factor of the gradient; None: no gradient is computed, and the
        result is undefined. `ends_operation`: no micro-batch follows.
        """
        train = loss_scale is not None
        flat_hidden = hidden.reshape(1, -1, hidden.shape[-1])
        flat_target = target.reshape(-1)
        grad = torch.empty_like(flat_hidden) if train else flat_hidden
        size = self.num_slice_tokens
        # With lanes, a micro-batch's loss is summed on its own, because other processes may compute those before it.
        own = LossSums.nothing(sums.num_targets, hidden.device) if self._has_lanes else sums
        for start in range(0, flat_target.numel(), size):
            stop = start + size
            is_last = stop >= flat_target.numel()
            self._params.begin_slice(is_last=is_last, ends_operation=is_last and ends_operation)
            slice_grad = self._add_slice(flat_hidden[:, start:stop], flat_target[start:stop], own, loss_scale)
            if train:
                assert slice_grad is not None
                grad[:, start:stop] = slice_grad
        if own is not sums:
            sums.add(own)
        return grad.view(hidden.shape)

    def _add_slice(
        self, hidden: torch.Tensor, target: torch.Tensor, sums: LossSums, loss_scale: float | None
    ) -> torch.Tensor | None:
        """Computes one slice of the head. It is a separate function so that a slice's logits are freed at its end."""
        train = loss_scale is not None
        entering = hidden.detach().requires_grad_(train)
        with torch.set_grad_enabled(train), self._params.borrowed.noted_by_place(entering):
            logits = self._model_forward.epilogue(entering)
        edge = get_gradient_edge(logits) if train else None
        if self._has_fused_loss:
            grad = add_fused_loss(logits.detach()[0], target, sums, loss_scale)
            del logits
        else:
            pieces = list(torch.split(logits.detach()[0], num_piece_tokens(self._slices, self._vocab_size)))
            del logits  # the backward pass needs the edge of the graph, not the logits
            grad = add_loss(pieces, target, sums, loss_scale)
        if edge is not None:
            assert grad is not None
            torch.autograd.backward(edge, grad[None])
        return entering.grad
