import pytest

from tests.support.storage.stores import make_geometry
from windlass.storage.ids import StateKind, Step
from windlass.storage.integrity.checksum import GRANULE_NBYTES
from windlass.storage.store.uncommitted import UncommittedMap

# One granule of a param, two of each other state.
GEOMETRY = make_geometry(chunk_numel=GRANULE_NBYTES // 2, chunks_per_block=(1, 1, 1))
SIZES = [(kind, GEOMETRY.region_nbytes(kind)) for kind in GEOMETRY.kinds]
GRADIENT = [(StateKind.GRAD, 2 * GRANULE_NBYTES)]


def _write(working: UncommittedMap, chunk: int, step: int, sizes: list[tuple[StateKind, int]] = SIZES) -> None:
    working.begin(chunk, Step(step), sizes)
    for kind, nbytes in sizes:
        working.note(chunk, kind, 0, [step + 1] * (nbytes // GRANULE_NBYTES))


def test_nothing_is_written_at_first() -> None:
    working = UncommittedMap(GEOMETRY)
    assert (
        [working.label(chunk) for chunk in range(3)] == [working.states_step(chunk) for chunk in range(3)] == [None] * 3
    )
    assert working.newest() is None
    assert working.unlike(None) is None
    assert working.unlike(Step(0)) == 0
    assert working.nbytes(0, StateKind.GRAD) == 0


def test_states_without_a_chunk_may_be_of_any_step() -> None:
    working = UncommittedMap(make_geometry(ssd=1, ssd_weights=(9, 1), chunks_per_block=(1,)))
    assert working.newest() is None
    assert working.unlike(None) is working.unlike(Step(3)) is None


@pytest.mark.parametrize("other", [0, 1, 2])
def test_one_chunk_of_another_step(other: int) -> None:
    working = UncommittedMap(GEOMETRY)
    for chunk in range(3):
        _write(working, chunk, 4)
    assert working.unlike(Step(4)) is None
    assert working.missing() is None
    _write(working, other, 6)
    assert (working.unlike(Step(4)), working.newest()) == (other, 6)
    assert working.missing() is None
    assert working.unlike(Step(6)) == (1 if other == 0 else 0)


def test_states_of_a_step_may_come_one_by_one() -> None:
    working = UncommittedMap(GEOMETRY)
    for kind, nbytes in SIZES:
        assert working.missing() == (0, kind)
        _write(working, 0, 4, [(kind, nbytes)])
    assert working.missing() == (1, StateKind.PARAM)
    working.place(0, 7)
    _write(working, 0, 5, SIZES[:1])
    assert working.extent(0) == 7
    assert working.nbytes(0, StateKind.PARAM) == SIZES[0][1]
    assert working.missing() == (0, SIZES[1][0])


def test_gradient_is_no_state() -> None:
    working = UncommittedMap(GEOMETRY)
    for chunk in range(3):
        _write(working, chunk, 4, GRADIENT)
    assert [working.label(chunk) for chunk in range(3)] == [4] * 3
    assert working.newest() == 4
    assert working.unlike(None) is None
    assert working.unlike(Step(4)) == 0
    assert working.missing() == (0, StateKind.PARAM)
    assert working.nbytes(1, StateKind.GRAD) == 2 * GRANULE_NBYTES
    assert [working.nbytes(1, kind) for kind in GEOMETRY.kinds] == [0] * 4
    assert working.digests(1, StateKind.GRAD, 0, 2) == [5, 5]


def test_gradient_and_states_of_one_step_do_not_stand_side_by_side() -> None:
    working = UncommittedMap(GEOMETRY)
    _write(working, 1, 4, GRADIENT)
    working.begin(1, Step(4), SIZES[-1:])
    assert working.states_step(1) == 4
    assert working.nbytes(1, StateKind.GRAD) == 0
    assert working.digests(1, StateKind.GRAD, 0, 2) == [0, 0]
    _write(working, 1, 4)
    assert working.digests(1, StateKind.PARAM, 0, 1) == [5]


def test_gradient_written_again_has_no_old_checksums() -> None:
    working = UncommittedMap(GEOMETRY)
    _write(working, 1, 4, GRADIENT)
    working.begin(1, Step(4), [(StateKind.GRAD, GRANULE_NBYTES)])
    assert working.nbytes(1, StateKind.GRAD) == GRANULE_NBYTES
    assert working.digests(1, StateKind.GRAD, 0, 2) == [0, 0]
