"""Runs a command under limits: `python -m windlass.service.preparation.sandbox.limited_exec --cpu-s N … -- command`.

It is a process of its own between the service and the command. Limits cannot be set safely between fork and exec in a
process that has threads.
"""

import argparse
import contextlib
import os
import resource
import sys
from pathlib import Path

from windlass.actors.lifecycle import COMPUTING_NICENESS, die_with_parent, lower_session


def main(arguments: list[str]) -> None:
    """Becomes the command, with limits. The kernel kills it when its parent ends."""
    parser = argparse.ArgumentParser(prog="limited_exec")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--cpu-s", type=int, help="else as long as it likes")
    parser.add_argument("--address-space-nbytes", type=int, help="else as much as it likes")
    parser.add_argument("--memory-nbytes", type=int, help="memory of its own; else as much as it likes")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    die_with_parent(options.parent_pid)
    limit(
        cpu_s=options.cpu_s,
        address_space_nbytes=options.address_space_nbytes,
        memory_nbytes=options.memory_nbytes,
    )
    _limit(resource.RLIMIT_CORE, 0, 0)
    os.nice(COMPUTING_NICENESS)
    os.setsid()  # from the service's session, which keeps its priority
    lower_session(os.getpid())
    # If memory runs out, the kernel ends this process before a training job, because it may run a user's code.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.execv(options.command[0], options.command)


def limit(*, cpu_s: int | None, address_space_nbytes: int | None, memory_nbytes: int | None) -> None:
    """Limits this process's CPU time, address space and own memory; None: no such limit.

    Own memory is private and writable. Files that are only read do not count.
    """
    if cpu_s is not None:
        # At the soft limit the kernel sends SIGXCPU, which identifies the cause. At the hard limit it kills.
        _limit(resource.RLIMIT_CPU, cpu_s, cpu_s + 5)
    if address_space_nbytes is not None:
        _limit(resource.RLIMIT_AS, address_space_nbytes, address_space_nbytes)
    if memory_nbytes is not None:
        _limit(resource.RLIMIT_DATA, memory_nbytes, memory_nbytes)


def _limit(which: int, soft: int, hard: int) -> None:
    _, given = resource.getrlimit(which)
    if given != resource.RLIM_INFINITY:
        soft, hard = min(soft, given), min(hard, given)
    resource.setrlimit(which, (soft, hard))


if __name__ == "__main__":
    main(sys.argv[1:])
