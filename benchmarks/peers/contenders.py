"""The parent's side of a benchmark run: starts a contender, samples its memory, and collects its steps."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.peer import MARK
from benchmarks.peers.workload import Workload
from benchmarks.reporting.pss import Memory, MemorySampler, memory_of, process_tree

SHM_DIR = Path("/dev/shm")
_END_DEADLINE_S = 60.0  # timeout after each signal to a contender
# Maximum share of the time that memory sampling may take while steps are timed.
_TIMED_SHARE = 0.01


class ContenderFailedError(Exception):
    """Raised if a contender ended before it had trained all steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A program that trains a workload: a module, and its arguments after the workload's folder."""

    name: str
    title: str
    module: str
    arguments: tuple[str, ...] = ()
    shm_pattern: str | None = None  # pattern of its files in shared memory
    on_gpu: bool = False  # else no GPU is visible to it
    deadline_s: float = 1800.0  # seconds for a whole run


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderRun:
    """The measurements of a contender's run. `missing` is the reason if there are none."""

    missing: str | None = None
    step_s: tuple[float, ...] = ()  # timed steps
    losses: tuple[float, ...] = ()  # all steps
    steps_peak_nbytes: int = 0  # sum of PSS over processes, while steps run
    run_peak_nbytes: int = 0  # the same from start to end
    ssd_nbytes: tuple[int, int] | None = None  # read and written in a step
    control_s: float | None = None  # processor seconds per step outside kernels, I/O and byte-moving threads
    moving_s: float | None = None  # processor seconds per step of byte-moving threads, without system I/O


@dataclass(slots=True)
class _Events:
    """The events that a contender has reported so far."""

    workload: Workload
    sampler: MemorySampler
    roots: set[int]  # processes whose descendants all belong to the contender
    on_step: Callable[[set[int]], None] | None
    reported: set[int] = field(default_factory=set)  # the roots that the contender has reported
    missing: str | None = None
    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    totals: dict[str, Any] = field(default_factory=dict)
    done: bool = False

    def take(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "missing":
                self.missing = event["reason"]
            case "processes":
                self.reported |= set(event["pids"])
                self.roots |= self.reported
            case "ready":
                self.sampler.enter_phase("steps")
            case "timed":
                self.sampler.enter_phase("timed", share=_TIMED_SHARE)
            case "step":
                self.losses.append(event["loss"])
                if event["index"] >= self.workload.num_warmup_steps:
                    self.step_s.append(event["step_s"])
                    if self.on_step is not None:
                        self.on_step(process_tree(self.reported))
            case "totals":
                self.totals = event["values"]
            case "done":
                self.done = True
                self.sampler.enter_phase("end")


def run_contender(
    contender: Contender, workload: Workload, folder: Path, *, on_step: Callable[[set[int]], None] | None = None
) -> ContenderRun:
    """Trains the workload in `folder` from its initial weights. Raises `ContenderFailedError`.

    `on_step` is called after each timed step, with the processes that the contender has reported and their descendants.
    """
    command = [sys.executable, "-W", "ignore", "-m", contender.module, str(folder), *contender.arguments]
    log_path = folder / f"{contender.name}.log"
    with (
        log_path.open("w") as log,
        subprocess.Popen(
            command,
            env=_environment(workload, contender),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        roots = {process.pid}

        def sample() -> Memory:
            files = SHM_DIR.glob(contender.shm_pattern) if contender.shm_pattern else ()
            return memory_of(process_tree(roots), files)

        timer = threading.Timer(contender.deadline_s, _end, [process])
        timer.start()
        try:
            with MemorySampler(sample) as sampler:
                events = _Events(workload, sampler, roots, on_step)
                for event in _read_events(process):
                    events.take(event)
                process.wait()
        finally:
            timer.cancel()
            _end(process)
    if events.missing is not None:
        return ContenderRun(missing=events.missing)
    if not events.done or process.returncode != 0:
        raise ContenderFailedError(f"{contender.title} {_failure(process.returncode, log_path)}")
    return ContenderRun(
        step_s=tuple(events.step_s),
        losses=tuple(events.losses),
        steps_peak_nbytes=sampler.peak_nbytes("steps", "timed"),
        run_peak_nbytes=sampler.peak_nbytes(),
        ssd_nbytes=tuple(events.totals["ssd_nbytes"]) if "ssd_nbytes" in events.totals else None,
        control_s=events.totals.get("control_s"),
        moving_s=events.totals.get("moving_s"),
    )


def rounds(contenders: Sequence[Contender], num_rounds: int) -> Iterator[Contender]:
    """Yields every contender once per round. Alternate rounds are reversed, so that drift affects all alike."""
    for index in range(num_rounds):
        yield from contenders if index % 2 == 0 else reversed(contenders)


def without_paths(text: str) -> str:
    """Removes the folders of absolute paths from a text, so that a report does not show them."""
    return re.sub(r"(?<![\w.])/(?:[\w.\-+@]+/)+", "", text)


def _environment(workload: Workload, contender: Contender) -> dict[str, str]:
    threads = str(workload.num_threads)
    without_gpu = {} if contender.on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return {
        **os.environ,
        **without_gpu,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _read_events(process: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(MARK):
            yield json.loads(line.removeprefix(MARK))


def _end(process: "subprocess.Popen[str]") -> None:
    """Ends a contender with SIGTERM, so that it can end its own processes, and then with SIGKILL."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        os.killpg(process.pid, signum)
        try:
            process.wait(_END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            continue


def _failure(returncode: int, log_path: Path) -> str:
    lines = [line for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
    how = (
        f"was ended by signal {-returncode}; was memory short?"
        if returncode < 0
        else f"ended with exit code {returncode}"
    )
    return without_paths(f"{how}: {lines[-1][:300]}" if lines else how)
