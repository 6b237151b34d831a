import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.storage.stores import FP32, make_geometry, make_record
from windlass.storage.ids import (
    ALL_FORMATS,
    Attempt,
    BlockIndex,
    ChunkIndex,
    ChunkKey,
    Formats,
    LayoutEpoch,
    Rank,
    SsdIndex,
    StateKind,
    Step,
)
from windlass.storage.integrity.errors import StoreCorrupt
from windlass.storage.integrity.records import RECORD_NBYTES
from windlass.storage.store import format as layout
from windlass.storage.store.format import (
    NUM_COMMIT_RECORDS,
    TRAINER_STATE_MAX_NBYTES,
    CommitRecord,
    pack_commit,
    pack_fence,
    pack_superblock,
    unpack_commit,
    unpack_fence,
    unpack_journals,
    unpack_superblock,
)

NONCE, OTHER_NONCE = "0123456789abcdef", "f123456789abcdef"
weights = st.lists(st.integers(1, 12), min_size=1, max_size=5).map(tuple)


class TestGeometry:
    @settings(deadline=None)
    @given(
        chunks=st.lists(st.integers(1, 4), min_size=1, max_size=5),
        ssd_weights=weights,
        formats=st.sampled_from(ALL_FORMATS),
        units=st.integers(1, 1000),
    )
    def test_every_state_has_an_aligned_place_of_its_own(
        self, chunks: list[int], ssd_weights: tuple[int, ...], formats: Formats, units: int
    ) -> None:
        keys = [ChunkKey(BlockIndex(b), ChunkIndex(c)) for b, num in enumerate(chunks) for c in range(num)]
        num_places = 0
        for ssd in range(len(ssd_weights)):
            geometry = make_geometry(
                ssd=SsdIndex(ssd),
                ssd_weights=ssd_weights,
                formats=formats,
                chunk_numel=units * layout.CHUNK_NUMEL_UNIT,
                chunks_per_block=tuple(chunks),
            )
            mine = [geometry.local_index(key) for key in keys if geometry.ssd_of(key) == ssd]
            assert mine == list(range(geometry.num_local_chunks))  # dense, in the model's order
            num_places += len(mine)
            covered = 0
            for kind in geometry.kinds:  # adjacent, without gap and overlap
                assert geometry.region_offset(kind) == covered
                covered += geometry.region_nbytes(kind)
                assert covered % 4096 == 0
            assert covered == geometry.extent_nbytes
            demand = geometry.demand
            assert geometry.manifest_offset(layout.NUM_MANIFESTS) == demand.head_nbytes
            assert demand.head_nbytes % 4096 == geometry.manifest_nbytes % 4096 == 0
            assert demand.num_extents == 2 * geometry.num_local_chunks
        assert num_places == sum(chunks)

    @settings(deadline=None)
    @given(ssd_weights=weights, num_chunks=st.integers(1, 120))
    def test_chunks_are_dealt_by_weight(self, ssd_weights: tuple[int, ...], num_chunks: int) -> None:
        """The bounds follow from two facts: the credits sum to 0, and the richest has at least the mean of the sum.

        So an SSD is ahead of its share by at most (1 - 1/n) of the sum. It is behind by at most what the other n - 1
        are ahead together.
        """
        geometry = make_geometry(ssd_weights=ssd_weights, chunks_per_block=(num_chunks,))
        counts, total, ahead = [0] * len(ssd_weights), sum(ssd_weights), 1 - 1 / len(ssd_weights)
        period = total // gcd(*ssd_weights)
        for dealt in range(1, num_chunks + 1):
            ssd = geometry.ssd_of(ChunkKey(BlockIndex(0), ChunkIndex(dealt - 1)))
            counts[ssd] += 1
            for count, weight in zip(counts, ssd_weights, strict=True):
                share = dealt * weight / total
                assert count <= share + ahead + 1e-9
                assert count >= share - (len(ssd_weights) - 1) * ahead - 1e-9
                if dealt % period == 0:
                    assert count * total == dealt * weight

    def test_faster_ssd_gets_more(self) -> None:
        geometry = make_geometry(ssd_weights=(3, 1), chunks_per_block=(8,))
        dealt = [geometry.ssd_of(ChunkKey(BlockIndex(0), ChunkIndex(i))) for i in range(8)]
        assert dealt == [0, 0, 1, 0, 0, 0, 1, 0]

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"job": "../ftjob"}, "job id '../ftjob' must consist of letters, digits"),
            ({"job": ".hidden"}, "job id"),
            ({"job": "x" * 129}, "job id"),
            ({"ssd_weights": ()}, r"every SSD needs a weight of at least 1, not \(\)"),
            ({"ssd_weights": (2, 0)}, r"at least 1, not \(2, 0\)"),
            ({"ssd": 1}, "SSD index 1 is not one of 1 SSDs"),
            ({"ssd": -1}, "SSD index -1"),
            ({"rank": -1}, "rank -1 must be at least 0"),
            ({"attempt": 0}, "attempt 0 at least 1"),
            ({"epoch": -1}, "layout epoch -1 must be at least 0"),
            ({"chunk_numel": 0}, "positive multiple of 2048, not 0"),
            ({"chunk_numel": 2049}, "positive multiple of 2048, not 2049"),
            ({"chunks_per_block": ()}, "at least one chunk"),
            ({"chunks_per_block": (0, 0)}, "at least one chunk"),
            ({"chunks_per_block": (1, -1)}, r"chunks_per_block is \(1, -1\)"),
        ],
    )
    def test_impossible_ones_are_refused(self, change: dict[str, Any], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            make_geometry(**change)

    def test_unknown_chunks_and_states_are_refused(self) -> None:
        geometry = make_geometry(ssd_weights=(1, 1), formats=FP32)
        for block, chunk in ((0, 2), (2, 0), (-1, 0), (0, -1)):
            with pytest.raises(ValueError, match="is not a chunk of job ftjob-1"):
                geometry.ssd_of(ChunkKey(BlockIndex(block), ChunkIndex(chunk)))
        with pytest.raises(ValueError, match="rests on SSD 1 of job ftjob-1, not on SSD 0"):
            geometry.local_index(ChunkKey(BlockIndex(0), ChunkIndex(1)))
        for method in (geometry.region_nbytes, geometry.region_offset):
            for kind in (StateKind.PARAM, StateKind.GRAD):
                with pytest.raises(ValueError, match=f"the store holds no {kind}, only master, exp_avg, exp_avg_sq"):
                    method(kind)

    def test_ssd_without_a_chunk_needs_a_head_only(self) -> None:
        geometry = make_geometry(ssd=SsdIndex(1), ssd_weights=(9, 1), chunks_per_block=(1,))
        assert geometry.num_local_chunks == geometry.demand.num_extents == 0
        assert geometry.manifest_nbytes == RECORD_NBYTES


class TestSuperblock:
    @pytest.mark.parametrize("formats", ALL_FORMATS)
    def test_comes_back(self, formats: Formats) -> None:
        geometry = make_geometry(formats=formats, ssd=SsdIndex(2), ssd_weights=(1, 5, 2), rank=Rank(3))
        raw = pack_superblock(geometry, NONCE)
        assert len(raw) == layout.SUPERBLOCK_NBYTES
        facts = json.loads(raw[20 : raw.index(b"\0", 20)])
        assert not [name for name in facts if name.startswith("_")]  # values that can be computed
        found = unpack_superblock(raw, NONCE, "SSD x")
        assert found == geometry
        assert [found.local_index(ChunkKey(BlockIndex(0), ChunkIndex(1)))] == [0]
        assert tuple(formats.itemsizes) == found.kinds
        assert pickle.loads(pickle.dumps(found)) == geometry

    def test_first_epoch_is_not_named_as_in_older_versions(self) -> None:
        for epoch in (0, 3):
            geometry = make_geometry(epoch=LayoutEpoch(epoch))
            raw = pack_superblock(geometry, NONCE)
            assert (b'"epoch":3' in raw) == (epoch == 3)
            assert (b"epoch" in raw) == (epoch == 3)
            assert unpack_superblock(raw, NONCE, "SSD x") == geometry

    @settings(max_examples=40, deadline=None)
    @given(position=st.integers(0, layout.SUPERBLOCK_NBYTES * 8 - 1))
    def test_any_flipped_bit_is_an_error(self, position: int) -> None:
        raw = bytearray(pack_superblock(make_geometry(), NONCE))
        raw[position // 8] ^= 1 << position % 8
        with pytest.raises(StoreCorrupt, match=r"^SSD x, job y: the superblock is damaged"):
            unpack_superblock(bytes(raw), NONCE, "SSD x, job y")

    def test_earlier_owners_is_an_error(self) -> None:
        with pytest.raises(StoreCorrupt, match="damaged"):
            unpack_superblock(pack_superblock(make_geometry(), OTHER_NONCE), NONCE, "SSD x")

    def test_more_blocks_than_it_can_note(self) -> None:
        pack_superblock(make_geometry(chunks_per_block=(1,) * 30_000), NONCE)
        with pytest.raises(ValueError, match="job ftjob-1: 40000 blocks are more than a store can note"):
            pack_superblock(make_geometry(chunks_per_block=(1,) * 40_000), NONCE)


class TestFence:
    @given(attempt=st.integers(1, (1 << 64) - 1))
    def test_comes_back_for_its_owner(self, attempt: int) -> None:
        raw = pack_fence(Attempt(attempt), NONCE)
        assert unpack_fence(raw, NONCE) == attempt
        assert unpack_fence(raw, OTHER_NONCE) is None
        assert unpack_fence(raw[:-1] + bytes([raw[-1] ^ 1]), NONCE) is None

    def test_closed_is_above_every_attempt(self) -> None:
        assert unpack_fence(pack_fence(layout.CLOSED, NONCE), NONCE) == layout.CLOSED == (1 << 64) - 1


class TestCommitRecord:
    @given(
        sequence=st.integers(0, 1 << 62),
        step=st.integers(0, 1 << 40),
        attempt=st.integers(1, 1 << 40),
        state=st.text(max_size=400),
        decided=st.none() | st.integers(0, 1 << 40).map(Step),
        epoch=st.integers(0, 1 << 40).map(LayoutEpoch),
    )
    def test_comes_back(
        self, sequence: int, step: int, attempt: int, state: str, decided: Step | None, epoch: LayoutEpoch
    ) -> None:
        record = replace(make_record(0, step, attempt, state), sequence=sequence, decided=decided, epoch=epoch)
        raw = pack_commit(record, NONCE)
        assert len(raw) == RECORD_NBYTES
        assert unpack_commit(raw, NONCE) == record
        assert unpack_commit(raw, OTHER_NONCE) is None
        assert pickle.loads(pickle.dumps(record)) == record

    def test_older_versions_entry_repeats_no_decision(self) -> None:
        """Those versions left zeros after the trainer's state."""
        record = make_record(3, 2, state="{}")
        raw = pack_commit(record, NONCE)
        assert raw[66:-4] == bytes(len(raw) - 70)
        assert unpack_commit(raw, NONCE) == record
        told = pack_commit(replace(record, decided=Step(1), epoch=LayoutEpoch(4)), NONCE)
        assert told[:3136] == raw[:3136], "older versions read the same entry"

    def test_longest_state_fits(self) -> None:
        longest = "é" * (TRAINER_STATE_MAX_NBYTES // 2)
        record = make_record(1, 2, state=longest)
        assert unpack_commit(pack_commit(record, NONCE), NONCE) == record
        with pytest.raises(ValueError, match="the trainer's state takes 3073 bytes; a commit holds 3072"):
            pack_commit(replace(record, trainer_state=longest + "x"), NONCE)


def _journal(records: Sequence[CommitRecord]) -> bytearray:
    raw = bytearray(NUM_COMMIT_RECORDS * RECORD_NBYTES)
    for record in records:
        place = record.sequence % NUM_COMMIT_RECORDS * RECORD_NBYTES
        raw[place : place + RECORD_NBYTES] = pack_commit(record, NONCE)
    return raw


class TestJournals:
    @settings(max_examples=30, deadline=None)
    @given(
        num=st.integers(0, 150),
        damage=st.dictionaries(
            st.integers(0, NUM_COMMIT_RECORDS - 1), st.tuples(st.integers(0, 1), st.integers(0, 4095))
        ),
        torn=st.none() | st.tuples(st.integers(0, 7), st.integers(0, 7)),
    )
    def test_one_copy_of_each_entry_suffices(
        self, num: int, damage: dict[int, tuple[int, int]], torn: tuple[int, int] | None
    ) -> None:
        """Also if the crash that tore the last entry tore both of its copies."""
        records = [make_record(sequence, step=sequence) for sequence in range(num)]
        copies = [_journal(records), _journal(records)]
        next_place = num % NUM_COMMIT_RECORDS
        for place, (copy, byte) in damage.items():
            copies[copy][place * RECORD_NBYTES + byte] ^= 4
        if torn is not None:
            new = pack_commit(make_record(num, step=num), NONCE)
            for copy, num_sectors in zip(copies, torn, strict=True):
                at = next_place * RECORD_NBYTES
                copy[at : at + 512 * num_sectors] = new[: 512 * num_sectors]
        found = unpack_journals([bytes(copy) for copy in copies], NONCE, "SSD x")
        # The place of the next entry held the oldest one, which may be lost.
        kept = [each for each in found if each.sequence % NUM_COMMIT_RECORDS != next_place]
        assert kept == [
            each for each in records[-NUM_COMMIT_RECORDS:] if each.sequence % NUM_COMMIT_RECORDS != next_place
        ]
        assert {each.sequence for each in found} <= set(range(num))

    def test_both_copies_of_an_acknowledged_entry_damaged(self) -> None:
        copies = [_journal([make_record(sequence, step=sequence) for sequence in range(70)]) for _ in range(2)]
        for copy in copies:
            for sequence in (68, 69):
                copy[sequence % NUM_COMMIT_RECORDS * RECORD_NBYTES + 100] ^= 1
        with pytest.raises(StoreCorrupt, match=r"^SSD x: both copies of the journal are damaged in 2 of 64 places"):
            unpack_journals([bytes(copy) for copy in copies], NONCE, "SSD x")

    def test_whole_journal_damaged_is_not_an_empty_one(self) -> None:
        journal = _journal([make_record(0, 0), make_record(1, 1)])
        for sequence in range(2):
            journal[sequence * RECORD_NBYTES + 4000] ^= 1
        with pytest.raises(StoreCorrupt, match="which step was committed last is unknown"):
            unpack_journals([bytes(journal)] * 2, NONCE, "SSD x")
        assert unpack_journals([bytes(journal)] * 2, OTHER_NONCE, "SSD x") == []

    def test_entry_in_the_wrong_place_does_not_count(self) -> None:
        journal = _journal([make_record(5, 5)])
        moved = journal[RECORD_NBYTES:] + journal[:RECORD_NBYTES]
        with pytest.raises(StoreCorrupt):
            unpack_journals([bytes(moved)] * 2, NONCE, "SSD x")
