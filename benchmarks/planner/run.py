"""Runs a planned job in its own process: `python -m benchmarks.planner.run {time,memory} FOLDER`

Memory use is read from the kernel, not from the plan: private memory for the device (which is the CPU), pages of the
arena, and blocks of the SSD directory. Prints one JSON object.

While a job is timed, its process is stopped every few seconds, so that the machine's pace can be measured. The time in
which it is stopped does not count. Nothing of the job goes on meanwhile, so no work is hidden in it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.workload import read_workload

if TYPE_CHECKING:
    from windlass.actors.job import JobSpec

JOB_FILE = "planned.json"  # beside the workload
_HOME, _SSD = "home", "ssd"
_NUM_MEMORY_STEPS = 4  # steps after which a job's memory no longer grows
_BLOCK_NBYTES = 512  # unit of `st_blocks`
_TIMED = "timed"  # a file that is there from the first timed step on
_RUN_S = 2.0  # for which a job runs between two measurements of the machine's pace


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements of a run. `error` is the reason if there are none."""

    error: str | None = None
    start_s: float = 0.0  # of the timed steps, by the monotonic clock
    end_s: float = 0.0
    step_s: float = 0.0  # mean of the timed steps, without the time in which the process was stopped
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

    memory = _run("memory", folder, MALLOC)
    return replace(memory, start_s=timed.start_s, end_s=timed.end_s, step_s=timed.step_s)


def run_timed(folder: Path, measure_pace: Callable[[], None] | None = None) -> Measured:
    """Trains the job of a folder in its own process, for the time alone.

    `measure_pace` is called every few seconds of the timed steps, while the process is stopped.
    """
    return _run("time", folder, {}, measure_pace)


def _run(
    what: str, folder: Path, environment: dict[str, str], measure_pace: Callable[[], None] | None = None
) -> Measured:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.planner.run", what, str(folder)]
    pauses: list[tuple[float, float]] = []
    with subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while True:
                try:
                    output, errors = process.communicate(timeout=None if measure_pace is None else _RUN_S)
                    break
                except subprocess.TimeoutExpired:
                    if measure_pace is not None and (folder / _TIMED).exists():
                        pauses.append(stopped(process, measure_pace))
        finally:
            process.kill()
    _clean(folder)
    if process.returncode != 0:
        raise RuntimeError(f"{folder.name} failed:\n{errors[-4000:]}")
    measured = Measured(**json.loads(output.splitlines()[-1]))
    return measured if measured.error is not None else without_pauses(measured, pauses)


def without_pauses(measured: Measured, pauses: Sequence[tuple[float, float]]) -> Measured:
    """Takes the time in which the process was stopped out of a run's step time."""
    start_s, end_s = measured.start_s, measured.end_s
    stopped_s = sum(max(0.0, min(until_s, end_s) - max(since_s, start_s)) for since_s, until_s in pauses)
    return replace(measured, step_s=(1 - stopped_s / (end_s - start_s)) * measured.step_s)


def stopped(process: subprocess.Popen[str], call: Callable[[], None]) -> tuple[float, float]:
    """Calls a function while all threads of a process are stopped. Returns when that was, by the monotonic clock."""
    start_s = time.monotonic()
    process.send_signal(signal.SIGSTOP)
    try:
        call()
    finally:
        end_s = time.monotonic()
        process.send_signal(signal.SIGCONT)
    return start_s, end_s


def _clean(folder: Path) -> None:
    for name in (_HOME, _SSD):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / _TIMED).unlink(missing_ok=True)


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
    from windlass.actors.messages import ComputeBlocks, KernelChosen, Message
    from windlass.actors.runtime.local_runner import run_local
    from windlass.actors.timeline import FOLDER, load_step
    from windlass.engine.model import partition_folder

    spec, workload = planned_spec(folder, num_steps), read_workload(folder)
    partition = partition_folder(spec.model_dir, spec.training.precision)
    memory, is_watched, is_timed = PrivateMemory(), False, False
    at_kernels: list[int] = []  # private memory when the optimizer is ready, and when states are on the device
    blocks = {"arena": 0, "ssd": 0}

    def look(_to: str, message: Message) -> None:
        nonlocal is_watched, is_timed
        if isinstance(message, KernelChosen):
            at_kernels.append(private_nbytes())
        elif isinstance(message, ComputeBlocks):
            if message.operations[-1].step > workload.num_warmup_steps and not is_timed:
                is_timed = True
                (folder / _TIMED).touch()  # once, because it takes a third of a millisecond
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
    first, last = workload.num_warmup_steps + 1, spec.training.total_steps
    steps = [load_step(Path(spec.job_dir) / FOLDER, step) for step in (first, last)]
    assert steps[0] is not None, "the spans of the last steps are kept"
    assert steps[-1] is not None, "and those of the very last"
    start_s, end_s = steps[0].start_s, steps[-1].end_s
    return Measured(
        start_s=start_s,
        end_s=end_s,
        step_s=(end_s - start_s) / (last - first + 1),
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
