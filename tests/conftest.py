"""`make test` runs the tests in as many processes as there are cores (pytest-xdist); this is what that takes."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

_TESTS = Path(__file__).parent
# What tests of these folders start (Ray, the service, a browser) takes more than one core, and they look at what the
# machine as a whole has: processes, loop devices, mounts. One process runs them all, one after the other.
_ONE_AFTER_THE_OTHER = ("e2e", "integration")
# Each holds torch and transformers, and more of them than this would only wait for the tests of those folders.
_MOST_PROCESSES = 4


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` means."""
    return min(_num_cores(), _MOST_PROCESSES)


def pytest_configure() -> None:
    # One of several processes: each would take all cores for itself.
    if num_processes := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        torch.set_num_threads(max(1, _num_cores() // int(num_processes)))


class _FolderScheduling(LoadScopeScheduling):
    """Each test is taken by whichever process is free, but for those that one process has to run."""

    def _split_scope(self, nodeid: str) -> str:
        return "machine" if Path(nodeid).parts[1] in _ONE_AFTER_THE_OTHER else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """What shares the tests out. Not `--dist=loadgroup`: pytest 9.2 ignores the names by which xdist 3.8 groups."""
    return _FolderScheduling(config, log)
