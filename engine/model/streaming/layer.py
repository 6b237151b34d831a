"""A layer, an embedding or a head whose params are streamed: each module has its own params only while it runs.

Params that autograd saves are recorded by their place (`saved_graph`), and installed again while a graph node runs.
"""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from windlass.engine.linear_parts import Columns
from windlass.engine.model import ParamSite
from windlass.engine.model.streaming.params import Piece, StreamedParams
from windlass.storage.ids import BlockIndex


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Hides copies from modes: those that record or replay a layer's operators, or the calls of a head."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


class StreamedLayer:
    """The use of a streamed layer by one operation. The caller must call `end` afterwards."""

    def __init__(
        self,
        block: BlockIndex,
        params: StreamedParams,
        sites: Sequence[ParamSite],
        *,
        user: BlockIndex,
        goes_backward: bool,
    ) -> None:
        """`sites`: the places of the params in pieces, without those of matrices that are computed in parts.

        `user`: the block whose operation uses the params of `block`; another one if both are tied.
        """
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
        self._params.buffers.begin(params, user, goes_backward=goes_backward)

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
        piece = self.piece_at(offset // itemsize)
        backward_pass, node = torch._C._current_graph_task_id(), torch._C._current_autograd_node()
        last, held = self._nodes.get(backward_pass, (None, []))
        if last is not node:
            self._release(held)
            held = []
        self._nodes[backward_pass] = (node, held)
        with _unseen():
            flat = self._params.buffers.hold(piece, backward=True)
        held.append(piece)
        return flat, bounds[piece] * itemsize

    def matrix(self, site: ParamSite) -> "StreamedMatrix":
        """Returns the parts of a matrix that is computed in parts."""
        return StreamedMatrix(self, site)

    def first_element(self, piece: int) -> int:
        """Returns the index of a piece's first element in the flat vector."""
        return self._params.bounds[piece]

    @contextlib.contextmanager
    def held(self, piece: Piece) -> Iterator[torch.Tensor]:
        """Provides a piece, flat, to work that the calling thread queues on the compute stream until the end."""
        is_backward = torch._C._current_graph_task_id() >= 0
        with _unseen():
            flat = self._params.buffers.hold(piece, backward=is_backward)
        try:
            yield flat
        finally:
            self._release([piece])

    def begin_graph(self, *, is_last: bool) -> None:
        """Releases the pieces of the graph before: of a micro-batch, or of a slice of the head.

        `is_last`: the operation's last graph begins.
        """
        for _, held in self._nodes.values():
            self._release(held)
        self._nodes.clear()
        self._params.buffers.is_last = is_last

    def _enter(self, sites: list[ParamSite], *_: Any) -> None:
        with _unseen():
            for site in sites:
                piece = self.piece_at(site.param.offset)
                flat = self._params.buffers.hold(piece, backward=False)
                start = site.param.offset - self._params.bounds[piece]
                site.module._parameters[site.attribute] = self._leaf(site, flat[start : start + site.param.numel])

    def _leave(self, sites: list[ParamSite], *_: Any) -> None:
        for site in sites:
            site.module._parameters[site.attribute] = site.placeholder
        with _unseen():
            for site in sites:
                self._params.buffers.release(self.piece_at(site.param.offset))

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

    def _release(self, pieces: Sequence[Piece]) -> None:
        with _unseen():
            for piece in pieces:
                self._params.buffers.release(piece)

    def piece_at(self, offset: int) -> int:
        """Returns the piece with an element of the flat vector."""
        bounds = self._params.bounds
        return next(piece for piece in range(len(bounds) - 1) if offset < bounds[piece + 1])


class StreamedMatrix:
    """The MatrixParts of a streamed layer."""

    def __init__(self, layer: StreamedLayer, site: ParamSite) -> None:
        self._layer = layer
        self._offset = site.param.offset
        self._num_rows, self._width = site.param.shape

    @contextlib.contextmanager
    def rows(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """See MatrixParts. The rows must lie in one piece."""
        first, numel = self._offset + start * self._width, (stop - start) * self._width
        piece = self._layer.piece_at(first)
        with self._layer.held(piece) as flat:
            first -= self._layer.first_element(piece)
            yield flat[first : first + numel].view(stop - start, self._width)

    @contextlib.contextmanager
    def columns(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """See MatrixParts."""
        with self._layer.held(Columns(self._offset, self._num_rows, self._width, start, stop)) as flat:
            yield flat.view(self._num_rows, stop - start)
