"""The rights of attempts, and the step at which a new attempt resumes."""

import fcntl
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.storage.direct_store import DirectStore
from tests.support.storage.faulty_device import power_losses
from tests.support.storage.stores import (
    JOB,
    OTHER,
    check,
    commit,
    content,
    fill,
    flip,
    make_geometry,
    new_store,
    open_volume,
    page_aligned,
    resume,
    states,
    volume_file,
)
from windlass.storage.ids import Attempt, SsdIndex, Step
from windlass.storage.integrity.errors import StaleAttempt, StepNotAllowed, StoreCorrupt
from windlass.storage.ssd import volume as volume_module
from windlass.storage.ssd.volume import Volume
from windlass.storage.store import format as layout
from windlass.storage.store.format import CommitRecord
from windlass.storage.store.recovery import StoreJournal, recover
from windlass.storage.store.tensor_store import last_attempt


@pytest.fixture(params=["file", "raw"])
def volume(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Volume]:
    """A volume on a file that shrinks when a job is deleted, and one on a raw device, where the bytes stay."""
    path = tmp_path
    if request.param == "raw":
        path = tmp_path / "disk"
        path.write_bytes(bytes(16 << 20))
        monkeypatch.setattr(volume_module, "is_block_device", lambda path: True)
        for name in ("require_not_in_use", "require_usable"):
            monkeypatch.setattr(volume_module, name, lambda path: None)
    volume = open_volume(path)
    yield volume
    volume.close()


def last_common_commit(stores: list[DirectStore]) -> CommitRecord | None:
    """The commit from which a new attempt resumes, without a log of decisions."""
    return recover([StoreJournal(store.name, tuple(store.commits())) for store in stores], None).resume_from


def _everything_is_refused(lost: DirectStore, step: int, text: str) -> None:
    """Checks that every operation by which an attempt could change data is refused."""
    key, kind = next(states(lost.geometry))
    raw = page_aligned(content(lost.geometry, key, kind, step))
    tries: list[Callable[[], object]] = [
        lambda: lost.write(key, kind, Step(step), raw),
        lambda: lost.commit(Step(step), lost.attempt, "{}"),
        lambda: lost.resume_from(None),
    ]
    for each in tries:
        with pytest.raises(StaleAttempt, match=text) as caught:
            each()
        assert f"SSD {lost.volume.path}, job {lost.geometry.job}: " in str(caught.value)


class TestRefused:
    def test_after_a_newer_attempt_opened(self, volume: Volume) -> None:
        lost = new_store(volume)
        commit(lost, 0)
        fill(lost, 1)
        newer = DirectStore.open(volume, JOB, Attempt(3))
        assert last_attempt(volume, JOB) == 3
        _everything_is_refused(lost, 1, "attempt 3 has taken over; attempt 1 may not change it")
        with pytest.raises(StaleAttempt, match="attempt 3 has taken over; attempt 2"):
            DirectStore.open(volume, JOB, Attempt(2))
        newer.resume_from(newer.commits()[-1])
        commit(newer, 1)
        check(newer, 1, attempt=3)
        assert [each.attempt for each in resume(volume, attempt=4).commits()] == [1, 3, 3, 4]

    def test_after_deletion(self, volume: Volume) -> None:
        lost = new_store(volume)
        commit(lost, 0)
        DirectStore.delete(volume, JOB)
        _everything_is_refused(lost, 1, "the job was deleted")

    @pytest.mark.parametrize("job", [JOB, OTHER])
    def test_after_the_space_went_to_another_job(self, volume: Volume, job: str) -> None:
        """Also if that job is the same one, made again."""
        lost = new_store(volume)
        commit(lost, 0)
        DirectStore.delete(volume, JOB)
        owner = new_store(volume, make_geometry(job))
        assert volume.allocation(owner.geometry.job).head_offset == lost._allocation.head_offset
        commit(owner, 0)
        _everything_is_refused(lost, 1, "its space belongs to another job; attempt 1")
        check(owner, 0)
        commit(owner, 1)
        check(resume(volume, 2, owner.geometry.job), 1)

    def test_read_of_space_of_another_job_raises(self, volume: Volume) -> None:
        lost = new_store(volume)
        commit(lost, 0)
        DirectStore.delete(volume, JOB)
        commit(new_store(volume, make_geometry(OTHER)), 0)
        with pytest.raises(StoreCorrupt, match=f"SSD {volume.path}, job ftjob-1, extent 0"):
            check(lost, 0)

    def test_late_deletion_does_not_close_what_came_after(
        self, volume: Volume, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two processes delete at once. Before the slower one continues, the space belongs to another job."""
        new_store(volume)
        known = volume.allocations()
        DirectStore.delete(volume, JOB)
        owner = new_store(volume, make_geometry(OTHER))
        with monkeypatch.context() as patch:
            patch.setattr(volume, "allocations", lambda: known)
            DirectStore.delete(volume, JOB)
        commit(owner, 0)

    @pytest.mark.parametrize("other", [1, 3])
    def test_commit_for_another_attempt(self, volume: Volume, other: int) -> None:
        store = new_store(volume, make_geometry(attempt=Attempt(2)))
        fill(store, 0)
        with pytest.raises(StaleAttempt, match=f"open for attempt 2; attempt {other} cannot commit"):
            store.commit(Step(0), Attempt(other), "{}")
        assert store.commits() == []

    def test_commit_just_before_the_fence_counts(self, volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
        """The older attempt commits after the newer one has first read the journal, before it writes the fence."""
        older = new_store(volume)
        commit(older, 0)
        fence = DirectStore._write_fences

        def commit_first(store: DirectStore, attempt: Attempt) -> None:
            commit(older, 1)
            fence(store, attempt)

        monkeypatch.setattr(DirectStore, "_write_fences", commit_first)
        newer = DirectStore.open(volume, JOB, Attempt(2))
        assert [each.step for each in newer.commits()] == [0, 1]

    def test_two_attempts_that_open_at_once_wait_for_each_other(
        self, volume: Volume, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise the older one could read first, and write its fence after the newer one's."""
        commit(new_store(volume), 0)
        write_fences, is_free = DirectStore._write_fences, []

        def look_who_waits(store: DirectStore, attempt: Attempt) -> None:
            with volume.device.path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    is_free.append(True)
                except BlockingIOError:
                    is_free.append(False)
            write_fences(store, attempt)

        monkeypatch.setattr(DirectStore, "_write_fences", look_who_waits)
        DirectStore.open(volume, JOB, Attempt(2))
        assert is_free == [False]


class TestFence:
    @pytest.mark.parametrize("copy", [0, 1])
    def test_one_closed_copy_tells_that_the_job_was_deleted(self, volume: Volume, copy: int) -> None:
        """The machine lost power while the job was deleted, between the two writes."""
        lost = new_store(volume)
        commit(lost, 0)
        allocation = volume.allocation(JOB)
        closed = layout.pack_fence(layout.CLOSED, allocation.nonce)
        volume.device.write_records(allocation.head_offset + layout.FENCE_OFFSETS[copy], closed)
        assert last_attempt(volume, JOB) == 1
        _everything_is_refused(lost, 1, "the job was deleted")

    @pytest.mark.parametrize("copy", [0, 1])
    @pytest.mark.parametrize("at", [0, 10, 17, 4095])
    def test_one_copy_suffices_and_the_next_attempt_mends_it(self, volume: Volume, copy: int, at: int) -> None:
        lost = new_store(volume)
        commit(lost, 0)
        DirectStore.open(volume, JOB, Attempt(3))
        head = volume.allocation(JOB).head_offset
        file = volume.device.path
        flip(file, head + layout.FENCE_OFFSETS[copy] + at)
        _everything_is_refused(lost, 1, "attempt 3 has taken over")
        resume(volume, attempt=4)
        flip(file, head + layout.FENCE_OFFSETS[1 - copy] + at)
        with pytest.raises(StaleAttempt, match="attempt 4 has taken over; attempt 3"):
            DirectStore.open(volume, JOB, Attempt(3))
        DirectStore.open(volume, JOB, Attempt(4))
        flip(file, head + layout.FENCE_OFFSETS[copy] + at)
        check(resume(volume, attempt=4), 0)

    @pytest.mark.parametrize("copy", [0, 1])
    def test_newer_of_two_copies_counts(self, volume: Volume, copy: int) -> None:
        """The machine lost power while attempt 3 took over, between the two writes."""
        lost = new_store(volume)
        commit(lost, 0)
        allocation = volume.allocation(JOB)
        fence = layout.pack_fence(Attempt(3), allocation.nonce)
        volume.device.write_records(allocation.head_offset + layout.FENCE_OFFSETS[copy], fence)
        assert last_attempt(volume, JOB) == 3
        _everything_is_refused(lost, 1, "attempt 3 has taken over")

    def test_journal_knows_better_than_a_fence_that_the_ssd_forgot(self, volume: Volume) -> None:
        commit(new_store(volume), 0)
        allocation = volume.allocation(JOB)
        commit(resume(volume, attempt=3), 1)
        for offset in layout.FENCE_OFFSETS:
            forgotten = layout.pack_fence(Attempt(1), allocation.nonce)
            volume.device.write_records(allocation.head_offset + offset, forgotten)
        with pytest.raises(StaleAttempt, match="attempt 3 has taken over; attempt 2"):
            DirectStore.open(volume, JOB, Attempt(2))

    @pytest.mark.parametrize("copy", [0, 1])
    def test_power_loss_while_the_only_good_copy_is_replaced(self, tmp_path: Path, copy: int) -> None:
        volume = open_volume(tmp_path)
        commit(new_store(volume), 0)
        flip(volume_file(tmp_path), volume.allocation(JOB).head_offset + layout.FENCE_OFFSETS[copy] + 20)
        volume.close()
        damaged = volume_file(tmp_path).read_bytes()

        def take_over(volume: Volume) -> None:
            DirectStore.open(volume, JOB, Attempt(2))

        for is_done in power_losses(tmp_path, take_over, image=damaged):
            volume = open_volume(tmp_path)
            if is_done:
                with pytest.raises(StaleAttempt, match="attempt 2 has taken over"):
                    DirectStore.open(volume, JOB, Attempt(1))
            check(resume(volume, attempt=3), 0)
            volume.close()


class TestResume:
    @pytest.fixture
    def volumes(self, tmp_path: Path) -> Iterator[list[Volume]]:
        for i in range(2):
            (tmp_path / f"ssd{i}").mkdir()
        volumes = [open_volume(tmp_path / f"ssd{i}") for i in range(2)]
        yield volumes
        for each in volumes:
            each.close()

    @pytest.fixture
    def stores(self, volumes: list[Volume]) -> list[DirectStore]:
        """The stores on two SSDs of a job that has committed steps 0 to 2 on both."""
        geometry = make_geometry(ssd_weights=(1, 1))
        stores = [new_store(each, replace(geometry, ssd=SsdIndex(i))) for i, each in enumerate(volumes)]
        for step in range(3):
            for store in stores:
                commit(store, step)
        return stores

    @staticmethod
    def _open(volumes: list[Volume], attempt: int) -> tuple[list[DirectStore], CommitRecord]:
        stores = [DirectStore.open(each, JOB, Attempt(attempt)) for each in volumes]
        found = last_common_commit(stores)
        assert found is not None
        return stores, found

    def test_older_commit_that_the_job_chose(self, volumes: list[Volume], stores: list[DirectStore]) -> None:
        """Once all SSDs have adopted it, higher steps of older attempts do not count."""
        again, newest = self._open(volumes, attempt=2)
        assert newest.step == 2
        chosen = stores[0].commits()[1]
        again[0].resume_from(chosen)
        assert self._open(volumes, attempt=3)[1].step == 2  # the other SSD has not adopted it: nothing has changed
        third = self._open(volumes, attempt=4)[0]
        for store in third:
            store.resume_from(chosen)
            check(store, 1)
        after, found = self._open(volumes, attempt=5)
        assert (found.step, found.attempt) == (1, 4)
        for store in after:
            store.resume_from(found)
            commit(store, 2)
        last, found = self._open(volumes, attempt=6)
        assert (found.step, found.attempt) == (2, 5)
        for store in last:
            store.resume_from(found)
            check(store, 2, attempt=5)

    def test_commit_that_one_ssd_lacks(self, volumes: list[Volume], stores: list[DirectStore]) -> None:
        """The crash came between the two commits of step 3: the job resumes at the step before, and repeats step 3."""
        for store in stores:
            fill(store, 3)
        stores[0].prepare(Step(3), Attempt(1), "{}")
        again, found = self._open(volumes, attempt=2)
        assert found.step == 2
        for store in again:
            store.resume_from(found)
            check(store, 2)
            with pytest.raises(StepNotAllowed):
                check(store, 3)
        for store in again:
            commit(store, 3)
        assert self._open(volumes, attempt=3)[1].identity == (0, 2, 3, '{"step": 3}')

    def test_commit_that_this_ssd_does_not_have(self, stores: list[DirectStore], volumes: list[Volume]) -> None:
        commit(stores[0], 3)
        unknown = stores[0].last_commit()
        again = self._open(volumes, attempt=2)[0][1]
        with pytest.raises(
            StoreCorrupt, match="job ftjob-1: no intact record of step 3 of attempt 1, which other SSDs"
        ):
            again.resume_from(unknown)

    def test_failed_try_leaves_nothing_behind(self, volumes: list[Volume], stores: list[DirectStore]) -> None:
        """The newest manifest is damaged; the job may resume from the previous commit."""
        newest, before = stores[0].commits()[-1], stores[0].commits()[-2]
        offset = volumes[0].allocation(JOB).head_offset + stores[0].geometry.manifest_offset(newest.manifest)
        flip(volumes[0].device.path, offset + 5000)
        store = DirectStore.open(volumes[0], JOB, Attempt(2))
        with pytest.raises(
            StoreCorrupt, match=f"SSD {volumes[0].path}, job ftjob-1: the manifest of step 2 is damaged"
        ):
            store.resume_from(newest)
        with pytest.raises(StepNotAllowed):
            check(store, 2)
        store.resume_from(before)
        check(store, 1)
        commit(store, 2)
        check(resume(volumes[0], attempt=3), 2, attempt=2)

    def test_from_the_beginning(self, volumes: list[Volume]) -> None:
        """Step 0 reached only one SSD."""
        geometry = make_geometry(ssd_weights=(1, 1))
        stores = [new_store(each, replace(geometry, ssd=SsdIndex(i))) for i, each in enumerate(volumes)]
        commit(stores[0], 0)
        for attempt in (2, 3):
            stores = [DirectStore.open(each, JOB, Attempt(attempt)) for each in volumes]
            assert last_common_commit(stores) is None
            for store in stores:
                store.resume_from(None)
            commit(stores[0], 0)
            check(stores[0], 0, attempt)
        commit(stores[1], 0)
        assert self._open(volumes, attempt=4)[1].identity == (0, 3, 0, '{"step": 0}')
