"""The behaviour of an SSD server after a failed transfer, set-up or stop."""

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.actors.ssd_bench import CHUNK_NUMEL, JOB, KEYS, WAIT_S, WORKER, Bench, fail, failure_of, running
from windlass.actors.messages import ChunkIo, ChunkIoDone, ChunkPart, Message, ReadChunks, StoreCommitted
from windlass.actors.ssd import server as ssd_server
from windlass.storage.ids import ActorName, CorrelationId, JobId, Span, StateKind, Step
from windlass.storage.integrity.errors import StoreError, StoreIoError
from windlass.storage.io.engines import TransferEngine, open_engine
from windlass.storage.memory.arena import Arena
from windlass.storage.ssd.volume import Volume


def num_open_files(directory: Path) -> int:
    """The number of this process's open files in a directory."""
    links = list(Path("/proc/self/fd").iterdir())  # the descriptor used for listing is closed by then
    return sum(str(directory) in str(link.readlink()) for link in links if link.is_symlink())


def test_chunk_whose_first_piece_failed_moves_no_more_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the report of the failure, the receiver may reuse the memory."""
    num_calls = 0

    def fail_once(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal num_calls
        num_calls += 1
        return fail(fd, buffers, offset)

    with running(Bench(tmp_path, num_threads=1)) as bench:
        bench.write_all()
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fail_once)
            bench.read(KEYS[:1])
            failure_of(bench.next())
            bench.write(KEYS[1:2], step=1)  # comes after the rest of the read
            bench.wait_done(1)
    assert num_calls == 1


def test_overdue_chunk_that_fails_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_server, "_TICK_S", 0.01)
    entered, released = threading.Event(), threading.Event()

    def fail_late(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        entered.set()
        assert released.wait(WAIT_S)
        raise OSError(errno.EIO, "Input/output error")

    bench = Bench(tmp_path, num_threads=1)
    with running(bench):
        bench.write_all()
        monkeypatch.setattr(os, "preadv", fail_late)
        bench.read(KEYS[:1], deadline_s=0.01)
        assert entered.wait(WAIT_S)
        assert "not done within 0.01 s" in failure_of(bench.next()).error
        released.set()
    assert bench.is_silent()


def test_failed_writes_of_a_later_and_then_an_earlier_step_are_both_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(Bench(tmp_path)) as bench:
        bench.write_all()
        bench.commit(0)
        assert isinstance(bench.next()[1], StoreCommitted)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", fail)
            for key, step in ((KEYS[0], 2), (KEYS[1], 1)):
                bench.write([key], step=step, gradient=True)
                failure_of(bench.next())
        bench.commit(1, states_step=0)
        assert "a write of step 1 failed; step 1 cannot be committed" in failure_of(bench.next()).error


@pytest.mark.parametrize("num_bytes_inside", [0, 4096])
def test_span_outside_the_arena_is_refused_and_the_server_lives_on(tmp_path: Path, num_bytes_inside: int) -> None:
    with running(Bench(tmp_path, num_threads=1)) as bench:
        bench.write_all()
        part = ChunkPart(StateKind.PARAM, Span(bench.arena.nbytes - num_bytes_inside, 2 * CHUNK_NUMEL))
        bench.server.post(
            ReadChunks(
                job=JOB,
                step=Step(0),
                correlation=CorrelationId(1),
                reply_to=WORKER,
                priority=(0, 0),
                deadline_s=WAIT_S,
                items=(ChunkIo(KEYS[0], (part,)),),
            )
        )
        assert "reaches outside the arena" in failure_of(bench.next()).error
        bench.read(KEYS)
        bench.wait_done()


def test_commit_that_waits_for_the_last_write_is_done_although_the_server_is_asked_to_stop(tmp_path: Path) -> None:
    """The write is reported before the commit starts; in between the server seems to be idle."""
    before = set(threading.enumerate())  # the server of an earlier test may still be ending
    bench = Bench(tmp_path)
    reporting, asked = threading.Event(), threading.Event()
    send = bench.server._send

    def hold_up(to: ActorName, message: Message) -> None:
        if isinstance(message, ChunkIoDone) and message.key == KEYS[-1]:
            reporting.set()
            assert asked.wait(WAIT_S)
        send(to, message)

    bench.setup()
    bench.write(KEYS[:-1])
    bench.wait_done(len(KEYS) - 1)
    bench.server._send = hold_up
    bench.write(KEYS[-1:])
    assert reporting.wait(WAIT_S)
    bench.commit(0)
    started = set(threading.enumerate()) - before
    (control,) = [thread for thread in started if "SsdServer._run_control" in thread.name]
    stopping = threading.Thread(target=bench.server.stop)
    stopping.start()
    control.join(0.1)  # time enough for it to end wrongly
    asked.set()
    stopping.join(WAIT_S)
    assert isinstance(bench.next()[1], ChunkIoDone)
    assert isinstance(bench.next()[1], StoreCommitted)


def test_commit_with_unknown_free_space_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_to_tell(volume: Volume, job: JobId) -> int:
        raise StoreIoError("the SSD fails")

    monkeypatch.setattr(Volume, "held_nbytes", fail_to_tell)
    with running(Bench(tmp_path)) as bench:
        bench.write_all()
        for step in (0, 1):
            bench.commit(step, states_step=0)
            assert isinstance(bench.next()[1], StoreCommitted)
    assert bench.space == []


@pytest.mark.parametrize(
    ("error", "text"), [(RuntimeError("a defect"), "RuntimeError: a defect"), (StoreError("too old"), "too old")]
)
def test_unexpected_failure_is_reported_with_its_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    def cut(*_: object) -> None:
        raise error

    monkeypatch.setattr(ssd_server, "cut", cut)
    with running(Bench(tmp_path)) as bench:
        bench.write(KEYS[:1])
        assert failure_of(bench.next()).error == f"{text} (at the write of block 0, chunk 0, step 0)"


def test_setup_without_an_arena_closes_the_ssd(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    Arena.unlink(bench.arena)
    before = num_open_files(tmp_path)
    with pytest.raises(FileNotFoundError):
        bench.server.setup()
    assert num_open_files(tmp_path) == before


def test_resume_from_where_an_engine_cannot_be_opened_closes_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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

    monkeypatch.setattr(ssd_server, "open_engine", open_two)
    bench = Bench(tmp_path)
    bench.server.setup()
    with pytest.raises(OSError, match="allocate"):
        bench.server.resume_from(None)
    assert closed == opened
    bench.server.stop()
