"""One step, block by block, with any choice of activations, and a store in memory that records how it is used."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from windlass.engine.activations.store import ActivationStore, SwapCounts, SwapHandle
from windlass.engine.device.device import Device
from windlass.engine.memory_plan.activation_policy import BlockActivations
from windlass.engine.model.block_runner import BlockRunner
from windlass.engine.model.grad_buffer import GradBuffer
from windlass.engine.model.partition import Partition, build_meta_model
from windlass.engine.model.streaming.flats import StreamedFlats
from windlass.storage.ids import BlockIndex, HeadSlices, ModelKernel, Precision

SEED, STEP = 7, 3


class MemoryStore:
    """An activation store that copies at once, and fills each tensor that it drops with 0xFF, which is NaN."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []  # method and handle index of each call
        self.held: dict[SwapHandle, torch.Tensor] = {}
        self.out_nbytes = self.in_nbytes = self.peak_nbytes = 0

    def put(self, tensor: torch.Tensor) -> SwapHandle:
        assert (tensor.dtype, tensor.ndim) == (torch.uint8, 1)
        handle = SwapHandle(sum(event == "put" for event, _ in self.events), tensor.nbytes)
        self.events.append(("put", handle.index))
        self.held[handle] = tensor.clone()
        self.out_nbytes += tensor.nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.held_nbytes)
        return handle

    def prefetch(self, handle: SwapHandle) -> None:
        assert handle in self.held
        self.events.append(("prefetch", handle.index))

    def get(self, handle: SwapHandle) -> torch.Tensor:
        self.events.append(("get", handle.index))
        self.in_nbytes += handle.nbytes
        mine = self.held.pop(handle)
        copy = mine.clone()
        mine.fill_(0xFF)
        return copy

    def drop(self, handle: SwapHandle) -> None:
        self.events.append(("drop", handle.index))
        self.held.pop(handle).fill_(0xFF)

    @property
    def held_nbytes(self) -> int:
        return sum(handle.nbytes for handle in self.held)

    @property
    def counts(self) -> SwapCounts:
        return SwapCounts(
            out_nbytes=self.out_nbytes,
            in_nbytes=self.in_nbytes,
            held_nbytes=self.held_nbytes,
            peak_held_nbytes=self.peak_nbytes,
        )


class Run:
    """A block runner that gets params block by block. Params are filled with NaN when they are taken back."""

    def __init__(
        self,
        model: Any,
        *,
        activations: Mapping[BlockIndex, BlockActivations] | None = None,
        store: ActivationStore | None = None,
        precision: Precision = Precision.FP32,
        streams_on: Device | None = None,
        streams_ends: bool = False,
        head_slices: HeadSlices = HeadSlices.LARGE,
        kernels: Collection[ModelKernel] = (),
        cut_matrices: int | None = None,
    ) -> None:
        """`streams_on`: a device on which the layers' params arrive in pieces. `streams_ends`: those of all blocks."""
        self.partition = Partition(build_meta_model(model.config, precision))
        self.params = dict(model.named_parameters())
        self.layout = self.partition.layout
        self.runner = BlockRunner(
            self.partition,
            torch.device("cpu"),
            SEED,
            activations=activations,
            store=store,
            head_slices=head_slices,
            kernels=kernels,
            cut_matrices=cut_matrices,
        )
        self.cut_matrices = cut_matrices
        self.grads = {block.index: GradBuffer(torch.full((block.numel,), torch.nan)) for block in self.layout.blocks}
        self._lent: dict[BlockIndex, torch.Tensor] = {}
        blocks = [block.index for block in self.layout.blocks]
        # A tied head has the embedding's matrix, and none of its own.
        ends = blocks if len(self.layout.shared[-1]) == 1 else blocks[:-1]
        streamed = ends if streams_ends else blocks[1:-1]
        self.streams = None
        if streams_on is not None:
            self.streams = StreamedFlats(self.partition, streamed, streams_on, cut_matrices=cut_matrices)

    def lend(self, block: BlockIndex, *, with_grads: bool) -> None:
        self._lent = {}
        for b in self.layout.shared[block]:
            parts = [self.params[param.name].detach().reshape(-1) for param in self.layout.blocks[b].params]
            self._lent[b] = torch.cat(parts) if parts else torch.empty(0)
        lent = self._lent if self.streams is None else self.streams.of(self._lent)
        self.runner.install(block, lent, {b: self.grads[b] for b in self._lent} if with_grads else {})

    def take_back(self, block: BlockIndex) -> None:
        self.runner.remove(block)
        for flat in self._lent.values():
            flat.fill_(torch.nan)

    def forward(self, block: BlockIndex, batch: Sequence[torch.Tensor], *, keep: bool = True) -> None:
        self.lend(block, with_grads=False)
        self.runner.forward(block, STEP, batch, keep=keep)
        self.take_back(block)

    def head(self, targets: Sequence[torch.Tensor]) -> None:
        self.lend(self.partition.head, with_grads=True)
        self.runner.head(STEP, targets)
        self.take_back(self.partition.head)

    def backward(self, block: BlockIndex, batch: Sequence[torch.Tensor]) -> None:
        self.lend(block, with_grads=True)
        self.runner.backward(block, STEP, batch)
        self.take_back(block)

    def step(self, batch: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Runs one step and returns all gradients."""
        blocks = [block.index for block in self.layout.blocks[:-1]]
        for block in blocks:
            self.forward(block, batch)
        self.head(targets)
        for block in reversed(blocks):
            self.backward(block, batch)
        found = {}
        for block_layout in self.layout.blocks:
            buffer = self.grads[block_layout.index]
            buffer.finish(self.layout.grad_parts(block_layout.index, self.cut_matrices))
            for param in block_layout.params:
                found[param.name] = buffer.flat[param.offset : param.offset + param.numel].view(param.shape)
        return found
