"""Buffers share contents among users, keep them after the release, and evict them in the order of releases."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from windlass.engine.memory_plan.block_buffers import Acquired, BlockBuffers
from windlass.engine.memory_plan.buffer_counts import param_buffers

Buffers = BlockBuffers[str, str]


def acquired(buffers: Buffers, contents: str | None, size: str = "layer", **options: set[str]) -> int:
    """Acquires a buffer that must be filled."""
    found = buffers.acquire(size, contents, **options)
    assert found is not None
    assert not found.has_contents
    return found.buffer


def test_buffer_in_use_is_shared_by_users_of_its_contents() -> None:
    buffers = Buffers({"layer": 1})
    first = acquired(buffers, "a")
    assert buffers.acquire("layer", "a") == Acquired(first, has_contents=True)
    buffers.release(first)
    assert buffers.num_users(first) == 1
    assert buffers.acquire("layer", "b") is None
    buffers.release(first)
    assert buffers.num_users(first) == 0


def test_released_contents_stay_until_the_buffer_is_needed() -> None:
    buffers = Buffers({"layer": 1})
    first = acquired(buffers, "a")
    buffers.release(first)
    assert buffers.contents(first) == "a"
    assert buffers.acquire("layer", "a") == Acquired(first, has_contents=True)
    buffers.release(first)
    assert buffers.acquire("layer", "b") == Acquired(first, has_contents=False, evicted="a")
    assert buffers.contents(first) == "b"


def test_least_recently_released_buffer_is_evicted() -> None:
    buffers = Buffers({"layer": 3})
    held = {name: acquired(buffers, name) for name in "abc"}
    for name in "bca":
        buffers.release(held[name])
    buffers.release(buffers.acquire("layer", "b").buffer)  # type: ignore[union-attr]
    evicted = [buffers.acquire("layer", name) for name in "xyz"]
    assert [each.evicted for each in evicted if each is not None] == ["c", "a", "b"]


def test_contents_to_keep_are_not_evicted() -> None:
    buffers = Buffers({"layer": 2})
    held = {name: acquired(buffers, name) for name in "ab"}
    for buffer in held.values():
        buffers.release(buffer)
    assert buffers.acquire("layer", "x", keep={"a", "b"}) is None
    assert acquired(buffers, "x", keep={"a"}) == held["b"]


@pytest.mark.parametrize("contents", [None, "dropped"])
def test_empty_buffer_is_used_before_contents_are_evicted(contents: str | None) -> None:
    """The buffer of contents that are not used again counts as empty, as one does whose contents were dropped."""
    buffers = Buffers({"layer": 2})
    useful, useless = acquired(buffers, "a"), acquired(buffers, contents)
    buffers.release(useful)
    buffers.release(useless)
    buffers.drop(useless)
    assert buffers.acquire("layer", contents) == Acquired(useless, has_contents=False)


def test_buffers_of_another_size_are_not_used() -> None:
    buffers = Buffers({"layer": 1, "head": 1})
    acquired(buffers, "a")
    assert buffers.acquire("layer", "b") is None
    assert buffers.acquire("embedding", "b") is None
    assert buffers.sizes[acquired(buffers, "b", "head")] == "head"


def test_misuse_is_refused() -> None:
    buffers = Buffers({"layer": 1})
    with pytest.raises(AssertionError, match="only a buffer in use is released"):
        buffers.release(0)
    acquired(buffers, "a")
    with pytest.raises(AssertionError, match="a buffer in use is not emptied"):
        buffers.drop(0)


@settings(max_examples=examples(100))
@given(st.data())
def test_buffers_hold_what_they_were_filled_with(data: st.DataObject) -> None:
    """After any events: who finds contents reads those that were written, and nothing in use is overwritten."""
    numbers = {"layer": data.draw(st.integers(0, 4)), "head": data.draw(st.integers(0, 2))}
    buffers, memory, uses = Buffers(numbers), dict[int, str | None](), list[tuple[int, str | None]]()
    for _ in range(data.draw(st.integers(1, 60))):
        event = data.draw(st.sampled_from(["acquire", "acquire", "release", "drop"]))
        if event == "acquire":
            size, contents = data.draw(st.sampled_from(sorted(numbers))), data.draw(st.sampled_from([None, *"abcde"]))
            keep = data.draw(st.sets(st.sampled_from("abcde")))
            found = buffers.acquire(size, contents, keep)
            if found is None:
                others = [each for each, its_size in enumerate(buffers.sizes) if its_size == size]
                assert all(buffers.num_users(each) or buffers.contents(each) in keep for each in others)
            else:
                assert buffers.sizes[found.buffer] == size
                assert found.evicted is None or found.evicted not in keep
                if found.has_contents:
                    assert memory[found.buffer] == contents is not None
                else:
                    assert found.buffer not in [each for each, _ in uses]
                    assert found.evicted == memory.get(found.buffer)
                memory[found.buffer] = contents
                uses.append((found.buffer, contents))
        elif event == "release" and uses:
            buffers.release(uses.pop(data.draw(st.integers(0, len(uses) - 1)))[0])
        elif event == "drop":
            idle = [each for each in range(len(buffers.sizes)) if not buffers.num_users(each)]
            if idle:
                dropped = data.draw(st.sampled_from(idle))
                buffers.drop(dropped)
                memory[dropped] = None
        assert all(memory[buffer] == contents for buffer, contents in uses)
        assert {each for each in range(len(buffers.sizes)) if buffers.num_users(each)} == {each for each, _ in uses}
        buffers.check_invariants()


def loads_of_step(numels: list[int], num_ahead: int, num_groups: int, num_late: int) -> Counter[int]:
    """The loads of each block in a step. `num_late`: operations before an operation that still hold their params."""
    own = [(block,) for block in range(len(numels))]
    buffers: BlockBuffers[int, int] = BlockBuffers(param_buffers(numels, own, resident=(), num_ahead=num_ahead))
    forward, loads, held = list(range(len(numels))), Counter[int](), list[int]()
    for block in (forward + forward[-2::-1]) * num_groups:
        while len(held) > num_late:
            buffers.release(held.pop(0))
        while (found := buffers.acquire(numels[block], block)) is None:
            buffers.release(held.pop(0))
        held.append(found.buffer)
        loads[block] += not found.has_contents
    return loads


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("num_ahead", [1, 2, 3])
def test_a_step_loads_each_layer_twice_except_at_the_turns(num_ahead: int, num_groups: int) -> None:
    """Regardless of when the operations in flight end. The embedding and the head have buffers of their own."""
    numels = [50, *[10] * 8, 60]
    for num_late in range(num_ahead):
        loads = loads_of_step(numels, num_ahead, num_groups, num_late)
        assert (loads[0], loads[9]) == (1, 1)
        assert sum(loads[block] for block in range(1, 9)) == num_groups * 2 * 8 - (2 * num_groups - 1) * num_ahead
