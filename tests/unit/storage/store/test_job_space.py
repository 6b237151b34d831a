"""A job's space on an SSD: it is created once, and opened by each attempt with the same geometry."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.storage.stores import JOB, make_geometry, volume_file
from windlass.storage.ids import Attempt, JobId, LayoutEpoch
from windlass.storage.integrity.errors import StaleAttempt, StoreError, StoreExists
from windlass.storage.memory.capacity import InsufficientSpaceError
from windlass.storage.ssd.volume import Volume
from windlass.storage.store.job_space import JobSpace, delete_space, read_journal, read_space
from windlass.storage.store.recovery import StoreJournal
from windlass.storage.store.tensor_store import last_attempt, spaces_in

GEOMETRY = make_geometry()


def open_space(directory: Path, attempt: int = 1, num_scratch_slots: int = 0) -> JobSpace:
    geometry = replace(GEOMETRY, attempt=Attempt(attempt))
    return JobSpace.open(directory, geometry, direct=False, num_scratch_slots=num_scratch_slots)


def holds_states(directory: Path) -> bool:
    with closing(Volume.open(directory, direct=False)) as volume:
        return bool(volume.allocations())


def num_open_files(directory: Path) -> int:
    """The number of this process's open files in a directory."""
    links = list(Path("/proc/self/fd").iterdir())  # the descriptor used for listing is closed by then
    return sum(str(directory) in str(link.readlink()) for link in links if link.is_symlink())


def test_space_is_created_opened_again_and_deleted(tmp_path: Path) -> None:
    first = open_space(tmp_path, num_scratch_slots=2)
    held_nbytes = first.held_nbytes()
    assert held_nbytes > 0
    first.close()
    assert holds_states(tmp_path)
    second = open_space(tmp_path, attempt=2)
    assert second.store.attempt == 2
    assert second.held_nbytes() < held_nbytes  # the scratch was the first attempt's
    second.close(delete=True)
    assert not holds_states(tmp_path)
    assert num_open_files(tmp_path) == 0


def test_store_of_another_geometry_is_refused_and_kept(tmp_path: Path) -> None:
    open_space(tmp_path).close()
    with pytest.raises(StoreError, match=r"chunks_per_block \(2, 1\), now \(2, 1, 1\)"):
        JobSpace.open(tmp_path, replace(GEOMETRY, chunks_per_block=(2, 1, 1)), direct=False)
    assert holds_states(tmp_path)
    assert num_open_files(tmp_path) == 0


def test_store_of_another_layout_epoch_is_refused_before_it_is_fenced(tmp_path: Path) -> None:
    """The chunks were dealt anew while this SSD was away, or the job's folder is an old copy."""
    for directory, epoch in ((tmp_path / "away", 0), (tmp_path / "dealt", 1)):
        directory.mkdir()
        JobSpace.open(directory, replace(GEOMETRY, epoch=LayoutEpoch(epoch)), direct=False).close()
        other = replace(GEOMETRY, epoch=LayoutEpoch(1 - epoch), attempt=Attempt(9))
        for refused in (JobSpace.open, read_journal):
            with pytest.raises(StoreError, match=f"are of layout epoch {epoch}, and .* in epoch {1 - epoch}"):
                refused(directory, other, direct=False)
        with closing(Volume.open(directory, direct=False)) as volume:
            assert last_attempt(volume, JOB) == 1


def test_stores_of_two_layout_epochs_lie_side_by_side(tmp_path: Path) -> None:
    next_epoch = replace(GEOMETRY, epoch=LayoutEpoch(1), attempt=Attempt(2), chunks_per_block=(1, 1))
    assert read_space(tmp_path, JOB, LayoutEpoch(1), direct=False) is None
    open_space(tmp_path).close()
    for number in (1, 2):
        made = JobSpace.create(tmp_path, next_epoch, direct=False)
        with pytest.raises(StoreExists):
            JobSpace.create(tmp_path, next_epoch, direct=False)
        made.close()
        found = read_space(tmp_path, JOB, LayoutEpoch(1), direct=False)
        assert found == (next_epoch, StoreJournal(f"SSD {tmp_path}", ()))
        with closing(Volume.open(tmp_path, direct=False)) as volume:
            assert set(spaces_in(volume)[JOB]) == {0, 1}
            assert last_attempt(volume, JOB) == 2
        if number == 1:
            delete_space(tmp_path, JOB, LayoutEpoch(1))
            assert read_space(tmp_path, JOB, LayoutEpoch(0), direct=False) is not None
    JobSpace.open(tmp_path, replace(next_epoch, attempt=Attempt(3)), direct=False).close(delete=True)
    assert not holds_states(tmp_path)
    delete_space(tmp_path, JOB, LayoutEpoch(1))
    delete_space(tmp_path / "nowhere", JOB, LayoutEpoch(1))
    assert not (tmp_path / "nowhere").exists()


def test_reading_a_journal_writes_nothing(tmp_path: Path) -> None:
    assert read_journal(tmp_path, GEOMETRY, direct=False) == StoreJournal(f"SSD {tmp_path}", ())
    assert list(tmp_path.iterdir()) == []
    space = open_space(tmp_path)
    before = volume_file(tmp_path).read_bytes()
    assert read_journal(tmp_path, replace(GEOMETRY, attempt=Attempt(7)), direct=False) == space.journal()
    space.close()
    assert volume_file(tmp_path).read_bytes() == before


def test_older_attempt_is_refused(tmp_path: Path) -> None:
    for attempt in (1, 3):
        open_space(tmp_path, attempt).close()
    with pytest.raises(StaleAttempt):
        open_space(tmp_path, 2)


def test_space_without_room_for_its_scratch_leaves_the_ssd_closed(tmp_path: Path) -> None:
    with pytest.raises(InsufficientSpaceError):
        open_space(tmp_path, num_scratch_slots=1 << 30)
    assert num_open_files(tmp_path) == 0


def test_stores_of_other_epochs_are_freed_and_those_of_other_jobs_stay(tmp_path: Path) -> None:
    other_job = JobId("ftjob-other")
    for geometry in (
        GEOMETRY,
        *(replace(GEOMETRY, epoch=LayoutEpoch(epoch)) for epoch in (1, 2)),
        replace(GEOMETRY, job=other_job, epoch=LayoutEpoch(1)),
    ):
        JobSpace.create(tmp_path, geometry, direct=False).close()
    space = JobSpace.open(tmp_path, replace(GEOMETRY, epoch=LayoutEpoch(1), attempt=Attempt(2)), direct=False)
    with closing(space):
        space.free_other_epochs()
        assert {job: set(epochs) for job, epochs in spaces_in(space.volume).items()} == {JOB: {1}, other_job: {1}}
        assert space.held_nbytes() > 0
