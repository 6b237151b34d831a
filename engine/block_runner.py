"""Runs a partitioned model block by block: prologue, block loop, epilogue.

Blocks are the outer loop and micro-batches the inner one, so a block's params are needed twice a step however many
micro-batches there are. Only the input of each block is kept; backward computes the block again. Random state is keyed
by (seed, step, micro-batch, block): the second computation draws what the first drew.

Shapes: B examples, T tokens, H hidden, V vocabulary, S tokens of a slice.
"""

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from windlass.engine.partition import (
    Partition,
    StandIn,
    hidden_of,
    restore_buffers,
    run_on_meta,
    swap_buffers_to_meta,
)
from windlass.storage.ids import BlockIndex

IGNORED_TARGET = -100
# Logits of one slice in fp32 stay under this many elements, whatever the vocabulary.
MAX_LOGITS_NUMEL = 64 * 2**20


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What the model's own forward hands to a layer, less the hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    by_keyword: bool


class _PrologueDone(Exception):
    """Ends the model's forward at its last stand-in; what follows belongs to the head."""


class GradBuffer:
    """The gradient of one block on the device, flat, accumulated over micro-batches in the buffer's dtype."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.touched: set[str] = set()

    def add(self, name: str, offset: int, grad: torch.Tensor) -> None:
        """Adds one tensor's gradient at its place."""
        view = self.flat[offset : offset + grad.numel()]
        if name in self.touched:
            view.add_(grad.reshape(-1))
        else:
            view.copy_(grad.reshape(-1))
            self.touched.add(name)

    def finish(self, params: Sequence[tuple[str, int, int]]) -> None:
        """Zeroes what no micro-batch reached, such as an expert without tokens. `params`: (name, offset, numel)."""
        for name, offset, numel in params:
            if name not in self.touched:
                self.flat[offset : offset + numel].zero_()


@dataclass(slots=True)
class LossSums:
    """Sums over target tokens."""

    loss_sum: float = 0.0
    num_targets: int = 0
    num_correct: int = 0


def random_key(seed: int, step: int, microbatch: int, block: int) -> int:
    """The seed of everything random in one block of one micro-batch."""
    digest = hashlib.blake2b(f"{seed}/{step}/{microbatch}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class BlockRunner:
    """Computes blocks whose params are installed; keeps the activations of one step between its calls.

    `install` lends flat device buffers to the module tree; they must stay as they are until `remove`.
    """

    def __init__(self, partition: Partition, device: torch.device, seed: int) -> None:
        self.partition = partition
        self.device = device
        self.seed = seed
        self.num_layers = len(partition.layers)
        self.model = partition.model
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        self._mode_on_call: Any = None
        for i, layer in enumerate(partition.layers):
            partition.layer_list[i] = StandIn(layer, i, self._on_call)
        self.inputs: list[list[torch.Tensor]] = []  # inputs[b][m]: what block b + 1 reads, (B, T, H)
        self.calls: list[list[LayerCall]] = []  # calls[m][layer]
        self.grads: list[torch.Tensor] = []  # grads[m]: of the hidden state that flows backward

    @property
    def num_tokens_of_head_slice(self) -> int:
        """Tokens whose logits exist at once."""
        return max(64, MAX_LOGITS_NUMEL // int(self.model.config.vocab_size))

    # --- params -----------------------------------------------------------------------------------------------------

    def install(
        self, block: BlockIndex, flats: Mapping[BlockIndex, torch.Tensor], grads: Mapping[BlockIndex, GradBuffer]
    ) -> None:
        """Puts views of flat params into the places that `block`'s operation reads; gradients go to `grads`."""
        for site in self.partition.sites[block]:
            view = flats[site.block][site.param.offset : site.param.offset + site.param.numel]
            param = nn.Parameter(view.view(site.param.shape), requires_grad=bool(grads))
            if grads:
                buffer = grads[site.block]
                name, offset = site.param.name, site.param.offset

                def take(p: torch.Tensor, buffer: GradBuffer = buffer, name: str = name, offset: int = offset) -> None:
                    assert p.grad is not None
                    buffer.add(name, offset, p.grad)
                    p.grad = None

                param.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
            site.module._parameters[site.attribute] = param

    def remove(self, block: BlockIndex) -> None:
        """Takes the views out again: the buffers may be reused."""
        for site in self.partition.sites[block]:
            site.module._parameters[site.attribute] = site.placeholder

    # --- operations -------------------------------------------------------------------------------------------------

    def forward(self, block: BlockIndex, step: int, batch: Sequence[torch.Tensor], *, keep: bool = True) -> None:
        """Forward of the embedding or a layer for every micro-batch of `batch` (token ids, (B, T)), without a graph."""
        if block == 0:
            self.inputs, self.calls, self.grads = [[]], [], []
        outputs = []
        with torch.no_grad():
            for m, ids in enumerate(batch):
                self._seed(step, m, block)
                if block == 0:
                    hidden, calls = self._prologue(ids)
                    self.calls.append(calls)
                else:
                    hidden = self._layer(block, self.inputs[-1][m], self.calls[m])
                outputs.append(hidden)
        if block == 0 or not keep:
            self.inputs[-1] = outputs
        else:
            self.inputs.append(outputs)

    def head(
        self, step: int, targets: Sequence[torch.Tensor], *, train: bool = True, loss_scale: float = 1.0
    ) -> LossSums:
        """Loss of every micro-batch, over slices of tokens; with `train` its gradients as well, times `loss_scale`.

        Normalised by the target tokens of the whole step. Consumes the last layer's output.
        """
        sums = LossSums()
        num_targets = sum(int((t != IGNORED_TARGET).sum()) for t in targets)
        hidden_states = self.inputs.pop()
        for m, target in enumerate(targets):
            self._seed(step, m, self.partition.head)
            grad = self._head_of_microbatch(hidden_states[m], target, num_targets, sums, loss_scale if train else None)
            if train:
                self.grads.append(grad)
            hidden_states[m] = torch.empty(0)
        sums.num_targets = num_targets
        return sums

    def backward(self, block: BlockIndex, step: int, batch: Sequence[torch.Tensor]) -> None:
        """Computes a block again, with a graph, and goes backward through it, for every micro-batch."""
        inputs = self.inputs.pop() if block > 0 else []
        for m, ids in enumerate(batch):
            self._seed(step, m, block)
            if block == 0:
                hidden, _ = self._prologue(ids)
                torch.autograd.backward(hidden, self.grads[m])
                self.grads[m] = torch.empty(0)
                continue
            entering = inputs[m].detach().requires_grad_(True)
            inputs[m] = torch.empty(0)
            output = self._layer(block, entering, self.calls[m])
            torch.autograd.backward(output, self.grads[m])
            assert entering.grad is not None
            self.grads[m] = entering.grad
        if block == 0:
            self.inputs, self.calls, self.grads = [], [], []

    # --- inside -----------------------------------------------------------------------------------------------------

    def _seed(self, step: int, microbatch: int, block: int) -> None:
        torch.manual_seed(random_key(self.seed, step, microbatch, block))

    def _on_call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._mode_on_call(index, args, kwargs)

    def _as_layer_output(self, hidden: torch.Tensor) -> Any:
        num = self.partition.num_returned
        return hidden if num is None else (hidden, *([None] * (num - 1)))

    def _prologue(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[LayerCall]]:
        """The model's own forward up to its first layer, and what it would call each layer with.

        No attention mask: with causal attention, padding on the right never reaches an earlier token, and its targets
        are ignored.
        """
        calls: list[LayerCall] = []
        entering: list[torch.Tensor] = []

        def record(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden, by_keyword = hidden_of(index, args, kwargs)
            entering.append(hidden)
            kwargs = {k: v for k, v in kwargs.items() if not (by_keyword and k == "hidden_states")}
            calls.append(LayerCall(args if by_keyword else args[1:], kwargs, by_keyword))
            if index == self.num_layers - 1:
                raise _PrologueDone
            return self._as_layer_output(hidden)

        self._mode_on_call = record
        with contextlib.suppress(_PrologueDone):
            self.model(input_ids=ids, use_cache=False)
        assert all(hidden is entering[0] for hidden in entering)
        return entering[0], calls

    def _layer(self, block: BlockIndex, hidden: torch.Tensor, calls: list[LayerCall]) -> torch.Tensor:
        call = calls[block - 1]
        layer = self.partition.layers[block - 1]
        if call.by_keyword:
            result = layer(*call.args, hidden_states=hidden, **call.kwargs)
        else:
            result = layer(hidden, *call.args, **call.kwargs)
        output: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return output

    def _epilogue(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's own forward after its last layer: (1, S, H) to logits (1, S, V).

        What comes before runs on the meta device; the last stand-in hands over the real hidden state.
        """

        def resume(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if index == self.num_layers - 1:
                restore_buffers(buffers)
                return self._as_layer_output(hidden)
            return self._as_layer_output(hidden_of(index, args, kwargs)[0])

        self._mode_on_call = resume
        buffers = swap_buffers_to_meta(self.model)
        try:
            logits: torch.Tensor = run_on_meta(self.model, num_tokens=hidden.shape[1]).logits
        finally:
            restore_buffers(buffers)
        return logits

    def _head_of_microbatch(
        self, hidden: torch.Tensor, target: torch.Tensor, num_targets: int, sums: LossSums, loss_scale: float | None
    ) -> torch.Tensor:
        train = loss_scale is not None
        flat_hidden = hidden.reshape(1, -1, hidden.shape[-1])
        flat_target = target.reshape(-1)
        grad = torch.empty_like(flat_hidden) if train else flat_hidden
        size = self.num_tokens_of_head_slice
        for start in range(0, flat_target.numel(), size):
            piece = flat_target[start : start + size]
            entering = flat_hidden[:, start : start + size].detach().requires_grad_(train)
            with torch.set_grad_enabled(train):
                logits = self._epilogue(entering)[0].float()
                loss_sum = F.cross_entropy(logits, piece, ignore_index=IGNORED_TARGET, reduction="sum")
                if loss_scale is not None:
                    torch.autograd.backward(loss_sum / num_targets * loss_scale)
            sums.loss_sum += float(loss_sum.detach())
            sums.num_correct += int((logits.detach().argmax(-1) == piece).sum())
            if train:
                assert entering.grad is not None
                grad[:, start : start + size] = entering.grad
        return grad.view(hidden.shape)
