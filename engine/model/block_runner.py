"""Runs a partitioned model block by block: prologue, block loop, epilogue.

Blocks are the outer loop and micro-batches the inner one. So each group of micro-batches needs a block's params only
twice. By default only a block's input is kept, and the backward pass recomputes the block. Random state is seeded by
(seed, step, micro-batch, block), so that the recomputation draws the same numbers.

Shapes: B examples, T tokens, H hidden.
"""

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch._functorch import config as functorch_config

from windlass.engine.activations import ActivationStore, Layer, LayerCost, Unit, generators_of, list_operators
from windlass.engine.lanes import LaneDivision
from windlass.engine.memory_plan import RECOMPUTE_ALL, BlockActivations, summed_in_fp32
from windlass.engine.model.fake_mode import fake_tensors
from windlass.engine.model.grad_buffer import GradBuffer, GradSink
from windlass.engine.model.head import Head
from windlass.engine.model.head_slices import IGNORED_TARGET, LossSums
from windlass.engine.model.installed_params import InstalledParams
from windlass.engine.model.layout import UnsupportedArchitectureError
from windlass.engine.model.model_forward import LayerCall, ModelForward
from windlass.engine.model.partition import Partition
from windlass.engine.model.streaming import StreamedParams
from windlass.storage.ids import BlockIndex, HeadSlices, ModelKernel


@dataclass(slots=True)
class GroupActivations:
    """The activations of a group of micro-batches between its passes; see the attributes of `BlockRunner`."""

    inputs: list[list[torch.Tensor]] = field(default_factory=list)
    calls: list[list[LayerCall]] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    units: dict[tuple[int, int], Unit] = field(default_factory=dict)
    first_microbatch: int = 0


def random_key(seed: int, step: int, microbatch: int, block: int) -> int:
    """Returns the random seed for one block and one micro-batch."""
    digest = hashlib.blake2b(f"{seed}/{step}/{microbatch}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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
        self.model = partition.model
        for module in self.model.modules():  # before `ModelForward`, whose stand-ins hide the modules of layers
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        self._lanes = lanes
        self._params = InstalledParams(
            partition,
            cut_matrices=cut_matrices,
            is_head_in_place=head_slices is HeadSlices.LARGE,
            in_fp32=ModelKernel.FP32_PRODUCT in kernels,
        )
        self._model_forward = ModelForward(partition)
        self._head = Head(
            partition, self._params, self._model_forward, head_slices, kernels, has_lanes=lanes is not None
        )
        self._with_functions: set[BlockIndex] = set()  # layers that are known to have Python autograd functions
        self._units: dict[tuple[int, int], Unit] = {}  # by block and micro-batch
        self.inputs: list[list[torch.Tensor]] = []  # inputs[b][m]: the input of block b + 1, (B, T, H)
        self.calls: list[list[LayerCall]] = []  # calls[m][layer]
        self.grads: list[torch.Tensor] = []  # grads[m]: gradient of the last hidden state of the backward pass
        self.first_microbatch = 0  # index in the step of the current batch's first micro-batch

    @property
    def num_tokens_of_head_slice(self) -> int:
        """The number of tokens whose logits exist at the same time."""
        return self._head.num_slice_tokens

    def summed_in_fp32(self, num_tokens: int) -> set[int]:
        """Returns the blocks whose gradients are summed in fp32 where a micro-batch has up to `num_tokens` tokens."""
        return summed_in_fp32(self.partition.layout.shared, is_sliced=num_tokens > self.num_tokens_of_head_slice)

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
        """Installs the params of `block`'s operation. Gradients go to `grads`."""
        self._params.install(block, flats, grads)

    def remove(self, block: BlockIndex) -> None:
        """Removes the params of `block`'s operation, so that the buffers may be reused.

        Raises:
            ParamsChangedError: the model has written to its parameters.
        """
        self._params.remove(block)

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
            self._params.require_grads(block)
        outputs = []
        with torch.no_grad():
            for m, ids in enumerate(batch):
                self._begin_microbatch(step, m, block, is_last=m + 1 == len(batch))
                if block == 0:
                    hidden, calls = self._model_forward.prologue(ids)
                    self.calls.append(calls)
                elif policy == RECOMPUTE_ALL:
                    hidden = self._model_forward.layer(block, self.inputs[-1][m], self.calls[m])
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
        with self._params.all_equal(BlockIndex(0), 0.0, self.device), torch.no_grad():
            for m, ids in enumerate(batch):
                self._seed(step, m, 0)
                self.calls.append(self._model_forward.prologue(ids)[1])
        self.inputs = [list(hidden)]

    def require_independent_calls(self) -> None:
        """Checks that the arguments of layers do not depend on the params of the embedding, so that `enter` is exact.

        Raises:
            UnsupportedArchitectureError: they do.
        """
        found = []
        for value in (0.0, 1.0):
            with self._params.all_equal(BlockIndex(0), value, self.device), torch.no_grad():
                _, calls = self._model_forward.prologue(torch.zeros(1, 8, dtype=torch.long, device=self.device))
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
        self._prefetch(len(self.partition.layers), 0)
        if sums is None:
            num_targets = sum(int((target != IGNORED_TARGET).sum()) for target in targets)
            sums = LossSums.nothing(num_targets, self.device)
        hidden_states = self.inputs.pop()
        with self._head.operation(train=train):
            for m, target in enumerate(targets):
                is_last = m + 1 == len(targets)
                self._begin_microbatch(step, m, self.partition.head, is_last=is_last)
                grad = self._head.add_microbatch(
                    hidden_states[m], target, sums, loss_scale if train else None, ends_operation=is_last
                )
                if train:
                    self.grads.append(grad)
                    self._end_microbatch(m)
                hidden_states[m] = torch.empty(0)
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
            hidden, calls = self._model_forward.prologue(ids)
            self.remove(BlockIndex(0))
            self._install_empty(block)
            try:
                yield lambda entering: self._model_forward.layer(block, entering, calls), hidden
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

    def _forward_unit(self, block: BlockIndex, microbatch: int, policy: BlockActivations) -> torch.Tensor:
        """Runs a layer forward for one micro-batch.

        One `Unit` is the saved activations of one block and micro-batch, with the input if the policy says so.
        """
        entering = self.inputs[-1][microbatch]
        self.inputs[-1][microbatch] = torch.empty(0)
        unit = Unit(policy, self._store, self._params.borrowed, copies=block in self._with_functions)
        self._units[block, microbatch] = unit
        output = unit.forward(self._layer_of(block, microbatch), entering)
        if unit.has_function:
            self._with_functions.add(block)
        return output

    # Separate functions, so that no local variable keeps one micro-batch's tensors while the next is computed.

    def _backward_of_prologue(self, microbatch: int, ids: torch.Tensor) -> None:
        with self._params.borrowed.noted_by_place(ids):
            hidden, _ = self._model_forward.prologue(ids)
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
        with self._params.borrowed.noted_by_place(entering):
            output = self._model_forward.layer(block, entering, self.calls[microbatch])
        torch.autograd.backward(output, self.grads[microbatch])
        assert entering.grad is not None
        return entering.grad

    def _prefetch(self, block: int, microbatch: int) -> None:
        """Starts to copy back the swapped activations of one block and micro-batch."""
        unit = self._units.get((block, microbatch))
        if unit is not None:
            unit.prefetch()

    def _layer_of(self, block: BlockIndex, microbatch: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda hidden: self._model_forward.layer(block, hidden, self.calls[microbatch])

    def _begin_microbatch(self, step: int, microbatch: int, block: int, *, is_last: bool) -> None:
        self._seed(step, microbatch, block)
        self._params.begin_microbatch(self.first_microbatch + microbatch, is_last=is_last)

    def _end_microbatch(self, microbatch: int) -> None:
        """Ends the lane of which a micro-batch is the last one."""
        if self._lanes is not None and self._lanes.ends_lane(self.first_microbatch + microbatch):
            self._params.end_lane()

    def _seed(self, step: int, microbatch: int, block: int) -> None:
        key = random_key(self.seed, step, self.first_microbatch + microbatch, block)
        # Not `torch.manual_seed`, because it keeps a stack trace for each kind of device that the machine lacks.
        for generator in generators_of(self.device):
            generator.manual_seed(key)
