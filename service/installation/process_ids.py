"""Ids of processes that outlive their parents. A later process with the same pid is never mistaken for them."""

import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A process of this machine. The start time distinguishes it from others with the same pid, also across reboots."""

    pid: int
    start: str  # boot id and start time in clock ticks since boot

    @property
    def is_alive(self) -> bool:
        """Returns whether this exact process still runs; a zombie does not."""
        return find_process(self.pid) == self


def find_process(pid: int) -> ProcessId | None:
    """Returns the process that has this pid now, or None if there is none or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may contain anything. The fields after it: state, ..., start time as the 20th.
    fields = stat[stat.rindex(")") + 2 :].split()
    if fields[0] in "ZX":
        return None
    return ProcessId(pid=pid, start=f"{boot_id()}:{fields[19]}")


def boot_id() -> str:
    """Returns the id of the machine's current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def with_descendants(processes: Iterable[ProcessId]) -> list[ProcessId]:
    """Returns those of these processes that live, with all their descendants, parents before children."""
    found: list[ProcessId] = []
    for process in processes:
        if not process.is_alive:
            continue
        try:
            children = psutil.Process(process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            continue
        found += [process, *(child for each in children if (child := find_process(each.pid)) is not None)]
    return list(dict.fromkeys(found))


def send_signal(process: ProcessId, signum: signal.Signals) -> None:
    """Signals this exact process; does nothing if it is gone."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        # The pidfd refers to the process that had the pid when it was opened. Compare first, then signal that one.
        if process.is_alive:
            signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


def end_processes(processes: Sequence[ProcessId], *, grace_s: float) -> None:
    """Sends SIGTERM, then SIGKILL to processes that live after `grace_s`, and waits until all are gone.

    Raises TimeoutError.
    """
    for signum, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        for process in processes:
            send_signal(process, signum)
        if wait_until_gone(processes, timeout_s=wait_s):
            return
    left = [process.pid for process in processes if process.is_alive]
    if left:
        raise TimeoutError(f"processes {left} did not end within 10 s of SIGKILL; they may hang in the kernel")


def wait_until_gone(processes: Sequence[ProcessId], *, timeout_s: float) -> bool:
    """Waits for processes to end. Returns False if some still run after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
