"""Measures the fixed memory of a job on Ray: that of its processes and of Ray's, for a model with next to no params.

A process is assigned to its kind by its command line. Workers of a job have the same one, and differ in their threads.
"""

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.peers.contenders import Contender, run_contender
from benchmarks.peers.workload import ModelShape, Workload
from benchmarks.reporting.pss import ProcessMemory, process_memory
from benchmarks.reporting.report import GIB, Report

_MIB = 1 << 20
_INTERVAL_S = 0.05  # between two samples
# Kinds by the first thread name's beginning, as the kernel shows it (`storage/threads.py`).
_WORKERS = {"GpuWorker": "GPU worker", "CpuOptimizer": "CPU optimizer", "SsdServer": "SSD server"}
# Kinds by a word of the command line.
_COMMANDS = {
    "ray::Runner": "runner",
    "ray::IDLE": "Ray: idle worker",
    "ray::DashboardAgent": "Ray: dashboard agent",
    "ray::RuntimeEnvAgent": "Ray: runtime environment agent",
    "dashboard.py": "Ray: dashboard",
    "gcs_server": "Ray: GCS",
    "raylet": "Ray: raylet",
}

# The memory of the processes of each kind at one moment.
Sample = Mapping[str, Sequence[ProcessMemory]]


def tiny_workload(num_steps: int) -> Workload:
    """Returns a model with next to no parameters."""
    return Workload(
        shape=ModelShape(hidden=64, num_layers=2, vocab=256, intermediate=128, num_heads=2),
        batch_size=1,
        sequence_length=16,
        num_warmup_steps=4,
        num_timed_steps=num_steps,
        num_threads=2,
        seed=1,
    )


def kind_of(pid: int) -> str:
    """Returns the kind of a process of Ray or of a job; "other" if it has none, or has ended."""
    process = Path(f"/proc/{pid}")
    try:
        words = [word for word in (process / "cmdline").read_text().split("\0") if word]
        threads = [(task / "comm").read_text() for task in (process / "task").iterdir()]
    except OSError:
        return "other"
    kinds = (kind for thread in threads for name, kind in _WORKERS.items() if thread.startswith(name))
    if kind := next(kinds, None):
        return kind
    # The interpreter, its options and the program; later words may name any file.
    commands = [Path(word).name for word in words[:3]]
    return next((kind for name, kind in _COMMANDS.items() for word in commands if word.startswith(name)), "other")


def sample_of(pids: Iterable[int]) -> Sample:
    """Returns the memory of these processes by kind."""
    sample: dict[str, list[ProcessMemory]] = defaultdict(list)
    for pid in pids:
        if (memory := process_memory(pid)) is not None:
            sample[kind_of(pid)].append(memory)
    return sample


class _StepSampler:
    """Samples memory in a thread between the first timed step and the last one, because a sample takes longer."""

    def __init__(self, num_steps: int) -> None:
        self.samples: list[Sample] = []
        self._num_left = num_steps
        self._thread = threading.Thread(target=self._run, name="memory sampler", daemon=True)
        self._pids: set[int] = set()

    def step(self, pids: set[int]) -> None:
        """Records the end of a step, with the processes of Ray and the job."""
        self._pids = pids
        self._num_left -= 1
        if not self._thread.is_alive() and self._num_left > 0:
            self._thread.start()

    def _run(self) -> None:
        while True:
            sample = sample_of(self._pids)
            if self._num_left <= 0:
                return
            self.samples.append(sample)
            time.sleep(_INTERVAL_S)


def measure(contender: Contender, workload: Workload, folder: Path) -> list[Sample]:
    """Trains the workload and samples the memory during its timed steps. The driver's memory does not count."""
    sampler = _StepSampler(workload.num_timed_steps)
    run_contender(contender, workload, folder, on_step=sampler.step)
    return sampler.samples


def fixed_nbytes(samples: Sequence[Sample]) -> float:
    """Returns the median of the sum over all processes."""
    return statistics.median(
        sum(memory.pss_nbytes for memories in sample.values() for memory in memories) for sample in samples
    )


def rows_of(samples: Sequence[Sample]) -> list[tuple[str, str, str, str]]:
    """Returns the table's rows: a kind, its number of processes, and the medians of their PSS and anonymous memory."""
    kinds = {kind for sample in samples for kind in sample}
    rows = []
    for kind in kinds:
        groups = [sample.get(kind, ()) for sample in samples]
        number = statistics.median_high(len(group) for group in groups)
        pss = statistics.median(sum(memory.pss_nbytes for memory in group) for group in groups)
        anon = statistics.median(sum(memory.anon_nbytes for memory in group) for group in groups)
        rows.append((pss, (kind, str(number), f"{pss / _MIB:.0f}", f"{anon / _MIB:.0f}")))
    return [row for _, row in sorted(rows, reverse=True)]


def report_on(report: Report, samples: Sequence[Sample]) -> float:
    """Adds the table to a report, and returns the fixed memory in GiB."""
    total = fixed_nbytes(samples)
    report.add("## Fixed memory")
    all_kinds = ("all", "", f"{total / _MIB:.0f}", "")
    header = ("process", "number", "PSS, MiB", "anonymous part, MiB")
    report.add_table(header, [*rows_of(samples), all_kinds])
    num_params = tiny_workload(1).shape.num_params
    report.add(
        f"Medians of {len(samples)} samples while a model with {num_params / 1e3:.0f} thousand parameters trains. "
        "Its arena counts. The driver does not: in the service it is the dispatcher. Pages of libraries that programs "
        "outside the job use too count in part, so the number is smaller on a busy machine."
    )
    return total / GIB
