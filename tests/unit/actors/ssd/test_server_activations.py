"""Transfers of activations to and from an SSD server's scratch, beside those of chunks."""

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.actors.ssd_bench import (
    CHUNK_NBYTES,
    GEOMETRY,
    JOB,
    KEYS,
    WAIT_S,
    WORKER,
    Bench,
    fail,
    failure_of,
    running,
)
from windlass.actors.messages import ActivationIoDone, ChunkIoDone, SpanKind, StoreCommitted
from windlass.storage.ids import Attempt, JobId, Span, Step
from windlass.storage.io.engines import Backend, IoSettings, uring_refusal
from windlass.storage.ssd.volume import Volume

MIB = 1 << 20
NUM_SLOTS = 6
# Spans in the arena, in bytes.
HERE, THERE = Span(0, 2 * MIB + 4096), Span(8 * MIB, 2 * MIB + 4096)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with running(Bench(tmp_path, num_scratch_slots=NUM_SLOTS)) as bench:
        yield bench


def put(bench: Bench, span: Span, seed: int) -> bytes:
    content = random.Random(seed).randbytes(span.nbytes)
    bench.arena.buffer(span)[:] = content
    return content


def scratch_offset(bench: Bench, slot: int, job: JobId = JOB) -> int:
    volume = Volume.open(bench.directory, direct=False)
    start = volume.allocation(job).scratch[0].start
    volume.close()
    return start * MIB + slot * MIB


def test_come_back_bit_exact_and_each_request_is_answered(bench: Bench) -> None:
    content = put(bench, HERE, 1)
    bench.write_activations([4, 0, 2], HERE, id=7)
    done = ActivationIoDone(job=JOB, step=Step(3), correlation=7)
    assert bench.next() == (WORKER, done)
    bench.read_activations([4, 0, 2], THERE, id=8)
    assert bench.next() == (WORKER, replace(done, correlation=8))
    assert bench.arena.buffer(THERE) == content
    assert bench.is_silent()
    assert bench.server.bytes_written == bench.server.bytes_read == HERE.nbytes


def test_neighbouring_slots_move_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = os.pwritev

    def record(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        sizes.append(buffers[0].nbytes)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", record)
    io = IoSettings(backend=Backend.THREADS, num_threads=1, depth=1, piece_nbytes=2 * MIB)
    bench = Bench(tmp_path, io=io, num_scratch_slots=NUM_SLOTS)
    bench.setup()
    bench.write_activations([1, 2, 3, 5], Span(0, 4 * MIB))
    bench.wait_done(1)
    assert sizes == [2 * MIB, MIB, MIB]
    bench.server.stop()


def test_activations_and_chunks_are_served_by_priority(tmp_path: Path) -> None:
    bench = Bench(tmp_path, num_threads=1, num_scratch_slots=NUM_SLOTS)
    bench.write_activations([0], Span(0, MIB), id=1, priority=(1, 6))
    bench.write(KEYS[1:2], id=2, priority=(1, 5))
    bench.write_activations([1], Span(MIB, MIB), id=3, priority=(0, 9))
    bench.write(KEYS[2:3], id=4, priority=(1, 6))
    bench.setup()
    messages = [bench.next()[1] for _ in range(4)]
    order = [each.correlation for each in messages if isinstance(each, ActivationIoDone | ChunkIoDone)]
    assert order == [3, 2, 1, 4]
    bench.server.stop()


def test_commit_ignores_activations(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit waits for no activation, and a failed one does not prevent it."""
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
    bench.write_activations([0], Span(0, MIB))
    assert entered.wait(WAIT_S)
    bench.commit(0)
    assert isinstance(bench.next()[1], StoreCommitted)
    released.set()
    assert "could not write" in failure_of(bench.next()).error
    bench.write_all(step=3)
    bench.commit(3)
    assert isinstance(bench.next()[1], StoreCommitted)


def test_activations_are_reported_to_the_timeline(tmp_path: Path) -> None:
    bench = Bench(tmp_path, num_scratch_slots=NUM_SLOTS)
    bench.setup()
    bench.write_activations([3, 4], Span(0, MIB + 4096), block=2)
    bench.wait_done(1)
    bench.read_activations([3, 4], Span(0, MIB + 4096), block=2)
    bench.wait_done(1)
    bench.server.stop()
    assert bench.is_silent()
    found = [(each.resource, each.kind, each.step, each.block, each.chunk, each.nbytes) for each in bench.spans]
    assert found == [
        ("ssd-0", SpanKind.WRITE_ACTIVATIONS, 3, 2, -1, MIB + 4096),
        ("ssd-0", SpanKind.READ_ACTIVATIONS, 3, 2, -1, MIB + 4096),
    ]


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_failing_ssd_is_named_and_nothing_is_answered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    bench.write_activations([2], Span(0, MIB))
    bench.wait_done(1)
    ask: Callable[..., None] = bench.write_activations if call == "pwritev" else bench.read_activations
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        ask([2], Span(0, MIB))
        told = failure_of(bench.next())
    verb = "write" if call == "pwritev" else "read"
    for fact in (str(bench.directory), JOB, "scratch slot 2", f"could not {verb}: [Errno 5]", "check the disk"):
        assert fact in told.error
    assert bench.is_silent()
    bench.write_activations([2], Span(0, MIB), id=9)
    assert bench.next() == (WORKER, ActivationIoDone(job=JOB, step=Step(3), correlation=9))


def test_a_flipped_bit_is_an_error_that_names_the_place(bench: Bench) -> None:
    put(bench, HERE, 1)
    bench.write_activations([4, 0, 2], HERE)
    bench.wait_done(1)
    at = scratch_offset(bench, 0) + 77
    volume = Volume.open(bench.directory, direct=False)
    volume.device.write_records(at, bytes([volume.device.read_records(at, 1)[0] ^ 4]))
    volume.close()
    bench.read_activations([4, 0, 2], THERE)
    told = failure_of(bench.next())
    for fact in (str(bench.directory), JOB, "scratch slot 0 (swapped activations)", "checksum is wrong", "replace it"):
        assert fact in told.error
    assert bench.is_silent()


def test_activation_with_invalid_slot_or_span_is_refused(bench: Bench) -> None:
    bench.write_activations([NUM_SLOTS], Span(0, MIB))
    assert "slots (6,) are not all of the 6 of its scratch" in failure_of(bench.next()).error
    bench.write_activations([0], Span(bench.arena.nbytes, MIB))
    assert "outside the arena" in failure_of(bench.next()).error
    bench.read_activations([1], Span(0, MIB))
    assert "cannot read 1048576 bytes: 0 were written there" in failure_of(bench.next()).error


def test_hanging_ssd_is_named_and_late_activation_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, num_scratch_slots=NUM_SLOTS)
    bench.setup()
    bench.write_activations([1], Span(0, MIB))
    bench.wait_done(1)
    entered, released = threading.Event(), threading.Event()
    real = os.preadv

    def hang(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        entered.set()
        assert released.wait(WAIT_S)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", hang)
    bench.read_activations([1], Span(0, MIB), deadline_s=0.05, block=4)
    assert entered.wait(WAIT_S)
    told = failure_of(bench.next())
    for fact in (str(bench.directory), "within 0.05 s", "check the disk", "read of activations of block 4, step 3"):
        assert fact in told.error
    released.set()
    bench.server.stop()
    assert bench.is_silent()


def test_stop_finishes_what_was_posted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, num_threads=1, num_scratch_slots=NUM_SLOTS)
    bench.setup()
    content = put(bench, HERE, 1)
    bench.write_activations([0, 1, 2], HERE)
    bench.read_activations([0, 1, 2], THERE, priority=(0, 1))
    bench.server.stop(delete_store=True)
    bench.wait_done(2)
    assert bench.arena.buffer(THERE) == content


def test_newer_attempt_has_no_activations_and_older_one_is_refused(tmp_path: Path) -> None:
    older = Bench(tmp_path, num_scratch_slots=NUM_SLOTS)
    older.setup()
    older.write_activations([0], Span(0, MIB))
    older.wait_done(1)
    newer = Bench(tmp_path, geometry=replace(GEOMETRY, attempt=Attempt(2)), num_scratch_slots=2)
    newer.setup()
    newer.read_activations([0], Span(0, MIB))
    assert "0 were written there" in failure_of(newer.next()).error
    older.write_activations([1], Span(0, MIB))
    assert "attempt 2 has taken over" in failure_of(older.next()).error
    older.server.stop()
    content = put(newer, Span(0, 2 * MIB), 5)
    newer.write_activations([0, 1], Span(0, 2 * MIB))
    newer.wait_done(1)
    newer.read_activations([0, 1], Span(8 * MIB, 2 * MIB))
    newer.wait_done(1)
    assert newer.arena.buffer(Span(8 * MIB, 2 * MIB)) == content
    newer.server.stop(delete_store=True)
    volume = Volume.open(tmp_path, direct=False)
    assert volume.allocations() == {}
    volume.close()


@pytest.mark.parametrize("depth", [1, 8])
def test_io_uring_moves_the_same_bytes(tmp_path: Path, depth: int) -> None:
    if (refusal := uring_refusal()) is not None:
        pytest.skip(refusal)
    io = IoSettings(backend=Backend.URING, num_threads=2, depth=depth, piece_nbytes=MIB)
    bench = Bench(tmp_path, io=io, num_scratch_slots=NUM_SLOTS)
    bench.setup()
    content = put(bench, HERE, 1)
    bench.write_activations([5, 1, 3], HERE)
    bench.wait_done(1)
    bench.read_activations([5, 1, 3], THERE)
    bench.wait_done(1)
    assert bench.arena.buffer(THERE) == content
    bench.server.stop()


def test_chunks_and_activations_keep_apart(bench: Bench) -> None:
    content = bench.fill(1)
    bench.write_all()
    size = Span(0, NUM_SLOTS * MIB)
    swapped = put(bench, size, 2)
    bench.write_activations(range(NUM_SLOTS), size)
    bench.wait_done(1)
    bench.fill(3)
    bench.read(KEYS)
    bench.wait_done()
    assert bench.content() == content
    bench.read_activations(range(NUM_SLOTS), size)
    bench.wait_done(1)
    assert bench.arena.buffer(size) == swapped
    assert bench.server.bytes_read == len(KEYS) * CHUNK_NBYTES + size.nbytes
