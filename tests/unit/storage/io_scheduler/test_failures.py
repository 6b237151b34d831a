"""The behaviour of an I/O scheduler when transfers fail, hang or come too late, and its end."""

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.storage.io_bench import (
    ARENA_NBYTES,
    CHUNK_NBYTES,
    CHUNK_NUMEL,
    GEOMETRY,
    KEYS,
    WAIT_S,
    Hang,
    IoBench,
    fail,
    parts_of,
    running,
    threads,
)
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import Attempt, Span, StateKind, Step
from windlass.storage.integrity.errors import StoreIoError
from windlass.storage.io.engines import TransferEngine, open_engine
from windlass.storage.io_scheduler import scheduler
from windlass.storage.io_scheduler.requests import IoResult, IoTerms
from windlass.storage.io_scheduler.scheduler import IoScheduler
from windlass.storage.memory.arena import Arena
from windlass.storage.store.job_space import JobSpace
from windlass.storage.store.regions import StateRegion


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[IoBench]:
    with running(IoBench(tmp_path)) as bench:
        yield bench


class TestFailedTransfers:
    def test_one_failure_per_chunk_with_the_facts_and_the_scheduler_lives_on(
        self, bench: IoBench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench.write_all()
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fail)
            bench.read([KEYS[4]])
            error = bench.next().error
        assert isinstance(error, StoreIoError)
        for fact in (str(bench.directory), "ftjob-1", "extent ", "block 1, chunk 1", "Input/output error"):
            assert fact in str(error)
        bench.read([KEYS[1]], id=5)
        assert bench.wait_done(1)[0].id == 5  # and nothing of the failed chunk comes before it
        assert bench.io.bytes_read == CHUNK_NBYTES

    def test_chunk_whose_first_piece_failed_moves_no_more_pieces(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After the report of the failure, the caller may reuse the memory."""
        num_calls = 0

        def fail_once(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            nonlocal num_calls
            num_calls += 1
            return fail(fd, buffers, offset)

        with running(IoBench(tmp_path, num_threads=1)) as bench:
            bench.write_all()
            with monkeypatch.context() as patch:
                patch.setattr(os, "preadv", fail_once)
                bench.read(KEYS[:1])
                assert bench.next().error
                bench.write(KEYS[1:2], step=1)  # comes after the rest of the read
                bench.wait_done(1)
        assert num_calls == 1

    @pytest.mark.parametrize("num_bytes_inside", [0, 4096])
    def test_span_outside_the_arena_is_refused_and_the_scheduler_lives_on(
        self, tmp_path: Path, num_bytes_inside: int
    ) -> None:
        with running(IoBench(tmp_path, num_threads=1)) as bench:
            bench.write_all()
            span = Span(ARENA_NBYTES - num_bytes_inside, 2 * CHUNK_NUMEL)
            bench.io.read(KEYS[0], Step(0), [(StateKind.PARAM, span)], bench.terms(1, KEYS[0]))
            assert "reaches outside the arena" in str(bench.next().error)
            bench.read(KEYS)
            bench.wait_done()


class TestTimeouts:
    def test_hanging_ssd_is_described_by_its_oldest_transfer(self, tmp_path: Path, hang: Hang) -> None:
        bench = IoBench(tmp_path, num_threads=2)
        assert bench.io.describe_open() == ""
        bench.write_all()
        entered, released = hang("preadv")
        bench.read([KEYS[1], KEYS[2]])
        assert entered.wait(WAIT_S)
        text = bench.io.describe_open()
        for fact in (
            str(tmp_path),
            "ftjob-1",
            "the read of block 0, chunk 1, step 0",
            "is not done after",
            "of 2 transfers: check the disk",
        ):
            assert fact in text
        assert bench.is_silent()
        released.set()
        bench.wait_done(2)
        assert bench.io.describe_open() == ""
        bench.close()

    def test_failure_noticed_after_the_report_of_success_is_not_reported(self, bench: IoBench) -> None:
        bench.write(KEYS[:1])
        bench.wait_done(1)
        job = scheduler.ChunkJob(
            is_read=True, terms=bench.terms(2, KEYS[0]), key=KEYS[0], step=Step(0), parts=parts_of(KEYS[0])
        )
        bench.io._fail(job, TimeoutError("late"))  # it is no longer open
        assert bench.is_silent()

    def test_full_queue_blocks_the_caller_until_there_is_room(self, tmp_path: Path, hang: Hang) -> None:
        bench = IoBench(tmp_path, max_open=2)
        bench.write_all()
        _, released = hang("preadv")
        bench.read(KEYS[:2], id=1)
        waiting = threading.Thread(target=bench.read, args=(KEYS[3:4],), kwargs={"id": 3})
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        released.set()
        waiting.join(WAIT_S)
        assert sorted(end.id for end in bench.wait_done(3)) == [1, 1, 3]
        bench.close()

    def test_full_queue_of_hanging_ssd_ends_the_wait_of_the_caller(self, tmp_path: Path, hang: Hang) -> None:
        bench = IoBench(tmp_path, max_open=2, deadline_s=0.5)
        bench.write_all()
        _, released = hang("preadv")
        bench.read(KEYS[:2])
        with pytest.raises(TimeoutError, match=r"waited 0\.5 s for the SSD at .*, which has 2 transfers to do"):
            bench.read(KEYS[2:3])
        bench.token.cancel()
        with pytest.raises(InterruptedError):
            bench.read(KEYS[2:3])
        released.set()
        bench.close()

    def test_request_in_a_callback_does_not_wait_for_room(self, tmp_path: Path) -> None:
        bench = IoBench(tmp_path, num_threads=1, max_open=1)
        with running(bench):

            def read_more(result: IoResult) -> None:
                for key in KEYS[1:3]:
                    bench.io.write(key, Step(0), parts_of(key), bench.terms(2, key))

            terms = replace(bench.terms(1, KEYS[0]), on_done=read_more)
            bench.io.write(KEYS[0], Step(0), parts_of(KEYS[0]), terms)
            assert [end.of for end in bench.wait_done(2)] == KEYS[1:3]


class TestBrokenThread:
    """Otherwise its transfers would be waited for until their timeout, and a working SSD be blamed."""

    def test_unexpected_error_is_the_failure_of_its_transfer(
        self, bench: IoBench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def breaks(region: StateRegion, *_: object) -> None:
            raise RuntimeError("a defect")

        monkeypatch.setattr(StateRegion, "note_written", breaks)
        bench.write(KEYS[:1], step=3)
        end = bench.next()
        assert (end.of, str(end.error)) == (KEYS[0], "a defect")
        bench.commit(3)
        assert bench.io._gate.failed_step == 3

    @pytest.mark.parametrize("what", ["transfer", "commit"])
    def test_error_in_on_done_is_passed_to_on_failed(self, bench: IoBench, what: str) -> None:
        errors: list[Exception] = []
        told = threading.Event()

        def breaks(result: IoResult) -> None:
            raise RuntimeError("a defect")

        def failed(error: Exception) -> None:
            errors.append(error)
            told.set()

        if what == "transfer":
            terms = IoTerms(priority=(0, 0), on_done=breaks, on_failed=failed)
            bench.io.write(KEYS[0], Step(0), parts_of(KEYS[0]), terms)
        else:
            bench.write_all()
            bench.io.commit(
                scheduler.CommitRequest(
                    step=Step(0), attempt=Attempt(1), trainer_state="", on_done=breaks, on_failed=failed
                )
            )
        assert told.wait(WAIT_S)
        assert [str(error) for error in errors] == ["a defect"]


class TestEnd:
    def test_close_finishes_all_requests(self, tmp_path: Path) -> None:
        bench = IoBench(tmp_path)
        content = bench.fill(1)
        bench.write(KEYS)
        bench.commit(0)
        bench.io.close()
        assert [end.of for end in bench.wait_done(len(KEYS) + 1)][-1] == 0
        for request in (lambda: bench.read(KEYS), lambda: bench.commit(1)):
            with pytest.raises(RuntimeError, match="its I/O scheduler was closed and takes no requests"):
                request()
        bench.close()
        with running(IoBench(tmp_path, geometry=replace(GEOMETRY, attempt=Attempt(2)))) as successor:
            assert successor.last_step() == 0
            successor.read(KEYS)
            successor.wait_done()
            assert successor.content() == content

    def test_close_delayed_by_hanging_ssd_reports_it(self, tmp_path: Path, hang: Hang) -> None:
        bench = IoBench(tmp_path)
        entered, released = hang("pwritev")
        bench.write(KEYS[:1])
        assert entered.wait(WAIT_S)
        with pytest.raises(TimeoutError) as late:
            bench.io.close(deadline_s=0.05)
        assert "ssd-0 IoScheduler._run_transfers (at the write of block 0, chunk 0, step 0)" in str(late.value)
        assert str(tmp_path) in late.value.__notes__[0]
        released.set()
        bench.close()

    def test_start_where_an_engine_cannot_be_opened_closes_the_others(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened: list[TransferEngine] = []
        closed: list[TransferEngine] = []

        def open_two(*arguments: Any) -> TransferEngine:
            if len(opened) == 2:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            engine = open_engine(*arguments)
            monkeypatch.setattr(engine, "close", lambda: closed.append(engine))
            opened.append(engine)
            return engine

        monkeypatch.setattr(scheduler, "open_engine", open_two)
        arena = Arena.create(tmp_path / "arena", ARENA_NBYTES)
        space = JobSpace.open(tmp_path, GEOMETRY, direct=False)
        space.store.resume_from(None)
        before = threading.active_count()
        with pytest.raises(OSError, match="allocate"):
            IoScheduler.start("ssd-0", space, arena, CancelToken(), threads(4))
        assert closed == opened
        assert threading.active_count() <= before
        space.close()
        arena.close()
