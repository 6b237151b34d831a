import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.storage.direct_store import DirectStore
from tests.support.storage.stores import (
    FP32,
    JOB,
    OTHER,
    QuickDevice,
    check,
    commit,
    content,
    fill,
    make_geometry,
    new_store,
    open_volume,
    page_aligned,
    resume,
    states,
    used_nbytes,
    volume_file,
)
from windlass.storage.ids import (
    ALL_FORMATS,
    Attempt,
    BlockIndex,
    ChunkIndex,
    ChunkKey,
    Formats,
    Rank,
    Span,
    SsdIndex,
    StateKind,
    Step,
)
from windlass.storage.integrity.checksum import GRANULE_NBYTES
from windlass.storage.integrity.errors import StepNotAllowed, StoreExists, StoreMissing
from windlass.storage.memory.arena import Arena
from windlass.storage.memory.capacity import InsufficientSpaceError
from windlass.storage.ssd import volume as volume_module
from windlass.storage.ssd.volume import Volume
from windlass.storage.store import format as layout
from windlass.storage.store.tensor_store import stored_geometry

KEY = ChunkKey(BlockIndex(0), ChunkIndex(1))
PAGE = 4096


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    volume = open_volume(tmp_path)
    yield volume
    volume.close()


class TestRoundTrip:
    @pytest.mark.parametrize("formats", ALL_FORMATS)
    def test_striped_over_two_ssds_from_an_arena_by_many_threads(
        self, tmp_path: Path, direct: bool, formats: Formats
    ) -> None:
        stores = []
        for i in range(2):
            (tmp_path / f"ssd{i}").mkdir()
            geometry = make_geometry(
                ssd=SsdIndex(i), ssd_weights=(2, 1), formats=formats, chunk_numel=4096, chunks_per_block=(2, 1, 6)
            )
            stores.append(new_store(Volume.open(tmp_path / f"ssd{i}", direct=direct), geometry))
        all_states = [(store, *state) for store in stores for state in states(store.geometry)]
        assert len(all_states) == 9 * len(stores[0].geometry.kinds)
        slot_nbytes = 4 * 4096
        arena = Arena.create(tmp_path / "arena", len(all_states) * slot_nbytes)

        def move(verb: str, step: int) -> None:
            def one(i: int) -> None:
                store, key, kind = all_states[i]
                expected = content(store.geometry, key, kind, step)
                buffer = arena.buffer(Span(i * slot_nbytes, len(expected)))
                buffer[:] = expected if verb == "write" else bytes(len(expected))
                getattr(store, verb)(key, kind, Step(step), buffer)
                assert buffer == expected

            with ThreadPoolExecutor(8) as threads:
                list(threads.map(one, range(len(all_states))))

        for step in range(3):
            move("write", step)
            move("read", step)
            for store in stores:
                store.commit(Step(step), Attempt(1), "{}")
        move("read", 2)
        for store in stores:
            store.volume.close()
        arena.close()
        reopened = [resume(Volume.open(tmp_path / f"ssd{i}", direct=direct), attempt=2) for i in range(2)]
        all_states = [(store, *state) for store in reopened for state in states(store.geometry)]
        for store in reopened:
            assert store.geometry == stores[store.geometry.ssd].geometry
            check(store, 2)
            store.volume.close()

    def test_partly_filled_chunk(self, volume: Volume) -> None:
        store = new_store(volume)
        fill(store, 0)
        store.write(KEY, StateKind.MASTER, Step(0), page_aligned(b"p" * PAGE))
        store.commit(Step(0), Attempt(1), "{}")
        found = page_aligned(bytes(PAGE))
        store.read(KEY, StateKind.MASTER, Step(0), found)
        assert found == b"p" * PAGE
        with pytest.raises(
            StepNotAllowed, match=r"cannot read 8192 bytes of the master of block 0, chunk 1 .* 4096 bytes"
        ):
            store.read(KEY, StateKind.MASTER, Step(0), page_aligned(bytes(2 * PAGE)))

    def test_beginning_of_a_state_in_whole_granules(self, volume: Volume) -> None:
        geometry = make_geometry(chunk_numel=GRANULE_NBYTES // 2 + 2048, chunks_per_block=(1,), formats=FP32)
        store, key = new_store(volume, geometry), ChunkKey(BlockIndex(0), ChunkIndex(0))
        commit(store, 0)
        expected = content(geometry, key, StateKind.EXP_AVG, 0)
        assert len(expected) > 2 * GRANULE_NBYTES
        found = page_aligned(bytes(GRANULE_NBYTES))
        store.read(key, StateKind.EXP_AVG, Step(0), found)
        assert found == expected[:GRANULE_NBYTES]
        with pytest.raises(ValueError, match="4096 of 2105344 bytes end inside a checksum"):
            store.read(key, StateKind.EXP_AVG, Step(0), page_aligned(bytes(PAGE)))

    @pytest.mark.parametrize("nbytes", [0, 100, 8192 + PAGE])
    def test_wrong_length_is_refused(self, volume: Volume, nbytes: int) -> None:
        store = new_store(volume)
        with pytest.raises(ValueError, match=f"^{nbytes} bytes cannot be the master .* up to 8192"):
            store.write(KEY, StateKind.MASTER, Step(0), memoryview(bytes(nbytes)))

    def test_ssd_without_a_chunk_commits_too(self, volume: Volume) -> None:
        geometry = make_geometry(ssd=SsdIndex(1), ssd_weights=(9, 1), chunks_per_block=(1,))
        store = new_store(volume, geometry)
        for step in range(3):
            commit(store, step)
        record = resume(volume, attempt=2).last_commit()
        assert record is not None
        assert record.step == 2


class TestCreateAndDelete:
    def test_takes_what_it_demands_and_gives_it_back(self, volume: Volume, tmp_path: Path) -> None:
        empty = used_nbytes(volume_file(tmp_path))
        store = new_store(volume)
        assert used_nbytes(volume_file(tmp_path)) >= empty + store.geometry.demand.nbytes
        assert stored_geometry(volume, JOB) == store.geometry
        with pytest.raises(StoreExists):
            DirectStore.create(volume, make_geometry())
        DirectStore.delete(volume, JOB)
        DirectStore.delete(volume, JOB)
        assert used_nbytes(volume_file(tmp_path)) <= empty + PAGE
        assert stored_geometry(volume, JOB) is None
        with pytest.raises(StoreMissing, match=f"SSD {tmp_path} holds no states of job ftjob-1, or they were never"):
            DirectStore.open(volume, JOB, Attempt(2))

    def test_half_made_store_is_missing_and_made_anew(self, volume: Volume, tmp_path: Path) -> None:
        volume.reserve(JOB, make_geometry().demand)  # and then its process was killed
        assert stored_geometry(volume, JOB) is None
        with pytest.raises(StoreMissing):
            DirectStore.open(volume, JOB, Attempt(2))
        before = volume_file(tmp_path).stat().st_size
        commit(new_store(volume), 0)
        assert volume_file(tmp_path).stat().st_size == before

    def test_failure_while_it_is_made_takes_nothing(self, volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ValueError, match="are more than a store can note"):
            DirectStore.create(volume, make_geometry(chunks_per_block=(1,) * 40_000, chunk_numel=2048))
        assert volume.allocations() == {}
        monkeypatch.setattr(volume_module, "directory_free_nbytes", lambda path: 0)
        with pytest.raises(InsufficientSpaceError):
            DirectStore.create(volume, make_geometry())
        assert volume.allocations() == {}

    def test_jobs_of_one_ssd_do_not_touch_each_other(self, volume: Volume) -> None:
        stores = [new_store(volume, make_geometry(job)) for job in (JOB, OTHER)]
        for step, store in itertools.product(range(3), stores):
            commit(store, step)
        for store in stores:
            check(store, 2)
        DirectStore.delete(volume, JOB)
        check(stores[1], 2)
        commit(stores[1], 3)
        check(resume(volume, attempt=2, job=OTHER), 3)


class TestCommit:
    def test_last_is_found_after_the_journal_went_round(self, volume: Volume) -> None:
        store = new_store(volume, make_geometry(rank=Rank(3), chunks_per_block=(1,)))
        for step in range(layout.NUM_COMMIT_RECORDS + 5):
            assert commit(store, step).step == step
        found = resume(volume, attempt=2)
        record = found.last_commit()
        assert record is not None
        assert (record.step, record.attempt, record.rank) == (68, 2, 3)
        assert record.trainer_state == '{"step": 68}'
        assert len(found.commits()) == layout.NUM_COMMIT_RECORDS
        check(found, 68)

    def test_order_of_writes_and_syncs(self, tmp_path: Path) -> None:
        """Data, then the manifest, a sync, both copies of the record, a sync."""
        calls: list[object] = []

        class Logging(QuickDevice):
            def write_records(self, offset: int, raw: bytes) -> None:
                calls.append(offset)
                super().write_records(offset, raw)

            def sync(self) -> None:
                calls.append("sync")

        volume = open_volume(tmp_path, make_device=Logging)
        store = new_store(volume)
        commit(store, 0)
        fill(store, 1)
        calls.clear()
        store.commit(Step(1), Attempt(1), "{}")
        head = volume.allocation(JOB).head_offset
        manifest = calls[0]
        assert manifest in [head + store.geometry.manifest_offset(i) for i in range(layout.NUM_MANIFESTS)]
        entries = [head + offset + PAGE for offset in layout.JOURNAL_OFFSETS]
        assert calls == [manifest, "sync", *entries, "sync"]
        volume.close()

    def test_states_are_found_at_every_moment_of_their_commit(
        self, volume: Volume, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are read without a lock, and move from the working map into the committed one meanwhile."""
        store = new_store(volume)
        fill(store, 0)
        moments: list[str] = []

        def set_and_read(changed: DirectStore, name: str, value: object) -> None:
            object.__setattr__(changed, name, value)
            moments.append(name)
            check(changed, 0)

        with monkeypatch.context() as patch:
            patch.setattr(DirectStore, "__setattr__", set_and_read)
            store.commit(Step(0), store.attempt, "{}")
        assert {"_committed", "_working"} <= set(moments)

    def test_trainer_state_that_is_too_long_changes_nothing(self, volume: Volume) -> None:
        store = new_store(volume)
        commit(store, 0)
        fill(store, 1)
        with pytest.raises(ValueError, match="the trainer's state takes 3073 bytes"):
            store.commit(Step(1), Attempt(1), "x" * 3073)
        check(store, 0)
        store.commit(Step(1), Attempt(1), "x" * 3072)
        check(resume(volume, attempt=2), 1)
