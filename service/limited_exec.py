"""Runs a command under limits: `python -m windlass.service.limited_exec --cpu-s N --address-space-nbytes N -- command`.

A step of its own between us and the command, as limits can't safely be set between fork and exec of a process that has
threads.
"""

import argparse
import contextlib
import os
import resource
import sys
from pathlib import Path

from windlass.service.processes import die_with_parent


def main(arguments: list[str]) -> None:
    """Become the command, limited, and dying with the process that started it."""
    parser = argparse.ArgumentParser(prog="limited_exec")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--cpu-s", type=int, required=True)
    parser.add_argument("--address-space-nbytes", type=int, required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    die_with_parent(options.parent_pid)
    # At the soft limit the kernel sends SIGXCPU, which tells what happened; at the hard one it kills.
    _limit(resource.RLIMIT_CPU, options.cpu_s, options.cpu_s + 5)
    _limit(resource.RLIMIT_AS, options.address_space_nbytes, options.address_space_nbytes)
    _limit(resource.RLIMIT_CORE, 0, 0)
    # Where memory runs out, a stranger's program ends before the job that trains.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.execv(options.command[0], options.command)


def _limit(limit: int, soft: int, hard: int) -> None:
    _, given = resource.getrlimit(limit)
    if given != resource.RLIM_INFINITY:
        soft, hard = min(soft, given), min(hard, given)
    resource.setrlimit(limit, (soft, hard))


if __name__ == "__main__":
    main(sys.argv[1:])
