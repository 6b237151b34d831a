"""A power loss before every operation of a job that keeps and gives up checkpoints, and is deleted in the end."""

from pathlib import Path

import pytest

from tests.support.storage.faulty_device import Disk, Power, PowerLoss, factory, write_image
from tests.support.storage.stores import (
    FP32,
    JOB,
    check,
    commit,
    make_geometry,
    new_store,
    open_volume,
    resume,
    volume_file,
)
from windlass.storage.ids import Attempt, Step
from windlass.storage.integrity.errors import StoreMissing
from windlass.storage.ssd.volume import Volume
from windlass.storage.store.tensor_store import TensorStore

# Extents of 768 KiB: a checkpoint makes the store grow.
GEOMETRY = make_geometry(chunk_numel=65536, chunks_per_block=(1,), formats=FP32)


class _Job:
    """What the job was told is safe: nothing may be lost of it, and no more may be gained than was under way."""

    def __init__(self) -> None:
        self.step = -1
        self.pinned: set[int] = set()
        self.may_be_pinned: set[int] = set()
        self.is_being_deleted = False

    def live(self, volume: Volume) -> None:
        store = new_store(volume, GEOMETRY)
        for step in range(3):
            commit(store, step)
            self.step = step
            if step == 0:
                self.may_be_pinned.add(step)
                store.pin(Step(step))
                self.pinned.add(step)
            if step == 1:
                self.pinned.discard(0)
                store.unpin(Step(0))
                self.may_be_pinned.discard(0)
        self.is_being_deleted = True
        TensorStore.delete(volume, JOB)

    def check(self, volume: Volume) -> None:
        """As a new attempt finds it; then it goes on."""
        try:
            store = resume(volume, attempt=2)
        except StoreMissing:
            assert self.step < 0 or self.is_being_deleted
            store = new_store(volume, make_geometry(chunks_per_block=(1,), attempt=Attempt(2)))
            commit(store, 0)
            return
        record = store.last_commit()
        step = -1 if record is None else record.step
        assert self.step <= step <= self.step + 1
        assert self.pinned <= set(store.pinned) <= self.may_be_pinned
        for kept in {step, *store.pinned} - {-1}:
            check(store, kept)
        commit(store, step + 1)
        for kept in store.pinned:
            check(store, kept)


@pytest.mark.parametrize("part", range(2))
def test_power_loss_before_every_operation(tmp_path: Path, part: int) -> None:
    for off_at in range(part, 400, 2):
        volume_file(tmp_path).unlink(missing_ok=True)
        job, disk = _Job(), Disk(Power(off_at=off_at))
        is_over = True
        try:
            volume = Volume.open(tmp_path, direct=False, make_device=factory(disk))
            try:
                job.live(volume)
            finally:
                volume.close()
        except PowerLoss:
            is_over = False
        for image in disk.outcomes(off_at, num_random=1):
            write_image(volume_file(tmp_path), image)
            volume = open_volume(tmp_path)
            job.check(volume)
            volume.close()
        if is_over:
            assert off_at > 50
            return
    pytest.fail("the job never came to its end")
