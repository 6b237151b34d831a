"""An optimizer's chunks begin in order, only with the slots that they need, and few are read ahead of the updates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.actors.worker_policy.block_queue import QueueOrder
from windlass.actors.worker_policy.chunk_queue import ChunkQueue, Countdown, QueuedChunk
from windlass.storage.ids import BlockIndex, Step

STEP = Step(1)


def queue_of(*items: str, order: QueueOrder = QueueOrder.PRIORITY) -> ChunkQueue[str]:
    """Chunks of blocks that are the last digit of their name. Those that begin with "r" are resident."""
    queue: ChunkQueue[str] = ChunkQueue(order, lambda item: item.startswith("r"))
    for item in items:
        add(queue, item)
    return queue


def add(queue: ChunkQueue[str], *items: str) -> None:
    queue.add(STEP, BlockIndex(int(items[0][-1])), items)


def begin(queue: ChunkQueue[str], *, has_slot: bool = True) -> QueuedChunk[str]:
    assert queue.may_begin
    chunk = queue.begin(has_slot=has_slot)
    assert chunk is not None
    return chunk


def test_no_chunk_begins_in_an_empty_queue() -> None:
    queue = queue_of()
    assert queue.first is None
    assert not queue.may_begin


@pytest.mark.parametrize(
    ("order", "expected"), [(QueueOrder.PRIORITY, ["c1", "b3", "a5"]), (QueueOrder.FIFO, ["a5", "b3", "c1"])]
)
def test_chunks_begin_in_the_order_of_their_blocks(order: QueueOrder, expected: list[str]) -> None:
    queue = queue_of("a5", "b3", "c1", order=order)
    assert [begin(queue).item for _ in expected] == expected
    assert queue.first is None


def test_only_a_resident_chunk_begins_without_a_slot() -> None:
    queue = queue_of("r0", "a5")
    assert begin(queue, has_slot=False).is_resident
    assert queue.begin(has_slot=False) is None
    assert queue.first is not None
    assert not begin(queue).is_resident


@pytest.mark.parametrize("urgent", ["a2", "r2"])
def test_an_urgent_chunk_overtakes_during_the_wait_for_a_slot(urgent: str) -> None:
    queue = queue_of("a5")
    assert queue.begin(has_slot=False) is None
    add(queue, urgent)
    chunk = begin(queue)
    assert (chunk.item, chunk.is_resident) == (urgent, urgent == "r2")


def test_while_none_has_arrived_all_chunks_may_begin() -> None:
    queue = queue_of("a1", "a2", "a3", "a4")
    for _ in range(3):
        begin(queue)
    assert queue.may_begin


def test_beside_an_arrived_chunk_one_more_may_begin() -> None:
    queue = queue_of("a1", "a2", "a3", "a4")
    for _ in range(2):
        begin(queue)
    queue.arrived()
    assert not queue.may_begin
    queue.updating()  # one is being updated, the other still arrives
    assert not queue.may_begin
    queue.arrived()
    queue.updated()
    assert not queue.may_begin  # the other has arrived and waits
    queue.updating()
    begin(queue)
    assert not queue.may_begin


def test_after_all_updates_all_chunks_may_begin() -> None:
    queue = queue_of("a1", "a2", "a3", "a4")
    begin(queue)
    queue.arrived()
    queue.updating()
    queue.updated()
    for _ in range(3):
        begin(queue)


def test_a_block_is_done_with_its_last_chunk() -> None:
    queue = queue_of()
    add(queue, "a1", "b1")
    add(queue, "a2")
    first, second, other = (begin(queue) for _ in range(3))
    assert not queue.chunk_done(first)
    assert queue.chunk_done(other)
    assert queue.chunk_done(second)
    with pytest.raises(KeyError):
        queue.chunk_done(second)


def test_countdown_part_done_is_true_for_the_last_part_of_a_task() -> None:
    countdown = Countdown()
    countdown.start("a", 2)
    countdown.start("b", 1)
    assert not countdown.part_done("a")
    assert countdown.part_done("b")
    assert countdown.part_done("a")
    with pytest.raises(KeyError):
        countdown.part_done("a")


@given(st.data())
def test_every_chunk_is_updated_once_and_every_block_done_once(data: st.DataObject) -> None:
    """With any number of slots, whatever arrives or is written first."""
    blocks = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    names = [[data.draw(st.sampled_from("ar")) + str(block) for _ in range(n)] for block, n in enumerate(blocks)]
    queue, num_slots = queue_of(), data.draw(st.integers(1, 3))
    to_add = list(enumerate(names))
    reading, ready, writing, done = ([] for _ in range(4))  # type: ignore[var-annotated]
    num_updated = 0
    while to_add or queue.first or reading or ready or writing:
        events = [name for name, possible in (("add", to_add), ("arrive", reading), ("write", writing)) if possible]
        if queue.may_begin and queue.first is not None and (queue.first.is_resident or num_slots):
            events.append("begin")
        if ready:
            events.append("update")
        match data.draw(st.sampled_from(events)):
            case "add":
                block, items = to_add.pop(0)
                queue.add(STEP, BlockIndex(block), items)
            case "begin":
                chunk = queue.begin(has_slot=False)
                if chunk is None:
                    num_slots, chunk = num_slots - 1, queue.begin(has_slot=True)
                    assert chunk is not None
                if chunk.is_resident:
                    queue.arrived()
                    ready.append(chunk)
                else:
                    reading.append(chunk)
            case "arrive":
                ready.append(reading.pop(data.draw(st.integers(0, len(reading) - 1))))
                queue.arrived()
            case "update":
                chunk = ready.pop(0)
                queue.updating()
                queue.updated()
                num_updated += 1
                if not chunk.is_resident:
                    writing.append(chunk)
                elif queue.chunk_done(chunk):
                    done.append(chunk.block)
            case "write":
                chunk = writing.pop(data.draw(st.integers(0, len(writing) - 1)))
                num_slots += 1
                if queue.chunk_done(chunk):
                    done.append(chunk.block)
    assert num_updated == sum(blocks)
    assert sorted(done) == list(range(len(blocks)))
