"""Processes that outlive who started them: named so that a reused pid is never mistaken for them."""

import ctypes
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1


class ParentGoneError(RuntimeError):
    """The process that this one was started for has ended already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A process of this machine, told apart from a later one with the same pid, also across reboots."""

    pid: int
    start: str  # boot id and start time in clock ticks since boot

    @property
    def is_alive(self) -> bool:
        """Whether this very process still runs; a zombie does not."""
        return find_process(self.pid) == self


def find_process(pid: int) -> ProcessId | None:
    """The process that has this pid now; None if there is none, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may hold anything; what follows it: state, ..., start time as the 20th field.
    fields = stat[stat.rindex(")") + 2 :].split()
    if fields[0] in "ZX":
        return None
    return ProcessId(pid=pid, start=f"{boot_id()}:{fields[19]}")


def boot_id() -> str:
    """This machine, since it was started last."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def with_descendants(processes: Iterable[ProcessId]) -> list[ProcessId]:
    """The living ones of these processes and all that they started, children after parents."""
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
    """Signal this very process; nothing happens if it is gone."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        # The pidfd holds the process that had the pid when it was opened: compare, then signal that one.
        if process.is_alive:
            signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


def end_processes(processes: Sequence[ProcessId], *, grace_s: float) -> None:
    """Ask these processes to end, kill those that have not within `grace_s`, and wait until all are gone."""
    for signum, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        for process in processes:
            send_signal(process, signum)
        if wait_until_gone(processes, timeout_s=wait_s):
            return
    left = [process.pid for process in processes if process.is_alive]
    if left:
        raise TimeoutError(f"processes {left} did not end within 10 s of SIGKILL; they may hang in the kernel")


def wait_until_gone(processes: Sequence[ProcessId], *, timeout_s: float) -> bool:
    """Wait for processes to end; False if some still run after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process as soon as the one that started it ends, however it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        raise ParentGoneError(f"process {parent_pid}, which started this one, has ended")
