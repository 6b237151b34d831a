"""Runs a partitioned model block by block: prologue, block loop, epilogue.

Blocks are the outer loop and micro-batches the inner one. So each group of micro-batches needs a block's params only
twice. By default only a block's input is kept, and the backward pass recomputes the block. Random state is seeded by
(seed, step, micro-batch, block), so that the recomputation draws the same numbers.

Shapes: B examples, T tokens, H hidden, V vocabulary, S tokens of a slice.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.autograd.graph import get_gradient_edge
from transformers import DynamicCache

from windlass.engine.activations import (
    ActivationStore,
    BorrowedParams,
    Layer,
    LayerCost,
    Unit,
    generators_of,
    list_operators,
)
from windlass.engine.lanes import LaneDivision
from windlass.engine.linear_parts import CutEmbedding, CutLinear, MatrixParts, WholeMatrix
from windlass.engine.memory_plan import RECOMPUTE_ALL, BlockActivations, summed_in_fp32
from windlass.engine.model.epilogue_calls import EpilogueCalls
from windlass.engine.model.fake_mode import fake_tensors
from windlass.engine.model.fused_kernels import add_fused_loss
from windlass.engine.model.grad_buffer import GradBuffer, GradSink, LaneSink, SliceSink
from windlass.engine.model.head_slices import (
    IGNORED_TARGET,
    LossSums,
    add_loss,
    projections_in_place,
)
from windlass.engine.model.layout import UnsupportedArchitectureError
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
from windlass.engine.slices import num_piece_tokens, num_slice_tokens
from windlass.storage.ids import BlockIndex, HeadSlices, ModelKernel


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


@dataclass(slots=True)
class GroupActivations:
    """The activations of a group of micro-batches between its passes; see the attributes of `BlockRunner`."""

    inputs: list[list[torch.Tensor]] = field(default_factory=list)
    calls: list[list[LayerCall]] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    units: dict[tuple[int, int], Unit] = field(default_factory=dict)
    first_microbatch: int = 0


class ParamsChangedError(RuntimeError):
    """The model's code writes to its own parameters. An operation's params may serve the next one, or be read again."""


class _PrologueDone(Exception):
    """Ends the model's forward at the last layer. The code after it belongs to the head."""


def random_key(seed: int, step: int, microbatch: int, block: int) -> int:
    """Returns the random seed for one block and one micro-batch."""
    digest = hashlib.blake2b(f"{seed}/{step}/{microbatch}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _is_in_pieces(site: ParamSite, flats: Mapping[BlockIndex, torch.Tensor | StreamedParams]) -> bool:
    flat = flats[site.block]
    return isinstance(flat, StreamedParams) and site.param.offset < flat.bounds[-1]


class BlockRunner:
    """Computes blocks whose params are installed, and keeps the activations of one step between calls.

    `install` puts views of flat device buffers into the module tree. The buffers must not change until `remove`.
    """

    def __init__(
        self,
        partition: Partition,
        device: torch.device,
        seed: int,
        *,
        activations: Mapping[BlockIndex, BlockActivations] | None = None,
        store: ActivationStore | None = None,
        head_slices: HeadSlices = HeadSlices.LARGE,
        lanes: LaneDivision | None = None,
        kernels: Collection[ModelKernel] = (),
        cut_matrices: int | None = None,
    ) -> None:
        """`activations`: policies of layers; by default a layer keeps its input and recomputes the rest.

        `lanes`: the lanes of a step; None if there is only one. `kernels`: those of the head are used; the caller
        installs the others into the model. `cut_matrices`: as in the job's `TrainingConfig`.

        Raises:
            ValueError: a policy is given for a block that is no layer, or swaps without a store.
        """
        self.partition = partition
        self.activations = dict(activations or {})  # the caller may change it between steps
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
        self._head_slices = head_slices
        self._cut = {block.index: self._cut_modules(block.index, cut_matrices) for block in partition.layout.blocks}
        self._lanes = lanes
        self._has_fused_loss = ModelKernel.LIGER_CROSS_ENTROPY in kernels
        self._has_fp32_product = ModelKernel.FP32_PRODUCT in kernels
        self._epilogues: dict[torch.Size, EpilogueCalls] = {}  # of the running head, by the shape of the hidden state
        self._mode_on_call: Any = None
        self._params = BorrowedParams()
        self._streamed: StreamedLayer | None = None  # the installed block, if its params are streamed
        self._versions: dict[BlockIndex, int] = {}  # of the installed params when they were installed
        self._sinks: Mapping[BlockIndex, GradSink] = {}
        self._with_functions: set[BlockIndex] = set()  # layers that are known to have Python autograd functions
        self._units: dict[tuple[int, int], Unit] = {}  # by block and micro-batch
        for i, layer in enumerate(partition.layers):
            partition.layer_list[i] = StandIn(layer, i, self._on_call)
        self.inputs: list[list[torch.Tensor]] = []  # inputs[b][m]: the input of block b + 1, (B, T, H)
        self.calls: list[list[LayerCall]] = []  # calls[m][layer]
        self.grads: list[torch.Tensor] = []  # grads[m]: gradient of the last hidden state of the backward pass
        self.first_microbatch = 0  # index in the step of the current batch's first micro-batch

    @property
    def num_tokens_of_head_slice(self) -> int:
        """The number of tokens whose logits exist at the same time."""
        return num_slice_tokens(self._head_slices, self._vocab_size)

    def summed_in_fp32(self, num_tokens: int) -> set[int]:
        """Returns the blocks whose gradients are summed in fp32 where a micro-batch has up to `num_tokens` tokens."""
        return summed_in_fp32(self.partition.layout.shared, is_sliced=num_tokens > self.num_tokens_of_head_slice)

    @property
    def _vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    def has_function(self, block: BlockIndex) -> bool:
        """Returns whether a layer has a Python autograd function, as far as its forward passes have shown."""
        return block in self._with_functions

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
        grads: Mapping[BlockIndex, GradSink],
    ) -> None:
        """Puts views of flat params into the modules that `block`'s operation uses. Gradients go to `grads`.

        The matrices of a streamed block are installed only while their own module runs.
        """
        self._params.flats = {b: flat for b, flat in flats.items() if isinstance(flat, torch.Tensor)}
        self._sinks = grads
        # One block at most: a head whose matrix is the embedding's has no others.
        streamed = next(((b, flat) for b, flat in flats.items() if isinstance(flat, StreamedParams)), None)
        cut = self._cut[block]
        sites = [site for site in self.partition.sites[block] if site.param.name not in cut]
        if streamed is not None:
            pieces = [site for site in sites if _is_in_pieces(site, flats)]
            self._streamed = StreamedLayer(*streamed, pieces, user=block, goes_backward=bool(grads))
            self._params.streamed = self._streamed
        for site, module in cut.values():
            module.install(self._matrix_of(site, flats))
        for site in sites:
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
        self._versions = {b: flat._version for b, flat in self._params.flats.items()}

    def remove(self, block: BlockIndex) -> None:
        """Removes the views from the modules, so that the buffers may be reused.

        Raises:
            ParamsChangedError: the model has written to its parameters.
        """
        changed = [b for b, flat in self._params.flats.items() if flat._version != self._versions[b]]
        if changed:
            raise ParamsChangedError(
                f"block {block} changes the parameters of block {changed[0]} in place while it is computed; such a "
                "model cannot be trained block by block"
            )
        if self._streamed is not None:
            self._streamed.end()
        self._streamed = self._params.streamed = None
        for _, module in self._cut[block].values():
            module.remove()
        self._params.flats, self._sinks = {}, {}
        for site in self.partition.sites[block]:
            site.module._parameters[site.attribute] = site.placeholder

    def _require_grads(self, block: BlockIndex) -> None:
        for site in self.partition.sites[block]:
            param = site.module.get_parameter(site.attribute)
            if param is not site.placeholder:
                self._require_grad(site, param)
        for _, module in self._cut[block].values():
            module.require_grad()
        if self._streamed is not None:
            self._streamed.on_param = self._require_grad

    def _cut_modules(
        self, block: BlockIndex, cut_matrices: int | None
    ) -> dict[str, tuple[ParamSite, CutLinear | CutEmbedding]]:
        """Returns the modules of a block that are computed in parts, by the name of their matrix."""
        cut: dict[str, tuple[ParamSite, CutLinear | CutEmbedding]] = {}
        if cut_matrices is None:
            return cut
        in_place = block == self.partition.head and self._head_slices is HeadSlices.LARGE
        for site in self.partition.sites[block]:
            if not site.param.is_cut(cut_matrices):
                continue
            name, shape = site.param.name, (site.param.shape[0], site.param.shape[1])
            parts, add_grad = list(site.param.parts(cut_matrices)), functools.partial(self._add_part, site.block)
            if isinstance(site.module, nn.Embedding):
                cut[name] = site, CutEmbedding(site.module, shape, parts, add_grad)
                continue
            add_product = functools.partial(self._add_product, site.block) if in_place else None
            linear = CutLinear(site.module, shape, parts, add_grad, cut_matrices=cut_matrices, add_product=add_product)
            cut[name] = site, linear
        return cut

    def _matrix_of(self, site: ParamSite, flats: Mapping[BlockIndex, torch.Tensor | StreamedParams]) -> MatrixParts:
        flat = flats[site.block]
        if isinstance(flat, StreamedParams):
            assert self._streamed is not None, "the layer is installed"
            return self._streamed.matrix(site)
        return WholeMatrix(flat[site.param.offset : site.param.offset + site.param.numel].view(site.param.shape))

    def _add_part(self, block: BlockIndex, name: str, offset: int, grad: torch.Tensor) -> None:
        self._sinks[block].add(name, offset, grad)

    def _add_product(self, block: BlockIndex, name: str, offset: int, left: torch.Tensor, right: torch.Tensor) -> None:
        self._sinks[block].add_product(name, offset, left, right, in_fp32=self._has_fp32_product)

    def _require_grad(self, site: ParamSite, param: nn.Parameter) -> None:
        param.requires_grad_(True)
        # A kept graph refers to the param of the forward pass. The hook sends its gradient to the current sinks.
        param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            functools.partial(self._take_grad, site)
        )

    def _take_grad(self, site: ParamSite, param: torch.Tensor) -> None:
        assert param.grad is not None
        self._sinks[site.block].add(site.param.name, site.param.offset, param.grad)
        param.grad = None

    # --- operations -------------------------------------------------------------------------------------------------

    def forward(self, block: BlockIndex, step: int, batch: Sequence[torch.Tensor], *, keep: bool = True) -> None:
        """Runs the embedding or a layer forward for every micro-batch of `batch` (token ids, (B, T)).

        The batch is a whole step or a group of its micro-batches, beginning with `first_microbatch`. With `keep`, for
        training, activations are held as the block's policy says.
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

    def enter(self, step: int, batch: Sequence[torch.Tensor], hidden: Sequence[torch.Tensor]) -> None:
        """Begins a group of micro-batches behind the embedding, whose outputs (B, T, H) another process has computed.

        The model's own code before the layers runs with params that are zero, for the arguments of the layers.
        `batch`: token ids, (B, T).
        """
        self.forget()
        with self._equal_params(BlockIndex(0), 0.0), torch.no_grad():
            for m, ids in enumerate(batch):
                self._seed(step, m, 0)
                self.calls.append(self._prologue(ids)[1])
        self.inputs = [list(hidden)]

    def require_independent_calls(self) -> None:
        """Checks that the arguments of layers do not depend on the params of the embedding, so that `enter` is exact.

        Raises:
            UnsupportedArchitectureError: they do.
        """
        found = []
        for value in (0.0, 1.0):
            with self._equal_params(BlockIndex(0), value), torch.no_grad():
                _, calls = self._prologue(torch.zeros(1, 8, dtype=torch.long, device=self.device))
            leaves = torch.utils._pytree.tree_leaves([(call.args, call.kwargs) for call in calls])
            found.append([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        one, other = found
        if len(one) != len(other) or not all(map(torch.equal, one, other)):
            raise UnsupportedArchitectureError(
                f"{self.partition.name} passes its layers tensors that depend on the embedding, which is on another "
                "box: it can be trained on one box only"
            )

    def take_outputs(self) -> list[torch.Tensor]:
        """Removes and returns the outputs of the last forward pass, for a process that computes the next block."""
        return [output.contiguous() for output in self.inputs.pop()]

    def take_grads(self) -> list[torch.Tensor]:
        """Returns the gradients of the last block's inputs, for another process, and forgets the group."""
        grads = [grad.contiguous() for grad in self.grads]
        self.forget()
        return grads

    def exchange(self, group: GroupActivations) -> GroupActivations:
        """Goes on with another group of micro-batches, and returns the activations of the current one."""
        before = GroupActivations(self.inputs, self.calls, self.grads, self._units, self.first_microbatch)
        self.inputs, self.calls, self.grads, self._units = group.inputs, group.calls, group.grads, group.units
        self.first_microbatch = group.first_microbatch
        return before

    def head(
        self,
        step: int,
        targets: Sequence[torch.Tensor],
        *,
        train: bool = True,
        loss_scale: float = 1.0,
        sums: LossSums | None = None,
    ) -> LossSums:
        """Adds the loss of every micro-batch, slice by slice; with `train`, also computes gradients times `loss_scale`.

        The loss is normalised by the target tokens of the whole step. The call consumes the last layer's output.
        `sums`: sums over nothing, with the number of targets of the whole step. None: the batch is the whole step, and
        the host waits to count its targets.
        """
        self._prefetch(self.num_layers, 0)
        if sums is None:
            num_targets = sum(int((target != IGNORED_TARGET).sum()) for target in targets)
            sums = LossSums.nothing(num_targets, self.device)
        hidden_states = self.inputs.pop()
        in_place = train and self._head_slices is HeadSlices.LARGE
        sites = self.partition.sites[self.partition.head] if in_place else []
        try:
            with projections_in_place(sites, self._sinks, in_fp32=self._has_fp32_product):
                for m, target in enumerate(targets):
                    self._begin_microbatch(step, m, self.partition.head, is_last=m + 1 == len(targets))
                    grad = self._head_of_microbatch(
                        hidden_states[m],
                        target,
                        sums,
                        loss_scale if train else None,
                        ends_operation=m + 1 == len(targets),
                    )
                    if train:
                        self.grads.append(grad)
                        self._end_microbatch(m)
                    hidden_states[m] = torch.empty(0)
        finally:
            self._epilogues.clear()  # they refer to the installed params
        return sums

    def backward(self, block: BlockIndex, step: int, batch: Sequence[torch.Tensor]) -> None:
        """Runs a block backward for every micro-batch, and first recomputes activations that are not held."""
        inputs = self.inputs.pop() if block > 0 else []
        for m, ids in enumerate(batch):
            self._begin_microbatch(step, m, block, is_last=m + 1 == len(batch))
            if block == 0:
                self._backward_of_prologue(m, ids)
            else:
                self._prefetch(*((block, m + 1) if m + 1 < len(batch) else (block - 1, 0)))
                self._backward_of_layer(block, m, inputs)
            self._end_microbatch(m)
        if block == 0:
            self.forget()

    def forget(self) -> None:
        """Releases everything that is held of a step, on the device and in the store."""
        for unit in self._units.values():
            unit.drop()
        self._units = {}
        self.inputs, self.calls, self.grads = [], [], []

    def operators(self, block: BlockIndex, num_examples: int, num_tokens: int) -> LayerCost:
        """Returns the output sizes and FLOPs of a layer's operators for one micro-batch. Computes nothing."""
        with self.fake_layer(block, num_examples, num_tokens) as (layer, entering):
            return list_operators(layer, entering)

    @contextlib.contextmanager
    def fake_layer(self, block: BlockIndex, num_examples: int, num_tokens: int) -> Iterator[tuple[Layer, torch.Tensor]]:
        """Yields a layer and its input for one micro-batch as fake tensors. Nothing is computed or allocated.

        No params may be installed. A Python function that passes tensors to its own kernel gets a RuntimeError.
        """
        # Without the patch, such a kernel would get invalid addresses, which on a GPU ends the process.
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

    # --- private ----------------------------------------------------------------------------------------------------

    def _install_empty(self, block: BlockIndex) -> None:
        blocks = self.partition.layout.blocks
        dtype = next(self.model.parameters()).dtype
        flats = {
            b: torch.empty(blocks[b].numel, dtype=dtype, device=self.device)
            for b in self.partition.layout.shared[block]
        }
        self.install(block, flats, {b: GradBuffer(flat) for b, flat in flats.items()})

    @contextlib.contextmanager
    def _equal_params(self, block: BlockIndex, value: float) -> Iterator[None]:
        """Installs params that are all equal and take no memory, for a block whose params are on another box."""
        sites = self.partition.sites[block]
        before = [site.module._parameters[site.attribute] for site in sites]
        for site in sites:
            params = torch.full((), value, dtype=site.placeholder.dtype, device=self.device).expand(site.param.shape)
            site.module._parameters[site.attribute] = nn.Parameter(params, requires_grad=False)
        try:
            yield
        finally:
            for site, param in zip(sites, before, strict=True):
                site.module._parameters[site.attribute] = param

    def _forward_unit(self, block: BlockIndex, microbatch: int, policy: BlockActivations) -> torch.Tensor:
        """Runs a layer forward for one micro-batch.

        One `Unit` is the saved activations of one block and micro-batch, with the input if the policy says so.
        """
        entering = self.inputs[-1][microbatch]
        self.inputs[-1][microbatch] = torch.empty(0)
        unit = Unit(policy, self._store, self._params, copies=block in self._with_functions)
        self._units[block, microbatch] = unit
        output = unit.forward(self._layer_of(block, microbatch), entering)
        if unit.has_function:
            self._with_functions.add(block)
        return output

    # Separate functions, so that no local variable keeps one micro-batch's tensors while the next is computed.

    def _backward_of_prologue(self, microbatch: int, ids: torch.Tensor) -> None:
        with self._params.noted_by_place(ids):
            hidden, _ = self._prologue(ids)
        torch.autograd.backward(hidden, self.grads[microbatch])
        self.grads[microbatch] = torch.empty(0)

    def _backward_of_layer(self, block: BlockIndex, microbatch: int, inputs: list[torch.Tensor]) -> None:
        unit = self._units.pop((block, microbatch), None)
        if unit is not None:
            self.grads[microbatch] = unit.backward(self._layer_of(block, microbatch), self.grads[microbatch])
        else:
            self.grads[microbatch] = self._backward_again(block, microbatch, inputs)

    def _backward_again(self, block: BlockIndex, microbatch: int, inputs: list[torch.Tensor]) -> torch.Tensor:
        """Recomputes a layer from its input, frees the input, and returns the input's gradient."""
        entering = inputs[microbatch].detach().requires_grad_(True)
        inputs[microbatch] = torch.empty(0)
        with self._params.noted_by_place(entering):
            output = self._layer(block, entering, self.calls[microbatch])
        torch.autograd.backward(output, self.grads[microbatch])
        assert entering.grad is not None
        return entering.grad

    def _prefetch(self, block: int, microbatch: int) -> None:
        """Starts to copy back the swapped activations of one block and micro-batch."""
        unit = self._units.get((block, microbatch))
        if unit is not None:
            unit.prefetch()

    def _layer_of(self, block: BlockIndex, microbatch: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda hidden: self._layer(block, hidden, self.calls[microbatch])

    def _begin_microbatch(self, step: int, microbatch: int, block: int, *, is_last: bool) -> None:
        self._seed(step, microbatch, block)
        if self._streamed is not None:
            self._streamed.begin_graph(is_last=is_last)
        for sink in self._sinks.values():
            if isinstance(sink, LaneSink):
                sink.begin_microbatch(self.first_microbatch + microbatch)

    def _begin_slice(self, *, is_last: bool, ends_operation: bool) -> None:
        """Begins a slice of the head. `is_last`: of its micro-batch. `ends_operation`: no micro-batch follows, too."""
        if self._streamed is not None:
            self._streamed.begin_graph(is_last=ends_operation)
        for sink in self._sinks.values():
            if isinstance(sink, SliceSink):
                sink.begin_slice(is_last=is_last)

    def _end_microbatch(self, microbatch: int) -> None:
        """Ends the lane of which a micro-batch is the last one."""
        if self._lanes is not None and self._lanes.ends_lane(self.first_microbatch + microbatch):
            for sink in self._sinks.values():
                if isinstance(sink, LaneSink):
                    sink.end_lane()

    def _seed(self, step: int, microbatch: int, block: int) -> None:
        key = random_key(self.seed, step, self.first_microbatch + microbatch, block)
        # Not `torch.manual_seed`, because it keeps a stack trace for each kind of device that the machine lacks.
        for generator in generators_of(self.device):
            generator.manual_seed(key)

    def _on_call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._mode_on_call(index, args, kwargs)

    def _as_layer_output(self, hidden: torch.Tensor) -> Any:
        num = self.partition.num_returned
        return hidden if num is None else (hidden, *([None] * (num - 1)))

    def _prologue(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[LayerCall]]:
        """Runs the model's own forward up to its layers. Returns the first hidden state and each layer's arguments.

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
            if index == self.num_layers - 1:
                raise _PrologueDone
            return self._as_layer_output(hidden)

        self._mode_on_call = record
        with contextlib.suppress(_PrologueDone):
            run_beside_cache(self.model, ids, cache)
        self._mode_on_call = None  # the closure would keep the recorded tensors
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
        """Computes what the model computes after its last layer: (1, S, H) to logits (1, S, V).

        The first call of a head with a hidden state of some shape runs the model's own forward and records it. Later
        ones repeat the recorded calls, which saves the host the code before the last layer.
        """
        calls = self._epilogues.get(hidden.shape)
        if calls is not None and calls.is_repeatable:
            return calls.repeat(hidden)
        if calls is None:
            calls = EpilogueCalls(self.model, self.partition.called_after_layers, hidden)
            self._epilogues[hidden.shape] = calls
        return self._own_epilogue(hidden, calls)

    def _own_epilogue(self, hidden: torch.Tensor, calls: EpilogueCalls) -> torch.Tensor:
        """Runs the model's own forward: on the meta device up to the last layer, whose stand-in returns `hidden`."""
        with contextlib.ExitStack() as stack:

            def resume(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                if index == self.num_layers - 1:
                    restore_buffers(buffers)
                    stack.enter_context(calls)
                    return self._as_layer_output(hidden)
                return self._as_layer_output(hidden_of(index, args, kwargs)[0])

            self._mode_on_call = resume
            buffers = swap_buffers_to_meta(self.model)
            try:
                logits: torch.Tensor = run_on_meta(self.model, num_tokens=hidden.shape[1]).logits
            finally:
                restore_buffers(buffers)
                self._mode_on_call = None  # the closure would keep the hidden state
        calls.end(logits)
        return logits

    def _head_of_microbatch(
        self,
        hidden: torch.Tensor,
        target: torch.Tensor,
        sums: LossSums,
        loss_scale: float | None,
        *,
        ends_operation: bool,
    ) -> torch.Tensor:
        train = loss_scale is not None
        flat_hidden = hidden.reshape(1, -1, hidden.shape[-1])
        flat_target = target.reshape(-1)
        grad = torch.empty_like(flat_hidden) if train else flat_hidden
        size = self.num_tokens_of_head_slice
        # With lanes, a micro-batch's loss is summed on its own, because other processes may compute those before it.
        own = sums if self._lanes is None else LossSums.nothing(sums.num_targets, self.device)
        for start in range(0, flat_target.numel(), size):
            stop = start + size
            is_last = stop >= flat_target.numel()
            self._begin_slice(is_last=is_last, ends_operation=is_last and ends_operation)
            slice_grad = self._head_of_slice(flat_hidden[:, start:stop], flat_target[start:stop], own, loss_scale)
            if train:
                assert slice_grad is not None
                grad[:, start:stop] = slice_grad
        if own is not sums:
            sums.add(own)
        return grad.view(hidden.shape)

    def _head_of_slice(
        self, hidden: torch.Tensor, target: torch.Tensor, sums: LossSums, loss_scale: float | None
    ) -> torch.Tensor | None:
        """Computes one slice of the head. It is a separate function so that a slice's logits are freed at its end."""
        train = loss_scale is not None
        entering = hidden.detach().requires_grad_(train)
        with torch.set_grad_enabled(train), self._params.noted_by_place(entering):
            logits = self._epilogue(entering)
        edge = get_gradient_edge(logits) if train else None
        if self._has_fused_loss:
            grad = add_fused_loss(logits.detach()[0], target, sums, loss_scale)
            del logits
        else:
            pieces = list(torch.split(logits.detach()[0], num_piece_tokens(self._head_slices, self._vocab_size)))
            del logits  # the backward pass needs the edge of the graph, not the logits
            grad = add_loss(pieces, target, sums, loss_scale)
        if edge is not None:
            assert grad is not None
            torch.autograd.backward(edge, grad[None])
        return entering.grad
