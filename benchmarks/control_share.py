"""How much processor time windlass spends on steering: everything that is neither a kernel nor I/O.

Seen from outside, by thread. In a worker that computes, the hottest threads run the kernels, as many as it was given
for them (the Python between two kernels on these counts as kernel, as in plain PyTorch). In an SSD server the time
inside the system is I/O. All the rest is control: the scheduler, Ray's daemon, messages, copies between buffers.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

ThreadSeconds = Mapping[tuple[int, int], tuple[float, float]]

# As Ray names them; the second kind is that of `throttled_actors.py`.
_WORKERS = (b"ray::ActorShell", b"ray::ThrottledShell")


class Role(StrEnum):
    """What a process of a job does."""

    COMPUTE = "compute"
    SSD = "ssd"
    CONTROL = "control"


def control_seconds(before: ThreadSeconds, after: ThreadSeconds, roles: Mapping[int, Role], num_threads: int) -> float:
    """Processor seconds between two looks at all threads that were neither kernels nor I/O."""
    by_process: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for (pid, tid), (user, system) in after.items():
        user_before, system_before = before.get((pid, tid), (0.0, 0.0))
        by_process[pid].append((user - user_before, system - system_before))
    total_s = 0.0
    for pid, threads in by_process.items():
        match roles.get(pid, Role.CONTROL):
            case Role.COMPUTE:
                total_s += sum(sorted((user + system for user, system in threads), reverse=True)[num_threads:])
            case Role.SSD:
                total_s += sum(user for user, _ in threads)
            case Role.CONTROL:
                total_s += sum(user + system for user, system in threads)
    return total_s


def role_of(pid: int, ssd_dirs: Sequence[Path]) -> Role:
    """The role of a process of a job that runs on Ray: Ray names its workers after the actor's class."""
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
