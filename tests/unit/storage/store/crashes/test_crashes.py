"""A power loss before every single operation of a job's disks, and the state that a restart finds.

The disks may be those of two boxes: the log of decisions lies on neither.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.storage.direct_store import DirectStore
from tests.support.storage.faulty_device import Disk, Power, PowerLoss, factory, write_image
from tests.support.storage.stores import keys, make_geometry, open_volume, page_aligned, states
from windlass.storage.ids import Attempt, ChunkKey, JobId, SsdIndex, StateKind, Step
from windlass.storage.integrity.errors import StoreMissing
from windlass.storage.ssd.volume import VOLUME_FILE, Volume
from windlass.storage.store.decisions import Decision
from windlass.storage.store.format import CommitRecord, StoreGeometry
from windlass.storage.store.recovery import StoreJournal, recover

JOB = JobId("ftjob-1")
# The actions of jobs in order: write all states, or gradients, of a step; commit a step with the states that were
# written last.
JOBS = {
    "every step": "write 0, commit 0, write 1, commit 1, commit 2, write 3, commit 3",
    # Overwritten in place between commits.
    "every third step": "write 0, commit 0, write 1, write 2, commit 3, write 4, write 5, write 6, commit 6, commit 9, "
    "write 10, write 12",
    # Gradients are stored where the states of their step will be. Step 2 is skipped.
    "gradients": "write 0, commit 0, gradient 1, write 1, commit 1, gradient 2, commit 2, gradient 3, write 3, "
    "commit 3, gradient 4",
}
LAST_STEP = 3  # of "every step"
GEOMETRIES = tuple(make_geometry(JOB, ssd=SsdIndex(ssd), ssd_weights=(1, 1)) for ssd in range(2))


def _acts(job: str) -> Iterator[tuple[str, int, int]]:
    """The actions with their step, and the step that the states belong to by then."""
    written = 0
    for act in job.split(", "):
        verb, step = act.split()
        if verb == "write":
            written = int(step)
        yield verb, int(step), written


def _states(geometry: StoreGeometry) -> Iterator[tuple[ChunkKey, StateKind, int]]:
    for key, kind in states(geometry):
        yield key, kind, geometry.region_nbytes(kind)


def _content(key: ChunkKey, kind: StateKind, step: int, attempt: int, nbytes: int) -> memoryview:
    return page_aligned(random.Random(f"{key} {kind} {step} {attempt}").randbytes(nbytes))


def _write(stores: list[DirectStore], step: int, attempt: int) -> None:
    for store in stores:
        for key, kind, nbytes in _states(store.geometry):
            store.write(key, kind, Step(step), _content(key, kind, step, attempt, nbytes))


def _write_gradients(stores: list[DirectStore], step: int, attempt: int) -> None:
    for store in stores:
        for key in keys(store.geometry):
            nbytes = store.geometry.region_nbytes(StateKind.MASTER)
            store.write(key, StateKind.GRAD, Step(step), _content(key, StateKind.GRAD, step, attempt, nbytes))


def _commit(
    stores: list[DirectStore], step: int, attempt: int, states_step: int, log: list[Decision], power: Power
) -> None:
    """Commits a step on all SSDs, then decides it. The power may be cut before and after the decision."""
    for store in stores:
        store.prepare(Step(step), Attempt(attempt), f'{{"step": {step}}}', states_step=Step(states_step))
    record = stores[0].last_commit()
    assert record is not None
    power.spend()
    log.append(Decision.of(record))
    power.spend()
    for store in stores:
        store.decide(Step(step))


def _train(directories: list[Path], disks: list[Disk], job: str, log: list[Decision]) -> None:
    """Runs a job. Adds its decisions to the log."""
    volumes = [
        Volume.open(directory, direct=False, make_device=factory(disk))
        for directory, disk in zip(directories, disks, strict=True)
    ]
    try:
        stores = [DirectStore.create(volume, geometry) for volume, geometry in zip(volumes, GEOMETRIES, strict=True)]
        for store in stores:
            store.resume_from(None)
        for act, step, states_step in _acts(job):
            if act == "write":
                _write(stores, step, attempt=1)
            elif act == "gradient":
                _write_gradients(stores, step, attempt=1)
            else:
                _commit(stores, step, 1, states_step, log, disks[0].power)
    finally:
        for volume in volumes:
            volume.close()


def _recover(stores: list[DirectStore], log: list[Decision]) -> CommitRecord | None:
    """Returns the commit to resume from, and writes a lost decision. Without the log it is the same commit."""
    journals = [StoreJournal(store.name, tuple(store.commits())) for store in stores]
    recovery = recover(journals, max(log, key=lambda decision: decision.step, default=None))
    assert recover(journals, None).resume_from == recovery.resume_from
    if recovery.decision is not None:
        log.append(recovery.decision)
    return recovery.resume_from


def _reopen(
    directories: list[Path], attempt: int, log: list[Decision]
) -> tuple[list[DirectStore], CommitRecord | None]:
    """Opens a new attempt that resumes from the stores it finds. Incomplete stores are made anew."""
    stores = []
    for directory, geometry in zip(directories, GEOMETRIES, strict=True):
        volume = open_volume(directory)
        try:
            stores.append(DirectStore.open(volume, JOB, Attempt(attempt)))
        except StoreMissing:
            stores.append(DirectStore.create(volume, replace(geometry, attempt=Attempt(attempt))))
    commit = _recover(stores, log)
    for store in stores:
        store.resume_from(commit)
    return stores, commit


def _check(stores: list[DirectStore], step: int, attempt: int, written_as: int) -> None:
    """Checks that all states of `step` are those that `attempt` wrote as `written_as`."""
    for store in stores:
        for key, kind, nbytes in _states(store.geometry):
            found = page_aligned(bytes(nbytes))
            store.read(key, kind, Step(step), found)
            assert found == _content(key, kind, written_as, attempt, nbytes), (key, kind, step)


def _check_commit(stores: list[DirectStore], step: int, job: str) -> None:
    """Checks that the states of `step` are those that the first attempt left."""
    (states_step,) = (states_step for act, each, states_step in _acts(job) if (act, each) == ("commit", step))
    _check(stores, step, 1, states_step)


def _close(stores: list[DirectStore]) -> None:
    for store in stores:
        store.volume.close()


def _go_on(stores: list[DirectStore], commit: CommitRecord | None, attempt: int) -> None:
    """Makes one more step after a crash, or the first one, and one skipped step."""
    step = 0 if commit is None else commit.step + 1
    _write(stores, step, attempt)
    _commit(stores, step, attempt, step, [], Power())
    _check(stores, step, attempt, step)
    _commit(stores, step + 1, attempt, step, [], Power())
    _check(stores, step + 1, attempt, step)


def _count_operations(root: Path, job: str) -> int:
    power = Power()
    _train(_directories(root, "whole"), [Disk(power), Disk(power)], job, [])
    return power.num_operations


def _directories(root: Path, name: str) -> list[Path]:
    directories = [root / f"{name}-{ssd}" for ssd in range(2)]
    for directory in directories:
        directory.mkdir(exist_ok=True)
        (directory / VOLUME_FILE).unlink(missing_ok=True)
    return directories


NUM_PARTS = 8
# Every operation of each job is in some part; one part of one job is fast enough.
PARTS = [
    pytest.param(name, part, marks=() if (name, part) == ("every third step", 0) else pytest.mark.long)
    for name in JOBS
    for part in range(NUM_PARTS)
]


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_power_loss_before_every_operation(tmp_path: Path, name: str, part: int) -> None:
    """Every write, sync and journal boundary of jobs on two SSDs, with torn and reordered unsynced writes."""
    job = JOBS[name]
    num_operations = _count_operations(tmp_path, job)
    assert num_operations > 100
    for off_at in range(part, num_operations + 1, NUM_PARTS):
        power, log = Power(off_at=off_at), list[Decision]()
        disks = [Disk(power), Disk(power)]
        directories = _directories(tmp_path, "crashed")
        try:
            _train(directories, disks, job, log)
        except PowerLoss:
            pass
        else:
            assert off_at == num_operations
        after = _directories(tmp_path, "after")
        second = list(disks[1].outcomes(seed=off_at + 1, num_random=2))
        for i, image in enumerate(disks[0].outcomes(seed=off_at, num_random=2)):
            write_image(after[0] / VOLUME_FILE, image)
            write_image(after[1] / VOLUME_FILE, second[(i * 5 + off_at) % len(second)])
            _check_restart(after, job, list(log))


def _check_restart(directories: list[Path], job: str, log: list[Decision]) -> None:
    decided = log[-1].step if log else None
    stores, commit = _reopen(directories, 2, log)
    try:
        if decided is not None:
            assert commit is not None
            assert commit.step >= decided
        if commit is not None:
            _check_commit(stores, commit.step, job)
            assert commit.trainer_state == f'{{"step": {commit.step}}}'
        _go_on(stores, commit, attempt=2)
    finally:
        _close(stores)


@pytest.mark.long
def test_power_loss_while_a_new_attempt_takes_over(tmp_path: Path) -> None:
    """The second attempt is cut off at each of its operations; the third still finds the committed step."""
    # The last commit reached only one SSD: the machine loses power before the other's journal has it.
    power = Power(off_at=_count_operations(tmp_path, JOBS["every step"]) - 5)
    disks, first_log = [Disk(power), Disk(power)], list[Decision]()
    with pytest.raises(PowerLoss):
        _train(_directories(tmp_path, "first"), disks, JOBS["every step"], first_log)
    assert first_log[-1].step == LAST_STEP - 1
    images = [disk.image([]) for disk in disks]
    for off_at in range(200):
        power = Power(off_at=off_at)
        again = [Disk(power, bytearray(image)) for image in images]
        directories = _directories(tmp_path, "second")
        for directory, image in zip(directories, images, strict=True):
            write_image(directory / VOLUME_FILE, image)
        committed, log = LAST_STEP - 1, list(first_log)
        try:
            _second_attempt(directories, again, log)
            committed = LAST_STEP
        except PowerLoss:
            pass
        after = _directories(tmp_path, "third")
        for outcome in zip(*(disk.outcomes(off_at, 1) for disk in again), strict=False):
            for directory, image in zip(after, outcome, strict=True):
                write_image(directory / VOLUME_FILE, image)
            stores, commit = _reopen(after, 3, list(log))
            assert commit is not None
            assert committed <= commit.step <= LAST_STEP
            if commit.step < LAST_STEP:
                _check_commit(stores, commit.step, JOBS["every step"])
            else:
                _check(stores, LAST_STEP, 2, LAST_STEP)
            _go_on(stores, commit, attempt=3)
            _close(stores)
        if committed == LAST_STEP:
            return
    pytest.fail("the second attempt never came to its end")


def _second_attempt(directories: list[Path], disks: list[Disk], log: list[Decision]) -> None:
    volumes = [
        Volume.open(directory, direct=False, make_device=factory(disk))
        for directory, disk in zip(directories, disks, strict=True)
    ]
    try:
        stores = [DirectStore.open(volume, JOB, Attempt(2)) for volume in volumes]
        commit = _recover(stores, log)
        for store in stores:
            store.resume_from(commit)
        assert commit is not None
        _write(stores, commit.step + 1, attempt=2)
        _commit(stores, commit.step + 1, 2, commit.step + 1, log, disks[0].power)
    finally:
        for volume in volumes:
            volume.close()
