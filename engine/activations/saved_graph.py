"""Keeps a block's autograd graph from its forward pass to its backward pass, so that nothing is recomputed.

Hooks see each tensor that autograd saves. Param buffers serve other blocks between the two passes. So a saved tensor
inside the params is recorded by its place, and read from the buffer that is installed in the backward pass. Each other
tensor is kept or put into the store.
"""

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from windlass.engine.activations.saved_tensors import SwappedView, UnitSwaps
from windlass.engine.activations.selective_recompute import Layer, Names, is_worth_swapping, storage_ref
from windlass.engine.memory_plan import RECOMPUTE_ALL, BlockActivations, Place
from windlass.storage.ids import BlockIndex


class ParamsNotLentError(RuntimeError):
    """A backward pass needs the params of a block, and they are not installed."""


class SavedTensorChangedError(RuntimeError):
    """A tensor was changed in place after autograd had saved it for the backward pass."""


@dataclass(frozen=True, slots=True)
class ParamView:
    """A tensor that lies in a block's flat params."""

    block: BlockIndex
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements of `dtype`, from the start of the flat vector


class PlacedParams(Protocol):
    """The params of a layer that is streamed: its pieces are installed and removed while it is computed."""

    @property
    def block(self) -> BlockIndex: ...

    def place_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the byte offset in the flat vector of a tensor in the installed params, None for other tensors."""

    def flat_at(self, offset: int) -> tuple[torch.Tensor, int]:
        """Returns the params around a byte offset, for the graph node that runs now, and their first byte's offset."""


class BorrowedParams:
    """The installed params: whole flat vectors by block, and the params of a layer that is streamed in pieces."""

    def __init__(self) -> None:
        self.flats: dict[BlockIndex, torch.Tensor] = {}
        self.streamed: PlacedParams | None = None

    def find(self, tensor: torch.Tensor) -> ParamView | None:
        """Returns the place of a tensor that lies in the installed params, None for other tensors."""
        storage = tensor.untyped_storage()._cdata
        for block, flat in self.flats.items():
            first = int(tensor.storage_offset()) * tensor.itemsize - int(flat.storage_offset()) * flat.itemsize
            if flat.untyped_storage()._cdata == storage and 0 <= first < flat.nbytes:
                return ParamView(block, tensor.dtype, tensor.shape, tensor.stride(), first // tensor.itemsize)
        if self.streamed is not None and (place := self.streamed.place_of(tensor)) is not None:
            offset = place // tensor.itemsize
            return ParamView(self.streamed.block, tensor.dtype, tensor.shape, tensor.stride(), offset)
        return None

    def view(self, place: ParamView) -> torch.Tensor:
        """Returns the tensor at a place, as a view of the installed params.

        Raises:
            ParamsNotLentError: the params of its block are not installed.
        """
        if self.streamed is not None and place.block == self.streamed.block:
            flat, start = self.streamed.flat_at(place.offset * place.dtype.itemsize)
        elif place.block in self.flats:
            flat, start = self.flats[place.block], 0
        else:
            raise ParamsNotLentError(
                f"backward reads params of block {place.block}, and only those of {sorted(self.flats)} are installed; "
                "install them before the backward pass"
            )
        flat = flat.view(place.dtype)
        first = int(flat.storage_offset()) + place.offset - start // place.dtype.itemsize
        return flat.as_strided(place.shape, place.stride, first)

    def noted_by_place(self, entering: torch.Tensor) -> AbstractContextManager[object]:
        """Returns a context in which autograd records streamed params by their place.

        The backward pass must go through the whole graph in one call.
        The pieces of a streamed layer are installed only while their modules run. Params that are installed whole stay
        until `remove`, so autograd may save them as usual.
        """
        if self.streamed is None:
            return contextlib.nullcontext()
        hooks = _Hooks(entering, RECOMPUTE_ALL, UnitSwaps(None), self, None)
        return saved_tensors_hooks(hooks.pack, hooks.unpack)


@dataclass(frozen=True, slots=True)
class _Kept:
    tensor: torch.Tensor
    version: int


class _Entry(torch.autograd.Function):
    """The start of the graph: collects the gradient of the hidden state. Unlike a leaf, it does not keep that state."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, hidden: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
        ctx.grads = grads
        return hidden.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.grads.append(grad.contiguous())
        return None, None, None


class SavedGraph:
    """The autograd graph of one block and micro-batch."""

    def __init__(self, edge: GradientEdge, grads: list[torch.Tensor]) -> None:
        self._edge = edge
        self._grads = grads

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        """Runs the backward pass and returns the gradient of the input hidden state. May be called once."""
        torch.autograd.backward(self._edge, grad)
        return self._grads.pop()


def keep_graph(
    layer: Layer, entering: torch.Tensor, policy: BlockActivations, swaps: UnitSwaps, params: BorrowedParams
) -> tuple[torch.Tensor, SavedGraph]:
    """Computes a layer and keeps its graph. The backward pass reads `params` again."""
    names = Names() if policy.swapped else None
    hooks = _Hooks(entering, policy, swaps, params, names)
    grads: list[torch.Tensor] = []
    with torch.enable_grad():
        anchor = torch.empty(0, requires_grad=True)
        hidden = _Entry.apply(anchor, entering, grads)  # type: ignore[no-untyped-call]
        with saved_tensors_hooks(hooks.pack, hooks.unpack), names or contextlib.nullcontext():
            output = layer(hidden)
        edge = get_gradient_edge(output)
    return output.detach(), SavedGraph(edge, grads)


class _Hooks:
    def __init__(
        self,
        entering: torch.Tensor,
        policy: BlockActivations,
        swaps: UnitSwaps,
        params: BorrowedParams,
        names: Names | None,
    ) -> None:
        self._entering = storage_ref(entering)
        self._device = entering.device
        self._policy = policy
        self._swaps = swaps
        self._params = params
        self._names = names

    def pack(self, tensor: torch.Tensor) -> Any:
        if self._names is None:
            return self._pack(tensor)
        self._names.paused = True
        try:
            return self._pack(tensor)
        finally:
            self._names.paused = False

    def _pack(self, tensor: torch.Tensor) -> Any:
        place = self._params.find(tensor) if tensor.numel() else None
        if place is not None:
            return place
        if tensor.device == self._device and is_worth_swapping(tensor) and self._is_swapped(tensor):
            return self._swaps.swap_out(tensor)
        return _Kept(tensor.detach(), tensor._version)

    def _is_swapped(self, tensor: torch.Tensor) -> bool:
        ref = storage_ref(tensor)
        if ref == self._entering:
            return self._policy.swap_input
        # A tensor that no operator of the block made, such as a mask, stays on the device anyway.
        maker = self._names.maker.get(ref) if self._names is not None else None
        return maker is not None and self._policy.place_of(*maker) is Place.SWAPPED

    def unpack(self, packed: Any) -> torch.Tensor:
        match packed:
            case ParamView():
                return self._params.view(packed)
            case SwappedView():
                return packed.tensor()
        assert isinstance(packed, _Kept)
        if packed.tensor._version != packed.version:
            raise SavedTensorChangedError(
                f"a tensor of shape {tuple(packed.tensor.shape)} was changed in place after autograd had saved it; the "
                "model cannot be trained so, with or without blocks"
            )
        return packed.tensor
