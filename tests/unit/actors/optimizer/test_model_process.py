"""Loading and exporting a model in a process of its own, which shares the arena's slots with the optimizer."""

import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.training import make_partition, make_spec
from windlass.actors.job.context import make_context, optimizer_name
from windlass.actors.lifecycle.report_timer import PROGRESS_EVERY_S
from windlass.actors.messages import FailureKind
from windlass.actors.optimizer.box_params import BoxParams
from windlass.actors.optimizer.model_io import ModelIo, ModelTask
from windlass.actors.optimizer.model_process import ModelProcess
from windlass.engine.checkpoint.model_exporter import ExportError
from windlass.engine.checkpoint.reader import CheckpointError
from windlass.engine.device.dtypes import state_dtype
from windlass.service.installation.process_ids import find_process, wait_until_gone
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import ChunkKey, Span, StateKind, Step
from windlass.storage.memory.arena import Arena, SlotPool

EMBEDDING = "model.embed_tokens.weight"


class Bench:
    """An arena with two slots, and a store in plain memory."""

    def __init__(self, directory: Path) -> None:
        self.spec = make_spec(directory, deadline_s=120.0)
        layout = make_partition(self.spec).layout
        path = directory / "windlass-test-1-1.arena"
        self.context = make_context(self.spec, layout, str(path))
        nbytes = self.context.plan.states[0].slot_nbytes
        self.arena = Arena.create(path, 2 * nbytes, huge_pages=False)
        self.token = CancelToken(self.spec.deadline_s)
        self.slots = SlotPool(0, nbytes, 2, token=self.token)
        self.store: dict[ChunkKey, bytes] = {}
        self.processes: list[ModelProcess] = []
        self.on_read: Callable[[], None] = lambda: None
        boxes = BoxParams(optimizer_name(0), self.context, lambda to, message: None)
        self.io = ModelIo(self.context, self.slots, self.start, self.read, self.write, boxes, self.token)

    def start(self) -> ModelProcess:
        self.processes.append(ModelProcess(self.context))
        return self.processes[-1]

    def close(self) -> None:
        for process in self.processes:
            process.close()
        self.arena.close()
        self.arena.unlink()

    def read(
        self, slot: Span, key: ChunkKey, kinds: tuple[StateKind, ...], step: Step, on_done: Callable[[], None]
    ) -> None:
        self.arena.buffer(slot)[:] = self.store[key]
        self.on_read()
        on_done()

    def write(self, slot: Span, key: ChunkKey, step: Step, on_done: Callable[[], None]) -> None:
        self.store[key] = bytes(self.arena.buffer(slot))
        on_done()

    def master(self, block: int) -> torch.Tensor:
        """The masters of a block as they were stored."""
        kind = StateKind.MASTER if StateKind.MASTER in self.context.formats.itemsizes else StateKind.PARAM
        start, dtype = self.context.state_offsets()[kind], state_dtype(self.context.formats, kind)
        keys = self.context.layout.chunk_keys(self.context.layout.blocks[block].index)
        return torch.cat(
            [
                torch.frombuffer(bytearray(self.store[key][start:]), dtype=dtype, count=self.context.chunk_numel(key))
                for key in keys
            ]
        )

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


@pytest.mark.long
def test_process_loads_and_exports_the_weights_bit_by_bit(bench: Bench) -> None:
    bench.io.prepare()
    bench.io.load()
    weights = load_file(Path(bench.spec.model_dir) / "model.safetensors")
    (embedding,) = bench.context.layout.blocks[0].params
    assert embedding.name == EMBEDDING
    assert torch.equal(bench.master(0).view(embedding.shape), weights[EMBEDDING].float())
    shares: list[float] = []
    bench.io._clock = itertools.count(step=PROGRESS_EVERY_S).__next__
    bench.io.export(bench.spec.output_dir, Step(0), None, shares.append)
    num_files = sum(path.is_file() for path in Path(bench.spec.output_dir).rglob("*"))
    assert shares.count(1.0) == 1 + num_files  # the last chunk, and each file that the process has synced
    exported = load_file(Path(bench.spec.output_dir) / "model.safetensors")
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    assert len(bench.processes) == 2  # one for each task
    assert all(find_process(pid) is None for pid in bench.pids)  # ended, and no zombie
    assert bench.slots.statistics.in_use_nbytes == 0


@pytest.mark.long
def test_error_in_the_process_keeps_its_class_text_and_traceback(bench: Bench) -> None:
    (Path(bench.spec.model_dir) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights; expected") as caught:
        bench.io.load()
    assert FailureKind.of(caught.value) is FailureKind.LASTING
    assert "in _find_tensors" in "".join(traceback.format_exception(caught.value))


@pytest.mark.long
def test_failed_export_leaves_nothing(bench: Bench) -> None:
    bench.io.load()
    target = Path(bench.spec.output_dir)
    before = sorted(target.parent.iterdir())
    worker = bench.start()
    worker.begin(ModelTask(export_path=str(target)))
    assert len(sorted(target.parent.iterdir())) == len(before) + 1
    with pytest.raises(ExportError, match=r"chunks were not written"):
        worker.finish(lambda: None)
    worker.close()
    assert sorted(target.parent.iterdir()) == before


@pytest.mark.long
def test_aborted_export_leaves_neither_files_nor_a_process(bench: Bench) -> None:
    bench.io.load()
    before = sorted(Path(bench.spec.output_dir).parent.iterdir())
    bench.on_read = bench.token.cancel
    with pytest.raises(InterruptedError, match="the job was stopped"):
        bench.io.export(bench.spec.output_dir, Step(0))
    assert sorted(Path(bench.spec.output_dir).parent.iterdir()) == before
    assert all(find_process(pid) is None for pid in bench.pids)


@pytest.mark.long
def test_killed_process_is_reported_as_unforeseen(bench: Bench) -> None:
    bench.io.load()
    bench.on_read = lambda: os.kill(bench.pids[-1], signal.SIGKILL)
    with pytest.raises(RuntimeError, match="process that loads and exports the model was killed by signal 9") as caught:
        bench.io.export(bench.spec.output_dir, Step(0))
    assert FailureKind.of(caught.value) is FailureKind.UNFORESEEN
    assert not Path(bench.spec.output_dir).exists()


@pytest.mark.long
def test_prepared_process_without_a_task_ends_at_once(bench: Bench) -> None:
    bench.io.prepare()
    bench.io.close()
    assert find_process(bench.pids[0]) is None


@pytest.mark.long
def test_process_has_the_niceness_of_the_thread_that_starts_it(bench: Bench) -> None:
    niceness: list[int] = []

    def start() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        process = bench.start()
        niceness.append(os.getpriority(os.PRIO_PROCESS, process.pid))
        process.close()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert niceness == [19]


_OPTIMIZER = """
import pickle, sys, time
from windlass.actors.optimizer.model_process import ModelProcess
from windlass.actors.optimizer.model_io import ModelTask
process = ModelProcess(pickle.load(open(sys.argv[1], "rb")))
process.begin(ModelTask(export_path=None))
print(process.pid, "transformers" in sys.modules, flush=True)
time.sleep(600)
"""


def test_process_dies_with_its_parent_which_holds_no_transformers(bench: Bench, tmp_path: Path) -> None:
    context_file = tmp_path / "context"
    context_file.write_bytes(pickle.dumps(bench.context))
    command = [sys.executable, "-c", _OPTIMIZER, str(context_file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, has_transformers = parent.stdout.readline().split()
        assert has_transformers == "False"
        child = find_process(int(pid))
        assert child is not None
        parent.kill()
        assert wait_until_gone([child], timeout_s=60.0)
