from typing import Any

import pytest

from tests.support.policy.jobs import GPU, make_shape
from windlass.actors.messages import Phase
from windlass.actors.policy.config import Operation, program
from windlass.storage.ids import BlockIndex, Step


def operation(op: int, step: int, version: int, phase: Phase | None, block: int, group: int = 0) -> Operation:
    return Operation(op=op, step=Step(step), version=Step(version), phase=phase, block=BlockIndex(block), group=group)


def test_the_program_of_a_small_job() -> None:
    shape = make_shape(
        chunks_per_block=(1, 1, 1), total_steps=3, num_evaluation_groups=2, evaluate_every=2, checkpoint_every=2
    )
    first = [o for o in program(shape, 1) if o.step == 1]
    assert first == [
        operation(1, 1, 0, Phase.FORWARD, 0),
        operation(2, 1, 0, Phase.FORWARD, 1),
        operation(3, 1, 0, Phase.HEAD, 2),
        operation(4, 1, 0, Phase.BACKWARD, 1),
        operation(5, 1, 0, Phase.BACKWARD, 0),
    ]
    afterwards = [o for o in program(shape, 1) if o.version == o.step == 2]
    assert afterwards == [
        operation(11, 2, 2, Phase.EVALUATE, 0, group=0),
        operation(12, 2, 2, Phase.EVALUATE, 1, group=0),
        operation(13, 2, 2, Phase.EVALUATE_HEAD, 2, group=0),
        operation(14, 2, 2, Phase.EVALUATE, 0, group=1),
        operation(15, 2, 2, Phase.EVALUATE, 1, group=1),
        operation(16, 2, 2, Phase.EVALUATE_HEAD, 2, group=1),
        operation(17, 2, 2, None, 0),
    ]
    # The last step evaluates and exports regardless of the intervals.
    last = [(o.phase, o.group) for o in program(shape, 3) if o.version == o.step == 3]
    assert last[-2:] == [(Phase.EVALUATE_HEAD, 1), (None, 0)]


def test_each_group_of_micro_batches_goes_through_all_blocks() -> None:
    shape = make_shape(chunks_per_block=(1, 1, 1), total_steps=2, num_groups=2)
    second = [o for o in program(shape, 2) if o.step == 2 and o.phase is not None]
    assert second == [
        operation(1, 2, 1, Phase.FORWARD, 0, group=0),
        operation(2, 2, 1, Phase.FORWARD, 1, group=0),
        operation(3, 2, 1, Phase.HEAD, 2, group=0),
        operation(4, 2, 1, Phase.BACKWARD, 1, group=0),
        operation(5, 2, 1, Phase.BACKWARD, 0, group=0),
        operation(6, 2, 1, Phase.FORWARD, 0, group=1),
        operation(7, 2, 1, Phase.FORWARD, 1, group=1),
        operation(8, 2, 1, Phase.HEAD, 2, group=1),
        operation(9, 2, 1, Phase.BACKWARD, 1, group=1),
        operation(10, 2, 1, Phase.BACKWARD, 0, group=1),
    ]


def test_without_intervals_only_the_end_is_exported_and_evaluated() -> None:
    shape = make_shape(total_steps=3, num_evaluation_groups=1)
    assert {o.step for o in program(shape, 1) if o.phase in (None, Phase.EVALUATE, Phase.EVALUATE_HEAD)} == {3}


@pytest.mark.parametrize(("commit_every", "checkpoint_every"), [(1, 0), (1, 2), (3, 0), (3, 4), (2, 5), (9, 0)])
def test_commit_steps_are_every_so_many_the_checkpoints_and_the_last(commit_every: int, checkpoint_every: int) -> None:
    shape = make_shape(total_steps=11, commit_every=commit_every, checkpoint_every=checkpoint_every)
    intervals = [each for each in (commit_every, checkpoint_every) if each]
    expected = [step for step in range(12) if step == 11 or 0 in [step % each for each in intervals]]
    assert [step for step in range(12) if shape.is_commit_step(step)] == expected
    for step in range(1, 12):
        assert shape.commit_before(step) == max(each for each in expected if each < step)
        assert shape.commit_after(step - 1) == min(each for each in expected if each >= step)
    assert shape.commit_after(-1) == 0


@pytest.mark.parametrize(("num_groups", "expected"), [(0, [0, 4, 7]), (2, [0, 3, 4, 6, 7])])
def test_evaluation_steps_that_decide_are_committed(num_groups: int, expected: list[int]) -> None:
    options: dict[str, Any] = {"evaluate_every": 3, "evaluation_decides": True, "num_evaluation_groups": num_groups}
    shape = make_shape(total_steps=7, commit_every=4, **options)
    assert [step for step in range(8) if shape.is_commit_step(step)] == expected
    assert [shape.commit_after(step - 1) for step in expected] == expected


def test_holders_of_a_block_are_the_actors_that_update_it() -> None:
    shape = make_shape(chunks_per_block=(3, 2, 1), num_optimizers=3, device_blocks=frozenset({1}))
    assert [shape.holders(block) for block in range(3)] == [shape.optimizers, (GPU,), shape.optimizers[:1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"commit_every": 0}, "commit_every is 0"),
        ({"num_groups": 0}, "num_groups is 0"),
        (
            {"host_blocks": {0, 1}, "device_blocks": {1, 2}},
            r"blocks \[1\] must be resident in host memory or on the device",
        ),
        (
            {"num_ssds": 0, "host_blocks": {0, 1, 2}},
            "without SSDs the states of all 4 blocks must be resident in host memory",
        ),
        ({"spilled_blocks": {1}, "commit_every": 2}, r"blocks \[1\] go to the SSDs: .* not every 2"),
        ({"spilled_blocks": {1}, "host_blocks": {0}}, r"blocks \[1\] go to the SSDs: .* as those of \(0,\) are"),
    ],
)
def test_tiers_that_exclude_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_shape(**options)
