"""Runs a partitioned model block by block: prologue, block loop, epilogue.

Blocks are the outer loop and micro-batches the inner one, so a block's params are needed twice for each group of them,
however many there are. Unless a block's policy says otherwise, only its input is kept; backward computes it again.
Random state is keyed by (seed, step, micro-batch, block): the second computation draws what the first drew.

Shapes: B examples, T tokens, H hidden, V vocabulary, S tokens of a slice.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.nn import functional as F
from transformers import DynamicCache

from windlass.engine.activations import (
    ActivationStore,
    Layer,
    LayerCost,
    LentParams,
    Unit,
    generators_of,
    list_operators,
)
from windlass.engine.memory_plan import RECOMPUTE_ALL, BlockActivations
from windlass.engine.model.fake_mode import fake_tensors
from windlass.engine.model.grad_buffer import GradBuffer
from windlass.engine.model.partition import (
    ParamSite,
    Partition,
    StandIn,
    hidden_of,
    restore_buffers,
    run_beside_cache,
    run_on_meta,
    swap_buffers_to_meta,
)
from windlass.engine.model.streamed_layer import StreamedLayer
from windlass.engine.model.streamed_params import StreamedParams
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

    def without(self, value: object) -> "LayerCall":
        """None in place of one argument."""
        args = tuple(None if arg is value else arg for arg in self.args)
        return LayerCall(args, {k: None if v is value else v for k, v in self.kwargs.items()}, self.by_keyword)


class _PrologueDone(Exception):
    """Ends the model's forward at its last stand-in; what follows belongs to the head."""


@dataclass(slots=True)
class LossSums:
    """Sums over target tokens: tensors of the device, for which nothing has waited, 0-dim."""

    num_targets: int  # of the whole step
    loss_sum: torch.Tensor  # fp64
    num_correct: torch.Tensor  # int64

    @classmethod
    def nothing(cls, num_targets: int, device: torch.device) -> "LossSums":
        """Over no tokens yet."""
        zeros = (torch.zeros((), dtype=dtype, device=device) for dtype in (torch.float64, torch.int64))
        return cls(num_targets, *zeros)


def random_key(seed: int, step: int, microbatch: int, block: int) -> int:
    """The seed of everything random in one block of one micro-batch."""
    digest = hashlib.blake2b(f"{seed}/{step}/{microbatch}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _is_in_pieces(site: ParamSite, flats: Mapping[BlockIndex, torch.Tensor | StreamedParams]) -> bool:
    flat = flats[site.block]
    return isinstance(flat, StreamedParams) and site.param.offset < flat.bounds[-1]


class BlockRunner:
    """Computes blocks whose params are installed; keeps the activations of one step between its calls.

    `install` lends flat device buffers to the module tree; they must stay as they are until `remove`.
    """

    def __init__(
        self,
        partition: Partition,
        device: torch.device,
        seed: int,
        *,
        activations: Mapping[BlockIndex, BlockActivations] | None = None,
        store: ActivationStore | None = None,
    ) -> None:
        """`activations`: for layers; a block that is not named keeps its input and computes the rest again.

        Raises:
            ValueError: activations are given for a block that is no layer, or are to be swapped without a store.
        """
        self.partition = partition
        self.activations = dict(activations or {})  # may be others in the next step
        self._store = store
        self._check_activations()
        self.device = device
        self.seed = seed
        self.num_layers = len(partition.layers)
        self.model = partition.model
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        self._mode_on_call: Any = None
        self._params = LentParams()
        self._streamed: StreamedLayer | None = None  # the layer installed now, where its params are streamed
        self._sinks: Mapping[BlockIndex, GradBuffer] = {}
        self._with_functions: set[BlockIndex] = set()  # layers found to have Python autograd functions
        self._units: dict[tuple[int, int], Unit] = {}  # by block and micro-batch
        for i, layer in enumerate(partition.layers):
            partition.layer_list[i] = StandIn(layer, i, self._on_call)
        self.inputs: list[list[torch.Tensor]] = []  # inputs[b][m]: what block b + 1 reads, (B, T, H)
        self.calls: list[list[LayerCall]] = []  # calls[m][layer]
        self.grads: list[torch.Tensor] = []  # grads[m]: of the hidden state that flows backward
        self.first_microbatch = 0  # of the batch that is computed, in its step

    @property
    def num_tokens_of_head_slice(self) -> int:
        """Tokens whose logits exist at once."""
        return max(64, MAX_LOGITS_NUMEL // int(self.model.config.vocab_size))

    def _check_activations(self) -> None:
        for block, policy in self.activations.items():
            if not 1 <= block <= len(self.partition.layers):
                raise ValueError(
                    f"activations are given for block {block}; only layers have a choice, blocks 1 to "
                    f"{len(self.partition.layers)}"
                )
            if policy.swaps and self._store is None:
                raise ValueError(f"activations of block {block} are to be swapped, and there is no store for them")

    # --- params -----------------------------------------------------------------------------------------------------

    def install(
        self,
        block: BlockIndex,
        flats: Mapping[BlockIndex, torch.Tensor | StreamedParams],
        grads: Mapping[BlockIndex, GradBuffer],
    ) -> None:
        """Puts views of flat params into the places that `block`'s operation reads; gradients go to `grads`.

        Of a layer whose params are streamed, matrices are there only while the module that holds them runs.
        """
        self._params.flats = {b: flat for b, flat in flats.items() if isinstance(flat, torch.Tensor)}
        self._sinks = grads
        streamed = flats.get(block)
        if isinstance(streamed, StreamedParams):
            pieces = [site for site in self.partition.sites[block] if _is_in_pieces(site, flats)]
            self._streamed = StreamedLayer(block, streamed, pieces, goes_backward=bool(grads))
            self._params.streamed = self._streamed
        for site in self.partition.sites[block]:
            if _is_in_pieces(site, flats):
                continue
            flat, start = flats[site.block], site.param.offset
            if isinstance(flat, StreamedParams):
                start -= flat.bounds[-1]
                flat = flat.rest
            view = flat[start : start + site.param.numel].view(site.param.shape)
            site.module._parameters[site.attribute] = nn.Parameter(view, requires_grad=False)
        if grads:
            self._require_grads(block)

    def remove(self, block: BlockIndex) -> None:
        """Takes the views out again: the buffers may be reused."""
        if self._streamed is not None:
            self._streamed.end()
        self._streamed = self._params.streamed = None
        self._params.flats, self._sinks = {}, {}
        for site in self.partition.sites[block]:
            site.module._parameters[site.attribute] = site.placeholder

    def _require_grads(self, block: BlockIndex) -> None:
        for site in self.partition.sites[block]:
            param = site.module.get_parameter(site.attribute)
            if param is not site.placeholder:
                self._require_grad(site, param)
        if self._streamed is not None:
            self._streamed.on_param = self._require_grad

    def _require_grad(self, site: ParamSite, param: nn.Parameter) -> None:
        param.requires_grad_(True)
        # A held graph knows the param of the forward pass; its gradient goes where the backward pass wants it.
        param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            functools.partial(self._take_grad, site)
        )

    def _take_grad(self, site: ParamSite, param: torch.Tensor) -> None:
        assert param.grad is not None
        self._sinks[site.block].add(site.param.name, site.param.offset, param.grad)
        param.grad = None

    # --- operations -------------------------------------------------------------------------------------------------

    def forward(self, block: BlockIndex, step: int, batch: Sequence[torch.Tensor], *, keep: bool = True) -> None:
        """Forward of the embedding or a layer for every micro-batch of `batch` (token ids, (B, T)).

        A batch is a step's or a group of its micro-batches, `first_microbatch` and those that follow. With `keep`, for
        training: what the backward pass needs is held as the block's policy says.
        """
        if block == 0:
            self.forget()
            self.inputs = [[]]
        policy = self.activations.get(block, RECOMPUTE_ALL) if keep else RECOMPUTE_ALL
        if policy.needs_grad:
            self._require_grads(block)
        outputs = []
        with torch.no_grad():
            for m, ids in enumerate(batch):
                self._begin_microbatch(step, m, block, is_last=m + 1 == len(batch))
                if block == 0:
                    hidden, calls = self._prologue(ids)
                    self.calls.append(calls)
                elif policy == RECOMPUTE_ALL:
                    hidden = self._layer(block, self.inputs[-1][m], self.calls[m])
                else:
                    hidden = self._forward_unit(block, m, policy)
                outputs.append(hidden)
        if block == 0 or not keep:
            self.inputs[-1] = outputs
        else:
            self.inputs.append(outputs)

    def head(
        self,
        step: int,
        targets: Sequence[torch.Tensor],
        *,
        train: bool = True,
        loss_scale: float = 1.0,
        sums: LossSums | None = None,
    ) -> LossSums:
        """Loss of every micro-batch, over slices of tokens; with `train` its gradients as well, times `loss_scale`.

        Normalised by the target tokens of the whole step. Consumes the last layer's output. `sums`: what the step's
        groups before this one came to, and the targets of all of them; None: the batch is the whole step, and its
        targets are counted, for which the host waits.
        """
        self._prefetch(self.num_layers, 0)
        if sums is None:
            num_targets = sum(int((target != IGNORED_TARGET).sum()) for target in targets)
            sums = LossSums.nothing(num_targets, self.device)
        hidden_states = self.inputs.pop()
        for m, target in enumerate(targets):
            self._seed(step, m, self.partition.head)
            grad = self._head_of_microbatch(hidden_states[m], target, sums, loss_scale if train else None)
            if train:
                self.grads.append(grad)
            hidden_states[m] = torch.empty(0)
        return sums

    def backward(self, block: BlockIndex, step: int, batch: Sequence[torch.Tensor]) -> None:
        """Goes backward through a block for every micro-batch, and first computes again what is not held of it."""
        inputs = self.inputs.pop() if block > 0 else []
        for m, ids in enumerate(batch):
            self._begin_microbatch(step, m, block, is_last=m + 1 == len(batch))
            if block == 0:
                self._backward_of_prologue(m, ids)
                continue
            self._prefetch(*((block, m + 1) if m + 1 < len(batch) else (block - 1, 0)))
            unit = self._units.pop((block, m), None)
            if unit is not None:
                self.grads[m] = unit.backward(self._layer_of(block, m), self.grads[m])
            else:
                self.grads[m] = self._backward_again(block, m, inputs)
        if block == 0:
            self.forget()

    def forget(self) -> None:
        """Lets go of all that is held of a step, wherever it is."""
        for unit in self._units.values():
            unit.drop()
        self._units.clear()
        self.inputs, self.calls, self.grads = [], [], []

    def operators(self, block: BlockIndex, num_examples: int, num_tokens: int) -> LayerCost:
        """What the operators of a layer put out and cost for one micro-batch; as `imagined`."""
        with self.imagined(block, num_examples, num_tokens) as (layer, entering):
            return list_operators(layer, entering)

    @contextlib.contextmanager
    def imagined(self, block: BlockIndex, num_examples: int, num_tokens: int) -> Iterator[tuple[Layer, torch.Tensor]]:
        """A layer, and what enters it for one micro-batch, in fake tensors: nothing is computed or allocated.

        No params may be installed. A Python function that hands tensors to a kernel of its own gets a RuntimeError.
        """
        # Else it would get addresses at which there is nothing; on a GPU that ends the process.
        with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
            fake = fake_tensors()
        with fake, torch.no_grad():
            self._install_empty(BlockIndex(0))
            ids = torch.zeros(num_examples, num_tokens, dtype=torch.long, device=self.device)
            hidden, calls = self._prologue(ids)
            self.remove(BlockIndex(0))
            self._install_empty(block)
            try:
                yield lambda entering: self._layer(block, entering, calls), hidden
            finally:
                self.remove(block)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _install_empty(self, block: BlockIndex) -> None:
        blocks = self.partition.layout.blocks
        dtype = next(self.model.parameters()).dtype
        flats = {
            b: torch.empty(blocks[b].numel, dtype=dtype, device=self.device)
            for b in self.partition.layout.shared[block]
        }
        self.install(block, flats, {b: GradBuffer(flat) for b, flat in flats.items()})

    def _forward_unit(self, block: BlockIndex, microbatch: int, policy: BlockActivations) -> torch.Tensor:
        """One layer and micro-batch; what backward needs is held, and the input with it or not at all."""
        entering = self.inputs[-1][microbatch]
        self.inputs[-1][microbatch] = torch.empty(0)
        unit = Unit(policy, self._store, self._params, copies=block in self._with_functions)
        self._units[block, microbatch] = unit
        output = unit.forward(self._layer_of(block, microbatch), entering)
        if unit.has_function:
            self._with_functions.add(block)
        return output

    # Functions of their own: nothing of one micro-batch is on the device while the next is computed.

    def _backward_of_prologue(self, microbatch: int, ids: torch.Tensor) -> None:
        hidden, _ = self._prologue(ids)
        torch.autograd.backward(hidden, self.grads[microbatch])
        self.grads[microbatch] = torch.empty(0)

    def _backward_again(self, block: BlockIndex, microbatch: int, inputs: list[torch.Tensor]) -> torch.Tensor:
        """Computes a layer again from its input alone, which is let go of; returns the gradient of that."""
        entering = inputs[microbatch].detach().requires_grad_(True)
        inputs[microbatch] = torch.empty(0)
        with self._params.noted_by_place(entering):
            output = self._layer(block, entering, self.calls[microbatch])
        torch.autograd.backward(output, self.grads[microbatch])
        assert entering.grad is not None
        return entering.grad

    def _prefetch(self, block: int, microbatch: int) -> None:
        """Begins to bring back what one block's backward pass for one micro-batch needs."""
        unit = self._units.get((block, microbatch))
        if unit is not None:
            unit.prefetch()

    def _layer_of(self, block: BlockIndex, microbatch: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda hidden: self._layer(block, hidden, self.calls[microbatch])

    def _begin_microbatch(self, step: int, microbatch: int, block: int, *, is_last: bool) -> None:
        self._seed(step, microbatch, block)
        if self._streamed is not None:
            self._streamed.begin_microbatch(is_last=is_last)

    def _seed(self, step: int, microbatch: int, block: int) -> None:
        key = random_key(self.seed, step, self.first_microbatch + microbatch, block)
        # Not `torch.manual_seed`: for each kind of device that a machine does not have, it keeps a stack trace.
        for generator in generators_of(self.device):
            generator.manual_seed(key)

    def _on_call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._mode_on_call(index, args, kwargs)

    def _as_layer_output(self, hidden: torch.Tensor) -> Any:
        num = self.partition.num_returned
        return hidden if num is None else (hidden, *([None] * (num - 1)))

    def _prologue(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[LayerCall]]:
        """The model's own forward up to its first layer, and what it would call each layer with.

        No attention mask: with causal attention, padding on the right never reaches an earlier token, and its targets
        are ignored.

        The empty cache, which layers do not get, is there as in `run_on_meta`: without one, the masking code would wait
        for the device to look at position values, and fake tensors have none.
        """
        calls: list[LayerCall] = []
        cache = DynamicCache()
        entering: list[torch.Tensor] = []

        def record(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden, by_keyword = hidden_of(index, args, kwargs)
            entering.append(hidden)
            kwargs = {k: v for k, v in kwargs.items() if not (by_keyword and k == "hidden_states")}
            calls.append(LayerCall(args if by_keyword else args[1:], kwargs, by_keyword).without(cache))
            if index == self.num_layers - 1:
                raise _PrologueDone
            return self._as_layer_output(hidden)

        self._mode_on_call = record
        with contextlib.suppress(_PrologueDone):
            run_beside_cache(self.model, ids, cache)
        self._mode_on_call = None  # it would hold what it has recorded
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
            self._mode_on_call = None  # it would hold the hidden state
        return logits

    def _head_of_microbatch(
        self, hidden: torch.Tensor, target: torch.Tensor, sums: LossSums, loss_scale: float | None
    ) -> torch.Tensor:
        train = loss_scale is not None
        flat_hidden = hidden.reshape(1, -1, hidden.shape[-1])
        flat_target = target.reshape(-1)
        grad = torch.empty_like(flat_hidden) if train else flat_hidden
        size = self.num_tokens_of_head_slice
        for start in range(0, flat_target.numel(), size):
            stop = start + size
            slice_grad = self._head_of_slice(flat_hidden[:, start:stop], flat_target[start:stop], sums, loss_scale)
            if train:
                assert slice_grad is not None
                grad[:, start:stop] = slice_grad
        return grad.view(hidden.shape)

    def _head_of_slice(
        self, hidden: torch.Tensor, target: torch.Tensor, sums: LossSums, loss_scale: float | None
    ) -> torch.Tensor | None:
        """A function of its own: the logits of one slice are gone before those of the next are computed."""
        train = loss_scale is not None
        entering = hidden.detach().requires_grad_(train)
        with torch.set_grad_enabled(train):
            logits = self._epilogue(entering)[0].float()
            loss_sum = F.cross_entropy(logits, target, ignore_index=IGNORED_TARGET, reduction="sum")
            if loss_scale is not None:
                torch.autograd.backward(loss_sum / sums.num_targets * loss_scale)
        sums.loss_sum += loss_sum.detach()
        sums.num_correct += (logits.detach().argmax(-1) == target).sum()
        return entering.grad
