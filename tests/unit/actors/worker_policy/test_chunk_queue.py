"""An optimizer's chunks are read and updated in order, and those in memory do not keep the SSDs waiting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.actors.worker_policy.block_queue import QueueOrder
from windlass.actors.worker_policy.chunk_queue import ChunkQueue, Countdown
from windlass.storage.ids import BlockIndex, Step

STEP = Step(1)


def queue_of(*items: str, order: QueueOrder = QueueOrder.PRIORITY, num_slots: int = 4) -> ChunkQueue[str]:
    """Chunks of blocks that are the last digit of their name. Those that begin with "r" are resident."""
    queue: ChunkQueue[str] = ChunkQueue(order, num_slots, lambda item: item.startswith("r"))
    for item in items:
        add(queue, item)
    return queue


def add(queue: ChunkQueue[str], *items: str) -> None:
    queue.add(STEP, BlockIndex(int(items[0][-1])), items)


def read(queue: ChunkQueue[str], number: int) -> None:
    """Lets the states of so many chunks arrive."""
    for _ in range(number):
        queue.arrived(queue.begin_to_read())


def updates(queue: ChunkQueue[str], number: int) -> list[str]:
    return [queue.begin_update().item for _ in range(number)]


def test_an_empty_queue_has_nothing_to_do() -> None:
    queue = queue_of()
    assert queue.first_to_read is None
    assert not queue.has_update


@pytest.mark.parametrize(
    ("order", "expected"), [(QueueOrder.PRIORITY, ["c1", "b3", "a5"]), (QueueOrder.FIFO, ["a5", "b3", "c1"])]
)
def test_chunks_are_read_in_the_order_of_their_blocks(order: QueueOrder, expected: list[str]) -> None:
    queue = queue_of("a5", "b3", "c1", order=order)
    assert [queue.begin_to_read().item for _ in expected] == expected
    assert queue.first_to_read is None


@pytest.mark.parametrize(
    ("order", "expected"), [(QueueOrder.PRIORITY, ["r1", "r3", "r5"]), (QueueOrder.FIFO, ["r5", "r3", "r1"])]
)
def test_resident_chunks_are_updated_in_the_order_of_their_blocks(order: QueueOrder, expected: list[str]) -> None:
    queue = queue_of("r5", "r3", "r1", order=order)
    assert queue.first_to_read is None
    assert updates(queue, 3) == expected
    assert not queue.has_update


def test_chunks_are_read_while_others_wait_for_their_update() -> None:
    queue = queue_of("a1", "a2", "a3", "r0")
    read(queue, 3)
    assert queue.has_update


@pytest.mark.parametrize(
    ("order", "expected"), [(QueueOrder.PRIORITY, ["a1", "b1", "a2"]), (QueueOrder.FIFO, ["a2", "a1", "b1"])]
)
def test_of_the_chunks_that_were_read_the_most_urgent_one_is_updated_first(
    order: QueueOrder, expected: list[str]
) -> None:
    queue = queue_of("a2", order=order)
    add(queue, "a1", "b1")
    chunks = {chunk.item: chunk for chunk in (queue.begin_to_read() for _ in range(3))}
    for item in ("a2", "a1", "b1"):
        queue.arrived(chunks[item])
    assert updates(queue, 3) == expected


def test_of_resident_and_read_chunks_the_more_urgent_one_is_updated_first() -> None:
    queue = queue_of("r0", "a1", "r2")
    read(queue, 1)
    assert updates(queue, 3) == ["r0", "a1", "r2"]


def test_while_more_than_half_of_the_slots_wait_every_third_update_is_that_of_a_resident_chunk() -> None:
    """Without slots, the SSDs have nothing to read. But SSDs that are fast fill all slots again and again."""
    queue = queue_of("r0", "r1", "a2", "b2", "c2", "d2", "e2", num_slots=4)
    done: list[str] = []
    read(queue, 4)
    while queue.has_update:
        done += updates(queue, 1)
        if queue.first_to_read is not None and not done[-1].startswith("r"):
            read(queue, 1)
    assert done == ["r0", "a2", "b2", "r1", "c2", "d2", "e2"]


def test_a_more_urgent_resident_chunk_does_not_wait_while_half_of_the_slots_do() -> None:
    queue = queue_of("r0", "r1", "a2", "b2", num_slots=4)
    read(queue, 2)
    assert updates(queue, 4) == ["r0", "r1", "a2", "b2"]


def test_resident_and_read_chunks_are_in_one_order_of_arrival() -> None:
    queue = queue_of("r5", "a3", "r1", order=QueueOrder.FIFO)
    read(queue, 1)
    assert updates(queue, 3) == ["r5", "a3", "r1"]


def test_a_block_is_done_with_its_last_chunk() -> None:
    queue = queue_of()
    add(queue, "a1", "b1")
    add(queue, "a2")
    first, second, other = (queue.begin_to_read() for _ in range(3))
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
    num_slots = data.draw(st.integers(1, 3))
    queue = queue_of(num_slots=num_slots)
    to_add = list(enumerate(names))
    reading, writing, done = ([] for _ in range(3))  # type: ignore[var-annotated]
    num_updated = 0
    while to_add or queue.first_to_read or queue.has_update or reading or writing:
        possible = {
            "add": to_add,
            "read": queue.first_to_read is not None and num_slots,
            "arrive": reading,
            "update": queue.has_update,
            "write": writing,
        }
        match data.draw(st.sampled_from([name for name, is_possible in possible.items() if is_possible])):
            case "add":
                block, items = to_add.pop(0)
                queue.add(STEP, BlockIndex(block), items)
            case "read":
                num_slots -= 1
                reading.append(queue.begin_to_read())
            case "arrive":
                queue.arrived(reading.pop(data.draw(st.integers(0, len(reading) - 1))))
            case "update":
                chunk = queue.begin_update()
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
