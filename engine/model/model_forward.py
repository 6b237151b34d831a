"""Runs a partitioned model's own forward in parts: the prologue, a layer, the epilogue.

Stand-ins take the places of the layers in the model. In the prologue they record the arguments of each layer. In the
epilogue the last one returns the hidden state.

Shapes: B examples, T tokens, H hidden, V vocabulary, S tokens of a slice.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from windlass.engine.model.epilogue_calls import EpilogueCalls
from windlass.engine.model.partition import (
    Partition,
    StandIn,
    hidden_of,
    restore_buffers,
    run_beside_cache,
    run_on_meta,
    swap_buffers_to_meta,
)
from windlass.storage.ids import BlockIndex


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The arguments with which the model's own forward calls a layer, without the hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    by_keyword: bool

    def without(self, value: object) -> "LayerCall":
        """Returns the call with None in place of one argument."""
        args = tuple(None if arg is value else arg for arg in self.args)
        return LayerCall(args, {k: None if v is value else v for k, v in self.kwargs.items()}, self.by_keyword)


class _PrologueDone(Exception):
    """Ends the model's forward at the last layer. The code after it belongs to the head."""


class ModelForward:
    """The parts of a model's own forward. Their params must be installed."""

    def __init__(self, partition: Partition) -> None:
        """Puts stand-ins into the model."""
        self._partition = partition
        self._model = partition.model
        self._last_layer = len(partition.layers) - 1
        self._mode_on_call: Any = None
        self._epilogues: dict[torch.Size, EpilogueCalls] = {}  # of the running head, by the shape of the hidden state
        for i, layer in enumerate(partition.layers):
            partition.layer_list[i] = StandIn(layer, i, self._on_call)

    def prologue(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[LayerCall]]:
        """Runs the model's own forward up to its layers. Returns the first hidden state and each layer's arguments.

        `ids`: token ids, (B, T). The hidden state is (B, T, H).

        There is no attention mask, because with causal attention padding on the right never affects earlier tokens, and
        its targets are ignored.

        Layers do not get the empty cache. It serves the masking code, as in `run_on_meta`: without a cache that code
        would wait for the device to read position values, and fake tensors have none.
        """
        calls: list[LayerCall] = []
        cache = DynamicCache()
        entering: list[torch.Tensor] = []

        def record(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden, by_keyword = hidden_of(index, args, kwargs)
            entering.append(hidden)
            kwargs = {k: v for k, v in kwargs.items() if not (by_keyword and k == "hidden_states")}
            calls.append(LayerCall(args if by_keyword else args[1:], kwargs, by_keyword).without(cache))
            if index == self._last_layer:
                raise _PrologueDone
            return self._as_layer_output(hidden)

        self._mode_on_call = record
        with contextlib.suppress(_PrologueDone):
            run_beside_cache(self._model, ids, cache)
        self._mode_on_call = None  # the closure would keep the recorded tensors
        assert all(hidden is entering[0] for hidden in entering)
        return entering[0], calls

    def layer(self, block: BlockIndex, hidden: torch.Tensor, calls: list[LayerCall]) -> torch.Tensor:
        """Runs a layer: (B, T, H) to (B, T, H). `calls`: the arguments of all layers."""
        call = calls[block - 1]
        layer = self._partition.layers[block - 1]
        if call.by_keyword:
            result = layer(*call.args, hidden_states=hidden, **call.kwargs)
        else:
            result = layer(hidden, *call.args, **call.kwargs)
        output: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return output

    def epilogue(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes what the model computes after its last layer: (1, S, H) to logits (1, S, V).

        The first call of a head with a hidden state of some shape runs the model's own forward and records it. Later
        ones repeat the recorded calls, which saves the host the code before the last layer.
        """
        calls = self._epilogues.get(hidden.shape)
        if calls is not None and calls.is_repeatable:
            return calls.repeat(hidden)
        if calls is None:
            calls = EpilogueCalls(self._model, self._partition.called_after_layers, hidden)
            self._epilogues[hidden.shape] = calls
        return self._own_epilogue(hidden, calls)

    def end_head(self) -> None:
        """Forgets the recorded calls, because they refer to the installed params."""
        self._epilogues.clear()

    # --- private ----------------------------------------------------------------------------------------------------

    def _own_epilogue(self, hidden: torch.Tensor, calls: EpilogueCalls) -> torch.Tensor:
        """Runs the model's own forward: on the meta device up to the last layer, whose stand-in returns `hidden`."""
        with contextlib.ExitStack() as stack:

            def resume(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                if index == self._last_layer:
                    restore_buffers(buffers)
                    stack.enter_context(calls)
                    return self._as_layer_output(hidden)
                return self._as_layer_output(hidden_of(index, args, kwargs)[0])

            self._mode_on_call = resume
            buffers = swap_buffers_to_meta(self._model)
            try:
                logits: torch.Tensor = run_on_meta(self._model, num_tokens=hidden.shape[1]).logits
            finally:
                restore_buffers(buffers)
                self._mode_on_call = None  # the closure would keep the hidden state
        calls.end(logits)
        return logits

    def _on_call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._mode_on_call(index, args, kwargs)

    def _as_layer_output(self, hidden: torch.Tensor) -> Any:
        num = self._partition.num_returned
        return hidden if num is None else (hidden, *([None] * (num - 1)))
