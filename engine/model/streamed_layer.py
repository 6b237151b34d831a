"""A layer that is computed while its params come and go: each module has those that it holds itself while it runs.

What autograd saves of them is noted by its place (`activations_graph`) and held again while a node of the graph runs.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from windlass.engine.model.partition import ParamSite
from windlass.engine.model.streamed_params import StreamedParams
from windlass.storage.ids import BlockIndex


class StreamedLayer:
    """One operation's use of a streamed layer; `end` must follow."""

    def __init__(
        self, block: BlockIndex, params: StreamedParams, sites: Sequence[ParamSite], *, goes_backward: bool
    ) -> None:
        """`sites`: of the params in pieces."""
        self.block = block
        self.on_param: Callable[[ParamSite, nn.Parameter], None] | None = None  # called with each when it first comes
        self._params = params
        self._leaves: dict[str, nn.Parameter] = {}  # by name: one in all of the operation, so that gradients add up
        self._nodes: dict[int, tuple[Any, list[int]]] = {}  # by backward pass: the node that runs, and what it holds
        by_module: dict[nn.Module, list[ParamSite]] = defaultdict(list)
        for site in sites:
            by_module[site.module].append(site)
        self._hooks = []
        for module, own in by_module.items():
            self._hooks.append(module.register_forward_pre_hook(functools.partial(self._enter, own)))
            self._hooks.append(module.register_forward_hook(functools.partial(self._leave, own)))
        self._params.buffers.begin(params, block, goes_backward=goes_backward)

    def end(self) -> None:
        """The layer has no params any more."""
        for hook in self._hooks:
            hook.remove()
        self._nodes.clear()
        self._params.buffers.end()

    def place_of(self, tensor: torch.Tensor) -> int | None:
        """Where a tensor that lies in params that are there now begins: bytes from the start of the flat vector."""
        rest = self._params.rest
        if tensor.device != rest.device:
            return None
        offset = tensor.data_ptr() - rest.data_ptr()
        if 0 <= offset < rest.nbytes:
            return self._params.bounds[-1] * rest.itemsize + offset
        return self._params.buffers.place_of(tensor)

    def flat_at(self, offset: int) -> tuple[torch.Tensor, int]:
        """The params around a place, for the node of a graph that runs now, and where they begin; both in bytes."""
        bounds, itemsize = self._params.bounds, self._params.rest.itemsize
        if offset >= bounds[-1] * itemsize:
            return self._params.rest, bounds[-1] * itemsize
        piece = self._piece_at(offset // itemsize)
        backward_pass, node = torch._C._current_graph_task_id(), torch._C._current_autograd_node()
        last, held = self._nodes.get(backward_pass, (None, []))
        if last is not node:
            self._let_go(held)
            held = []
        self._nodes[backward_pass] = (node, held)
        with _disable_current_modes():
            flat = self._params.buffers.hold(piece, backward=True)
        held.append(piece)
        return flat, bounds[piece] * itemsize

    def begin_microbatch(self, *, is_last: bool) -> None:
        """Nothing of the one before goes on: no node of its graph runs. `is_last`: of the operation."""
        for _, held in self._nodes.values():
            self._let_go(held)
        self._nodes.clear()
        self._params.buffers.is_last = is_last

    def _enter(self, sites: list[ParamSite], *_: Any) -> None:
        # Whoever records or replays the operators of a layer shall see no copies.
        with _disable_current_modes():
            for site in sites:
                piece = self._piece_at(site.param.offset)
                flat = self._params.buffers.hold(piece, backward=False)
                start = site.param.offset - self._params.bounds[piece]
                site.module._parameters[site.attribute] = self._leaf(site, flat[start : start + site.param.numel])

    def _leave(self, sites: list[ParamSite], *_: Any) -> None:
        for site in sites:
            site.module._parameters[site.attribute] = site.placeholder
        with _disable_current_modes():
            for site in sites:
                self._params.buffers.let_go(self._piece_at(site.param.offset))

    def _leaf(self, site: ParamSite, flat: torch.Tensor) -> nn.Parameter:
        view = flat.view(site.param.shape)
        leaf = self._leaves.get(site.param.name)
        if leaf is not None:
            leaf.data = view
            return leaf
        leaf = self._leaves[site.param.name] = nn.Parameter(view, requires_grad=False)
        if self.on_param is not None:
            self.on_param(site, leaf)
        return leaf

    def _let_go(self, pieces: list[int]) -> None:
        with _disable_current_modes():
            for piece in pieces:
                self._params.buffers.let_go(piece)

    def _piece_at(self, offset: int) -> int:
        bounds = self._params.bounds
        return next(piece for piece in range(len(bounds) - 1) if offset < bounds[piece + 1])
