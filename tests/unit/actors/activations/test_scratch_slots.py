from hypothesis import given
from hypothesis import strategies as st

from windlass.actors.activations.scratch_slots import ScratchSlots


def test_ssds_are_used_by_weight_and_full_ones_not_at_all() -> None:
    slots = ScratchSlots([6, 2], [3, 1])
    taken = [slots.take(1) for _ in range(8)]
    assert [ssd for ssd, _ in taken] == [0, 1, 0, 0, 0, 1, 0, 0]
    assert sorted(slot for ssd, (slot,) in taken if ssd == 0) == list(range(6))
    assert slots.num_free == 0
    slots = ScratchSlots([2, 9], [1, 1])
    assert [slots.take(4) for _ in range(4)] == [(0, (0, 1)), (1, (0, 1, 2, 3)), (1, (4, 5, 6, 7)), (1, (8,))]


def test_released_slots_are_reused_before_new_ones_lowest_first() -> None:
    slots = ScratchSlots([10], [1])
    assert slots.take(5) == (0, (0, 1, 2, 3, 4))
    slots.give_back(0, (3, 1))
    assert slots.take(4) == (0, (1, 3, 5, 6))


@given(
    shares=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    weights=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    data=st.data(),
)
def test_no_slot_is_handed_out_twice_and_none_is_lost(
    shares: list[int], weights: list[int], data: st.DataObject
) -> None:
    slots = ScratchSlots(shares, weights[: len(shares)])
    held: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(data.draw(st.integers(0, 30))):
        if slots.num_free and (not held or data.draw(st.booleans())):
            count = data.draw(st.integers(1, 5))
            ssd, taken = slots.take(count)
            assert 1 <= len(taken) <= count
            held.append((ssd, taken))
        elif held:
            slots.give_back(*held.pop(data.draw(st.integers(0, len(held) - 1))))
        used = [(ssd, slot) for ssd, taken in held for slot in taken]
        assert len(set(used)) == len(used) == sum(shares) - slots.num_free
        assert all(0 <= slot < shares[ssd] for ssd, slot in used)
