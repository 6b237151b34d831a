"""Processes of jobs that share an SSD directory; `test_processes.py` starts and kills them."""

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from tests.support.storage.direct_store import DirectStore
from tests.support.storage.stores import (
    FILE_INDEX_NBYTES,
    JOB,
    OTHER,
    QuickDevice,
    check,
    commit,
    make_geometry,
    new_store,
    open_volume,
    resume,
    used_nbytes,
    volume_file,
)
from windlass.storage.ids import Attempt, JobId
from windlass.storage.integrity.errors import StoreMissing
from windlass.storage.ssd.volume import Volume
from windlass.storage.ssd.volume_format import HEADER_UNITS, UNIT_NBYTES, AllocationTable


def check_disjoint(volume: Volume) -> None:
    """Checks that no unit belongs to two jobs or to the header."""
    table = AllocationTable(allocations=volume.allocations())
    taken = [
        unit for each in table.allocations.values() for part in each.taken for unit in range(part.start, part.stop)
    ]
    assert len(taken) == len(set(taken))
    assert min(taken, default=HEADER_UNITS) >= HEADER_UNITS
    # The units in the gaps belong to no job.
    assert sum(gap.count for gap in table.gaps(table.stop)) + len(taken) + HEADER_UNITS == table.stop


def inherit(volume: Volume, prefix: str, attempt: int) -> None:
    """Checks that the stores of a killed process with this prefix are complete or missing, and deletes them."""
    for job in [each for each in volume.allocations() if each.startswith(prefix)]:
        try:
            store = DirectStore.open(volume, job, Attempt(attempt))
        except StoreMissing:
            store = new_store(volume, make_geometry(job, attempt=Attempt(attempt)))
        else:
            commits = store.commits()
            store.resume_from(commits[-1] if commits else None)
            if commits:
                check(store, commits[-1].step)
        DirectStore.delete(volume, job)


def churn(directory: Path, prefix: str, attempt: int, num_rounds: int) -> None:
    """Makes, trains, checks and deletes jobs at random, and leaves none behind."""
    chance = random.Random(f"{prefix} {attempt}")
    volume, stores = open_volume(directory), dict[JobId, DirectStore]()
    inherit(volume, prefix, attempt)
    for i in range(num_rounds):
        job = JobId(f"{prefix}-{attempt}-{i}")
        if len(stores) < 3 and chance.random() < 0.6:
            numel = 2048 * chance.choice([1, 3, 16])
            stores[job] = new_store(volume, make_geometry(job, chunk_numel=numel))
            commit(stores[job], 0)
        elif stores:
            job = chance.choice(sorted(stores))
            last = stores[job].last_commit()
            assert last is not None
            check(stores[job], last.step)
            stores[job].reserve_scratch(1 << 20, chance.randrange(4))
            if chance.random() < 0.5:
                commit(stores[job], last.step + 1)
            else:
                DirectStore.delete(volume, stores.pop(job).geometry.job)
        check_disjoint(volume)
    for job, store in stores.items():
        last = store.last_commit()
        assert last is not None
        check(store, last.step)
        DirectStore.delete(volume, job)


class MortalDevice(QuickDevice):
    """A device whose process is killed before the operation of a given number."""

    operations_left = 0

    def _spend(self) -> None:
        if self.operations_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.operations_left -= 1

    def write(self, offset: int, buffer: memoryview) -> int:
        self._spend()
        return super().write(offset, buffer)

    def write_records(self, offset: int, raw: bytes) -> None:
        self._spend()
        super().write_records(offset, raw)

    def sync(self) -> None:
        self._spend()

    def allocate(self, offset: int, nbytes: int) -> None:
        self._spend()
        super().allocate(offset, nbytes)

    def discard(self, offset: int, nbytes: int) -> None:
        self._spend()
        super().discard(offset, nbytes)

    def truncate(self, nbytes: int) -> None:
        self._spend()
        super().truncate(nbytes)


def live_and_die(directory: Path) -> None:
    """Runs one job after another in a forked process, each killed one operation later, beside a job that lives on."""
    volume = open_volume(directory)
    other = new_store(volume, make_geometry(OTHER))
    commit(other, 0)
    before = volume_file(directory).stat()
    for num_operations in range(300):
        child = os.fork()
        if child == 0:
            live(directory, num_operations)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status in (0, signal.SIGKILL), f"the process ended with {status} after {num_operations} operations"
        commit(other, num_operations + 1)
        check_disjoint(volume)
        volume.free_nbytes()
        taken = [part.count for each in volume.allocations().values() for part in each.taken]
        assert used_nbytes(volume_file(directory)) >= (HEADER_UNITS + sum(taken)) * UNIT_NBYTES  # backed by the disk
        # The file system's index of the file's extents counts as used by it too.
        if JOB not in volume.allocations():  # it died before it was made or after it was deleted: nothing is left
            assert volume_file(directory).stat().st_size == before.st_size
            assert used_nbytes(volume_file(directory)) <= before.st_blocks * 512 + FILE_INDEX_NBYTES
        inherit(volume, JOB, attempt=2)
        assert volume_file(directory).stat().st_size == before.st_size
        assert used_nbytes(volume_file(directory)) <= before.st_blocks * 512 + FILE_INDEX_NBYTES
        check(other, num_operations + 1)
        if status == 0:
            print(num_operations)
            return
    raise AssertionError("the job never came to its end")


def live(directory: Path, num_operations: int) -> None:
    """The whole life of a job: made, trained, with scratch, reopened with more scratch, deleted."""

    def make_device(*arguments: Any, **named: Any) -> MortalDevice:
        device = MortalDevice(*arguments, **named)
        device.operations_left = num_operations
        return device

    volume = open_volume(directory, make_device=make_device)
    store = new_store(volume, make_geometry(chunk_numel=32768, chunks_per_block=(1, 1)))
    commit(store, 0)
    store.reserve_scratch(1 << 20, 3)
    store = resume(volume, attempt=2)
    store.reserve_scratch(1 << 20, 5)
    DirectStore.delete(volume, JOB)


if __name__ == "__main__":
    if sys.argv[1] == "churn":
        churn(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        live_and_die(Path(sys.argv[2]))
