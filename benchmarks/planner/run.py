"""Runs a planned job in its own process: `python -m benchmarks.planner.run {time,memory} FOLDER`

Memory use is read from the kernel, not from the plan: private memory for the device (which is the CPU), pages of the
arena, and blocks of the SSD directory. Prints one JSON object.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.workload import read_workload

if TYPE_CHECKING:
    from windlass.actors.job import JobSpec

JOB_FILE = "planned.json"  # beside the workload
_HOME, _SSD = "home", "ssd"
_NUM_MEMORY_STEPS = 4  # steps after which a job's memory no longer grows
_BLOCK_NBYTES = 512  # unit of `st_blocks`


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements of a run. `error` is the reason if there are none."""

    error: str | None = None
    step_s: float = 0.0  # mean of the timed steps
    device_nbytes: int = 0
    arena_nbytes: int = 0
    ssd_nbytes: int = 0


def with_memory(timed: Measured, folder: Path) -> Measured:
    """Trains the job of a folder again for its memory, in its own process, and returns both measurements.

    The process returns freed memory to the system at once, so that private memory is live memory. This doubles the
    step time. It trains the job for a step before. So the kernels that oneDNN compiles for each shape of a matrix
    product, half a MiB each, are not counted as the job's memory.
    """
    from benchmarks.activations.run import MALLOC

    return replace(_run("memory", folder, MALLOC), step_s=timed.step_s)


def run_timed(folder: Path) -> Measured:
    """Trains the job of a folder in its own process, for the time alone."""
    return _run("time", folder, {})


def _run(what: str, folder: Path, environment: dict[str, str]) -> Measured:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.planner.run", what, str(folder)]
    process = subprocess.run(command, cwd=Path.cwd(), env=os.environ | environment, capture_output=True, text=True)
    _clean(folder)
    if process.returncode != 0:
        raise RuntimeError(f"{folder.name} failed:\n{process.stderr[-4000:]}")
    return Measured(**json.loads(process.stdout.splitlines()[-1]))


def _clean(folder: Path) -> None:
    for name in (_HOME, _SSD):
        shutil.rmtree(folder / name, ignore_errors=True)


def planned_spec(folder: Path, num_steps: int | None = None) -> "JobSpec":
    """Returns the workload's job with the planned settings. `num_steps`: fewer than the workload's."""
    from benchmarks.peers.windlass_runner import job_spec
    from windlass.planner.question import JobPlan
    from windlass.storage.ids import JobId

    workload, planned = read_workload(folder), json.loads((folder / JOB_FILE).read_text())
    home, ssd_dir = folder / _HOME, folder / _SSD
    home.mkdir()
    spec = job_spec(workload, folder, home, [ssd_dir])
    spec = spec.with_training(
        num_microbatches=planned["num_microbatches"],
        clip_norm=planned["clip_norm"],
        total_steps=num_steps or spec.training.total_steps,
    )
    plan = JobPlan.model_validate(planned["job_plan"])
    assert plan.placement is not None, "a case is written only if it fits"
    return replace(
        spec,
        job=JobId(f"planned-{os.getpid()}"),
        placement=plan.placement,
        host_memory_nbytes=plan.arena_nbytes,
        kernel_dir=planned["kernel_dir"],
    )


def train(folder: Path, num_steps: int | None = None, *, watches_memory: bool = True) -> Measured:
    """Trains in this process, with all actors as threads.

    `watches_memory`: sample private memory, which costs some percent of a step on few cores. `num_steps`: fewer than
    the workload's.
    """
    from benchmarks.activations.run import PrivateMemory, private_nbytes
    from windlass.actors.job import JOURNAL_FILE, read_journal
    from windlass.actors.job.journal import METRICS
    from windlass.actors.messages import ComputeBlocks, KernelChosen, Message
    from windlass.actors.runtime.local_runner import run_local
    from windlass.engine.model import partition_folder

    spec, workload = planned_spec(folder, num_steps), read_workload(folder)
    partition = partition_folder(spec.model_dir, spec.training.precision)
    memory, is_watched = PrivateMemory(), False
    at_kernels: list[int] = []  # private memory when the optimizer is ready, and when states are on the device
    blocks = {"arena": 0, "ssd": 0}

    def look(_to: str, message: Message) -> None:
        nonlocal is_watched
        if isinstance(message, KernelChosen):
            at_kernels.append(private_nbytes())
        elif isinstance(message, ComputeBlocks):
            if watches_memory and not is_watched:
                is_watched = True
                memory.start()
            if message.operations[-1].step == spec.training.total_steps and not blocks["ssd"]:
                blocks["ssd"] = _used_nbytes(Path(spec.ssd_dirs[0]), "*")
                blocks["arena"] = _used_nbytes(Path(spec.arena_dir), f"windlass-{spec.job}-*")

    try:
        outcome = run_local(spec, partition=partition, on_message=look)
    finally:
        device_nbytes = memory.stop()
    if outcome["status"] != "succeeded":
        return Measured(error=str(outcome["error"]))
    steps: list[dict[str, Any]] = [
        each.data for each in read_journal(Path(spec.job_dir) / JOURNAL_FILE) if each.kind == METRICS
    ]
    return Measured(
        step_s=statistics.fmean(data["timeline"]["period_s"] for data in steps[workload.num_warmup_steps :]),
        device_nbytes=device_nbytes + at_kernels[-1] - at_kernels[0],
        arena_nbytes=blocks["arena"],
        ssd_nbytes=blocks["ssd"],
    )


def _compile_kernels(folder: Path) -> None:
    """Trains for one step, which compiles the kernels of all shapes in this process."""
    from windlass.actors.runtime.local_runner import run_local

    run_local(planned_spec(folder, 1))
    _clean(folder)


def _used_nbytes(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_blocks * _BLOCK_NBYTES for path in folder.glob(pattern) if path.is_file())


def main() -> None:
    """Trains the job of a folder, for the time or for the memory."""
    from windlass.engine.device import retain_freed_memory

    retain_freed_memory()  # as in a service's worker process
    what, folder = sys.argv[1:]
    asks_memory = what == "memory"
    if asks_memory:
        _compile_kernels(Path(folder))
    measured = train(Path(folder), _NUM_MEMORY_STEPS if asks_memory else None, watches_memory=asks_memory)
    print(json.dumps(asdict(measured)))


if __name__ == "__main__":
    main()
