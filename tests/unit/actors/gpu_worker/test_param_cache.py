"""The cache of params in host memory from one use to the next."""

import pytest

from windlass.actors.gpu_worker.param_cache import ParamCache
from windlass.actors.messages import ParamSlotLease, Phase
from windlass.storage.ids import BlockIndex, ChunkIndex, ChunkKey, Span, Step
from windlass.storage.memory.arena import SlotPool

HEAD = 5
NUM_FETCHED = 2


class Bench:
    """A cache, and the calls of a worker: one chunk a block."""

    def __init__(self, capacity: int, *, reads_params: bool = False) -> None:
        self.pool = SlotPool(0, 4096, NUM_FETCHED + capacity)
        self.cache = ParamCache(self.pool, capacity=capacity, head=HEAD, reads_params=reads_params)
        self.num_read = 0

    @property
    def num_in_use(self) -> int:
        return self.pool.statistics.in_use_nbytes // 4096

    def use(self, block: int, step: int, phase: Phase, *, is_last_group: bool = True) -> bool:
        """Uses a block's params of `step`, and returns whether they were in the cache."""
        span = self.cache.take(key(block), Step(step))
        found = span is not None
        if span is None:
            (span,) = self.pool.acquire(1, 1.0)
            self.num_read += 1
        self.cache.put(key(block), Step(step), span, phase, is_last_group=is_last_group)
        return found

    def forward(self, step: int) -> list[int]:
        """The blocks whose params were in the cache."""
        return [block for block in range(HEAD) if self.use(block, step - 1, Phase.FORWARD)]

    def backward(self, step: int) -> list[int]:
        found = [HEAD] if self.use(HEAD, step - 1, Phase.HEAD) else []
        return found + [block for block in reversed(range(HEAD)) if self.use(block, step - 1, Phase.BACKWARD)]

    def update(self, block: int, step: int) -> ParamSlotLease | None:
        loan = self.cache.lend(key(block), Step(step - 1))
        if loan is not None:
            self.cache.take_back(key(block), Step(step), loan.span)
        return loan


def key(block: int) -> ChunkKey:
    return ChunkKey(BlockIndex(block), ChunkIndex(0))


def test_without_room_nothing_stays() -> None:
    bench = Bench(0)
    assert bench.forward(1) == bench.backward(1) == []
    assert bench.cache.lend(key(0), Step(0)) is None
    assert bench.num_in_use == 0


def test_with_room_for_all_params_are_read_once() -> None:
    bench = Bench(HEAD + 1)
    for step in (1, 2, 3):
        assert bench.forward(step) == ([] if step == 1 else list(range(HEAD)))
        assert bench.backward(step) == [HEAD] * (step > 1) + list(reversed(range(HEAD)))
        for block in range(HEAD + 1):
            loan = bench.update(block, step)
            assert loan is not None
            assert loan.is_filled
    assert bench.num_read == HEAD + 1


def test_cache_keeps_blocks_that_are_needed_soonest() -> None:
    bench = Bench(2)
    # The backward pass uses the last layers first; then the next step needs the first ones.
    bench.forward(1)
    assert bench.backward(1) == [4, 3]
    assert bench.num_in_use == 2
    for block in (0, 1):
        loan = bench.update(block, 1)
        assert loan is not None
        assert loan.is_filled
    assert bench.forward(2) == [0, 1]


def test_a_slot_is_lent_empty_where_something_else_is_needed_later() -> None:
    bench = Bench(1)
    bench.use(3, 0, Phase.BACKWARD)
    loan = bench.update(1, 1)
    assert loan is not None
    assert not loan.is_filled
    assert bench.cache.take(key(3), Step(0)) is None  # it was evicted
    assert bench.cache.take(key(1), Step(1)) == loan.span


def test_block_that_is_needed_sooner_is_not_evicted() -> None:
    bench = Bench(1)
    bench.use(1, 0, Phase.BACKWARD)
    assert bench.update(3, 1) is None
    assert bench.use(1, 0, Phase.FORWARD)


def test_params_that_an_update_is_about_to_read_wait_for_it() -> None:
    for reads_params in (True, False):
        bench = Bench(1, reads_params=reads_params)
        bench.use(1, 0, Phase.FORWARD)
        bench.use(4, 0, Phase.BACKWARD)
        loan = bench.update(4, 1)
        assert (loan is not None and loan.is_filled) == reads_params


def test_no_update_follows_on_a_group_that_is_not_the_last() -> None:
    """The group that follows needs last what this one used last."""
    for is_last_group in (True, False):
        bench = Bench(1, reads_params=True)
        bench.use(4, 0, Phase.BACKWARD, is_last_group=is_last_group)
        bench.use(3, 0, Phase.BACKWARD, is_last_group=is_last_group)
        bench.use(0, 0, Phase.BACKWARD, is_last_group=is_last_group)
        assert bench.use(0, 0, Phase.FORWARD) == (not is_last_group)


def test_lent_slot_is_not_given_to_another_use() -> None:
    bench = Bench(1)
    loan = bench.cache.lend(key(2), Step(0))
    assert loan is not None
    assert bench.cache.take(key(2), Step(0)) is None
    assert bench.cache.lend(key(2), Step(0)) is None
    assert bench.cache.lend(key(0), Step(0)) is None  # no space, and nothing may be evicted
    bench.use(2, 0, Phase.FORWARD)
    assert bench.num_in_use == 1
    bench.cache.take_back(key(2), Step(1), loan.span)
    assert bench.cache.take(key(2), Step(1)) == loan.span


def test_params_of_another_step_are_not_those_that_are_wanted() -> None:
    bench = Bench(2)
    bench.use(0, 3, Phase.FORWARD)
    assert bench.cache.lend(key(0), Step(4)) is None
    assert bench.cache.take(key(0), Step(4)) is None
    assert bench.num_in_use == 0  # nothing will use it


def test_fetches_keep_their_slots() -> None:
    bench = Bench(2)
    fetched = bench.pool.acquire(NUM_FETCHED + 2, 1.0)
    assert bench.cache.lend(key(0), Step(0)) is None
    for block, span in enumerate(fetched):
        bench.cache.put(key(block), Step(0), span, Phase.BACKWARD, is_last_group=True)
    assert bench.num_in_use == 2


def test_evaluation_evicts_no_block_that_training_needs() -> None:
    bench = Bench(2)
    for block in range(HEAD):
        bench.use(block, 1, Phase.EVALUATE)
    assert bench.forward(2) == [0, 1]


def test_a_slot_that_was_not_lent_is_not_taken_back() -> None:
    bench = Bench(2)
    bench.use(0, 0, Phase.FORWARD)
    with pytest.raises(AssertionError):
        bench.cache.take_back(key(0), Step(1), Span(0, 4096))
