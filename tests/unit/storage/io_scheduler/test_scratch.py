"""Transfers to and from the scratch by an I/O scheduler, beside those of chunks."""

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.storage.io_bench import (
    ARENA_NBYTES,
    CHUNK_NBYTES,
    GEOMETRY,
    JOB,
    KEYS,
    WAIT_S,
    Hang,
    IoBench,
    fail,
    running,
    threads,
)
from windlass.storage.ids import Attempt, Span
from windlass.storage.integrity.errors import StaleAttempt, StepNotAllowed, StoreCorrupt, StoreIoError
from windlass.storage.io.engines import Backend, IoSettings, uring_refusal
from windlass.storage.ssd.volume import Volume

MIB = 1 << 20
NUM_SLOTS = 6
# Spans in the arena, in bytes.
HERE, THERE = Span(0, 2 * MIB + 4096), Span(8 * MIB, 2 * MIB + 4096)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[IoBench]:
    with running(IoBench(tmp_path, num_scratch_slots=NUM_SLOTS)) as bench:
        yield bench


def put(bench: IoBench, span: Span, seed: int) -> bytes:
    content = random.Random(seed).randbytes(span.nbytes)
    bench.arena.buffer(span)[:] = content
    return content


def scratch_offset(bench: IoBench, slot: int) -> int:
    with closing(Volume.open(bench.directory, direct=False)) as volume:
        return volume.allocation(JOB).scratch[0].start * MIB + slot * MIB


def test_slots_come_back_bit_exact(tmp_path: Path, direct: bool) -> None:
    with running(IoBench(tmp_path, direct=direct, num_scratch_slots=NUM_SLOTS)) as bench:
        content = put(bench, HERE, 1)
        bench.write_scratch([4, 0, 2], HERE, id=7)
        bench.wait_done(1)
        bench.read_scratch([4, 0, 2], THERE, id=8)
        (end,) = bench.wait_done(1)
        assert (end.id, end.of, end.result.nbytes) == (8, (4, 0, 2), HERE.nbytes)
        assert bench.arena.buffer(THERE) == content
        assert bench.is_silent()
        assert bench.io.bytes_written == bench.io.bytes_read == HERE.nbytes


def test_neighbouring_slots_move_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = os.pwritev

    def record(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        sizes.append(buffers[0].nbytes)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", record)
    io = threads(1, piece_nbytes=2 * MIB)
    with running(IoBench(tmp_path, io=io, num_scratch_slots=NUM_SLOTS)) as bench:
        bench.write_scratch([1, 2, 3, 5], Span(0, 4 * MIB))
        bench.wait_done(1)
    assert sizes == [2 * MIB, MIB, MIB]


def test_scratch_and_chunks_are_served_by_priority(tmp_path: Path) -> None:
    with running(IoBench(tmp_path, num_threads=1, num_scratch_slots=NUM_SLOTS)) as bench:
        with bench.holding_queue():
            bench.write_scratch([0], Span(0, MIB), id=1, priority=(1, 6))
            bench.write(KEYS[1:2], id=2, priority=(1, 5))
            bench.write_scratch([1], Span(MIB, MIB), id=3, priority=(0, 9))
            bench.write(KEYS[2:3], id=4, priority=(1, 6))
        assert [end.id for end in bench.wait_done(4)] == [3, 2, 1, 4]


def test_commit_ignores_scratch(bench: IoBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit waits for no write of scratch, and a failed one does not prevent it."""
    bench.write_all()
    entered, released = threading.Event(), threading.Event()
    real, scratch = os.pwritev, range(scratch_offset(bench, 0), scratch_offset(bench, NUM_SLOTS))

    def hang(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset in scratch:
            entered.set()
            assert released.wait(WAIT_S)
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", hang)
    bench.write_scratch([0], Span(0, MIB))
    assert entered.wait(WAIT_S)
    bench.commit(0)
    bench.wait_done(1)
    released.set()
    assert "could not write" in str(bench.next().error)
    bench.commit_all(3)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_failing_ssd_is_named(bench: IoBench, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    bench.write_scratch([2], Span(0, MIB))
    bench.wait_done(1)
    ask: Callable[..., None] = bench.write_scratch if call == "pwritev" else bench.read_scratch
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        ask([2], Span(0, MIB))
        error = bench.next().error
    assert isinstance(error, StoreIoError)
    verb = "write" if call == "pwritev" else "read"
    for fact in (str(bench.directory), JOB, "scratch slot 2", f"could not {verb}: [Errno 5]", "check the disk"):
        assert fact in str(error)
    assert bench.is_silent()
    bench.write_scratch([2], Span(0, MIB), id=9)
    assert bench.wait_done(1)[0].id == 9


def test_a_flipped_bit_is_an_error_that_names_the_place(bench: IoBench) -> None:
    put(bench, HERE, 1)
    bench.write_scratch([4, 0, 2], HERE)
    bench.wait_done(1)
    at = scratch_offset(bench, 0) + 77
    with closing(Volume.open(bench.directory, direct=False)) as volume:
        volume.device.write_records(at, bytes([volume.device.read_records(at, 1)[0] ^ 4]))
    bench.read_scratch([4, 0, 2], THERE)
    error = bench.next().error
    assert isinstance(error, StoreCorrupt)
    for fact in (str(bench.directory), JOB, "scratch slot 0 (swapped activations)", "checksum is wrong", "replace it"):
        assert fact in str(error)
    assert bench.is_silent()


def test_invalid_slot_or_span_is_refused(bench: IoBench) -> None:
    bench.write_scratch([NUM_SLOTS], Span(0, MIB))
    assert "slots [6] are not all of the 6 of its scratch" in str(bench.next().error)
    bench.write_scratch([0], Span(ARENA_NBYTES, MIB))
    assert "outside the arena" in str(bench.next().error)
    bench.read_scratch([1], Span(0, MIB))
    error = bench.next().error
    assert isinstance(error, StepNotAllowed)
    assert "cannot read 1048576 bytes: 0 were written there" in str(error)


def test_hanging_ssd_is_described(tmp_path: Path, hang: Hang) -> None:
    bench = IoBench(tmp_path, num_scratch_slots=NUM_SLOTS)
    bench.write_scratch([1], Span(0, MIB))
    bench.wait_done(1)
    entered, released = hang("preadv")
    bench.read_scratch([1], Span(0, MIB))
    assert entered.wait(WAIT_S)
    text = bench.io.describe_open()
    for fact in (str(bench.directory), "is not done after", "check the disk", "the read of scratch slots 1"):
        assert fact in text
    assert bench.is_silent()
    released.set()
    bench.close()


def test_close_finishes_all_requests(tmp_path: Path) -> None:
    bench = IoBench(tmp_path, num_threads=1, num_scratch_slots=NUM_SLOTS)
    content = put(bench, HERE, 1)
    bench.write_scratch([0, 1, 2], HERE)
    bench.read_scratch([0, 1, 2], THERE, priority=(0, 1))
    bench.io.close()
    bench.wait_done(2)
    assert bench.arena.buffer(THERE) == content
    bench.close(delete=True)


def test_newer_attempt_has_empty_scratch_and_older_one_is_refused(tmp_path: Path) -> None:
    older = IoBench(tmp_path, num_scratch_slots=NUM_SLOTS)
    older.write_scratch([0], Span(0, MIB))
    older.wait_done(1)
    newer = IoBench(tmp_path, geometry=replace(GEOMETRY, attempt=Attempt(2)), num_scratch_slots=2)
    newer.read_scratch([0], Span(0, MIB))
    assert "0 were written there" in str(newer.next().error)
    older.write_scratch([1], Span(0, MIB))
    error = older.next().error
    assert isinstance(error, StaleAttempt)
    assert "attempt 2 has taken over" in str(error)
    older.close()
    content = put(newer, Span(0, 2 * MIB), 5)
    newer.write_scratch([0, 1], Span(0, 2 * MIB))
    newer.wait_done(1)
    newer.read_scratch([0, 1], Span(8 * MIB, 2 * MIB))
    newer.wait_done(1)
    assert newer.arena.buffer(Span(8 * MIB, 2 * MIB)) == content
    newer.close(delete=True)
    with closing(Volume.open(tmp_path, direct=False)) as volume:
        assert volume.allocations() == {}


@pytest.mark.parametrize("depth", [1, 8])
def test_io_uring_moves_the_same_bytes(tmp_path: Path, depth: int) -> None:
    if (refusal := uring_refusal()) is not None:
        pytest.skip(refusal)
    io = IoSettings(backend=Backend.URING, num_threads=2, depth=depth, piece_nbytes=MIB)
    with running(IoBench(tmp_path, io=io, num_scratch_slots=NUM_SLOTS)) as bench:
        content = put(bench, HERE, 1)
        bench.write_scratch([5, 1, 3], HERE)
        bench.wait_done(1)
        bench.read_scratch([5, 1, 3], THERE)
        bench.wait_done(1)
        assert bench.arena.buffer(THERE) == content


def test_chunks_and_scratch_keep_apart(bench: IoBench) -> None:
    content = bench.fill(1)
    bench.write_all()
    size = Span(0, NUM_SLOTS * MIB)
    swapped = put(bench, size, 2)
    bench.write_scratch(range(NUM_SLOTS), size)
    bench.wait_done(1)
    bench.fill(3)
    bench.read(KEYS)
    bench.wait_done()
    assert bench.content() == content
    bench.read_scratch(range(NUM_SLOTS), size)
    bench.wait_done(1)
    assert bench.arena.buffer(size) == swapped
    assert bench.io.bytes_read == len(KEYS) * CHUNK_NBYTES + size.nbytes
