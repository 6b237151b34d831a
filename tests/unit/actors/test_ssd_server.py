import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.actors.ssd_bench import (
    CHUNK_NBYTES,
    CHUNK_NUMEL,
    GEOMETRY,
    GRADIENT_NBYTES,
    JOB,
    KEYS,
    WAIT_S,
    WORKER,
    Bench,
    commit_of,
)
from windlass.actors.messages import (
    ActorFailed,
    ChunkIo,
    ChunkIoDone,
    ChunkPart,
    FailureKind,
    LoadModel,
    MemoryKind,
    Message,
    ReadChunks,
    SpanKind,
    SpansTold,
    StoreCommitted,
)
from windlass.storage.ids import (
    ActorName,
    Attempt,
    CorrelationId,
    JobId,
    Span,
    StateKind,
    Step,
)
from windlass.storage.regions import StateRegion
from windlass.storage.store_errors import StaleAttempt, StoreError
from windlass.storage.transfers import Backend, IoSettings, uring_refusal
from windlass.storage.volume import VOLUME_FILE, Volume

# What tells that the SSD hangs, and what ends it.
Hang = Callable[..., tuple[threading.Event, threading.Event]]


def holds_states(directory: Path) -> bool:
    volume = Volume.open(directory, direct=False)
    try:
        return JOB in volume.allocations()
    finally:
        volume.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    bench.setup()
    yield bench
    bench.server.stop()


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Hang:
    """Make the SSD hang in so many calls of a function of `os`."""

    def replace_call(name: str, num_calls: int = 1000) -> tuple[threading.Event, threading.Event]:
        entered, released = threading.Event(), threading.Event()
        real, calls = getattr(os, name), iter(range(num_calls))

        def call(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if next(calls, None) is not None:
                entered.set()
                assert released.wait(WAIT_S)
            moved: int = real(fd, buffers, offset)
            return moved

        monkeypatch.setattr(os, name, call)
        return entered, released

    return replace_call


def _fail(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    raise OSError(errno.EIO, "Input/output error")


def _failure(answer: tuple[ActorName, Message]) -> ActorFailed:
    to, message = answer
    assert to == "scheduler"
    assert isinstance(message, ActorFailed)
    assert message.actor == "ssd-0"
    return message


class TestTransfers:
    def test_chunks_come_back_bit_exact_and_are_answered_one_by_one(self, bench: Bench) -> None:
        content = bench.fill(1)
        bench.write(KEYS, id=7)
        answers = [bench.next() for _ in KEYS]
        assert {to for to, _ in answers} == {WORKER}
        done = [message for _, message in answers if isinstance(message, ChunkIoDone)]
        assert {message.key for message in done} == set(KEYS)
        assert {(message.correlation, message.step, message.job) for message in done} == {(7, 0, JOB)}
        bench.fill(2)
        bench.read(KEYS, id=8)
        assert {bench.next()[0] for _ in KEYS} == {WORKER}
        assert bench.content() == content
        assert bench.is_silent()
        assert bench.server.bytes_written == bench.server.bytes_read == len(KEYS) * CHUNK_NBYTES

    def test_a_chunks_answer_comes_after_its_last_piece(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pieces: list[int] = []
        real_write = os.pwritev

        def record(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            pieces.append(buffers[0].nbytes)
            return real_write(fd, buffers, offset)

        monkeypatch.setattr(os, "pwritev", record)
        bench = Bench(tmp_path)
        bench.write(KEYS[:1])
        bench.setup()
        bench.next()
        assert pieces == [1 << 20] * (CHUNK_NBYTES >> 20)
        bench.server.stop()

    def test_pieces_of_one_chunk_spread_over_the_threads(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        meeting = threading.Barrier(4)  # passes only if four threads are inside the system call at once
        real_write = os.pwritev
        first = iter(range(4))

        def meet(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if next(first, None) is not None:
                meeting.wait(WAIT_S)
            return real_write(fd, buffers, offset)

        monkeypatch.setattr(os, "pwritev", meet)
        bench = Bench(tmp_path)
        bench.write(KEYS[:1])
        bench.setup()
        assert isinstance(bench.next()[1], ChunkIoDone)
        bench.server.stop()


class TestGradients:
    def test_come_back_bit_exact_and_their_bytes_count(self, bench: Bench) -> None:
        bench.write_all()
        bench.commit(0)
        assert isinstance(bench.next()[1], StoreCommitted)
        content = bench.fill(1)
        bench.write(KEYS, step=1, gradient=True)
        bench.wait_done()
        bench.fill(2)
        bench.read(KEYS, step=1, gradient=True)
        bench.wait_done()
        for i in range(len(KEYS)):
            at = i * CHUNK_NBYTES
            assert bench.content()[at : at + GRADIENT_NBYTES] == content[at : at + GRADIENT_NBYTES]
        assert bench.server.bytes_read == len(KEYS) * GRADIENT_NBYTES
        assert bench.server.bytes_written == len(KEYS) * (CHUNK_NBYTES + GRADIENT_NBYTES)

    def test_make_room_for_the_states_of_their_step(self, bench: Bench) -> None:
        bench.write_all()
        bench.commit(0)
        assert isinstance(bench.next()[1], StoreCommitted)
        bench.write(KEYS, step=1, gradient=True)
        bench.wait_done()
        content = bench.fill(1)
        bench.write_all(step=1)
        bench.read(KEYS[:1], step=1, gradient=True)
        assert "cannot read 1048576 bytes of the grad of block 0, chunk 0 as step 1" in _failure(bench.next()).error
        bench.write(KEYS[:1], step=2, gradient=True)
        assert "cannot write the gradient of block 0, chunk 0, step 2" in _failure(bench.next()).error
        bench.read(KEYS, step=1)
        bench.wait_done()
        assert bench.content() == content
        bench.commit(1)
        assert isinstance(bench.next()[1], StoreCommitted)

    def test_flipped_bit_is_an_error(self, bench: Bench) -> None:
        bench.write(KEYS[:1], gradient=True)
        bench.wait_done(1)
        volume = Volume.open(bench.directory, direct=False)
        at = volume.allocation(JOB).extent_offsets(GEOMETRY.demand)[0] + GRADIENT_NBYTES - 5
        byte = volume.device.read_records(at, 1)[0]
        volume.device.write_records(at, bytes([byte ^ 0x10]))
        volume.close()
        bench.read(KEYS[:1], gradient=True)
        assert "extent 0 (grad of block 0, chunk 0, step 0): the bytes" in _failure(bench.next()).error


class TestOrder:
    def test_smallest_priority_first_then_arrival(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path, num_threads=1)
        bench.write([KEYS[5]], id=1, priority=(2, 0))
        bench.write([KEYS[3], KEYS[2]], id=2, priority=(1, 5))
        bench.write([KEYS[1]], id=3, priority=(1, 0))
        bench.write([KEYS[4]], id=4, priority=(1, 5))
        bench.write([KEYS[0]], id=5, priority=(0, 9))
        bench.setup()
        done = [bench.next()[1] for _ in KEYS]
        order = [(message.correlation, message.key) for message in done if isinstance(message, ChunkIoDone)]
        assert order == [(5, KEYS[0]), (3, KEYS[1]), (2, KEYS[3]), (2, KEYS[2]), (4, KEYS[4]), (1, KEYS[5])]
        bench.server.stop()

    def test_urgent_chunk_overtakes_one_that_is_half_done(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench = Bench(tmp_path, num_threads=1)
        real_write = os.pwritev
        calls = iter(range(1_000_000))

        def interrupt(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if next(calls) == 2:
                bench.write([KEYS[1]], id=2, priority=(0, 0))
            return real_write(fd, buffers, offset)

        monkeypatch.setattr(os, "pwritev", interrupt)
        bench.write([KEYS[0]], id=1, priority=(1, 0))
        bench.setup()
        done = [bench.next()[1] for _ in range(2)]
        assert [message.correlation for message in done if isinstance(message, ChunkIoDone)] == [2, 1]
        bench.server.stop()


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
        # One thread hangs; were the commit runnable, the other would have done it before this read.
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
        """What it has written over is lost for this commit."""
        bench.write_all(step=1)
        entered, released = hang("pwritev", num_calls=1)
        bench.write([KEYS[0]], step=2)
        assert entered.wait(WAIT_S)
        bench.commit(1)
        assert "step 1 cannot be committed: step 2 has been begun" in _failure(bench.next()).error
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
            patch.setattr(os, "pwritev", _fail)
            bench.write(KEYS[:2], step=0)
            bench.commit(0)
            texts = [_failure(bench.next()).error for _ in range(3)]
        assert "a write of step 0 failed; step 0 cannot be committed" in texts[2]
        assert all("could not write" in text for text in texts[:2])
        bench.write_all(step=2)
        bench.commit(2)
        assert "a write of step 0 failed; step 2 cannot be committed" in _failure(bench.next()).error
        assert bench.last_step() is None

    def test_failed_write_of_a_later_step_leaves_the_one_before(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench.write_all()
        bench.commit(0)
        assert isinstance(bench.next()[1], StoreCommitted)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", _fail)
            bench.write(KEYS[:1], step=2, gradient=True)
            _failure(bench.next())
        for step in (1, 2):
            bench.commit(step, states_step=0)
            assert f"step {step} cannot be committed" in _failure(bench.next()).error
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
        bench.read(KEYS[:1], step=2)  # still there while the next one is written
        assert isinstance(bench.next()[1], ChunkIoDone)
        assert bench.content() == content[:CHUNK_NBYTES] + changed[CHUNK_NBYTES:]
        bench.commit(3)
        assert isinstance(bench.next()[1], StoreCommitted)

    def test_step_that_is_not_as_it_was_cannot_be_skipped(self, bench: Bench) -> None:
        bench.commit(1, states_step=0)
        assert "step 1 cannot be committed: the param of chunk 0" in _failure(bench.next()).error
        bench.write_all()
        bench.commit(0)
        assert isinstance(bench.next()[1], StoreCommitted)
        bench.write(KEYS[:1], step=1)
        bench.wait_done(1)
        bench.commit(1, states_step=0)
        assert "chunk 0 of this SSD has the states of step 1, not 0" in _failure(bench.next()).error
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

    def test_older_attempt_is_told(self, bench: Bench) -> None:
        bench.commit(0, attempt=9)
        assert "attempt 9 cannot commit" in _failure(bench.next()).error


class TestFailures:
    def test_one_failure_per_chunk_with_the_facts_and_the_server_lives_on(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench.write_all()
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", _fail)
            bench.read([KEYS[4]], step=0)
            failure = _failure(bench.next())
        for fact in (str(bench.directory), "ftjob-1", "extent ", "block 1, chunk 1", "Input/output error"):
            assert fact in failure.error
        assert "Traceback" in failure.detail
        bench.read([KEYS[1]], id=5)
        answer = bench.next()[1]  # and nothing of the failed chunk before it
        assert isinstance(answer, ChunkIoDone)
        assert answer.correlation == 5
        assert bench.server.bytes_read == CHUNK_NBYTES

    def test_span_outside_the_arena(self, bench: Bench) -> None:
        bench.write_all()
        part = ChunkPart(StateKind.PARAM, Span(bench.arena.nbytes, 2 * CHUNK_NUMEL))
        request = ReadChunks(
            job=JOB,
            step=Step(0),
            correlation=CorrelationId(1),
            reply_to=WORKER,
            priority=(0, 0),
            deadline_s=WAIT_S,
            items=(ChunkIo(KEYS[0], (part,)),),
        )
        bench.server.post(request)
        assert "outside the arena" in _failure(bench.next()).error

    def test_message_of_another_job_or_kind(self, bench: Bench) -> None:
        bench.server.post(LoadModel(job=JOB, step=Step(0)))
        assert "no use for LoadModel" in _failure(bench.next()).error
        bench.server.post(commit_of(0, job=JobId("ftjob-2")))
        assert "of job ftjob-2" in _failure(bench.next()).error
        assert bench.last_step() is None


class TestSpans:
    def test_each_chunk_that_moved_is_told_the_written_ones_before_the_commit(self, tmp_path: Path) -> None:
        begin_s = time.monotonic()
        bench = Bench(tmp_path)
        bench.setup()
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

    def test_without_commits_they_are_told_now_and_then(self, bench: Bench) -> None:
        bench.write_all()
        while not bench.spans:
            to, message = bench.sent.get(timeout=WAIT_S)
            assert to == "scheduler"
            assert isinstance(message, SpansTold)
            bench.spans += message.spans
        assert sorted((span.block, span.chunk) for span in bench.spans) == [(key.block, key.chunk) for key in KEYS]

    def test_a_chunk_that_failed_has_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bench = Bench(tmp_path)
        bench.setup()
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", _fail)
            bench.write(KEYS[:1])
            _failure(bench.next())
        bench.server.stop()
        assert bench.is_silent()
        assert bench.spans == []


class TestLifeCycle:
    def test_stop_finishes_what_was_posted(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path)
        content = bench.fill(1)
        bench.setup()
        bench.write(KEYS)
        bench.commit(0)
        bench.server.stop()
        assert sum(isinstance(bench.next()[1], ChunkIoDone) for _ in KEYS) == len(KEYS)
        assert isinstance(bench.next()[1], StoreCommitted)
        with pytest.raises(RuntimeError, match="stopped"):
            bench.read(KEYS)
        successor = Bench(tmp_path, geometry=replace(GEOMETRY, attempt=Attempt(2)))
        successor.setup()
        assert successor.last_step() == 0
        successor.read(KEYS, step=0)
        for _ in KEYS:
            successor.next()
        assert successor.content() == content
        successor.server.stop(delete_store=True)
        assert not holds_states(tmp_path)

    def test_goes_back_to_what_every_ssd_of_its_job_has(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path)
        bench.setup()
        contents = []
        for step in (0, 1):
            contents.append(bench.fill(step))
            bench.write_all(step)
            bench.commit(step)
            assert isinstance(bench.next()[1], StoreCommitted)
        bench.server.stop()
        bench = Bench(tmp_path, geometry=replace(GEOMETRY, attempt=Attempt(2)))
        bench.server.setup()
        bench.server.resume_from(bench.server.commits()[0])
        bench.read(KEYS, step=1)
        assert {"cannot read" in _failure(bench.next()).error for _ in KEYS} == {True}
        bench.read(KEYS, step=0)
        for _ in KEYS:
            bench.next()
        assert bench.content() == contents[0]
        last = bench.server.commits()[-1]
        assert (last.step, last.attempt) == (0, 2)
        bench.server.stop()

    def test_store_of_another_geometry_is_refused_and_kept(self, tmp_path: Path) -> None:
        first = Bench(tmp_path)
        first.server.setup()
        first.server.stop()
        other = Bench(tmp_path, geometry=replace(GEOMETRY, chunks_per_block=(3, 3, 1)))
        with pytest.raises(StoreError, match=r"chunks_per_block \(3, 3\), now \(3, 3, 1\)"):
            other.server.setup()
        assert holds_states(tmp_path)

    def test_older_attempt_cannot_start(self, tmp_path: Path) -> None:
        for attempt in (1, 3):
            bench = Bench(tmp_path, geometry=replace(GEOMETRY, attempt=Attempt(attempt)))
            bench.setup()
            bench.server.stop()
        with pytest.raises(StaleAttempt):
            Bench(tmp_path, geometry=replace(GEOMETRY, attempt=Attempt(2))).server.setup()


class TestCorruption:
    def test_a_flipped_bit_is_an_error_that_names_ssd_extent_and_job(self, bench: Bench) -> None:
        bench.write_all()
        volume = Volume.open(bench.directory, direct=False)
        at = volume.allocation(JOB).extent_offsets(GEOMETRY.demand)[2] + CHUNK_NBYTES - 5
        byte = volume.device.read_records(at, 1)[0]
        volume.device.write_records(at, bytes([byte ^ 0x10]))
        volume.close()
        bench.read(KEYS)
        answers = [bench.next()[1] for _ in KEYS]
        (failure,) = [each for each in answers if isinstance(each, ActorFailed)]
        for fact in (str(bench.directory), "ftjob-1", "extent 2 (exp_avg_sq of block", "checksum"):
            assert fact in failure.error
        done = {each.key for each in answers if isinstance(each, ChunkIoDone)}
        assert len(done) == len(KEYS) - 1
        (broken,) = {*KEYS} - done
        assert f"block {broken.block}, chunk {broken.chunk}" in failure.error


class TestDeadlines:
    def test_a_hanging_ssd_is_named_and_its_slot_is_never_given_back(self, tmp_path: Path, hang: Hang) -> None:
        bench = Bench(tmp_path, num_threads=2)
        bench.setup()
        bench.write_all()
        entered, released = hang("preadv")
        bench.read([KEYS[1]], deadline_s=0.05)
        assert entered.wait(WAIT_S)
        failure = _failure(bench.next())
        for fact in (str(tmp_path), "ftjob-1", "block 0, chunk 1", "within 0.05 s", "slow or hangs"):
            assert fact in failure.error
        bench.fill(9)
        released.set()
        bench.server.stop()
        assert bench.is_silent()  # it did land, and was not reported: the slot still was the server's

    def test_a_thread_of_it_that_breaks_is_told_of(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        """Else its chunks would be waited for until their deadline, and an SSD be blamed that works."""

        def breaks(region: StateRegion, *_: object) -> None:
            raise RuntimeError("a defect")

        monkeypatch.setattr(StateRegion, "note_written", breaks)
        bench.write(KEYS[:1])
        failure = _failure(bench.next())
        assert failure.kind is FailureKind.UNFORESEEN
        assert failure.error == "RuntimeError: a defect (at write chunks of step 0, block 0)"

    def test_a_stop_that_an_ssd_holds_up_tells_so(self, tmp_path: Path, hang: Hang) -> None:
        bench = Bench(tmp_path)
        bench.setup()
        entered, released = hang("pwritev")
        bench.write(KEYS[:1])
        assert entered.wait(WAIT_S)
        with pytest.raises(TimeoutError) as late:
            bench.server.stop(deadline_s=0.05)
        assert "_run_transfers (at write chunks of step 0, block 0)" in str(late.value)
        assert str(tmp_path) in late.value.__notes__[0]
        released.set()
        bench.server.stop()

    def test_a_full_queue_holds_up_who_asks_and_tells_of_an_ssd_that_hangs(self, tmp_path: Path, hang: Hang) -> None:
        bench = Bench(tmp_path, max_open_chunks=2)
        bench.setup()
        bench.write_all()
        _, released = hang("preadv")
        bench.read(KEYS[:2], id=1)
        bench.read(KEYS[2:3], id=2, deadline_s=0.05)
        assert "left 2 chunks waiting for 0.05 s" in _failure(bench.next()).error
        waiting = threading.Thread(target=bench.read, args=(KEYS[3:4],), kwargs={"id": 3})
        waiting.start()
        released.set()
        waiting.join(WAIT_S)
        done = [bench.next()[1] for _ in range(3)]
        assert sorted(each.correlation for each in done if isinstance(each, ChunkIoDone)) == [1, 1, 3]
        bench.server.stop()


@pytest.mark.parametrize("depth", [1, 3, 16])
def test_io_uring_moves_the_same_bytes(tmp_path: Path, depth: int) -> None:
    if (refusal := uring_refusal()) is not None:
        pytest.skip(refusal)
    bench = Bench(tmp_path, io=IoSettings(backend=Backend.URING, num_threads=2, depth=depth, piece_nbytes=1 << 20))
    bench.setup()
    content = bench.fill(1)
    bench.write_all()
    bench.fill(2)
    bench.read(KEYS)
    assert all(isinstance(bench.next()[1], ChunkIoDone) for _ in KEYS)
    assert bench.content() == content
    bench.commit(0)
    assert isinstance(bench.next()[1], StoreCommitted)
    bench.server.stop()


def test_a_vanished_directory_commits_nothing(bench: Bench) -> None:
    bench.write_all()
    (bench.directory / VOLUME_FILE).unlink()
    bench.commit(0)
    failure = _failure(bench.next()).error
    assert "vanished" in failure
    assert str(bench.directory) in failure
