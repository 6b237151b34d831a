from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from windlass.engine.memory_plan.copy_batches import COPY_BATCH_NBYTES, batches_to_copy, copy_batch_size

MIB = 1 << 20


def test_chunks_of_one_owner_are_one_batch_up_to_the_limit() -> None:
    assert copy_batch_size([("a", 16 * MIB)] * 9) == 4
    assert copy_batch_size([("a", 40 * MIB), ("a", 24 * MIB), ("a", 1)]) == 2


def test_chunk_alone_and_chunk_larger_than_the_limit_are_a_batch_each() -> None:
    assert copy_batch_size([("a", 1)]) == 1
    assert copy_batch_size([("a", 2 * COPY_BATCH_NBYTES), ("a", 1)]) == 1
    assert copy_batch_size([]) == 0


def test_chunks_of_another_owner_wait_for_the_next_batch() -> None:
    assert copy_batch_size([("a", 1), ("a", 1), ("b", 1), ("a", 1)]) == 2
    assert copy_batch_size([(None, 1), ("b", 1)]) == 1


def test_only_chunks_of_the_batch_and_one_more_are_looked_at() -> None:
    endless = iter(lambda: ("a", 40 * MIB), None)
    assert copy_batch_size(endless) == 1


@given(st.lists(st.integers(0, 2 * COPY_BATCH_NBYTES)))
def test_batches_have_all_chunks_in_order_and_are_as_large_as_the_limit_allows(nbytes: list[int]) -> None:
    batches = [list(batch) for batch in batches_to_copy(nbytes, int)]
    assert [chunk for batch in batches for chunk in batch] == nbytes
    assert all(len(batch) == 1 or sum(batch) <= COPY_BATCH_NBYTES for batch in batches)
    assert all(sum(batch) + following[0] > COPY_BATCH_NBYTES for batch, following in pairwise(batches))
