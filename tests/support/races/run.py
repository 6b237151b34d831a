"""Runs code under the race checker."""

import contextlib
from collections.abc import Iterator

import pytest

from tests.support.races.accesses import follow_accesses
from tests.support.races.checker import RaceChecker
from tests.support.races.cuda import RecordedCuda
from tests.support.races.operators import AccessMode, Memory
from tests.support.races.sites import HOST_WAITS, Site
from tests.support.races.sync import follow_threads

QUIET_S = 0.0003  # of a run where nothing is left out


class Recording:
    """A run under the checker."""

    def __init__(self, checker: RaceChecker, memory: Memory, cuda: RecordedCuda) -> None:
        self.checker = checker
        self.memory = memory
        self.cuda = cuda


@contextlib.contextmanager
def recorded(dropped: Site | None = None, *, quiet_s: float = QUIET_S) -> Iterator[Recording]:
    """Follows all threads that start, and devices that are opened, in the context.

    `dropped`: the site to leave out. `quiet_s`: how late the device is, see `RecordedCuda`.
    """
    checker = RaceChecker(host_waits=HOST_WAITS)
    checker.dropped = None if dropped is None else dropped.name
    with pytest.MonkeyPatch.context() as patch:
        cuda = RecordedCuda(checker, dropped, quiet_s=quiet_s)
        follow_threads(checker, patch)
        memory = follow_accesses(checker, cuda, patch)
        cuda.install(patch)
        with AccessMode(checker, memory):
            yield Recording(checker, memory, cuda)
