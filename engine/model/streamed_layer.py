"""A layer whose params are streamed: each module has its own params only while it runs.

Params that autograd saves are recorded by their place (`saved_graph`), and installed again while a graph node runs.
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
    """The use of a streamed layer by one operation. The caller must call `end` afterwards."""

    def __init__(
        self, block: BlockIndex, params: StreamedParams, sites: Sequence[ParamSite], *, goes_backward: bool
    ) -> None:
        """`sites`: the places of the params in pieces."""
        self.block = block
        self.on_param: Callable[[ParamSite, nn.Parameter], None] | None = None  # called at each param's first install
        self._params = params
        self._leaves: dict[str, nn.Parameter] = {}  # by name: one leaf in all of the operation, so gradients add up
        self._nodes: dict[int, tuple[Any, list[int]]] = {}  # by backward pass: the running node and its pieces
        by_module: dict[nn.Module, list[ParamSite]] = defaultdict(list)
        for site in sites:
            by_module[site.module].append(site)
        self._hooks = []
        for module, own in by_module.items():
            self._hooks.append(module.register_forward_pre_hook(functools.partial(self._enter, own)))
            self._hooks.append(module.register_forward_hook(functools.partial(self._leave, own)))
        self._params.buffers.begin(params, block, goes_backward=goes_backward)

    def end(self) -> None:
        """Removes the layer's params and hooks."""
        for hook in self._hooks:
            hook.remove()
        self._nodes.clear()
        self._params.buffers.end()

    def place_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the byte offset in the flat vector of a tensor in the installed params, None for other tensors."""
        rest = self._params.rest
        if tensor.device != rest.device:
            return None
        offset = tensor.data_ptr() - rest.data_ptr()
        if 0 <= offset < rest.nbytes:
            return self._params.bounds[-1] * rest.itemsize + offset
        return self._params.buffers.place_of(tensor)

    def flat_at(self, offset: int) -> tuple[torch.Tensor, int]:
        """Returns the params around a byte offset, for the graph node that runs now, and their first byte's offset."""
        bounds, itemsize = self._params.bounds, self._params.rest.itemsize
        if offset >= bounds[-1] * itemsize:
            return self._params.rest, bounds[-1] * itemsize
        piece = self._piece_at(offset // itemsize)
        backward_pass, node = torch._C._current_graph_task_id(), torch._C._current_autograd_node()
        last, held = self._nodes.get(backward_pass, (None, []))
        if last is not node:
            self._release(held)
            held = []
        self._nodes[backward_pass] = (node, held)
        with _disable_current_modes():
            flat = self._params.buffers.hold(piece, backward=True)
        held.append(piece)
        return flat, bounds[piece] * itemsize

    def begin_microbatch(self, *, is_last: bool) -> None:
        """Releases the pieces of the previous micro-batch's graph. `is_last`: the operation's last one begins."""
        for _, held in self._nodes.values():
            self._release(held)
        self._nodes.clear()
        self._params.buffers.is_last = is_last

    def _enter(self, sites: list[ParamSite], *_: Any) -> None:
        # Modes are disabled, because those that record or replay a layer's operators must not see the copies.
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
                self._params.buffers.release(self._piece_at(site.param.offset))

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

    def _release(self, pieces: list[int]) -> None:
        with _disable_current_modes():
            for piece in pieces:
                self._params.buffers.release(piece)

    def _piece_at(self, offset: int) -> int:
        bounds = self._params.bounds
        return next(piece for piece in range(len(bounds) - 1) if offset < bounds[piece + 1])
