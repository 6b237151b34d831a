"""Estimates the device memory of a model's operations from shapes alone. It reads no weights and computes nothing.

The block runner runs its operations with fake tensors, and a tracker counts the bytes of live tensors. A kernel's
temporary memory is unknown, except in one case (`LiveStorageTracker`). The allocator's rounding is not counted.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._functorch import config as functorch_config

from windlass.engine.activations import NOTHING_SWAPPED, SwapCounts, SwapHandle
from windlass.engine.memory_estimate.live_storages import LiveStorageTracker, SizeArithmetic
from windlass.engine.memory_estimate.model_facts import DeviceNeedUnknownError
from windlass.engine.memory_plan import RECOMPUTE_ALL, BlockActivations, UnitNeed
from windlass.engine.model import BlockRunner, GradBuffer, LossSums, Partition, fake_tensors
from windlass.storage.ids import BlockIndex, HeadSlices
from windlass.storage.memory import is_out_of_memory


class _ImaginedStore:
    """An ActivationStore that drops the tensors at once and returns new empty ones."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._back: dict[SwapHandle, torch.Tensor | None] = {}
        self._num_puts = 0

    def put(self, tensor: torch.Tensor) -> SwapHandle:
        """See ActivationStore."""
        self._num_puts += 1
        handle = SwapHandle(self._num_puts, tensor.nbytes)
        self._back[handle] = None
        return handle

    def prefetch(self, handle: SwapHandle) -> None:
        """See ActivationStore."""
        if self._back[handle] is None:
            self._back[handle] = torch.empty(handle.nbytes, dtype=torch.uint8, device=self._device)

    def get(self, handle: SwapHandle) -> torch.Tensor:
        """See ActivationStore."""
        self.prefetch(handle)
        back = self._back.pop(handle)
        assert back is not None
        return back

    def drop(self, handle: SwapHandle) -> None:
        """See ActivationStore."""
        del self._back[handle]

    @property
    def counts(self) -> SwapCounts:
        """See ActivationStore."""
        return NOTHING_SWAPPED

    def bring_back(self) -> tuple[int, ...]:
        """Prefetches everything and returns the sizes in bytes."""
        for handle in self._back:
            self.prefetch(handle)
        return tuple(handle.nbytes for handle in self._back)


@dataclass(frozen=True, slots=True)
class _Passes:
    """The arguments of a dry run, without the layers' choices of activations."""

    num_examples: int
    num_tokens: int
    train: bool
    grad_dtype: torch.dtype
    is_summed: bool
    in_fp32: frozenset[int]
    head_slices: HeadSlices
    cut_matrices: int | None


@dataclass(slots=True, kw_only=True)
class _Found:
    """The results of a dry run that do not depend on the choices."""

    embedding: UnitNeed
    head_peak_nbytes: int
    kinds: list[object]  # of each layer: layers of equal kind and choice need the same memory


@dataclass(slots=True, kw_only=True)
class DryRunResult:
    """The cached results of dry runs of one partition on one device. Later dry runs reuse them."""

    found: dict[_Passes, _Found] = field(default_factory=dict)
    layers: dict[tuple[_Passes, object, BlockActivations], UnitNeed] = field(default_factory=dict)


class _ImaginedSums(GradBuffer):
    """Sums to which gradients are added without memory beside them: `device_need` counts it."""

    def add(self, name: str, offset: int, grad: torch.Tensor) -> None:
        """See GradBuffer. Only a copy of the gradient counts, where its elements are not in order."""
        grad.reshape(-1)


class DryRun:
    """Runs the operations of a model with fake tensors. No other runner of the partition may be in use."""

    def __init__(
        self,
        partition: Partition,
        activations: Mapping[BlockIndex, BlockActivations],
        *,
        grad_dtype: torch.dtype,
        is_summed: bool,
        head_slices: HeadSlices = HeadSlices.LARGE,
        cut_matrices: int | None = None,
        device: str = "cpu",
        rehearsed: DryRunResult | None = None,
        sizes: SizeArithmetic | None = None,
    ) -> None:
        """Prepares a dry run.

        Args:
            partition: the model's blocks.
            activations: the choice for each layer, as for a BlockRunner.
            grad_dtype: of gradients that are sent to the optimizer.
            is_summed: gradients are added to those of earlier micro-batches.
            head_slices: the way in which the head goes over tokens, as for a BlockRunner.
            cut_matrices: as for a BlockRunner.
            device: the device type of the job, because operators choose their kernels by it.
            rehearsed: cached results for the partition; new ones are added.
            sizes: the numbers in which it counts bytes; None: plain integers.
        """
        self._partition = partition
        self._activations = activations
        self._grad_dtype = grad_dtype
        self._in_fp32: set[int] = set()  # blocks whose gradients are summed in fp32
        self._is_summed = is_summed
        self._rehearsed = DryRunResult() if rehearsed is None else rehearsed
        self._device = torch.device(device)
        self._store = _ImaginedStore(self._device)
        self._head_slices, self._cut_matrices = head_slices, cut_matrices
        self._runner = BlockRunner(
            partition,
            self._device,
            seed=0,
            activations=activations,
            store=self._store,
            head_slices=head_slices,
            cut_matrices=cut_matrices,
        )
        self._living = LiveStorageTracker(self._device, sizes)
        # Without the patch, a custom kernel of the model would get invalid addresses.
        with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
            self._fake = fake_tensors()
        # Disabled for swapped tensors, because the cache would keep their storages alive.
        self._fake.cache_enabled = not any(choice.swaps for choice in activations.values())

    def summed_in_fp32(self, num_tokens: int) -> set[int]:
        """See BlockRunner."""
        return self._runner.summed_in_fp32(num_tokens)

    def units(self, num_examples: int, num_tokens: int, *, train: bool = True) -> tuple[list[UnitNeed], int]:
        """Returns the needs of the embedding and each layer for one micro-batch, and the head's peak in bytes.

        Without `train`, they are those of an evaluation. Layers of the same kind and choice run once.

        Raises:
            DeviceNeedUnknownError: a block has operators whose output shapes torch cannot derive without computing, or
                a Python autograd function that launches its own kernels.
        """
        passes = self._passes(num_examples, num_tokens, train)
        rehearsed, choices = self._rehearsed, [self._choice(block) for block in range(1, self._partition.head)]
        found = rehearsed.found.get(passes)
        if found is None or any(
            (passes, kind, choice) not in rehearsed.layers for kind, choice in zip(found.kinds, choices, strict=True)
        ):
            found = self._go_through(passes)
        layers = [rehearsed.layers[passes, kind, choice] for kind, choice in zip(found.kinds, choices, strict=True)]
        return [found.embedding, *layers], found.head_peak_nbytes

    def kinds(self, num_examples: int, num_tokens: int, *, train: bool = True) -> list[object]:
        """Returns the kind of each layer in passes that `units` has run.

        Layers of equal kind and choice need the same memory.
        """
        return self._rehearsed.found[self._passes(num_examples, num_tokens, train)].kinds

    def _passes(self, num_examples: int, num_tokens: int, train: bool) -> _Passes:
        self._in_fp32 = self.summed_in_fp32(num_examples * num_tokens)
        in_fp32 = frozenset(self._in_fp32)
        return _Passes(
            num_examples,
            num_tokens,
            train,
            self._grad_dtype,
            self._is_summed,
            in_fp32,
            self._head_slices,
            self._cut_matrices,
        )

    def _go_through(self, passes: _Passes) -> _Found:
        """Runs all operations whose results are not cached yet."""
        head, train, rehearsed = self._partition.head, passes.train, self._rehearsed
        self._runner.model.train(train)
        with self._fake:
            batch = [torch.zeros(passes.num_examples, passes.num_tokens, dtype=torch.long, device=self._device)]
            with unknown_where(0):
                output_nbytes, held_nbytes, forward_peak_nbytes = self._forward_of_embedding(batch, keep=train)
            hidden = self._runner.inputs.pop()[0]
            kinds = [self._kind(BlockIndex(block)) for block in range(1, head)]
            for block, kind in enumerate(kinds, start=1):
                if (key := (passes, kind, self._choice(block))) not in rehearsed.layers:
                    with unknown_where(block):
                        find = self._layer if train else self._evaluated_layer
                        rehearsed.layers[key] = find(BlockIndex(block), hidden, batch)
            if passes not in rehearsed.found:
                with unknown_where(head):
                    head_peak_nbytes = self._head(hidden, train=train)
                with unknown_where(0):
                    backward_peak_nbytes = self._backward(BlockIndex(0), hidden, batch) if train else 0
                embedding = UnitNeed(
                    output_nbytes=output_nbytes,
                    held_nbytes=held_nbytes,
                    swapped=(),
                    forward_peak_nbytes=forward_peak_nbytes,
                    backward_peak_nbytes=backward_peak_nbytes,
                )
                rehearsed.found[passes] = _Found(embedding=embedding, head_peak_nbytes=head_peak_nbytes, kinds=kinds)
        self._runner.forget()
        return rehearsed.found[passes]

    # --- private: all calls use fake tensors --------------------------------------------------------------------------

    def _choice(self, block: int) -> BlockActivations:
        return self._activations.get(BlockIndex(block), RECOMPUTE_ALL)

    def _kind(self, block: BlockIndex) -> object:
        """Returns a key that is equal for layers that call the same operators under the same choice of activations.

        It compares the modules' descriptions, the parameters' shapes and the arguments.
        """
        call = self._runner.calls[0][block - 1]
        layer = self._partition.layers[block - 1]
        shapes = tuple(site.param.shape for site in self._partition.sites[block])
        return repr(layer), shapes, block in self._in_fp32, _kind_of((call.args, call.kwargs))

    def _forward_of_embedding(self, batch: list[torch.Tensor], *, keep: bool) -> tuple[int, int, int]:
        """Returns the embedding's output bytes, held bytes and peak bytes."""
        before_nbytes, peak_nbytes = self._watch_forward(BlockIndex(0), batch, keep=keep)
        output_nbytes = self._living.size_of(self._runner.inputs[-1][0])
        return output_nbytes, self._living.nbytes - before_nbytes - output_nbytes, peak_nbytes

    def _layer(self, block: BlockIndex, hidden: torch.Tensor, batch: list[torch.Tensor]) -> UnitNeed:
        """Measures one layer's forward and backward pass. `hidden` has the shape and dtype of its input."""
        policy = self._choice(block)
        # Twice, because a runner knows only after the first forward pass whether a layer has Python autograd functions.
        for _ in range(2 if policy.recompute and policy.needs_grad else 1):
            self._enter(hidden)
            input_nbytes = self._living.size_of(self._runner.inputs[0][0])
            before_nbytes, forward_peak_nbytes = self._watch_forward(block, batch)
            output = self._runner.inputs.pop()[0]
            output_nbytes = self._living.size_of(output)
            held_nbytes = self._living.nbytes - before_nbytes + input_nbytes - output_nbytes
            with self._living:
                swapped = self._store.bring_back()
            like_output = output.to("meta")
            del output
            backward_peak_nbytes = self._backward(block, like_output, batch)
            if not self._runner.has_function(block):
                break  # the second pass would be as the first
        return UnitNeed(
            output_nbytes=output_nbytes,
            held_nbytes=held_nbytes,
            swapped=swapped,
            forward_peak_nbytes=forward_peak_nbytes,
            backward_peak_nbytes=backward_peak_nbytes,
        )

    def _evaluated_layer(self, block: BlockIndex, hidden: torch.Tensor, batch: list[torch.Tensor]) -> UnitNeed:
        """Measures one layer's forward pass in an evaluation, which holds nothing."""
        self._enter(hidden)
        _, forward_peak_nbytes = self._watch_forward(block, batch, keep=False)
        return UnitNeed(
            output_nbytes=self._living.size_of(self._runner.inputs[-1][0]),
            held_nbytes=0,
            swapped=(),
            forward_peak_nbytes=forward_peak_nbytes,
            backward_peak_nbytes=0,
        )

    def _enter(self, hidden: torch.Tensor) -> None:
        with self._living:
            self._runner.inputs = [[torch.empty_like(hidden)]]

    def _watch_forward(self, block: BlockIndex, batch: list[torch.Tensor], *, keep: bool = True) -> tuple[int, int]:
        """Runs a forward pass. Returns the bytes alive before it, and its peak beyond them."""
        self._install(block, goes_backward=False)
        before_nbytes = self._living.begin()
        with self._living:
            self._runner.forward(block, 0, batch, keep=keep)
        self._runner.remove(block)
        return before_nbytes, self._living.peak_nbytes - before_nbytes

    def _backward(self, block: BlockIndex, output: torch.Tensor, batch: list[torch.Tensor]) -> int:
        """Returns the peak bytes of a backward pass. `output` has the shape and dtype of the block's output."""
        with self._living:
            self._runner.grads = [torch.empty_like(output, device=self._device)]
        self._install(block, goes_backward=True)
        before_nbytes = self._living.begin()
        with self._living:
            self._runner.backward(block, 0, batch)
        self._runner.remove(block)
        self._runner.grads = []
        return self._living.peak_nbytes - before_nbytes

    def _head(self, hidden: torch.Tensor, *, train: bool) -> int:
        """Returns the head's peak bytes. Only two slices of tokens run, because all later ones equal the second."""
        num_tokens, width = hidden.shape[:-1].numel(), hidden.shape[-1]
        num_watched = min(num_tokens, 2 * self._runner.num_tokens_of_head_slice)
        target = torch.zeros(1, num_watched, dtype=torch.long, device=self._device)
        sums = LossSums.nothing(1, self._device)
        with self._living:
            self._runner.inputs = [[hidden.new_empty(1, num_watched, width)]]
        self._install(self._partition.head, goes_backward=train)
        before_nbytes = self._living.begin()
        with self._living:
            self._runner.head(0, [target], train=train, sums=sums)
        self._runner.remove(self._partition.head)
        self._runner.grads = []
        # The gradient of the hidden state exists for all tokens, not only for the measured slices.
        num_more = num_tokens - num_watched if train else 0
        return self._living.peak_nbytes - before_nbytes + num_more * width * hidden.itemsize

    def _install(self, block: BlockIndex, *, goes_backward: bool) -> None:
        layout = self._partition.layout
        dtype = next(self._partition.model.parameters()).dtype
        flats, grads = {}, {}
        for b in layout.shared[block]:
            numel = layout.blocks[b].numel
            flats[b] = torch.empty(numel, dtype=dtype, device=self._device)
            parts = layout.grad_parts(b, self._cut_matrices) if self._is_summed else []
            touched = [name for name, *_ in parts]
            grad_dtype = torch.float32 if b in self._in_fp32 else self._grad_dtype
            grads[b] = _ImaginedSums(torch.empty(numel, dtype=grad_dtype, device=self._device), touched)
        self._runner.install(block, flats, grads if goes_backward else {})


@contextlib.contextmanager
def unknown_where(block: int) -> Iterator[None]:
    """Raises DeviceNeedUnknownError for errors of a block that is run by shapes alone, unless memory ran out."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise DeviceNeedUnknownError(
            f"how much device memory block {block} needs is not known before it is computed: {type(error).__name__}: "
            f"{error}"
        ) from error


def _kind_of(value: Any) -> object:
    """Returns a key for an argument: a tensor's shape, stride and dtype, or a plain value itself."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, dict):
        return tuple((key, _kind_of(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_kind_of(item) for item in value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value)
