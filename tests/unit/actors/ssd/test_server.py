"""The messages of an SSD server: the requests that it accepts, its answers, and its reports."""

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.actors.ssd_bench import WORKER, Bench, commit_of, failure_of, running
from tests.support.storage.io_bench import CHUNK_NBYTES, GEOMETRY, GRADIENT_NBYTES, JOB, KEYS, WAIT_S, fail
from windlass.actors.messages import (
    ActivationIoDone,
    ChunkIoDone,
    DescribeStatus,
    FailureKind,
    LoadModel,
    MemoryKind,
    ReadActivations,
    SpanKind,
    SpansReported,
    StatusDescribed,
    StoreCommitted,
    WriteActivations,
)
from windlass.storage.ids import ActorName, Attempt, JobId, Span, Step
from windlass.storage.integrity.errors import StoreCorrupt, StoreIoError
from windlass.storage.memory.arena import Arena
from windlass.storage.ssd.volume import Volume
from windlass.storage.store.regions import StateRegion

MIB = 1 << 20


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with running(Bench(tmp_path, num_scratch_slots=6)) as bench:
        yield bench


def num_open_files(directory: Path) -> int:
    """The number of this process's open files in a directory."""
    links = list(Path("/proc/self/fd").iterdir())  # the descriptor used for listing is closed by then
    return sum(str(directory) in str(link.readlink()) for link in links if link.is_symlink())


class TestAnswers:
    def test_each_chunk_of_a_request_is_answered(self, bench: Bench) -> None:
        content = os.urandom(MIB) * (bench.arena.nbytes // MIB)
        memory = bench.arena.buffer(Span(0, bench.arena.nbytes))
        memory[:] = content
        for ask, id in ((bench.write, 7), (bench.read, 8)):
            ask(KEYS, id=id)
            answers = [bench.next() for _ in KEYS]
            assert {to for to, _ in answers} == {WORKER}
            done = [message for _, message in answers if isinstance(message, ChunkIoDone)]
            assert {message.key for message in done} == set(KEYS)
            assert {(message.correlation, message.step, message.job) for message in done} == {(id, 0, JOB)}
            if ask == bench.write:
                memory[:] = bytes(bench.arena.nbytes)
        assert memory == content
        assert bench.is_silent()
        assert bench.server.bytes_written == bench.server.bytes_read == len(KEYS) * CHUNK_NBYTES

    def test_activations_are_answered(self, bench: Bench) -> None:
        here, there = Span(0, 2 * MIB + 4096), Span(8 * MIB, 2 * MIB + 4096)
        content = os.urandom(here.nbytes)
        bench.arena.buffer(here)[:] = content
        bench.move_activations(WriteActivations, [4, 0, 2], here, id=7)
        done = ActivationIoDone(job=JOB, step=Step(3), correlation=7)
        assert bench.next() == (WORKER, done)
        bench.move_activations(ReadActivations, [4, 0, 2], there, id=8)
        assert bench.next() == (WORKER, replace(done, correlation=8))
        assert bench.arena.buffer(there) == content

    def test_commits_are_answered_with_the_bytes_so_far(self, bench: Bench) -> None:
        bench.write_all()
        for step in (0, 1):
            bench.commit(step, states_step=0)
            assert bench.next() == (
                "scheduler",
                StoreCommitted(
                    job=JOB,
                    step=Step(step),
                    actor=ActorName("ssd-0"),
                    bytes_read=0,
                    bytes_written=len(KEYS) * CHUNK_NBYTES,
                ),
            )
        assert [record.trainer_state for record in bench.opened.journal().records] == ["[0]", "[1]"]

    def test_first_commit_comes_with_the_space_of_the_job(self, bench: Bench) -> None:
        bench.write_all()
        for step in (0, 1):
            bench.commit(step, states_step=0)
            assert isinstance(bench.next()[1], StoreCommitted)
        (told,) = bench.space
        assert (told.actor, told.kind) == ("ssd-0", MemoryKind.SSD)
        with closing(Volume.open(bench.directory, direct=False)) as volume:
            assert told.nbytes == volume.held_nbytes(JOB) > 0

    def test_commit_with_unknown_free_space_succeeds(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail_to_tell(volume: Volume, job: JobId) -> int:
            raise StoreIoError("the SSD fails")

        monkeypatch.setattr(Volume, "held_nbytes", fail_to_tell)
        bench.write_all()
        for step in (0, 1):
            bench.commit(step, states_step=0)
            assert isinstance(bench.next()[1], StoreCommitted)
        assert bench.space == []


class TestFailures:
    def test_failed_chunk_is_reported_with_its_request(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        bench.write_all()
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fail)
            bench.read([KEYS[4]])
            failure = failure_of(bench.next())
        assert failure.error.startswith(f"StoreIoError: SSD {bench.directory}, job ftjob-1, extent ")
        assert "block 1, chunk 1" in failure.error
        assert failure.error.endswith("(at read chunks of step 0, block 1)")
        assert (failure.kind, failure.step) == (FailureKind.LASTING, 0)
        assert "Traceback" in failure.detail

    def test_failed_activations_and_commits_are_reported_with_their_request(self, bench: Bench) -> None:
        bench.move_activations(ReadActivations, [1], Span(0, MIB), block=4)
        failure = failure_of(bench.next())
        assert failure.error.startswith("StepNotAllowed: ")
        assert failure.error.endswith("(at read activations of step 3, block 4)")
        bench.commit(2, attempt=9)
        failure = failure_of(bench.next())
        assert failure.error.startswith("StaleAttempt: ")
        assert failure.error.endswith("(at commit store of step 2)")
        assert failure.step == 2

    def test_status_of_hanging_ssd_names_its_oldest_chunk(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        bench.write_all()
        entered, released = threading.Event(), threading.Event()

        def hang(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            entered.set()
            assert released.wait(WAIT_S)
            return fail(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", hang)
        bench.read(KEYS[1:2])
        assert entered.wait(WAIT_S)
        bench.server.post(DescribeStatus(job=JOB, step=Step(0)))
        to, status = bench.next()
        released.set()
        assert to == "scheduler"
        assert isinstance(status, StatusDescribed)
        text = (
            r"(.* is busy; )?SSD .*, job ftjob-1: the read of block 0, chunk 1, step 0 is not done after \d\.\d s, as "
            r"the first of 1 transfers: check the disk"
        )
        assert re.fullmatch(text, status.text)
        failure_of(bench.next())

    def test_broken_thread_is_reported_with_its_request(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        def breaks(region: StateRegion, *_: object) -> None:
            raise RuntimeError("a defect")

        monkeypatch.setattr(StateRegion, "note_written", breaks)
        bench.write(KEYS[:1])
        failure = failure_of(bench.next())
        assert failure.kind is FailureKind.UNFORESEEN
        assert failure.error == "RuntimeError: a defect (at write chunks of step 0, block 0)"

    def test_message_of_another_job_or_kind_is_refused(self, bench: Bench) -> None:
        with pytest.raises(ValueError, match="ssd-0 of job ftjob-1 does not accept LoadModel of job ftjob-1"):
            bench.server.post(LoadModel(job=JOB, step=Step(0)))
        with pytest.raises(ValueError, match="does not accept CommitStore of job ftjob-2"):
            bench.server.post(commit_of(0, job=JobId("ftjob-2")))
        assert bench.opened.journal().records == ()


class TestSpans:
    def test_each_chunk_that_moved_is_reported_the_written_ones_before_the_commit(self, tmp_path: Path) -> None:
        begin_s = time.monotonic()
        bench = Bench(tmp_path)
        bench.start()
        bench.write_all(step=0)
        bench.commit(0)
        assert isinstance(bench.next()[1], StoreCommitted)
        expected = [(SpanKind.WRITE_STATES, 0, key.block, key.chunk, CHUNK_NBYTES) for key in KEYS]
        expected.append((SpanKind.COMMIT, 0, -1, -1, 0))
        assert len(bench.spans) == len(expected)
        bench.write(KEYS[:2], step=1, gradient=True)
        bench.read(KEYS[1:], step=0, id=2)
        bench.wait_done(2 + len(KEYS) - 1)
        bench.server.stop()
        assert bench.is_silent()
        expected += [(SpanKind.WRITE_GRAD, 1, key.block, key.chunk, GRADIENT_NBYTES) for key in KEYS[:2]]
        expected += [(SpanKind.READ_STATES, 0, key.block, key.chunk, CHUNK_NBYTES) for key in KEYS[1:]]
        found = [(span.kind, span.step, span.block, span.chunk, span.nbytes) for span in bench.spans]
        assert sorted(found) == sorted(expected)
        assert {span.resource for span in bench.spans} == {"ssd-0"}
        assert all(begin_s <= span.start_s < span.end_s <= time.monotonic() for span in bench.spans)
        moved = sum(span.nbytes for span in bench.spans)
        assert moved == bench.server.bytes_read + bench.server.bytes_written

    def test_spans_without_commits_are_reported_at_intervals(self, bench: Bench) -> None:
        bench.write_all()
        while not bench.spans:
            to, message = bench.sent.get(timeout=WAIT_S)
            assert to == "scheduler"
            assert isinstance(message, SpansReported)
            bench.spans += message.spans
        assert sorted((span.block, span.chunk) for span in bench.spans) == [(key.block, key.chunk) for key in KEYS]

    def test_activations_are_reported(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path, num_scratch_slots=6)
        bench.start()
        for kind in (WriteActivations, ReadActivations):
            bench.move_activations(kind, [3, 4], Span(0, MIB + 4096), block=2)
            bench.wait_done(1)
        bench.server.stop()
        assert bench.is_silent()
        found = [(each.resource, each.kind, each.step, each.block, each.chunk, each.nbytes) for each in bench.spans]
        assert found == [
            ("ssd-0", SpanKind.WRITE_ACTIVATIONS, 3, 2, -1, MIB + 4096),
            ("ssd-0", SpanKind.READ_ACTIVATIONS, 3, 2, -1, MIB + 4096),
        ]

    def test_a_chunk_that_failed_has_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bench = Bench(tmp_path)
        bench.start()
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", fail)
            bench.write(KEYS[:1])
            failure_of(bench.next())
        bench.server.stop()
        assert bench.is_silent()
        assert bench.spans == []


class TestLifeCycle:
    def test_stop_finishes_what_was_posted(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path)
        bench.start()
        bench.write(KEYS)
        bench.commit(0)
        bench.server.stop()
        bench.wait_done()
        assert isinstance(bench.next()[1], StoreCommitted)
        with pytest.raises(RuntimeError, match="ssd-0 of job ftjob-1 is stopped and takes no messages"):
            bench.read(KEYS)

    def test_server_resumes_from_the_given_commit(self, tmp_path: Path) -> None:
        with running(Bench(tmp_path)) as bench:
            for step in (0, 1):
                bench.write_all(step)
                bench.commit(step)
                assert isinstance(bench.next()[1], StoreCommitted)
        bench = Bench(tmp_path, geometry=replace(GEOMETRY, attempt=Attempt(2)))
        bench.start(lambda commits: commits[0])
        bench.read(KEYS[:1], step=1)
        assert "cannot read" in failure_of(bench.next()).error
        bench.read(KEYS, step=0)
        bench.wait_done()
        last = bench.opened.journal().records[-1]
        assert (last.step, last.attempt) == (0, 2)
        bench.server.stop(delete_store=True)
        with closing(Volume.open(tmp_path, direct=False)) as volume:
            assert JOB not in volume.allocations()

    def test_start_without_an_arena_closes_the_ssd(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path)
        Arena.unlink(bench.arena)
        before = num_open_files(tmp_path)
        with pytest.raises(FileNotFoundError):
            bench.start()
        assert num_open_files(tmp_path) == before

    def test_start_from_a_commit_that_the_ssd_lacks_closes_it(self, tmp_path: Path) -> None:
        with running(Bench(tmp_path)) as bench:
            bench.write_all(0)
            bench.commit(0)
            assert isinstance(bench.next()[1], StoreCommitted)
        bench, before = Bench(tmp_path), num_open_files(tmp_path)
        with pytest.raises(StoreCorrupt):
            bench.start(lambda commits: replace(commits[-1], step=Step(7)))
        assert num_open_files(tmp_path) == before

    def test_space_that_no_server_serves_can_be_closed(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path)
        before = num_open_files(tmp_path)
        bench.open_space().close()
        assert num_open_files(tmp_path) == before
