"""Sums of gradients begin, pass to the next group and are completed; one operation's sums return at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.policy.jobs import JOB
from windlass.actors.messages import ComputeBlock, Phase, StoredParams
from windlass.actors.worker_policy.grad_sums import GradSums, ReturningSums, SumSource, Use, leaving_sums
from windlass.storage.ids import BlockIndex, Step

# Three blocks. The head also uses the params of the first one.
HEAD = 2
SHARED = ((BlockIndex(0),), (BlockIndex(1),), (BlockIndex(HEAD), BlockIndex(0)))


def operation(block: int, group: int = 0, phase: Phase | None = None) -> ComputeBlock:
    return ComputeBlock(
        job=JOB,
        step=Step(1),
        op=10 * group + HEAD - block,
        phase=phase or (Phase.HEAD if block == HEAD else Phase.BACKWARD),
        block=BlockIndex(block),
        params=tuple(StoredParams(needed, Step(0)) for needed in SHARED[block]),
        group=group,
        loss_scale=1.0,
    )


def use(user: int, block: int) -> Use:
    return BlockIndex(user), BlockIndex(block)


def sources(sums: GradSums, block: int, group: int) -> list[SumSource]:
    return [sums.begin(operation(block, group), used) for used in SHARED[block]]


def test_sums_of_a_first_group_have_new_buffers_and_later_ones_come_from_the_host() -> None:
    sums = GradSums(SHARED, ())
    assert sources(sums, HEAD, 0) == [SumSource.NEW_BUFFER] * 2
    assert sums.pass_on(operation(HEAD)) == [use(HEAD, HEAD), use(HEAD, 0)]
    assert sources(sums, HEAD, 1) == [SumSource.HOST] * 2


def test_sums_of_device_blocks_stay_there() -> None:
    sums = GradSums(SHARED, (0,))
    assert sources(sums, HEAD, 0) == [SumSource.NEW_BUFFER] * 2
    assert sums.pass_on(operation(HEAD)) == [use(HEAD, HEAD)]
    assert sources(sums, HEAD, 1) == [SumSource.HOST, SumSource.DEVICE]
    assert sums.complete(BlockIndex(HEAD)) == [use(HEAD, HEAD)]
    assert sums.begin(operation(HEAD, 1), BlockIndex(0)) is SumSource.DEVICE


def test_sum_for_a_block_of_another_box_stays_until_it_is_handed_over() -> None:
    of_box = ((), (BlockIndex(1),), SHARED[HEAD])
    sums = GradSums(of_box, (0,))
    for group, source in enumerate((SumSource.NEW_BUFFER, SumSource.DEVICE)):
        assert sums.begin(operation(HEAD, group), BlockIndex(0)) is source
    assert sums.complete_for_others(BlockIndex(1), (0,)) == []
    assert sums.complete_for_others(BlockIndex(HEAD), (0,)) == [use(HEAD, 0)]
    assert sums.begin(operation(HEAD), BlockIndex(0)) is SumSource.NEW_BUFFER  # in the next step


def test_a_gradient_is_complete_with_the_sums_of_all_its_users() -> None:
    sums = GradSums(SHARED, (0,))
    for block in (HEAD, 1, 0):
        sources(sums, block, 0)
    assert sums.complete(BlockIndex(1)) == [use(1, 1)]
    assert sums.complete(BlockIndex(0)) == [use(HEAD, 0), use(0, 0)]
    assert sources(sums, 0, 0) == [SumSource.NEW_BUFFER]  # in the next step


def test_a_permit_is_needed_for_a_blocks_own_sum_that_leaves() -> None:
    sums = GradSums(SHARED, (1,))
    needed = {pair for pair in (use(0, 0), use(1, 1), use(HEAD, HEAD), use(HEAD, 0)) if sums.needs_permit(pair)}
    assert needed == {use(0, 0), use(HEAD, HEAD)}


def test_sums_return_once_all_of_an_operation_have_left() -> None:
    returning = ReturningSums(())
    returning.expect(operation(HEAD, 1))
    returning.left(use(HEAD, HEAD))
    assert not returning.is_due
    returning.left(use(HEAD, 0))
    assert returning.is_due
    assert returning.begin() == (operation(HEAD, 1), [use(HEAD, HEAD), use(HEAD, 0)])


def test_sums_that_take_a_way_of_their_own_do_not_return_ahead() -> None:
    """The head's own sum does, and the one that it leaves for the embedding does not."""
    tied = ReturningSums((), own_ways=(0,), tied_in_pieces=(0,))
    assert [tied.takes_own_way(use) for use in ((HEAD, 0), (0, 0), (HEAD, HEAD))] == [True, True, False]
    returning = ReturningSums((), own_ways=(HEAD, 0))
    assert [returning.takes_own_way(each) for each in (use(HEAD, HEAD), use(HEAD, 0), use(1, 1))] == [
        True,
        False,
        False,
    ]
    for block in (HEAD, 1, 0):
        returning.expect(operation(block, 1))
    for each in (use(HEAD, 0), use(1, 1)):
        returning.left(each)
        assert returning.begin()[1] == [each]
        returning.take(each)
    assert not returning.is_due


def test_sums_of_the_next_operation_return_when_those_before_are_taken() -> None:
    returning = ReturningSums(())
    for block in (HEAD, 1):
        returning.expect(operation(block, 1))
    for pair in (use(1, 1), use(HEAD, 0), use(HEAD, HEAD)):
        returning.left(pair)
    _, (first, second) = returning.begin()
    returning.take(second)
    assert not returning.is_due
    returning.take(first)
    assert returning.is_due
    assert returning.begin() == (operation(1, 1), [use(1, 1)])


@pytest.mark.parametrize(
    "unneeded", [operation(1, 0), operation(1, 1, Phase.FORWARD), operation(0, 1)], ids=["first", "forward", "resident"]
)
def test_operations_that_need_no_sum_from_the_host_are_not_expected(unneeded: ComputeBlock) -> None:
    returning = ReturningSums((0,))
    returning.expect(unneeded)
    assert not returning.is_due
    returning.expect(operation(1, 1))
    returning.left(use(1, 1))
    assert returning.begin()[0] == operation(1, 1)


@given(st.sets(st.integers(0, HEAD)), st.integers(1, 4), st.data())
def test_each_group_continues_the_sums_of_the_group_before(
    device_blocks: set[int], num_groups: int, data: st.DataObject
) -> None:
    """Whenever the sums have left, and whenever they come back."""
    sums, returning, there, back = GradSums(SHARED, device_blocks), ReturningSums(device_blocks), set[Use](), set[Use]()
    leaving: list[Use] = []

    def advance() -> bool:
        """Does one transfer, and returns whether there was one."""
        events = [*(["leave"] if leaving else []), *(["return"] if returning.is_due else [])]
        if not events:
            return False
        if data.draw(st.sampled_from(events)) == "leave":
            there.add(leaving[0])
            returning.left(leaving.pop(0))
        else:
            _, uses = returning.begin()
            assert there.issuperset(uses)
            there.difference_update(uses)
            back.update(uses)
        return True

    order = [operation(block, group) for group in range(num_groups) for block in (HEAD, 1, 0)]
    for each in order:
        returning.expect(each)
    for each in order:
        for _ in range(data.draw(st.integers(0, 2))):
            advance()
        for block in each.blocks:
            pair, source = (each.block, block), sums.begin(each, block)
            assert source is not SumSource.DEVICE or block in device_blocks
            assert (source is SumSource.NEW_BUFFER) == (each.group == 0)
            while source is SumSource.HOST and pair not in back:
                assert advance(), "a sum that is needed is on its way"
            if source is SumSource.HOST:
                back.remove(pair)
                returning.take(pair)
        if each.group < num_groups - 1:
            leaving += sums.pass_on(each)
        else:
            assert sums.complete(each.block)[-1] == (each.block, each.block)
    assert not there
    assert not back
    assert leaving_sums(order[0], device_blocks) == [
        pair for pair in (use(HEAD, HEAD), use(HEAD, 0)) if pair[1] not in device_blocks
    ]
