import pytest

from tests.support.storage.stores import make_record
from windlass.storage.integrity.errors import StoreCorrupt
from windlass.storage.store.common_commit import last_common_commit
from windlass.storage.store.format import CommitRecord


def test_last_common_commit_is_the_newest_that_all_ssds_have() -> None:
    a = [make_record(0, 0), make_record(1, 1), make_record(2, 2)]
    b = [make_record(7, 0), make_record(8, 1)]
    assert last_common_commit([a, b]) == a[1]
    assert last_common_commit([b, a]) == b[1]
    assert last_common_commit([a]) == a[2]


def test_adopted_commit_wins_over_higher_steps_of_older_attempts() -> None:
    old = [make_record(sequence, sequence) for sequence in range(4)]
    adopted = make_record(4, 2, attempt=2)
    assert last_common_commit([[*old, adopted], [*old, adopted]]) == adopted
    # The crash came before the second SSD adopted it: the earlier commit still counts.
    assert last_common_commit([[*old, adopted], old]) == old[3]


def test_same_step_of_another_history_does_not_pair() -> None:
    a = [make_record(0, 0), make_record(1, 1, attempt=1, state="a")]
    for other in (make_record(1, 1, attempt=2, state="a"), make_record(1, 1, attempt=1, state="b")):
        assert last_common_commit([a, [make_record(0, 0), other]]) == a[0]


def test_none_before_the_first_step_is_on_all() -> None:
    assert last_common_commit([[], []]) is None
    assert last_common_commit([[make_record(0, 0), make_record(1, 0, attempt=2)], []]) is None


@pytest.mark.parametrize("other", [[], [make_record(0, 0, attempt=9)]])
def test_lost_journal_is_not_a_new_job(other: list[CommitRecord]) -> None:
    """An SSD was replaced, or is not mounted and an empty directory is in its place."""
    with pytest.raises(StoreCorrupt, match=r"those of the steps \[5, (None|0)\], and none is the same on all"):
        last_common_commit([[make_record(0, 4), make_record(1, 5)], other])
