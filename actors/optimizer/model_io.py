"""Loads a model into the store and exports it, chunk by chunk, through an optimizer's slots."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from windlass.actors.job import JobContext
from windlass.actors.lifecycle import ReportTimer
from windlass.actors.optimizer.box_params import BoxParams
from windlass.engine.checkpoint import copy_model_folder, folder_nbytes
from windlass.engine.model import ModelLayout
from windlass.storage.cancellation import CancelToken, Signal
from windlass.storage.ids import ChunkKey, Span, Step
from windlass.storage.memory import SlotPool


@dataclass(frozen=True, slots=True)
class ModelTask:
    """A load of the model's first states, or an export."""

    export_path: str | None  # None: a load


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


@dataclass(frozen=True, slots=True, eq=False)
class _Coming:
    """A chunk of an export."""

    key: ChunkKey
    slot: Span  # for its params
    is_resident: bool  # the slot is its own
    arrived: Signal
    source: str  # for errors


class ModelIo:
    """Loads the blocks of a box, and exports the model, for the box's first optimizer. The first box exports.

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
        boxes: BoxParams,
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
        self._boxes = boxes
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
        """Writes the states of step 0 for all chunks of the box.

        `on_progress` is called every few seconds with the number of params so far.
        """
        timer, num_params = ReportTimer(), 0
        with self._working(ModelTask(export_path=None)) as worker:
            for key in _keys_of(self.context.layout):
                self._token.check()
                self._load_chunk(key, worker)
                num_params += self.context.chunk_numel(key)
                if timer.restart_if_due(self._clock()):
                    on_progress(num_params)
        self._slots.drain()  # every write is done then

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
    ) -> None:
        """Writes the params of `step` as a Hugging Face folder, or copies the folder `copy_of`.

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
        num_params, total = 0, self.context.whole_layout.numel
        with self._working(ModelTask(export_path=path), on_synced=lambda: note(total, total)) as worker:
            for key, slot in self._params_of(step):
                worker.move(key, slot)
                num_params += self.context.chunk_numel(key)
                note(num_params, total)

    def offer(self, key: ChunkKey, step: Step) -> None:
        """Offers a chunk's params of `step` to the first box, which exports the model. It may wait for a slot."""
        if self._resting:
            self._boxes.offer(key, self._resting[key], step, lambda: None)
            return
        (slot,) = self._slots.acquire(1)

        def arrived() -> None:
            self._boxes.offer(key, slot, step, lambda: self._slots.release([slot]))

        self._read(slot, key, (self.context.formats.param_kind,), step, arrived)

    def _params_of(self, step: Step) -> Iterator[tuple[ChunkKey, Span]]:
        """Yields the model's chunks in order, each with a slot that holds its params until the next one is asked for.

        Meanwhile the next chunks come, as many as there are slots.
        """
        coming: deque[_Coming] = deque()
        for key in _keys_of(self.context.whole_layout):
            if len(coming) == self._slots.num_slots:
                yield from self._await(coming.popleft(), step)
            coming.append(self._request(key, step))
        while coming:
            yield from self._await(coming.popleft(), step)

    def _request(self, key: ChunkKey, step: Step) -> _Coming:
        """Requests a chunk's params from the SSDs or from another box."""
        self._token.check()
        arrived, is_own = Signal(self._token), self.context.layout.is_own(key.block)
        if is_own and self._resting:
            arrived.set()
            return _Coming(key, self._resting[key], True, arrived, "")
        (slot,) = self._slots.acquire(1)
        if is_own:
            self._read(slot, key, (self.context.formats.param_kind,), step, arrived.set)
            return _Coming(key, slot, False, arrived, "the SSDs; check the disks")
        self._boxes.pull(key, slot, step, arrived.set)
        box = self.context.spec.name_of_box(self.context.box_of_block(key.block))
        return _Coming(key, slot, False, arrived, f"{box}; that box or the link to it is stuck")

    def _await(self, chunk: _Coming, step: Step) -> Iterator[tuple[ChunkKey, Span]]:
        """Yields a chunk with its slot when its params are there. Then its slot is free."""
        chunk.arrived.wait(f"{chunk.key} of step {step}, from {chunk.source}")
        yield chunk.key, chunk.slot
        if not chunk.is_resident:
            self._slots.release([chunk.slot])

    @contextlib.contextmanager
    def _working(self, task: ModelTask, on_synced: Callable[[], None] = lambda: None) -> Iterator[ModelWorker]:
        """Yields a worker of the task, which is complete when the context ends without an error."""
        worker, self._prepared = self._prepared or self._start_worker(), None
        with contextlib.closing(worker):
            worker.begin(task)
            yield worker
            worker.finish(on_synced)


def _keys_of(layout: ModelLayout) -> Iterator[ChunkKey]:
    return (key for block in layout.blocks for key in layout.chunk_keys(block.index))
