"""Moves a model between its folder and slots, chunk by chunk. It needs the transformers library.

The library takes more memory than the rest of an optimizer. So on Ray a process of its own runs this for one task
(`model_process.py`): `python -m windlass.actors.optimizer.model_mover PARENT_PID DESCRIPTOR`.
"""

import contextlib
import ctypes
import importlib
import pickle
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from windlass.actors.job import JobContext
from windlass.actors.lifecycle import die_with_parent, has_begun, join_attempt
from windlass.actors.optimizer.model_io import ModelTask
from windlass.actors.optimizer.model_process import Begin, Failed, Finish, Move, Synced
from windlass.engine.checkpoint import BlockInitializer, CheckpointReader, ModelExporter
from windlass.engine.device import TORCH_DTYPE, TensorArena, state_dtype
from windlass.engine.model import MODELS_MODULE, build_meta_model, load_config
from windlass.engine.optimizer import split_master
from windlass.engine.training_config import Initialization
from windlass.storage.ids import ChunkKey, Span, StateKind
from windlass.storage.memory import Arena

# Number of elements of a master that are split at a time, so that temporary tensors stay in the processor's caches. On
# one core this is seven times as fast as splitting a whole chunk at once.
_SPLIT_NUMEL = 2**16

ChunkView = Callable[[Span, ChunkKey, StateKind], torch.Tensor]


class ModelMover:
    """Fills slots with a model's first states, or writes the params in slots to a model folder.

    It never holds more than one tensor or one block.
    """

    def __init__(self, context: JobContext, view: ChunkView) -> None:
        """`view` returns one state of a chunk in a slot, as a flat tensor with the chunk's number of elements."""
        self._context = context
        self._view = view
        self._source: CheckpointReader | BlockInitializer | None = None
        self._exporter: ModelExporter | None = None

    def begin(self, task: ModelTask) -> None:
        """Opens the model's folder for a load, or makes one for an export."""
        spec, precision = self._context.spec, self._context.formats.precision
        config = load_config(spec.model_dir)
        if task.export_path is not None:
            layout, dtype = self._context.whole_layout, TORCH_DTYPE[precision]
            self._exporter = ModelExporter(spec.model_dir, layout, config, task.export_path, dtype)
            return
        model = build_meta_model(config, precision)
        if spec.training.initialization is Initialization.WEIGHTS:
            self._source = CheckpointReader(spec.model_dir, self._context.layout, model)
        else:
            self._source = BlockInitializer(model, self._context.layout, spec.training.seed)

    def move(self, key: ChunkKey, slot: Span) -> None:
        """Moves one chunk into its slot, or from there to the folder."""
        if self._exporter is not None:
            self._exporter.write_chunk(key, self._view(slot, key, self._context.formats.param_kind))
        else:
            assert self._source is not None, "`begin` comes first"
            self._fill(self._source, key, slot)

    def finish(self, on_synced: Callable[[], None]) -> None:
        """Completes an exported folder, see `ModelExporter.finish`; a load needs nothing more."""
        if self._exporter is not None:
            self._exporter.finish(on_synced)

    def close(self) -> None:
        """Closes the files. Removes what an unfinished export has written."""
        if self._exporter is not None:
            self._exporter.abort()
        if self._source is not None:
            self._source.close()
            self._source = None
            # Returns the memory of the loaded tensors to the system. Otherwise the C library would keep it.
            ctypes.CDLL(None).malloc_trim(0)

    def _fill(self, source: CheckpointReader | BlockInitializer, key: ChunkKey, slot: Span) -> None:
        """Fills a slot with a chunk's first states."""
        held = {kind: self._view(slot, key, kind) for kind in self._context.formats.itemsizes}
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


def main() -> None:
    """Answers a parent's requests until it closes the connection, or until the first error."""
    die_with_parent(int(sys.argv[1]))
    importlib.import_module(MODELS_MODULE)
    mover: ModelMover | None = None
    with contextlib.ExitStack() as closing:
        connection = closing.enter_context(Connection(int(sys.argv[2])))
        while (request := _receive(connection)) is not None:
            try:
                if isinstance(request, Begin):
                    mover = closing.enter_context(contextlib.closing(_make_mover(request.context)))
                assert mover is not None, "`Begin` comes first"
                _carry_out(mover, request, on_synced=lambda: connection.send(Synced()))
            except Exception as error:  # noqa: BLE001 - the parent raises it
                connection.send(_described(error))
                return
            connection.send(None)


def _receive(connection: Connection) -> Begin | Move | Finish | None:
    """Returns the next request, or None if the parent has closed the connection."""
    try:
        request: Begin | Move | Finish = connection.recv()
    except (EOFError, ConnectionResetError):
        return None
    return request


def _make_mover(context: JobContext) -> ModelMover:
    """Joins the attempt, if a runner has begun it, and makes a mover whose slots are in the job's arena."""
    job_dir, attempt = Path(context.spec.job_dir), context.spec.attempt
    if has_begun(job_dir, attempt):
        join_attempt(job_dir, attempt)  # the process keeps the descriptor open, and with it the lock
    arena = Arena.open(context.arena_path)
    tensors, offsets = TensorArena.of(arena), context.state_offsets()

    def view(slot: Span, key: ChunkKey, kind: StateKind) -> torch.Tensor:
        dtype = state_dtype(context.formats, kind)
        return tensors.view(slot.offset + offsets[kind], context.chunk_numel(key), dtype)

    return ModelMover(context, view)


def _carry_out(mover: ModelMover, request: Begin | Move | Finish, on_synced: Callable[[], None]) -> None:
    match request:
        case Begin():
            mover.begin(request.task)
        case Move():
            mover.move(request.key, request.slot)
        case Finish():
            mover.finish(on_synced)


def _described(error: Exception) -> Failed:
    detail = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - an error of another package may not survive it
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return Failed(error, detail)


if __name__ == "__main__":
    main()
