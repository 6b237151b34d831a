"""The writes that a commit waits for."""

from windlass.storage.ids import Attempt, Step
from windlass.storage.io_scheduler.commit_gate import CommitGate
from windlass.storage.io_scheduler.requests import CommitRequest


def commit_of(step: int) -> CommitRequest:
    return CommitRequest(
        step=Step(step), attempt=Attempt(1), trainer_state="", on_done=lambda _: None, on_failed=lambda _: None
    )


def taken(gate: CommitGate) -> list[int]:
    steps = []
    while (commit := gate.take()) is not None:
        steps.append(int(commit.step))
    return steps


def test_commits_without_open_writes_keep_their_order() -> None:
    gate = CommitGate()
    for step in (1, 0, 2):
        gate.add(commit_of(step))
    assert (gate.num_ready, gate.num_waiting) == (3, 0)
    assert taken(gate) == [1, 0, 2]


def test_commit_waits_for_the_last_write_of_its_step_and_of_earlier_ones() -> None:
    gate = CommitGate()
    for step in (1, 2, 2):
        gate.begin_write(Step(step))
    for step in (0, 1, 2):
        gate.add(commit_of(step))
    assert (taken(gate), gate.num_waiting) == ([0], 2)
    gate.end_write(Step(2))
    assert taken(gate) == []
    gate.end_write(Step(2))
    assert taken(gate) == []  # step 1 is still written
    gate.end_write(Step(1))
    assert (taken(gate), gate.num_waiting) == ([1, 2], 0)


def test_failed_write_is_waited_for_and_its_step_remembered() -> None:
    gate = CommitGate()
    for step in (3, 2, 4):
        gate.begin_write(Step(step))
        gate.fail_write(Step(step))
    assert gate.failed_step == 2
    gate.add(commit_of(2))
    assert gate.num_waiting == 1
    gate.end_write(Step(2))
    assert gate.num_ready == 1


def test_later_steps_wait_until_the_last_commit_is_decided() -> None:
    gate = CommitGate()
    assert not gate.waits_for_decision(Step(0))
    gate.commit_ended(Step(3))
    assert gate.undecided_step == 3
    assert [gate.waits_for_decision(Step(step)) for step in (3, 4, 5)] == [False, True, True]
    gate.decide(Step(2))  # late
    assert gate.waits_for_decision(Step(4))
    for _ in range(2):
        gate.decide(Step(3))
        assert gate.undecided_step is None
        assert not gate.waits_for_decision(Step(4))


def test_commit_of_a_later_step_waits_for_the_decision_whenever_it_was_requested() -> None:
    gate = CommitGate()
    gate.add(commit_of(0))
    gate.add(commit_of(1))
    first = gate.take()
    assert first is not None
    gate.commit_ended(first.step)
    gate.add(commit_of(2))
    assert (taken(gate), gate.num_waiting) == ([], 0)
    gate.decide(Step(0))
    second = gate.take()
    assert second is not None
    gate.commit_ended(second.step)
    assert taken(gate) == []
    assert [int(commit.step) for commit in gate.drain()] == [2]
    gate.decide(Step(1))
    assert taken(gate) == []
