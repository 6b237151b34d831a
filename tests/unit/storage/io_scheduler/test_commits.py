"""The conditions under which an I/O scheduler commits a step."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.storage.io_bench import CHUNK_NBYTES, KEYS, WAIT_S, Hang, IoBench, fail, parts_of, running
from windlass.storage.ids import Step
from windlass.storage.integrity.errors import StaleAttempt, StepNotAllowed
from windlass.storage.io_scheduler.requests import IoResult, IoTerms
from windlass.storage.ssd.volume import VOLUME_FILE


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[IoBench]:
    with running(IoBench(tmp_path)) as bench:
        yield bench


@pytest.mark.parametrize("step", [0, 2])
def test_commit_waits_for_writes_of_its_step_and_of_earlier_ones_while_others_go_on(
    tmp_path: Path, hang: Hang, step: int
) -> None:
    with running(IoBench(tmp_path, num_threads=2)) as bench:
        bench.write_all()
        entered, released = hang("pwritev", num_calls=1)
        bench.write([KEYS[0]], step=0, id=2)
        assert entered.wait(WAIT_S)
        bench.commit(step, states_step=0)
        # One thread hangs. If the commit could run, the other thread would have done it before this read.
        bench.read([KEYS[1]], step=0, id=3)
        assert [end.id for end in bench.wait_done(1)] == [3]
        assert bench.last_step() is None
        released.set()
        written, committed = bench.wait_done(2)
        assert (written.id, committed.of) == (2, step)
        assert committed.result.start_s <= committed.result.end_s
        assert bench.last_step() == step


def test_write_of_a_later_step_is_not_waited_for(bench: IoBench, hang: Hang) -> None:
    """The states that it has overwritten are lost for this commit."""
    bench.write_all(step=1)
    entered, released = hang("pwritev", num_calls=1)
    bench.write([KEYS[0]], step=2)
    assert entered.wait(WAIT_S)
    bench.commit(1)
    assert "step 1 cannot be committed: step 2 has been begun" in str(bench.next().error)
    released.set()
    bench.wait_done(1)


def test_commit_without_open_writes_runs_at_once(bench: IoBench) -> None:
    bench.write_all()
    bench.commit(0)
    bench.wait_done(1)
    assert bench.last_step() == 0


def test_step_with_a_failed_write_and_those_after_it_are_never_committed(
    bench: IoBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        bench.write(KEYS[:2], step=0)
        bench.commit(0)
        texts = [str(bench.next().error) for _ in range(3)]
    assert "a write of step 0 failed; step 0 cannot be committed" in texts[2]
    assert all("could not write" in text for text in texts[:2])
    bench.write_all(step=2)
    bench.commit(2)
    assert "a write of step 0 failed; step 2 cannot be committed" in str(bench.next().error)
    assert bench.last_step() is None


def test_failed_write_of_a_later_step_leaves_the_one_before(bench: IoBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.commit_all()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        bench.write(KEYS[:1], step=2, gradient=True)
        assert "could not write" in str(bench.next().error)
    for step in (1, 2):
        bench.commit(step, states_step=0)
        assert f"step {step} cannot be committed" in str(bench.next().error)
    assert bench.last_step() == 0


def test_failed_writes_of_a_later_and_then_an_earlier_step_are_both_remembered(
    bench: IoBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.commit_all()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        for key, step in ((KEYS[0], 2), (KEYS[1], 1)):
            bench.write([key], step=step, gradient=True)
            assert "could not write" in str(bench.next().error)
    bench.commit(1, states_step=0)
    assert "a write of step 1 failed; step 1 cannot be committed" in str(bench.next().error)


def test_skipped_steps_have_the_states_of_the_one_before(bench: IoBench) -> None:
    content = bench.fill(1)
    bench.write_all()
    bench.commit(0)
    for step in (1, 2):
        bench.commit(step, states_step=step - 1)
    assert [end.of for end in bench.wait_done(3)] == [0, 1, 2]
    assert [record.trainer_state for record in bench.space.store.commits()] == ["[0]", "[1]", "[2]"]
    bench.fill(2)
    bench.read(KEYS, step=2)
    bench.wait_done()
    assert bench.content() == content
    changed = bench.fill(3)
    bench.write_all(step=3)
    bench.read(KEYS[:1], step=2)  # still readable while the next step is written
    bench.wait_done(1)
    assert bench.content() == content[:CHUNK_NBYTES] + changed[CHUNK_NBYTES:]
    bench.commit(3)
    bench.wait_done(1)


def test_skipped_step_with_changed_states_cannot_be_committed(bench: IoBench) -> None:
    bench.commit(1, states_step=0)
    assert "step 1 cannot be committed: the param of chunk 0" in str(bench.next().error)
    bench.commit_all()
    bench.write(KEYS[:1], step=1)
    bench.wait_done(1)
    bench.commit(1, states_step=0)
    assert "chunk 0 of this SSD has the states of step 1, not 0" in str(bench.next().error)
    assert bench.last_step() == 0


def test_steps_between_commits_are_written_over_in_place(bench: IoBench) -> None:
    first = bench.fill(0)
    bench.commit_all()
    for step in (1, 2):
        content = bench.fill(step)
        bench.write_all(step)
        bench.read(KEYS, step=0)
        bench.wait_done()
        assert bench.content() == first
        bench.read(KEYS, step=step)
        bench.wait_done()
        assert bench.content() == content
    bench.commit(3, states_step=2)
    bench.wait_done(1)
    bench.fill(9)
    bench.read(KEYS, step=3)
    bench.wait_done()
    assert bench.content() == content


def test_commit_of_older_attempt_fails(bench: IoBench) -> None:
    bench.commit(0, attempt=9)
    error = bench.next().error
    assert isinstance(error, StaleAttempt)
    assert "attempt 9 cannot commit" in str(error)


def test_a_vanished_directory_commits_nothing(bench: IoBench) -> None:
    bench.write_all()
    (bench.directory / VOLUME_FILE).unlink()
    bench.commit(0)
    error = str(bench.next().error)
    assert "vanished" in error
    assert str(bench.directory) in error


def test_commit_that_waits_for_the_last_write_is_done_although_the_scheduler_is_closing(tmp_path: Path) -> None:
    """The write is reported before the commit starts; in between the scheduler seems to be idle."""
    before = set(threading.enumerate())  # the scheduler of an earlier test may still be ending
    bench = IoBench(tmp_path)
    reporting, asked = threading.Event(), threading.Event()
    reported: list[str] = []
    bench.write(KEYS[:-1])
    bench.wait_done(len(KEYS) - 1)

    def hold_up(result: IoResult) -> None:
        reporting.set()
        assert asked.wait(WAIT_S)
        reported.append("written")

    terms = IoTerms(priority=(0, 0), on_done=hold_up, on_failed=lambda error: reported.append(str(error)))
    bench.io.write(KEYS[-1], Step(0), parts_of(KEYS[-1]), terms)
    assert reporting.wait(WAIT_S)
    bench.commit(0)
    started = set(threading.enumerate()) - before
    (control,) = [thread for thread in started if "IoScheduler._run_commits" in thread.name]
    closing = threading.Thread(target=bench.close)
    closing.start()
    control.join(0.1)  # time enough for it to end wrongly
    asked.set()
    closing.join(WAIT_S)
    assert reported == ["written"]
    assert [end.of for end in bench.wait_done(1)] == [0]


def test_write_of_the_next_step_that_overtakes_the_decision_waits_for_it(bench: IoBench) -> None:
    """The scheduler tells the SSD and the optimizer, whose write may come first. Reads and scratch do not wait."""
    content = bench.fill(1)
    bench.write_all()
    bench.commit(0, is_decided=False)
    bench.wait_done(1)
    bench.write(KEYS, step=1)
    bench.read(KEYS, step=0, id=2)
    assert [end.id for end in bench.wait_done()] == [2] * len(KEYS)
    assert bench.is_silent()
    assert bench.io.describe_open() == (
        f"SSD {bench.directory}, job ftjob-1: the write of block 0, chunk 0, step 1 waits until all SSDs of the job "
        "have committed step 0"
    )
    assert bench.content() == content
    bench.io.decide(Step(0))
    assert [end.id for end in bench.wait_done()] == [1] * len(KEYS)
    bench.commit(1)
    bench.wait_done(1)
    assert bench.last_step() == 1


def test_commit_waits_for_a_write_that_waits_for_a_decision(bench: IoBench) -> None:
    bench.commit_all()
    bench.commit(1, states_step=0, is_decided=False)
    bench.wait_done(1)
    bench.write(KEYS, step=2)
    bench.commit(2)
    assert bench.is_silent()
    bench.io.decide(Step(1))
    assert [end.of for end in bench.wait_done(len(KEYS) + 1)][-1] == 2


def test_decision_on_a_step_that_is_not_committed_is_refused(bench: IoBench) -> None:
    bench.commit_all()
    with pytest.raises(StepNotAllowed, match="step 1 was decided, but step 0 is the last commit here"):
        bench.io.decide(Step(1))
    bench.io.decide(Step(0))


def test_close_fails_what_waits_for_a_decision(tmp_path: Path) -> None:
    bench = IoBench(tmp_path)
    bench.write_all()
    bench.commit(0, is_decided=False)
    bench.wait_done(1)
    bench.write(KEYS[:1], step=1)
    bench.commit(2, states_step=0)
    bench.close()
    texts = [str(bench.next().error) for _ in range(2)]
    assert "closed before the write of block 0, chunk 0, step 1 was allowed" in texts[0]
    assert "closed before the commit of step 2 was allowed" in texts[1]


def test_commit_of_a_skipped_step_waits_for_the_decision_on_the_one_before(bench: IoBench) -> None:
    """The message about the decision may be lost. Then the scheduler's deadline ends the attempt, and not the job."""
    bench.write_all()
    bench.commit(0, is_decided=False)
    bench.commit(1, states_step=0)
    assert [end.of for end in bench.wait_done(1)] == [0]
    assert bench.is_silent()
    bench.io.decide(Step(0))
    assert [end.of for end in bench.wait_done(1)] == [1]
