"""Runs one job in its own process and measures its device memory: `python -m benchmarks.activations.run JSON`

The device is the CPU, so its memory is the process's private memory. The arena and the SSDs are not part of that.
Prints one JSON object.
"""

import json
import os
import statistics
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.scratch_folder import scratch_folder
from windlass.engine.memory_plan import ACTIVATION_SLOT_NBYTES, ActivationChoice, BlockActivations, Placement

if TYPE_CHECKING:
    from windlass.actors.job import JobSpec

_SAMPLE_S = 0.002  # interval between samples of private memory
# Return freed memory to the system at once, so that private memory is live memory.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
_DEADLINE_S = 3600.0
# A single narrow head. Attention over 128k tokens then ends within minutes on two cores, and a layer's activations for
# backward are as large as usual.
_HEAD_DIM = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationRun:
    """A training run, and the place of its activations. With `num_swapping`, only the first layers follow `choice`."""

    hidden: int
    num_layers: int
    batch_size: int
    sequence_length: int
    choice: ActivationChoice
    num_swapping: int | None = None  # the other layers swap their inputs and recompute the rest
    host_nbytes: int | None = None  # memory for activations; None: what is needed
    ssd_nbytes: int = 0
    num_steps: int = 1
    intermediate: int | None = None  # size of a layer's MLP; None: `hidden`
    vocabulary: int = 64
    num_microbatches: int = 1
    group_size: int | None = None  # of micro-batches; None: all
    device_blocks: tuple[int, ...] = ()
    streamed_blocks: tuple[int, ...] = ()
    streams_grads: bool = False

    def activations(self) -> tuple[BlockActivations, ...]:
        """Returns the choice of each layer."""
        chosen = self.choice.of_layers(self.num_layers)
        if self.num_swapping is None:
            return chosen
        others = ActivationChoice.RECOMPUTE_SWAP_INPUT.of_layers(self.num_layers)
        return chosen[: self.num_swapping] + others[self.num_swapping :]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationResult:
    """The measurements of a run. `error` is the reason if there are none."""

    error: str | None = None
    step_s: float = 0.0  # median, without the first step if there are several
    # Peak of private memory over its value before the first step, plus the states resident on the device. These are
    # allocated earlier.
    device_nbytes: int = 0
    out_nbytes: int = 0  # activation bytes per step that left the device
    written_nbytes: int = 0  # ... of these, bytes that went on to the SSDs


def run_in_process(run: ActivationRun, directory: Path) -> ActivationResult:
    """Trains in its own process, with its files below `directory`."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.activations.run", json.dumps(asdict(run))]
    process = subprocess.run(
        command, cwd=Path.cwd(), env=os.environ | MALLOC | {"TMPDIR": str(directory)}, capture_output=True, text=True
    )
    if process.returncode != 0:
        raise RuntimeError(f"{run} failed:\n{process.stderr[-4000:]}")
    return ActivationResult(**json.loads(process.stdout.splitlines()[-1]))


class PrivateMemory:
    """The peak of this process's private memory while it is watched, minus its value at the start."""

    def __init__(self) -> None:
        self._first = self._peak = private_nbytes()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="private memory")

    def start(self) -> None:
        """Starts watching."""
        self._first = self._peak = private_nbytes()
        self._thread.start()

    def stop(self) -> int:
        """Stops watching, and returns the peak in bytes."""
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()
        return self._peak - self._first

    def _watch(self) -> None:
        while not self._is_over.wait(_SAMPLE_S):
            self._peak = max(self._peak, private_nbytes())


def private_nbytes() -> int:
    """Returns the private memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def train(run: ActivationRun, folder: Path) -> ActivationResult:
    """Trains in this process, with all actors as threads."""
    from windlass.actors.job import JOURNAL_FILE, read_journal
    from windlass.actors.job.journal import METRICS
    from windlass.actors.messages import ComputeBlocks, KernelChosen, Message, WriteActivations
    from windlass.actors.runtime.local_runner import run_local
    from windlass.engine.activations import ActivationMemoryError
    from windlass.engine.model import partition_folder

    spec = job_spec(run, folder)
    partition = partition_folder(spec.model_dir, spec.training.precision)
    memory = PrivateMemory()
    is_watched = False
    written_nbytes = 0
    at_kernels: list[int] = []  # private memory when the optimizer is ready, and when states are on the device

    def look(_to: str, message: Message) -> None:
        nonlocal is_watched, written_nbytes
        if isinstance(message, ComputeBlocks) and not is_watched:
            is_watched = True
            memory.start()
        elif isinstance(message, KernelChosen):
            at_kernels.append(private_nbytes())
        elif isinstance(message, WriteActivations):
            written_nbytes += message.span.nbytes

    try:
        outcome = run_local(spec, partition=partition, on_message=look)
    except ActivationMemoryError as error:
        return ActivationResult(error=str(error))
    finally:
        device_nbytes = memory.stop()
    if outcome["status"] != "succeeded":
        return ActivationResult(error=str(outcome["error"]))
    steps = [each.data for each in read_journal(Path(spec.job_dir) / JOURNAL_FILE) if each.kind == METRICS]
    timed = [data["step_s"] for data in steps][1:] or [steps[0]["step_s"]]
    return ActivationResult(
        step_s=statistics.median(timed),
        device_nbytes=device_nbytes + at_kernels[-1] - at_kernels[0],
        out_nbytes=int(steps[-1].get("activation_bytes_out", 0)),
        written_nbytes=written_nbytes // run.num_steps,
    )


def job_spec(run: ActivationRun, folder: Path) -> "JobSpec":
    """Returns a job on random tokens with random weights, in bf16, with its states on one SSD."""
    from benchmarks.activations.memory_need import activation_need_of_model
    from windlass.actors.job import JobSpec
    from windlass.engine.training_config import Initialization, Schedule, TrainingConfig
    from windlass.storage.ids import JobId, Precision

    _write_model(run, folder / "model")
    _write_tokens(run, folder / "data")
    (folder / "job").mkdir()
    num_cores = len(os.sched_getaffinity(0))
    activations, host_nbytes = run.activations(), run.host_nbytes
    if host_nbytes is None:
        of_microbatch = (run.batch_size // run.num_microbatches, run.sequence_length)
        shapes = [of_microbatch] * (run.group_size or run.num_microbatches)
        need = activation_need_of_model(str(folder / "model"), Precision.BF16, activations, shapes)
        host_nbytes = need.num_slots * ACTIVATION_SLOT_NBYTES
    return JobSpec(
        job=JobId(f"benchmark-{os.getpid()}"),
        model_dir=str(folder / "model"),
        layout_file=str(folder / "layout.json"),
        dataset_dir=str(folder / "data"),
        job_dir=str(folder / "job"),
        output_dir=str(folder / "out"),
        ssd_dirs=(str(folder / "ssd"),),
        training=TrainingConfig(
            batch_size=run.batch_size,
            num_microbatches=run.num_microbatches,
            sequence_length=run.sequence_length,
            learning_rate=1e-4,
            schedule=Schedule.CONSTANT,
            beta2=0.95,
            clip_norm=None,
            seed=1,
            total_steps=run.num_steps,
            initialization=Initialization.RANDOM,
        ),
        compute_threads=num_cores,
        deadline_s=_DEADLINE_S,
        placement=Placement(
            activations=activations,
            host_activation_nbytes=host_nbytes,
            ssd_activation_nbytes=run.ssd_nbytes,
            group_size=run.group_size,
            device_blocks=tuple(run.device_blocks),
            streamed_blocks=tuple(run.streamed_blocks),
            streams_grads=run.streams_grads,
        ),
    )


def _write_model(run: ActivationRun, folder: Path) -> None:
    from transformers import Qwen3Config

    Qwen3Config(
        hidden_size=run.hidden,
        num_hidden_layers=run.num_layers,
        vocab_size=run.vocabulary,
        intermediate_size=run.intermediate or run.hidden,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=_HEAD_DIM,
        max_position_embeddings=run.sequence_length,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder)


def _write_tokens(run: ActivationRun, folder: Path) -> None:
    import numpy as np

    from windlass.engine.data.examples import FORMAT_VERSION
    from windlass.engine.data.tokenize import SplitWriter

    folder.mkdir()
    generator = np.random.default_rng(1)
    with SplitWriter(folder, "train", run.sequence_length) as writer:
        for _ in range(run.num_steps * run.batch_size):
            tokens = generator.integers(0, run.vocabulary, run.sequence_length + 1, dtype=np.int32)
            writer.append(tokens, np.ones(len(tokens), dtype=np.bool_))
        split = {name: getattr(writer, name) for name in ("num_examples", "num_tokens", "num_targets")}
    meta = {"version": FORMAT_VERSION, "sequence_length": run.sequence_length, "splits": {"train": split}}
    (folder / "meta.json").write_text(json.dumps(meta))


def main() -> None:
    """Trains with the options of the command line."""
    fields = json.loads(sys.argv[1])
    run = ActivationRun(**{**fields, "choice": ActivationChoice(fields["choice"])})
    with scratch_folder() as folder:
        print(json.dumps(asdict(train(run, folder))))


if __name__ == "__main__":
    main()
