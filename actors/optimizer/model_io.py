"""Loads a model into the store and exports it, chunk by chunk, through an optimizer's slots."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from windlass.actors.job import JobContext
from windlass.actors.lifecycle import ReportTimer
from windlass.engine.checkpoint import copy_model_folder, folder_nbytes
from windlass.storage.cancellation import CancelToken, Signal
from windlass.storage.ids import ChunkKey, Span, StateKind, Step
from windlass.storage.memory import SlotPool


@dataclass(frozen=True, slots=True)
class ModelTask:
    """A load of the model's first states, or an export."""

    export_path: str | None  # None: a load
    parts: tuple[str, ...] = ()  # see `ExportModel`


class ModelWorker(Protocol):
    """Moves a model between its folder and slots, for one task: `ModelMover`, or a process that has one."""

    def begin(self, task: ModelTask) -> None:
        """Begins the task."""

    def move(self, key: ChunkKey, slot: Span) -> None:
        """Fills a slot with a chunk's first states, or writes the chunk's params to the exported folder."""

    def finish(self, on_synced: Callable[[], None]) -> None:
        """Completes the task. Calls `on_synced` after each file of an export that is on the disk."""

    def close(self) -> None:
        """Frees everything. Nothing is left of a task that is not finished."""


class ModelIo:
    """Loads and exports the model for the first optimizer.

    It never holds more than its slots. In a job without SSDs, it reads and writes the resident states of all optimizers
    in host memory.
    """

    def __init__(
        self,
        context: JobContext,
        slots: SlotPool,
        start_worker: Callable[[], ModelWorker],
        read: Callable[..., None],
        write: Callable[..., None],
        token: CancelToken,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`token` ends a load or an export before its next chunk. `clock` times the reports of progress."""
        self.context = context
        self._slots = slots
        self._start_worker = start_worker
        self._prepared: ModelWorker | None = None
        self._read = read
        self._write = write
        self._resting = {} if context.spec.ssd_dirs else context.host_slots()
        self._token = token
        self._clock = clock

    def prepare(self) -> None:
        """Starts the worker of the next task, so that it can import its modules meanwhile."""
        self._prepared = self._start_worker()

    def close(self) -> None:
        """Ends a prepared worker that got no task. No load or export may run."""
        if self._prepared is not None:
            self._prepared.close()
            self._prepared = None

    def load(self, on_progress: Callable[[int], None] = lambda num_params: None) -> None:
        """Writes the states of step 0 for all chunks.

        `on_progress` is called every few seconds with the number of params so far.
        """
        timer, num_params = ReportTimer(), 0
        with self._working(ModelTask(export_path=None)) as worker:
            for key in self._keys():
                self._token.check()
                self._load_chunk(key, worker)
                num_params += self.context.chunk_numel(key)
                if timer.restart_if_due(self._clock()):
                    on_progress(num_params)
        self._slots.drain()  # every write is done then

    def _keys(self) -> Iterator[ChunkKey]:
        layout = self.context.layout
        return (key for block in layout.blocks for key in layout.chunk_keys(block.index))

    def _load_chunk(self, key: ChunkKey, worker: ModelWorker) -> None:
        if self._resting:
            worker.move(key, self._resting[key])
            return
        (slot,) = self._slots.acquire(1)
        worker.move(key, slot)
        self._write(slot, key, Step(0), lambda: self._slots.release([slot]))

    def export(
        self,
        path: str,
        step: Step,
        copy_of: str | None = None,
        on_progress: Callable[[float], None] = lambda share: None,
        parts: tuple[str, ...] = (),
    ) -> None:
        """Writes the params of `step` as a Hugging Face folder with `parts`, or copies the folder `copy_of`.

        `on_progress` is called every few seconds with the share that is written; 1 while the files are synced. A
        failure leaves nothing at `path`.
        """
        timer = ReportTimer()

        def note(num_done: int, total: int) -> None:
            if timer.restart_if_due(self._clock()):
                on_progress(num_done / total)

        if Path(path).exists():
            return  # complete: written by an attempt that was lost before it could report it
        if copy_of is not None:
            nbytes = folder_nbytes(Path(copy_of))
            copy_model_folder(Path(copy_of), Path(path), links=True, on_progress=lambda done: note(done, nbytes))
            return
        kind, num_params, total = self.context.formats.param_kind, 0, self.context.layout.numel
        with self._working(ModelTask(export_path=path, parts=parts), on_synced=lambda: note(total, total)) as worker:
            for key in self._keys():
                with self._held(key, kind, step) as slot:
                    worker.move(key, slot)
                num_params += self.context.chunk_numel(key)
                note(num_params, total)

    @contextlib.contextmanager
    def _working(self, task: ModelTask, on_synced: Callable[[], None] = lambda: None) -> Iterator[ModelWorker]:
        """Yields a worker of the task, which is complete when the context ends without an error."""
        worker, self._prepared = self._prepared or self._start_worker(), None
        with contextlib.closing(worker):
            worker.begin(task)
            yield worker
            worker.finish(on_synced)

    @contextlib.contextmanager
    def _held(self, key: ChunkKey, kind: StateKind, step: Step) -> Iterator[Span]:
        """Yields the slot with a state of a chunk, which stays valid during the context."""
        self._token.check()
        if self._resting:
            yield self._resting[key]
            return
        (slot,) = self._slots.acquire(1)
        arrived = Signal(self._token)
        self._read(slot, key, (kind,), step, arrived.set)
        arrived.wait(f"{key} of step {step}, from the SSDs; check the disks")
        yield slot
        self._slots.release([slot])
