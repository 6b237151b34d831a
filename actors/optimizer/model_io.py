"""Loads a model into the store and exports it, chunk by chunk, through an optimizer's slots."""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from windlass.actors.job import JobContext
from windlass.engine.checkpoint import BlockInitializer, CheckpointReader, ModelExporter, copy_model_folder
from windlass.engine.device import TORCH_DTYPE
from windlass.engine.model import build_meta_model, load_config
from windlass.engine.optimizer import split_master
from windlass.engine.training_config import Initialization
from windlass.storage.ids import ChunkKey, Span, StateKind, Step
from windlass.storage.memory import SlotPool

# Number of elements of a master that are split at a time, so that temporary tensors stay in the processor's caches. On
# one core this is seven times as fast as splitting a whole chunk at once.
_SPLIT_NUMEL = 2**16

ChunkView = Callable[[Span, ChunkKey, StateKind], torch.Tensor]


class ModelIo:
    """Loads and exports the model for the first optimizer.

    It never holds more than its slots and one tensor or one block. In a job without SSDs, it reads and writes the
    resident states of all optimizers in host memory.
    """

    def __init__(
        self,
        context: JobContext,
        slots: SlotPool,
        view: ChunkView,
        read: Callable[..., None],
        write: Callable[..., None],
    ) -> None:
        self.context = context
        self._slots = slots
        self._view = view
        self._read = read
        self._write = write
        self._resting = {} if context.spec.ssd_dirs else context.host_slots()
        self._aborted = threading.Event()
        self._arrived = threading.Event()  # the chunk that an export reads has arrived

    def abort(self) -> None:
        """Ends a load or an export before its next chunk."""
        self._aborted.set()
        self._arrived.set()

    def load(self) -> Iterator[dict[str, int]]:
        """Writes the states of step 0 for all chunks. Yields progress as {"num_params", "total_params"}."""
        layout = self.context.layout
        num_params, shown_at = 0, 0
        with contextlib.closing(self._source()) as source:
            for block in layout.blocks:
                for key in layout.chunk_keys(block.index):
                    self._check()
                    num_params += self._load_chunk(key, source)
                if num_params - shown_at >= layout.numel // 20:
                    shown_at = num_params
                    yield {"num_params": num_params, "total_params": layout.numel}
        self._slots.drain(self.context.spec.deadline_s)  # every write is done then
        # Returns the memory of the loaded tensors to the system; otherwise the C library would keep it during training.
        ctypes.CDLL(None).malloc_trim(0)

    def _load_chunk(self, key: ChunkKey, source: CheckpointReader | BlockInitializer) -> int:
        """Loads a chunk; returns its number of elements."""
        if self._resting:
            return self._fill(self._resting[key], key, source)
        (slot,) = self._slots.acquire(1, self.context.spec.deadline_s)
        num_params = self._fill(slot, key, source)
        self._write(slot, key, Step(0), lambda: self._slots.release([slot]))
        return num_params

    def _fill(self, slot: Span, key: ChunkKey, source: CheckpointReader | BlockInitializer) -> int:
        """Fills a slot with a chunk's first states; returns the number of elements."""
        held = {kind: self._view(slot, key, kind) for kind in self.context.formats.itemsizes}
        master = held.get(StateKind.MASTER)
        if master is None:
            master = torch.empty(held[StateKind.PARAM].numel(), dtype=torch.float32)
        source.fill_chunk(key, master)
        held[StateKind.EXP_AVG].zero_()
        held[StateKind.EXP_AVG_SQ].zero_()
        if StateKind.RESIDUAL in held:
            kinds = (StateKind.PARAM, StateKind.RESIDUAL, StateKind.EXP_AVG_SQ)
            for start in range(0, master.numel(), _SPLIT_NUMEL):
                views = {kind: held[kind][start : start + _SPLIT_NUMEL] for kind in kinds}
                states = split_master(master[start : start + _SPLIT_NUMEL], views[StateKind.EXP_AVG_SQ])
                for kind, state in zip(kinds, states, strict=True):
                    views[kind].copy_(state)
        elif StateKind.PARAM in held:
            held[StateKind.PARAM].copy_(master)
        return master.numel()

    def _source(self) -> CheckpointReader | BlockInitializer:
        spec = self.context.spec
        model = build_meta_model(load_config(spec.model_dir), self.context.formats.precision)
        if spec.training.initialization is Initialization.WEIGHTS:
            return CheckpointReader(spec.model_dir, self.context.layout, model)
        return BlockInitializer(model, self.context.layout, spec.training.seed)

    def export(self, path: str, step: Step, copy_of: str | None = None) -> None:
        """Writes the params of `step` as a Hugging Face folder, or copies the folder `copy_of`.

        A failure leaves nothing at `path`.
        """
        if Path(path).exists():
            return  # complete: written by an attempt that was lost before it could report it
        if copy_of is not None:
            copy_model_folder(Path(copy_of), Path(path), links=True)
            return
        spec, layout = self.context.spec, self.context.layout
        dtype = TORCH_DTYPE[self.context.formats.precision]
        exporter = ModelExporter(spec.model_dir, layout, load_config(spec.model_dir), path, dtype)
        kind = self.context.formats.param_kind
        try:
            for block in layout.blocks:
                for key in layout.chunk_keys(block.index):
                    with self._held(key, kind, step) as slot:
                        exporter.write_chunk(key, self._view(slot, key, kind))
            exporter.finish()
        except BaseException:
            exporter.abort()
            raise

    @contextlib.contextmanager
    def _held(self, key: ChunkKey, kind: StateKind, step: Step) -> Iterator[Span]:
        """Yields the slot with a state of a chunk, which stays valid during the context."""
        self._arrived.clear()  # before the check, so that an event set by `abort` is not cleared
        self._check()
        if self._resting:
            yield self._resting[key]
            return
        deadline_s = self.context.spec.deadline_s
        (slot,) = self._slots.acquire(1, deadline_s)
        self._read(slot, key, (kind,), step, self._arrived.set)
        if not self._arrived.wait(deadline_s):
            raise TimeoutError(f"{key} of step {step} did not arrive within {deadline_s:g} s; check the disks")
        self._check()
        yield slot
        self._slots.release([slot])

    def _check(self) -> None:
        if self._aborted.is_set():
            raise InterruptedError("the job was stopped")
