"""Disks that return wrong data, fail and vanish: nothing is lost, or an error names the SSD, job and extent."""

import errno
import os
import pickle
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.storage.direct_store import DirectStore
from tests.support.storage.stores import (
    FP32,
    JOB,
    OTHER,
    QuickDevice,
    check,
    commit,
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
from windlass.storage.ids import Attempt, BlockIndex, ChunkIndex, ChunkKey, StateKind, Step
from windlass.storage.integrity.errors import StaleAttempt, StoreCorrupt, StoreError, StoreIoError
from windlass.storage.integrity.records import RECORD_NBYTES
from windlass.storage.ssd import volume_format
from windlass.storage.ssd.volume import VOLUME_FILE, Volume
from windlass.storage.store import format as layout
from windlass.storage.store.format import CommitRecord, pack_commit

KEY = ChunkKey(BlockIndex(0), ChunkIndex(1))
SMALL = make_geometry(formats=FP32, chunks_per_block=(1,))
LAST = 4


class FaultyDisk(QuickDevice):
    """Fails with the errors in `errors`, and transfers at most `most_nbytes` at once."""

    def __init__(self, path: Path, *, is_raw: bool = False, direct: bool = True) -> None:
        super().__init__(path, is_raw=is_raw, direct=direct)
        self.errors: dict[str, int] = {}
        self.most_nbytes: int | None = None
        self.num_calls = 0

    def _try(self, name: str) -> None:
        if name in self.errors:
            raise OSError(self.errors[name], os.strerror(self.errors[name]))

    def read(self, offset: int, buffer: memoryview) -> int:
        self._try("read")
        self.num_calls += 1
        return super().read(offset, buffer[: self.most_nbytes])

    def write(self, offset: int, buffer: memoryview) -> int:
        self._try("write")
        self.num_calls += 1
        return super().write(offset, buffer[: self.most_nbytes])

    def read_records(self, offset: int, nbytes: int) -> bytes:
        self._try("read_records")
        return super().read_records(offset, nbytes)

    def write_records(self, offset: int, raw: bytes) -> None:
        self._try("write_records")
        super().write_records(offset, raw)

    def sync(self) -> None:
        self._try("sync")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Volume]:
    volume = open_volume(tmp_path, make_device=FaultyDisk)
    yield volume
    volume.close()


def _regions(volume: Volume, store: DirectStore) -> dict[str, tuple[int, int]]:
    """The offset and length of every record and state of one job on the SSD."""
    regions = {f"volume superblock {i}": (at, RECORD_NBYTES) for i, at in enumerate(volume_format.SUPERBLOCK_OFFSETS)}
    regions |= {f"table {i}": (at, volume_format.TABLE_NBYTES) for i, at in enumerate(volume_format.TABLE_OFFSETS)}
    head, geometry = volume.allocation(JOB).head_offset, store.geometry
    regions["superblock"] = (head + layout.SUPERBLOCK_OFFSET, layout.SUPERBLOCK_NBYTES)
    regions |= {f"fence {i}": (head + at, RECORD_NBYTES) for i, at in enumerate(layout.FENCE_OFFSETS)}
    last = store.commits()[-1]
    for i, journal in enumerate(layout.JOURNAL_OFFSETS):
        regions[f"journal {i}"] = (head + journal, layout.NUM_COMMIT_RECORDS * RECORD_NBYTES)
        place = last.sequence % layout.NUM_COMMIT_RECORDS * RECORD_NBYTES
        regions[f"last commit {i}"] = (head + journal + place, RECORD_NBYTES)
    regions["manifest"] = (head + geometry.manifest_offset(last.manifest), geometry.manifest_nbytes)
    for key, kind in states(geometry):
        (region,) = store.regions_to_read(key, Step(LAST), [(kind, geometry.region_nbytes(kind))])
        regions[f"state: {kind} of {key.block}, {key.chunk}"] = (region.offset, region.nbytes)
    return regions


class TestFlippedBits:
    @pytest.fixture(scope="class", name="trained")
    @staticmethod
    def _trained() -> Iterator[tuple[Path, dict[str, tuple[int, int]]]]:
        """A volume with two jobs of some steps."""
        with tempfile.TemporaryDirectory() as name:
            volume = open_volume(Path(name))
            stores = [new_store(volume, make_geometry(job)) for job in (OTHER, JOB)]
            for store in stores:
                for step in range(LAST + 1):
                    commit(store, step)
            yield Path(name), _regions(volume, stores[1])
            volume.close()

    @settings(max_examples=examples(150), deadline=None)
    @given(data=st.data())
    def test_of_any_region_change_nothing_or_are_an_error(
        self, trained: tuple[Path, dict[str, tuple[int, int]]], data: st.DataObject
    ) -> None:
        """Never other bytes and never an older step; and the other job continues."""
        source, regions = trained
        name = data.draw(st.sampled_from(sorted(regions)))
        offset, nbytes = regions[name]
        at = data.draw(st.sampled_from([0, 9, nbytes - 1]) | st.integers(0, nbytes - 1))
        with tempfile.TemporaryDirectory() as copy:
            shutil.copyfile(volume_file(source), Path(copy) / VOLUME_FILE)
            flip(Path(copy) / VOLUME_FILE, offset + at, data.draw(st.integers(0, 7)))
            volume = open_volume(Path(copy))
            other = resume(volume, attempt=2, job=OTHER)
            check(other, LAST)
            commit(other, LAST + 1)
            is_once_only = name.split(":")[0] in ("superblock", "manifest", "state")
            if not is_once_only:
                self._use(volume)
            else:
                with pytest.raises(StoreCorrupt) as caught:
                    self._use(volume)
                text = str(caught.value)
                assert text.startswith(f"SSD {copy}, job {JOB}")
                if ":" in name:
                    kind, block, chunk = re.findall(r"(\w+) of (\d), (\d)", name)[0]
                    place = rf"extent \d+ \({kind} of block {block}, chunk {chunk}, step {LAST}\)"
                    assert re.search(place, text)
                    assert f"offset {offset} of the SSD" in text
            check(resume(volume, attempt=3, job=OTHER), LAST + 1, attempt=2)
            volume.close()

    @staticmethod
    def _use(volume: Volume) -> None:
        store = resume(volume, attempt=2)
        record = store.last_commit()
        assert record is not None
        assert record.step == LAST
        check(store, LAST)
        commit(store, LAST + 1)

    @pytest.mark.parametrize("what", ["volume superblock", "table", "fence", "last commit"])
    def test_of_both_copies(self, trained: tuple[Path, dict[str, tuple[int, int]]], tmp_path: Path, what: str) -> None:
        """An open store of another job is not affected."""
        source, regions = trained
        shutil.copyfile(volume_file(source), volume_file(tmp_path))
        volume = open_volume(tmp_path)
        other = resume(volume, attempt=2, job=OTHER)
        for copy in range(2):
            flip(volume_file(tmp_path), regions[f"{what} {copy}"][0] + 40)
        if what == "last commit":
            # It looks like a commit that a crash cut off; the commit before it is still complete.
            assert DirectStore.open(volume, JOB, Attempt(2)).commits()[-1].step == LAST - 1
        else:
            with pytest.raises(StoreError, match=re.escape(str(tmp_path))) as caught:
                DirectStore.open(open_volume(tmp_path), JOB, Attempt(2))
            assert what != "fence" or f"SSD {tmp_path}, job {JOB}: both fence records are damaged" in str(caught.value)
        commit(other, LAST + 1)
        check(other, LAST + 1, attempt=2)
        volume.close()


class TestTransfers:
    def test_short_reads_and_writes_are_completed(self, tmp_path: Path, direct: bool) -> None:
        volume = open_volume(tmp_path, direct=direct, make_device=FaultyDisk)
        volume.device.most_nbytes = 4096
        store = new_store(volume)
        commit(store, 0)
        num_pages = store.geometry.num_local_chunks * store.geometry.extent_nbytes // 4096
        assert volume.device.num_calls == num_pages
        check(store, 0)
        assert volume.device.num_calls == 2 * num_pages
        volume.close()

    @pytest.mark.parametrize(
        ("verb", "code", "advice"),
        [
            ("read", errno.EIO, "check the disk"),
            ("write", errno.EIO, "check the disk"),
            ("write", errno.ENOSPC, "the file system has given the space away that was reserved: delete files there"),
            ("read", errno.EINVAL, "O_DIRECT needs buffers aligned to 4096 bytes"),
        ],
    )
    def test_error_names_everything(self, disk: Volume, verb: str, code: int, advice: str) -> None:
        store = new_store(disk)
        commit(store, 0)
        step = Step(0 if verb == "read" else 1)
        disk.device.errors[verb] = code
        with pytest.raises(StoreIoError) as caught:
            getattr(store, verb)(KEY, StateKind.EXP_AVG, step, page_aligned(bytes(8192)))
        error = pickle.loads(pickle.dumps(caught.value))
        start = f"SSD {disk.path}, job ftjob-1, extent "
        assert re.match(
            re.escape(start) + rf"\d \(exp_avg of block 0, chunk 1, step {step}\): could not {verb}: .*; {advice}$",
            str(error),
        )
        disk.device.errors.clear()
        check(store, 0)
        commit(store, 1)  # the failed state is written again

    def test_step_of_which_a_write_failed_is_not_committed(self, disk: Volume) -> None:
        store = new_store(disk)
        commit(store, 0)
        fill(store, 1)
        disk.device.errors["write"] = errno.EIO
        with pytest.raises(StoreIoError):
            store.write(KEY, StateKind.PARAM, Step(1), page_aligned(bytes(4096)))
        with pytest.raises(StoreError, match="the param of chunk 1 of this SSD has not been written"):
            store.commit(Step(1), Attempt(1), "{}")

    def test_end_of_the_file(self, disk: Volume) -> None:
        store = new_store(disk)
        commit(store, 0)
        (region,) = store.regions_to_read(KEY, Step(0), [(StateKind.MASTER, 8192)])
        os.truncate(disk.device.path, region.offset + 4096)
        with pytest.raises(StoreIoError, match=f"could not read: the SSD ends at byte {region.offset + 4096}; check"):
            store.read(KEY, StateKind.MASTER, Step(0), page_aligned(bytes(8192)))
        os.truncate(disk.device.path, 0)
        with pytest.raises(StaleAttempt, match=f"SSD {disk.path}, job ftjob-1: both fence records are damaged"):
            fill(store, 1)

    def test_disk_that_takes_nothing(self, disk: Volume) -> None:
        store = new_store(disk)
        disk.device.most_nbytes = 0
        with pytest.raises(StoreIoError, match="could not write: the SSD ends at byte"):
            fill(store, 0)


class TestCommits:
    @pytest.mark.parametrize("method", ["sync", "write_records"])
    def test_failed_sync_is_final(self, disk: Volume, method: str) -> None:
        """The kernel reports lost data only once, so a second sync that succeeds proves nothing."""
        store = new_store(disk)
        commit(store, 0)
        fill(store, 1)
        disk.device.errors[method] = errno.EIO
        with pytest.raises(
            StoreIoError, match=f"SSD {disk.path}, job ftjob-1: could not sync the manifest of step 1: "
        ):
            store.commit(Step(1), Attempt(1), "{}")
        disk.device.errors.clear()
        with pytest.raises(StoreIoError, match=r"an earlier sync failed \(\[Errno 5\] Input/output error\); nothing"):
            store.commit(Step(1), Attempt(1), "{}")
        check(store, 0)
        check(resume(disk, attempt=2), 0)

    def test_commit_whose_record_could_not_be_synced_is_not_told(
        self, disk: Volume, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = new_store(disk)
        commit(store, 0)
        fill(store, 1)
        syncs = iter([None])  # that of the manifest

        def sync_once() -> None:
            if next(syncs, OSError) is OSError:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(disk.device, "sync", sync_once)
        with pytest.raises(StoreIoError, match="could not sync the commit of step 1"):
            store.commit(Step(1), Attempt(1), "{}")
        last = store.last_commit()
        assert last is not None
        assert (last.step, [record.step for record in store.commits()]) == (0, [0])

    @pytest.mark.parametrize("method", ["read_records", "write_records", "sync"])
    def test_failing_disk_is_named_when_a_store_is_opened(self, disk: Volume, method: str) -> None:
        commit(new_store(disk), 0)
        disk.device.errors[method] = errno.EIO
        with pytest.raises(StoreIoError) as caught:
            resume(disk, attempt=2)
        assert str(disk.path) in str(caught.value)
        assert "Input/output error" in str(caught.value)
        disk.device.errors.clear()
        check(resume(disk, attempt=3), 0)

    @pytest.mark.parametrize("vanished", ["file", "directory", "replaced"])
    def test_vanished_volume_is_not_committed_to(self, tmp_path: Path, vanished: str) -> None:
        """The bytes of a removed file, or of a disk that was unmounted lazily, are lost when it is closed."""
        directory = tmp_path / "mounted"
        directory.mkdir()
        volume = open_volume(directory)
        store = new_store(volume)
        commit(store, 0)
        fill(store, 1)
        if vanished == "directory":
            directory.rename(tmp_path / "gone")
        else:
            volume_file(directory).unlink()
        if vanished == "replaced":
            new_store(open_volume(directory))
        with pytest.raises(
            StoreIoError, match=f"SSD {directory}, job ftjob-1: the file has vanished from its directory"
        ):
            store.commit(Step(1), Attempt(1), "{}")
        volume.close()


class _Model:
    """A store of one SSD with the rules that hold if any one copy of its records is damaged."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.file, self.chance = volume_file(directory), random.Random(seed)
        self.volume = open_volume(directory)
        self.store = new_store(self.volume, SMALL)
        self.attempt, self.step = 1, -1
        self.writers: dict[int, int] = {}  # of every step, the attempt
        self.head = self.volume.allocation(JOB).head_offset
        self.commit()

    def commit(self) -> None:
        self.step += 1
        commit(self.store, self.step)
        self.writers[self.step] = self.attempt

    def tear(self) -> None:
        """Simulates a power loss within the next commit: both copies of its record may be torn."""
        fill(self.store, self.step + 1)
        last = self.store.commits()[-1]
        self._write_torn(pack_commit(_following(last), self.volume.allocation(JOB).nonce), last.sequence + 1)
        self.reopen()

    def damage(self) -> None:
        """Damages one copy of several journal entries and one of the fences."""
        for place in self.chance.sample(range(layout.NUM_COMMIT_RECORDS), 20):
            journal = self.chance.choice(layout.JOURNAL_OFFSETS)
            flip(self.file, self.head + journal + place * RECORD_NBYTES + self.chance.randrange(RECORD_NBYTES))
        flip(self.file, self.head + self.chance.choice(layout.FENCE_OFFSETS) + self.chance.randrange(RECORD_NBYTES))
        self.reopen()
        self._mend()

    def reopen(self) -> None:
        self.attempt += 1
        self.store = resume(self.volume, self.attempt)
        record = self.store.last_commit()
        assert record is not None
        assert record.step == self.step
        check(self.store, self.step, self.writers[self.step])

    def _write_torn(self, raw: bytes, sequence: int) -> None:
        place = sequence % layout.NUM_COMMIT_RECORDS * RECORD_NBYTES
        with self.file.open("r+b") as file:
            for journal in layout.JOURNAL_OFFSETS:
                file.seek(self.head + journal + place)
                file.write(raw[: 512 * self.chance.randrange(8)])

    def _mend(self) -> None:
        """Repairs the journal, before the other copy of the same entry may be damaged."""
        copies = [self.volume.device.read_records(self.head + at, 64 * RECORD_NBYTES) for at in layout.JOURNAL_OFFSETS]
        nonce = self.volume.allocation(JOB).nonce
        for at in range(0, 64 * RECORD_NBYTES, RECORD_NBYTES):
            good = [raw for copy in copies if layout.unpack_commit(raw := copy[at : at + RECORD_NBYTES], nonce)]
            for journal in layout.JOURNAL_OFFSETS if good else ():
                self.volume.device.write_records(self.head + journal + at, good[0])


def _following(record: CommitRecord) -> CommitRecord:
    return CommitRecord(
        sequence=record.sequence + 1,
        step=Step(record.step + 1),
        attempt=record.attempt,
        rank=record.rank,
        manifest=record.manifest,
        manifest_digest=1,
        trainer_state=os.urandom(1000).hex(),
    )


@settings(max_examples=examples(25), deadline=None)
@given(
    actions=st.lists(st.sampled_from(["commit", "commit", "tear", "damage", "reopen"]), max_size=25),
    seed=st.integers(0, 1 << 32),
)
def test_last_acknowledged_commit_is_always_found(actions: list[str], seed: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        model = _Model(Path(name), seed)
        for action in actions:
            getattr(model, action)()
        model.reopen()
        model.volume.close()
