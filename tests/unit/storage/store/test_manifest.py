from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.storage.stores import FP32, make_geometry
from windlass.storage.ids import ALL_FORMATS, Attempt, Formats, Rank, StateKind, Step
from windlass.storage.integrity.checksum import GRANULE_NBYTES
from windlass.storage.integrity.records import RECORD_NBYTES
from windlass.storage.store.format import CommitRecord, unpack_commit
from windlass.storage.store.manifest import Manifest

NONCE = "0123456789abcdef"
RECORD = CommitRecord(
    sequence=3,
    step=Step(2),
    attempt=Attempt(1),
    rank=Rank(0),
    manifest=1,
    manifest_digest=0,
    trainer_state="{}",
)
# Two and a half granules of a param, five of each other state.
LARGE = make_geometry(chunk_numel=5 * GRANULE_NBYTES // 4, chunks_per_block=(1, 1))


def _written(step_map: Manifest, chunk: int, kind: StateKind, nbytes: int, digests: list[int]) -> None:
    step_map.expect(chunk, kind, nbytes)
    step_map.note(chunk, kind, 0, digests)


def _whole(geometry: Any) -> Manifest:
    step_map = Manifest(geometry)
    for chunk in range(geometry.num_local_chunks):
        step_map.place(chunk, 10 + chunk)
        for i, kind in enumerate(geometry.kinds):
            nbytes = geometry.region_nbytes(kind)
            _written(step_map, chunk, kind, nbytes, [1 + chunk * 100 + i] * -(-nbytes // GRANULE_NBYTES))
    return step_map


def test_nothing_is_held_at_first() -> None:
    step_map = Manifest(LARGE)
    assert step_map.extent(0) is None
    assert step_map.extents() == set()
    assert step_map.nbytes(1, StateKind.MASTER) == 0
    assert step_map.digests(1, StateKind.MASTER, 0, 5) == [0] * 5
    assert step_map.missing() == (0, StateKind.PARAM)


@settings(deadline=None)
@given(
    notes=st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from(LARGE.kinds), st.integers(0, 4), st.integers(1, 1 << 63)),
        max_size=30,
    )
)
def test_every_granule_has_a_number_of_its_own(notes: list[tuple[int, StateKind, int, int]]) -> None:
    """Compared with a dictionary."""
    step_map, expected = Manifest(LARGE), dict[tuple[int, StateKind, int], int]()
    for chunk, kind, granule, digest in notes:
        granule %= -(-LARGE.region_nbytes(kind) // GRANULE_NBYTES)
        step_map.note(chunk, kind, granule, [digest])
        expected[chunk, kind, granule] = digest
    for chunk in range(2):
        for kind in LARGE.kinds:
            num = -(-LARGE.region_nbytes(kind) // GRANULE_NBYTES)
            assert step_map.digests(chunk, kind, 0, num) == [expected.get((chunk, kind, i), 0) for i in range(num)]


def test_cleared_chunk_keeps_its_extent_and_nothing_else() -> None:
    step_map, expected = _whole(LARGE), _whole(LARGE)
    step_map.clear(1)
    assert step_map.extents() == {10, 11}
    assert step_map.missing() == (1, StateKind.PARAM)
    for kind in LARGE.kinds:
        assert step_map.nbytes(1, kind) == 0
        num = -(-LARGE.region_nbytes(kind) // GRANULE_NBYTES)
        assert step_map.digests(1, kind, 0, num) == [0] * num
        assert step_map.nbytes(0, kind) == expected.nbytes(0, kind)
        assert step_map.digests(0, kind, 0, num) == expected.digests(0, kind, 0, num)
    for kind in LARGE.kinds:
        num = -(-LARGE.region_nbytes(kind) // GRANULE_NBYTES)
        _written(step_map, 1, kind, expected.nbytes(1, kind), expected.digests(1, kind, 0, num))
    assert step_map.pack(RECORD, NONCE) == expected.pack(RECORD, NONCE)


def test_manifest_of_fp32_formats_holds_no_param_and_no_gradient() -> None:
    step_map = _whole(make_geometry(formats=FP32))
    assert step_map.nbytes(0, StateKind.PARAM) == step_map.nbytes(0, StateKind.GRAD) == 0


@pytest.mark.parametrize("formats", ALL_FORMATS)
def test_comes_back_from_its_manifest(formats: Formats) -> None:
    geometry = make_geometry(formats=formats, chunks_per_block=(70, 1))
    step_map = _whole(geometry)
    raw, digest = step_map.pack(RECORD, NONCE)
    assert len(raw) == geometry.manifest_nbytes
    assert digest == xxhash.xxh3_64_intdigest(raw)
    assert unpack_commit(raw[:RECORD_NBYTES], NONCE) == RECORD
    found = Manifest.unpack(raw, geometry)
    assert found.extents() == set(range(10, 81))
    assert [found.extent(chunk) for chunk in range(71)] == list(range(10, 81))
    for chunk in range(71):
        for i, kind in enumerate(geometry.kinds):
            assert found.nbytes(chunk, kind) == geometry.region_nbytes(kind)
            assert found.digests(chunk, kind, 0, 1) == [1 + chunk * 100 + i]
    assert found.missing() is None
    assert found.pack(RECORD, NONCE) == (raw, digest)


def test_layout_of_the_numbers() -> None:
    """As in docs/store-format.md: extents, then bytes written, then checksums; 8 bytes each, little-endian."""
    geometry = make_geometry(formats=FP32, chunks_per_block=(2,))
    raw, _ = _whole(geometry).pack(RECORD, NONCE)
    numbers = [int.from_bytes(raw[at : at + 8], "little") for at in range(RECORD_NBYTES, RECORD_NBYTES + 8 * 14, 8)]
    assert numbers == [10, 11, *[8192] * 6, 1, 2, 3, 101, 102, 103]


class TestMissing:
    @pytest.mark.parametrize("chunk", [0, 1])
    @pytest.mark.parametrize("kind", LARGE.kinds)
    def test_one_granule_that_is_not_written(self, chunk: int, kind: StateKind) -> None:
        step_map = _whole(LARGE)
        assert step_map.missing() is None
        num = -(-LARGE.region_nbytes(kind) // GRANULE_NBYTES)
        for granule in range(num):
            (digest,) = step_map.digests(chunk, kind, granule, 1)
            step_map.note(chunk, kind, granule, [0])
            assert step_map.missing() == (chunk, kind)
            step_map.note(chunk, kind, granule, [digest])
        assert step_map.missing() is None

    def test_state_that_is_written_again_is_missing_until_it_is(self) -> None:
        step_map = _whole(LARGE)
        step_map.expect(1, StateKind.EXP_AVG, 2 * GRANULE_NBYTES)
        assert step_map.missing() == (1, StateKind.EXP_AVG)
        step_map.note(1, StateKind.EXP_AVG, 1, [7])
        assert step_map.missing() == (1, StateKind.EXP_AVG)
        step_map.note(1, StateKind.EXP_AVG, 0, [6])
        assert step_map.missing() is None  # the rest of the chunk is not filled
        step_map.expect(1, StateKind.EXP_AVG, 3 * GRANULE_NBYTES)
        assert step_map.digests(1, StateKind.EXP_AVG, 0, 3) == [0, 0, 0]

    def test_partly_filled_granule_counts(self) -> None:
        step_map = _whole(LARGE)
        step_map.expect(0, StateKind.PARAM, GRANULE_NBYTES + 4096)
        step_map.note(0, StateKind.PARAM, 0, [5])
        assert step_map.missing() == (0, StateKind.PARAM)
        step_map.note(0, StateKind.PARAM, 1, [5])
        assert step_map.missing() is None
