"""Measures the processor time that windlass spends on control: everything that is neither a kernel nor I/O.

It is measured from outside, by thread:

- In a worker that computes, the busiest threads run kernels, as many as the worker was given. Threads that update
  resident states on the device count as kernels too. So does the Python code between their kernels, as for PyTorch.
- In an SSD server, system time is I/O.
- Threads that move bytes are counted apart. In SSD servers their user time is mostly checksums. On a CPU, other such
  threads copy between host memory and the device, where a GPU has copy engines.
- The rest is control: the scheduler, Ray's daemon, messages.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from benchmarks.reporting.pss import ThreadSeconds

# Process names that Ray gives the workers; the others are those of `throttled_actors.py` and `observed_actors.py`.
_WORKERS = (b"ray::ActorShell", b"ray::ThrottledShell", b"ray::ObservedShell")
# Names of threads that update states on the device,
_UPDATERS = ("DeviceStates.ru",)
# and of threads that move bytes, as the kernel shows them (`storage/threads.py`).
_MOVERS = ("IoScheduler_tra", "ParamFeed_arriv", "GradOffload", "PartialGrads.ru")


class Role(StrEnum):
    """The role of a job's process."""

    COMPUTE = "compute"
    SSD = "ssd"
    CONTROL = "control"


@dataclass(frozen=True, slots=True)
class Overhead:
    """Processor seconds beside kernels and system I/O."""

    control_s: float
    moving_s: float  # of threads that move bytes


def overhead(
    before: Mapping[tuple[int, int], ThreadSeconds],
    after: Mapping[tuple[int, int], ThreadSeconds],
    roles: Mapping[int, Role],
    num_threads: int,
) -> Overhead:
    """Returns the time spent between two samples of all threads. `num_threads`: threads of a worker's kernels."""
    by_process: dict[int, list[ThreadSeconds]] = defaultdict(list)
    nothing = ThreadSeconds(0.0, 0.0, "")
    for (pid, tid), now in after.items():
        past = before.get((pid, tid), nothing)
        by_process[pid].append(ThreadSeconds(now.user_s - past.user_s, now.system_s - past.system_s, now.name))
    control_s = moving_s = 0.0
    for pid, threads in by_process.items():
        role, counted = roles.get(pid, Role.CONTROL), threads
        if role is Role.COMPUTE:
            threads = [thread for thread in threads if thread.name not in _UPDATERS]
            counted = sorted(threads, key=lambda each: each.user_s + each.system_s, reverse=True)[num_threads:]
        for thread in counted:
            seconds = thread.user_s + (0.0 if role is Role.SSD else thread.system_s)
            if role is not Role.CONTROL and thread.name in _MOVERS:
                moving_s += seconds
            else:
                control_s += seconds
    return Overhead(control_s, moving_s)


def role_of(pid: int, ssd_dirs: Sequence[Path]) -> Role:
    """Returns the role of a process of a job on Ray, which names its workers after the actor's class."""
    process = Path(f"/proc/{pid}")
    try:
        command = (process / "cmdline").read_bytes()
        files = [file.readlink() for file in (process / "fd").iterdir()]
    except OSError:  # the process has ended
        return Role.CONTROL
    if not command.startswith(_WORKERS):
        return Role.CONTROL
    holds_store = any(file.is_relative_to(directory) for file in files for directory in ssd_dirs)
    return Role.SSD if holds_store else Role.COMPUTE
