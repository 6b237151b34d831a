import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.storage.ids import (
    STATE_ITEMSIZE,
    Attempt,
    BlockIndex,
    ChunkIndex,
    ChunkKey,
    JobId,
    Precision,
    Rank,
    SsdIndex,
    StateKind,
    Step,
)
from windlass.storage.store_format import (
    EXTENTS_OFFSET,
    JOURNAL_OFFSET,
    NUM_COMMIT_RECORDS,
    RECORD_NBYTES,
    TRAINER_STATE_MAX_NBYTES,
    CommitRecord,
    StoreCorrupt,
    StoreGeometry,
    pack_commit,
    pack_fence,
    pack_superblock,
    unpack_fence,
    unpack_journal,
    unpack_superblock,
)

GEOMETRY = StoreGeometry(
    job=JobId("ftjob-1"),
    rank=Rank(0),
    attempt=Attempt(1),
    ssd=SsdIndex(0),
    num_ssds=2,
    precision=Precision.BF16,
    chunk_numel=2048,
    chunks_per_block=(3, 1, 2),
)


def _record(sequence: int, step: int, state: str = "{}") -> CommitRecord:
    return CommitRecord(sequence=sequence, step=Step(step), attempt=Attempt(2), rank=Rank(1), trainer_state=state)


class TestGeometry:
    @given(
        chunks=st.lists(st.integers(1, 4), min_size=1, max_size=5),
        num_ssds=st.integers(1, 4),
        precision=st.sampled_from(Precision),
    )
    def test_every_state_has_an_aligned_place_of_its_own(
        self, chunks: list[int], num_ssds: int, precision: Precision
    ) -> None:
        places: set[tuple[int, int]] = set()
        for ssd in range(num_ssds):
            geometry = replace(
                GEOMETRY, ssd=SsdIndex(ssd), num_ssds=num_ssds, precision=precision, chunks_per_block=tuple(chunks)
            )
            covered = EXTENTS_OFFSET
            regions = sorted(
                (geometry.region_offset(key, kind, Step(step)), geometry.region_nbytes(kind))
                for block, n in enumerate(chunks)
                for key in (ChunkKey(BlockIndex(block), ChunkIndex(i)) for i in range(n))
                if geometry.ssd_of(key) == ssd
                for kind in STATE_ITEMSIZE[precision]
                for step in (0, 1)
            )
            for offset, nbytes in regions:  # one behind another, no gap and no overlap
                assert offset == covered
                assert offset % 4096 == nbytes % 4096 == 0
                covered += nbytes
                places.add((ssd, offset))
            assert covered == geometry.file_nbytes
        assert len(places) == 2 * sum(chunks) * len(STATE_ITEMSIZE[precision])

    def test_chunks_are_striped_in_order(self) -> None:
        keys = [ChunkKey(BlockIndex(b), ChunkIndex(c)) for b, n in enumerate((3, 1, 2)) for c in range(n)]
        assert [GEOMETRY.ordinal(key) for key in keys] == [0, 1, 2, 3, 4, 5]
        assert [GEOMETRY.ssd_of(key) for key in keys] == [0, 1, 0, 1, 0, 1]

    def test_steps_of_one_parity_share_a_place(self) -> None:
        key = ChunkKey(BlockIndex(0), ChunkIndex(2))
        places = [GEOMETRY.region_offset(key, StateKind.MASTER, Step(step)) for step in range(4)]
        assert places[0] == places[2] != places[1] == places[3]

    def test_journal_ends_before_the_extents(self) -> None:
        assert JOURNAL_OFFSET + NUM_COMMIT_RECORDS * RECORD_NBYTES <= EXTENTS_OFFSET

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"chunk_numel": 1024}, "2048"),
            ({"chunk_numel": 0}, "2048"),
            ({"ssd": 2}, "not one of 2 SSDs"),
            ({"job": "../x"}, "cannot name a file"),
            ({"job": ""}, "cannot name a file"),
            ({"chunks_per_block": ()}, "at least one chunk"),
            ({"chunks_per_block": (1, 0)}, "at least one chunk"),
            ({"attempt": 0}, "attempt 0"),
        ],
    )
    def test_bad_geometry_is_refused(self, change: dict[str, Any], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            replace(GEOMETRY, **change)

    @pytest.mark.parametrize(("block", "chunk"), [(0, 3), (3, 0), (-1, 0), (0, -1)])
    def test_unknown_chunk_is_refused(self, block: int, chunk: int) -> None:
        with pytest.raises(ValueError, match="is not a chunk of job ftjob-1"):
            GEOMETRY.ordinal(ChunkKey(BlockIndex(block), ChunkIndex(chunk)))

    def test_chunk_of_another_ssd_is_refused(self) -> None:
        with pytest.raises(ValueError, match="rests on SSD 1"):
            GEOMETRY.region_offset(ChunkKey(BlockIndex(0), ChunkIndex(1)), StateKind.PARAM, Step(0))

    def test_state_the_precision_lacks_is_refused(self) -> None:
        with pytest.raises(ValueError, match="fp32 store holds no param, only master"):
            replace(GEOMETRY, precision=Precision.FP32).region_nbytes(StateKind.PARAM)

    def test_survives_pickling(self) -> None:
        assert pickle.loads(pickle.dumps(GEOMETRY)) == GEOMETRY


class TestSuperblock:
    def test_roundtrip(self) -> None:
        assert unpack_superblock(pack_superblock(GEOMETRY), "x") == GEOMETRY

    def test_foreign_file(self) -> None:
        with pytest.raises(StoreCorrupt, match=r"a\.store is not a windlass tensor store"):
            unpack_superblock(b"\x7fELF" * 20000, "a.store")

    def test_flipped_bit(self) -> None:
        raw = bytearray(pack_superblock(GEOMETRY))
        raw[40] ^= 1
        with pytest.raises(StoreCorrupt, match="damaged"):
            unpack_superblock(bytes(raw), "a.store")

    def test_too_many_blocks_to_note(self) -> None:
        with pytest.raises(ValueError, match="40000 blocks"):
            pack_superblock(replace(GEOMETRY, chunks_per_block=(1,) * 40000))


class TestFence:
    def test_roundtrip_and_torn(self) -> None:
        raw = pack_fence(Attempt(7))
        assert unpack_fence(raw) == 7
        assert unpack_fence(raw[:512] + b"\xff" * (RECORD_NBYTES - 512)) is None
        assert unpack_fence(bytes(RECORD_NBYTES)) is None


class TestJournal:
    def _journal(self, *records: CommitRecord) -> bytearray:
        raw = bytearray(NUM_COMMIT_RECORDS * RECORD_NBYTES)
        for record in records:
            place = record.sequence % NUM_COMMIT_RECORDS * RECORD_NBYTES
            raw[place : place + RECORD_NBYTES] = pack_commit(record)
        return raw

    def test_roundtrip_in_order_of_sequence_after_wrapping(self) -> None:
        records = [_record(n, n, state='{"loss_scale": 1.5}') for n in range(62, 67)]
        assert unpack_journal(bytes(self._journal(*records))) == records

    @pytest.mark.parametrize("at", [0, 9, 40, 2000, RECORD_NBYTES - 1])
    def test_damaged_entry_is_left_out(self, at: int) -> None:
        raw = self._journal(_record(0, 0), _record(1, 1))
        raw[RECORD_NBYTES + at] ^= 0x10
        assert unpack_journal(bytes(raw)) == [_record(0, 0)]

    def test_entry_in_a_foreign_place_is_left_out(self) -> None:
        raw = self._journal(_record(0, 0))
        raw[RECORD_NBYTES : 2 * RECORD_NBYTES] = pack_commit(_record(5, 5))
        assert unpack_journal(bytes(raw)) == [_record(0, 0)]

    def test_largest_trainer_state_fits_and_a_larger_one_is_refused(self) -> None:
        largest = _record(0, 0, state="ü" * (TRAINER_STATE_MAX_NBYTES // 2))
        assert unpack_journal(pack_commit(largest)) == [largest]
        with pytest.raises(ValueError, match="3073 bytes"):
            pack_commit(_record(0, 0, state="x" * (TRAINER_STATE_MAX_NBYTES + 1)))
