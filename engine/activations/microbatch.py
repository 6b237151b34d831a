"""Computes one block for one micro-batch: its forward pass and its backward pass."""

import torch

from windlass.engine.activations.saved_graph import BorrowedParams, SavedGraph, keep_graph
from windlass.engine.activations.saved_tensors import SwappedView, UnitSwaps
from windlass.engine.activations.selective_recompute import Layer, SelectiveRecompute, record
from windlass.engine.activations.store import ActivationStore
from windlass.engine.memory_plan import BlockActivations


class Unit:
    """The forward and backward pass of one block and micro-batch, with the activations that a policy holds."""

    def __init__(
        self, policy: BlockActivations, store: ActivationStore | None, params: BorrowedParams, *, copies: bool
    ) -> None:
        """`copies`: hold copies of operators' outputs, for a layer that is known to have Python autograd functions."""
        self.has_function = copies  # the layer has a Python autograd function; known after the forward pass
        self._policy = policy
        self._swaps = UnitSwaps(store)
        self._params = params
        self._entering: torch.Tensor | SwappedView | None = None
        self._replay: SelectiveRecompute | None = None
        self._graph: SavedGraph | None = None

    def forward(self, layer: Layer, entering: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output without a graph. The policy decides whether the input is held."""
        policy = self._policy
        if policy.recompute:
            # Swapped first, because the backward pass needs it first.
            self._entering = self._swaps.swap_out(entering) if policy.swap_input else entering
        if not policy.recompute:
            output, self._graph = keep_graph(layer, entering, policy, self._swaps, self._params)
        elif policy.needs_grad:
            output, self._replay, self.has_function = record(
                layer, entering, policy, self._swaps, copies=self.has_function
            )
        else:
            output = layer(entering)
        self._swaps.seal()
        return output

    def prefetch(self) -> None:
        """Starts to copy swapped storages back, in the order in which the backward pass needs them."""
        self._swaps.prefetch(latest_first=self._graph is not None)

    def backward(self, layer: Layer, grad: torch.Tensor) -> torch.Tensor:
        """Runs the backward pass and returns the gradient of the input. May be called once."""
        try:
            if self._graph is not None:
                return self._graph.backward(grad)
            return self._backward_again(layer, grad)
        finally:
            self.drop()

    def drop(self) -> None:
        """Releases all held activations."""
        self._swaps.drop_all()
        self._entering = self._replay = self._graph = None

    def _backward_again(self, layer: Layer, grad: torch.Tensor) -> torch.Tensor:
        entering = self._entering.tensor() if isinstance(self._entering, SwappedView) else self._entering
        assert entering is not None
        entering = entering.detach().requires_grad_()
        self._entering = None
        with self._params.noted_by_place(entering):
            if self._replay is None:
                with torch.enable_grad():
                    output = layer(entering)
            else:
                output = self._replay.run(layer, entering)
        torch.autograd.backward(output, grad)
        assert entering.grad is not None
        return entering.grad
