"""The conditions under which an SSD server commits a step."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.actors.ssd_bench import (
    CHUNK_NBYTES,
    JOB,
    KEYS,
    WAIT_S,
    Bench,
    Hang,
    fail,
    failure_of,
    running,
)
from windlass.actors.messages import (
    ChunkIoDone,
    MemoryKind,
    StoreCommitted,
)
from windlass.storage.ids import (
    ActorName,
    Step,
)
from windlass.storage.ssd.volume import VOLUME_FILE, Volume


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with running(Bench(tmp_path)) as bench:
        yield bench


class TestCommit:
    @pytest.mark.parametrize("step", [0, 2])
    def test_waits_for_the_writes_of_its_step_and_of_earlier_ones_while_others_go_on(
        self, tmp_path: Path, hang: Hang, step: int
    ) -> None:
        bench = Bench(tmp_path, num_threads=2)
        bench.setup()
        bench.write_all()
        entered, released = hang("pwritev", num_calls=1)
        bench.write([KEYS[0]], step=0, id=2)
        assert entered.wait(WAIT_S)
        bench.commit(step, states_step=0)
        # One thread hangs. If the commit could run, the other thread would have done it before this read.
        bench.read([KEYS[1]], step=0, id=3)
        answer = bench.next()[1]
        assert isinstance(answer, ChunkIoDone)
        assert answer.correlation == 3
        assert bench.last_step() is None
        released.set()
        answer = bench.next()[1]
        assert isinstance(answer, ChunkIoDone)
        assert answer.correlation == 2
        to, committed = bench.next()
        assert to == "scheduler"
        assert committed == StoreCommitted(
            job=JOB,
            step=Step(step),
            actor=ActorName("ssd-0"),
            bytes_read=CHUNK_NBYTES,
            bytes_written=(len(KEYS) + 1) * CHUNK_NBYTES,
        )
        assert bench.last_step() == step
        bench.server.stop()

    def test_write_of_a_later_step_is_not_waited_for(self, bench: Bench, hang: Hang) -> None:
        """The states that it has overwritten are lost for this commit."""
        bench.write_all(step=1)
        entered, released = hang("pwritev", num_calls=1)
        bench.write([KEYS[0]], step=2)
        assert entered.wait(WAIT_S)
        bench.commit(1)
        assert "step 1 cannot be committed: step 2 has been begun" in failure_of(bench.next()).error
        released.set()
        bench.wait_done(1)

    def test_the_first_one_comes_with_the_space_that_the_job_has(self, bench: Bench) -> None:
        bench.write_all()
        for step in (0, 1):
            bench.commit(step, states_step=0)
            assert isinstance(bench.next()[1], StoreCommitted)
        (told,) = bench.space
        assert (told.actor, told.kind) == ("ssd-0", MemoryKind.SSD)
        with closing(Volume.open(bench.directory, direct=False)) as volume:
            assert told.nbytes == volume.held_nbytes(JOB) > 0

    def test_without_open_writes_it_runs_at_once(self, bench: Bench) -> None:
        bench.write_all()
        bench.commit(0)
        assert isinstance(bench.next()[1], StoreCommitted)

    def test_step_with_a_failed_write_and_those_after_it_are_never_committed(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", fail)
            bench.write(KEYS[:2], step=0)
            bench.commit(0)
            texts = [failure_of(bench.next()).error for _ in range(3)]
        assert "a write of step 0 failed; step 0 cannot be committed" in texts[2]
        assert all("could not write" in text for text in texts[:2])
        bench.write_all(step=2)
        bench.commit(2)
        assert "a write of step 0 failed; step 2 cannot be committed" in failure_of(bench.next()).error
        assert bench.last_step() is None

    def test_failed_write_of_a_later_step_leaves_the_one_before(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench.write_all()
        bench.commit(0)
        assert isinstance(bench.next()[1], StoreCommitted)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", fail)
            bench.write(KEYS[:1], step=2, gradient=True)
            failure_of(bench.next())
        for step in (1, 2):
            bench.commit(step, states_step=0)
            assert f"step {step} cannot be committed" in failure_of(bench.next()).error
        assert bench.last_step() == 0

    def test_skipped_steps_have_the_states_of_the_one_before(self, bench: Bench) -> None:
        content = bench.fill(1)
        bench.write_all()
        bench.commit(0)
        for step in (1, 2):
            bench.commit(step, states_step=step - 1)
        committed = [bench.next()[1] for _ in range(3)]
        assert committed == [
            StoreCommitted(
                job=JOB,
                step=Step(step),
                actor=ActorName("ssd-0"),
                bytes_read=0,
                bytes_written=len(KEYS) * CHUNK_NBYTES,
            )
            for step in range(3)
        ]
        assert [each.trainer_state for each in bench.server.commits()] == ["[0]", "[1]", "[2]"]
        bench.fill(2)
        bench.read(KEYS, step=2)
        bench.wait_done()
        assert bench.content() == content
        changed = bench.fill(3)
        bench.write_all(step=3)
        bench.read(KEYS[:1], step=2)  # still readable while the next step is written
        assert isinstance(bench.next()[1], ChunkIoDone)
        assert bench.content() == content[:CHUNK_NBYTES] + changed[CHUNK_NBYTES:]
        bench.commit(3)
        assert isinstance(bench.next()[1], StoreCommitted)

    def test_skipped_step_with_changed_states_cannot_be_committed(self, bench: Bench) -> None:
        bench.commit(1, states_step=0)
        assert "step 1 cannot be committed: the param of chunk 0" in failure_of(bench.next()).error
        bench.write_all()
        bench.commit(0)
        assert isinstance(bench.next()[1], StoreCommitted)
        bench.write(KEYS[:1], step=1)
        bench.wait_done(1)
        bench.commit(1, states_step=0)
        assert "chunk 0 of this SSD has the states of step 1, not 0" in failure_of(bench.next()).error
        assert bench.last_step() == 0

    def test_steps_between_commits_are_written_over_in_place(self, bench: Bench) -> None:
        first = bench.fill(0)
        bench.write_all()
        bench.commit(0)
        assert isinstance(bench.next()[1], StoreCommitted)
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
        assert isinstance(bench.next()[1], StoreCommitted)
        bench.fill(9)
        bench.read(KEYS, step=3)
        bench.wait_done()
        assert bench.content() == content

    def test_commit_of_older_attempt_fails(self, bench: Bench) -> None:
        bench.commit(0, attempt=9)
        assert "attempt 9 cannot commit" in failure_of(bench.next()).error


def test_a_vanished_directory_commits_nothing(bench: Bench) -> None:
    bench.write_all()
    (bench.directory / VOLUME_FILE).unlink()
    bench.commit(0)
    failure = failure_of(bench.next()).error
    assert "vanished" in failure
    assert str(bench.directory) in failure
