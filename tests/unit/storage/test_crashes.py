"""A power loss before every single operation of a job's disks, and what a restart then finds."""

import mmap
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.storage.faulty_device import Disk, Power, PowerLoss, factory, write_image
from tests.unit.storage.stores import BF16
from windlass.storage.ids import Attempt, BlockIndex, ChunkIndex, ChunkKey, JobId, Rank, SsdIndex, Step
from windlass.storage.store_errors import StoreMissing
from windlass.storage.store_format import CommitRecord, StoreGeometry, last_common_commit
from windlass.storage.tensor_store import TensorStore
from windlass.storage.volume import VOLUME_FILE, Volume

JOB = JobId("ftjob-1")
LAST_STEP = 3
CARRIED_STEP = 2  # skipped: its states are those of the step before
GEOMETRIES = tuple(
    StoreGeometry(
        job=JOB,
        rank=Rank(0),
        attempt=Attempt(1),
        ssd=SsdIndex(ssd),
        ssd_weights=(1, 1),
        formats=BF16,
        chunk_numel=2048,
        chunks_per_block=(2, 1),
    )
    for ssd in range(2)
)


def _states(geometry: StoreGeometry) -> Iterator[tuple[ChunkKey, str, int]]:
    for block, num in enumerate(geometry.chunks_per_block):
        for chunk in range(num):
            key = ChunkKey(BlockIndex(block), ChunkIndex(chunk))
            if geometry.ssd_of(key) == geometry.ssd:
                for kind in geometry.kinds:
                    yield key, kind, geometry.region_nbytes(kind)


def _content(key: ChunkKey, kind: str, step: int, attempt: int, nbytes: int) -> memoryview:
    buffer = memoryview(mmap.mmap(-1, nbytes))
    buffer[:] = random.Random(f"{key} {kind} {step} {attempt}").randbytes(nbytes)
    return buffer


def _write_step(stores: list[TensorStore], step: int, attempt: int) -> None:
    for store in stores:
        for key, kind, nbytes in _states(store.geometry):
            store.write(key, kind, Step(step), _content(key, kind, step, attempt, nbytes))  # type: ignore[arg-type]
    _commit(stores, step, attempt)


def _carry_step(stores: list[TensorStore], step: int, attempt: int) -> None:
    for store in stores:
        store.carry_over(Step(step))
    _commit(stores, step, attempt)


def _commit(stores: list[TensorStore], step: int, attempt: int) -> None:
    for store in stores:
        store.commit(Step(step), Attempt(attempt), f'{{"step": {step}}}')


def _train(directories: list[Path], disks: list[Disk], acknowledged: list[int]) -> None:
    """A job of three steps, the second skipped; those that it was told are safe go into `acknowledged`."""
    volumes = [
        Volume.open(directory, make_device=factory(disk)) for directory, disk in zip(directories, disks, strict=True)
    ]
    try:
        stores = [TensorStore.create(volume, geometry) for volume, geometry in zip(volumes, GEOMETRIES, strict=True)]
        for store in stores:
            store.resume_from(None)
        for step in range(LAST_STEP + 1):
            if step == CARRIED_STEP:
                _carry_step(stores, step, attempt=1)
            else:
                _write_step(stores, step, attempt=1)
            acknowledged.append(step)
    finally:
        for volume in volumes:
            volume.close()


def _reopen(directories: list[Path], attempt: int) -> tuple[list[TensorStore], CommitRecord | None]:
    """A new attempt, resumed from what it finds; stores that were never whole are made anew."""
    stores = []
    for directory, geometry in zip(directories, GEOMETRIES, strict=True):
        volume = Volume.open(directory)
        try:
            stores.append(TensorStore.open(volume, JOB, Attempt(attempt)))
        except StoreMissing:
            stores.append(TensorStore.create(volume, replace(geometry, attempt=Attempt(attempt))))
    commit = last_common_commit([store.commits() for store in stores])
    for store in stores:
        store.resume_from(commit)
    return stores, commit


def _check(stores: list[TensorStore], step: int, attempt: int, written_as: int | None = None) -> None:
    """`written_as`: the step that wrote the states of `step`, where that was carried over."""
    for store in stores:
        for key, kind, nbytes in _states(store.geometry):
            found = memoryview(mmap.mmap(-1, nbytes))
            store.read(key, kind, Step(step), found)  # type: ignore[arg-type]
            expected = _content(key, kind, step if written_as is None else written_as, attempt, nbytes)
            assert found == expected, (key, kind, step)


def _check_commit(stores: list[TensorStore], step: int, attempt: int) -> None:
    """What `_train` left as `step`, or a later attempt that went on from there."""
    is_carried = attempt == 1 and step == CARRIED_STEP
    _check(stores, step, attempt, step - 1 if is_carried else step)


def _close(stores: list[TensorStore]) -> None:
    for store in stores:
        store.volume.close()


def _go_on(stores: list[TensorStore], commit: CommitRecord | None, attempt: int) -> None:
    """One more step by the attempt after a crash, or the first one, and one that it skips."""
    step = 0 if commit is None else commit.step + 1
    _write_step(stores, step, attempt)
    _check(stores, step, attempt)
    _carry_step(stores, step + 1, attempt)
    _check(stores, step + 1, attempt, written_as=step)


def _count_operations(root: Path) -> int:
    power = Power()
    _train(_directories(root, "whole"), [Disk(power), Disk(power)], [])
    return power.num_operations


def _directories(root: Path, name: str) -> list[Path]:
    directories = [root / f"{name}-{ssd}" for ssd in range(2)]
    for directory in directories:
        directory.mkdir(exist_ok=True)
        (directory / VOLUME_FILE).unlink(missing_ok=True)
    return directories


@pytest.mark.parametrize("part", range(4))
def test_power_loss_before_every_operation(tmp_path: Path, part: int) -> None:
    """Every write, sync and journal boundary of three steps on two SSDs, with torn and reordered unsynced writes."""
    num_operations = _count_operations(tmp_path)
    assert num_operations > 100
    for off_at in range(part, num_operations + 1, 4):
        power, acknowledged = Power(off_at=off_at), list[int]()
        disks = [Disk(power), Disk(power)]
        directories = _directories(tmp_path, "crashed")
        try:
            _train(directories, disks, acknowledged)
        except PowerLoss:
            pass
        else:
            assert off_at == num_operations
        after = _directories(tmp_path, "after")
        second = list(disks[1].outcomes(seed=off_at + 1, num_random=2))
        for i, image in enumerate(disks[0].outcomes(seed=off_at, num_random=2)):
            write_image(after[0] / VOLUME_FILE, image)
            write_image(after[1] / VOLUME_FILE, second[(i * 5 + off_at) % len(second)])
            _check_restart(after, acknowledged)


def _check_restart(directories: list[Path], acknowledged: list[int]) -> None:
    stores, commit = _reopen(directories, attempt=2)
    try:
        if acknowledged:
            assert commit is not None
            assert commit.step >= acknowledged[-1]
        if commit is not None:
            _check_commit(stores, commit.step, attempt=1)
            assert commit.trainer_state == f'{{"step": {commit.step}}}'
        _go_on(stores, commit, attempt=2)
    finally:
        _close(stores)


def test_power_loss_while_a_new_attempt_takes_over(tmp_path: Path) -> None:
    """The second attempt is cut off at every operation of its own; the third finds the committed step all the same."""
    # The last commit reached one SSD only: the machine goes off before the other's journal has it.
    power = Power(off_at=_count_operations(tmp_path) - 3)
    disks = [Disk(power), Disk(power)]
    with pytest.raises(PowerLoss):
        _train(_directories(tmp_path, "first"), disks, [])
    images = [disk.image([]) for disk in disks]
    for off_at in range(200):
        power = Power(off_at=off_at)
        again = [Disk(power, bytearray(image)) for image in images]
        directories = _directories(tmp_path, "second")
        for directory, image in zip(directories, images, strict=True):
            write_image(directory / VOLUME_FILE, image)
        committed = LAST_STEP - 1
        try:
            _second_attempt(directories, again)
            committed = LAST_STEP
        except PowerLoss:
            pass
        after = _directories(tmp_path, "third")
        for outcome in zip(*(disk.outcomes(off_at, 1) for disk in again), strict=False):
            for directory, image in zip(after, outcome, strict=True):
                write_image(directory / VOLUME_FILE, image)
            stores, commit = _reopen(after, attempt=3)
            assert commit is not None
            assert committed <= commit.step <= LAST_STEP
            _check_commit(stores, commit.step, attempt=1 if commit.step < LAST_STEP else 2)
            _go_on(stores, commit, attempt=3)
            _close(stores)
        if committed == LAST_STEP:
            return
    pytest.fail("the second attempt never came to its end")


def _second_attempt(directories: list[Path], disks: list[Disk]) -> None:
    volumes = [
        Volume.open(directory, make_device=factory(disk)) for directory, disk in zip(directories, disks, strict=True)
    ]
    try:
        stores = [TensorStore.open(volume, JOB, Attempt(2)) for volume in volumes]
        commit = last_common_commit([store.commits() for store in stores])
        for store in stores:
            store.resume_from(commit)
        assert commit is not None
        _write_step(stores, commit.step + 1, attempt=2)
    finally:
        for volume in volumes:
            volume.close()
