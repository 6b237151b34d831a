"""Transfers of chunks by an I/O scheduler: their bytes, their order, and their checksums."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.storage.io_bench import (
    CHUNK_NBYTES,
    GEOMETRY,
    GRADIENT_NBYTES,
    JOB,
    KEYS,
    WAIT_S,
    IoBench,
    running,
    threads,
)
from tests.support.storage.stores import BF16, flip, volume_file
from windlass.storage.ids import StateKind
from windlass.storage.integrity.errors import StepNotAllowed, StoreCorrupt
from windlass.storage.io.engines import Backend, IoSettings, uring_refusal
from windlass.storage.ssd.volume import Volume


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[IoBench]:
    with running(IoBench(tmp_path)) as bench:
        yield bench


class TestChunks:
    def test_chunks_come_back_bit_exact_and_are_reported_one_by_one(self, tmp_path: Path, direct: bool) -> None:
        with running(IoBench(tmp_path, direct=direct)) as bench:
            content = bench.fill(1)
            begin_s = time.monotonic()
            bench.write(KEYS, id=7)
            written = bench.wait_done()
            assert sorted((end.id, end.of) for end in written) == [(7, key) for key in KEYS]
            bench.fill(2)
            bench.read(KEYS, id=8)
            ends = written + bench.wait_done()
            assert bench.content() == content
            assert bench.is_silent()
            assert {end.result.nbytes for end in ends} == {CHUNK_NBYTES}
            for end in ends:
                assert begin_s <= end.result.start_s < end.result.end_s <= time.monotonic()
            assert bench.io.bytes_written == bench.io.bytes_read == len(KEYS) * CHUNK_NBYTES

    def test_a_chunk_is_done_after_its_last_piece(self, bench: IoBench, monkeypatch: pytest.MonkeyPatch) -> None:
        pieces: list[int] = []
        real_write = os.pwritev

        def record(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            pieces.append(buffers[0].nbytes)
            return real_write(fd, buffers, offset)

        monkeypatch.setattr(os, "pwritev", record)
        bench.write(KEYS[:1])
        bench.wait_done(1)
        assert pieces == [1 << 20] * (CHUNK_NBYTES >> 20)

    def test_pieces_of_one_chunk_spread_over_the_threads(self, bench: IoBench, monkeypatch: pytest.MonkeyPatch) -> None:
        meeting = threading.Barrier(4)  # passes only if four threads are inside the system call at the same time
        real_write = os.pwritev
        first = iter(range(4))

        def meet(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if next(first, None) is not None:
                meeting.wait(WAIT_S)
            return real_write(fd, buffers, offset)

        monkeypatch.setattr(os, "pwritev", meet)
        bench.write(KEYS[:1])
        bench.wait_done(1)


class TestGradients:
    def test_come_back_bit_exact_and_their_bytes_count(self, bench: IoBench) -> None:
        bench.commit_all()
        content = bench.fill(1)
        bench.write(KEYS, step=1, gradient=True)
        bench.wait_done()
        bench.fill(2)
        bench.read(KEYS, step=1, gradient=True)
        bench.wait_done()
        for i in range(len(KEYS)):
            at = i * CHUNK_NBYTES
            assert bench.content()[at : at + GRADIENT_NBYTES] == content[at : at + GRADIENT_NBYTES]
        assert bench.io.bytes_read == len(KEYS) * GRADIENT_NBYTES
        assert bench.io.bytes_written == len(KEYS) * (CHUNK_NBYTES + GRADIENT_NBYTES)

    def test_make_room_for_the_states_of_their_step(self, bench: IoBench) -> None:
        bench.commit_all()
        bench.write(KEYS, step=1, gradient=True)
        bench.wait_done()
        content = bench.fill(1)
        bench.write_all(step=1)
        bench.read(KEYS[:1], step=1, gradient=True)
        error = bench.next().error
        assert isinstance(error, StepNotAllowed)
        assert "cannot read 1048576 bytes of the grad of block 0, chunk 0 as step 1" in str(error)
        bench.write(KEYS[:1], step=2, gradient=True)
        assert "cannot write the gradient of block 0, chunk 0, step 2" in str(bench.next().error)
        bench.read(KEYS, step=1)
        bench.wait_done()
        assert bench.content() == content

    def test_flipped_bit_is_an_error(self, bench: IoBench) -> None:
        bench.write(KEYS[:1], gradient=True)
        bench.wait_done(1)
        flip_at(bench, GRADIENT_NBYTES - 5, extent=0)
        bench.read(KEYS[:1], gradient=True)
        assert "extent 0 (grad of block 0, chunk 0, step 0): the bytes" in str(bench.next().error)


class TestOrder:
    def test_smallest_priority_first_then_arrival(self, tmp_path: Path) -> None:
        with running(IoBench(tmp_path, num_threads=1)) as bench:
            with bench.holding_queue():
                bench.write([KEYS[5]], id=1, priority=(2, 0))
                bench.write([KEYS[3], KEYS[2]], id=2, priority=(1, 5))
                bench.write([KEYS[1]], id=3, priority=(1, 0))
                bench.write([KEYS[4]], id=4, priority=(1, 5))
                bench.write([KEYS[0]], id=5, priority=(0, 9))
            order = [(end.id, end.of) for end in bench.wait_done()]
        assert order == [(5, KEYS[0]), (3, KEYS[1]), (2, KEYS[3]), (2, KEYS[2]), (4, KEYS[4]), (1, KEYS[5])]

    def test_urgent_chunk_overtakes_one_that_is_half_done(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench = IoBench(tmp_path, num_threads=1)
        real_write = os.pwritev
        calls = iter(range(1_000_000))

        def interrupt(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if next(calls) == 2:
                bench.write([KEYS[1]], id=2, priority=(0, 0))
            return real_write(fd, buffers, offset)

        monkeypatch.setattr(os, "pwritev", interrupt)
        with running(bench):
            bench.write([KEYS[0]], id=1, priority=(1, 0))
            assert [end.id for end in bench.wait_done(2)] == [2, 1]


class TestCorruption:
    def test_a_flipped_bit_is_an_error_that_names_ssd_extent_and_job(self, bench: IoBench) -> None:
        bench.write_all()
        flip_at(bench, CHUNK_NBYTES - 5, extent=2)
        bench.read(KEYS)
        ends = [bench.next() for _ in KEYS]
        (failed,) = [end for end in ends if isinstance(end.outcome, Exception)]
        assert isinstance(failed.error, StoreCorrupt)
        for fact in (str(bench.directory), "ftjob-1", "extent 2 (exp_avg_sq of block", "checksum"):
            assert fact in str(failed.error)
        broken = failed.of
        assert broken in KEYS
        assert f"block {broken.block}, chunk {broken.chunk}" in str(failed.error)  # type: ignore[union-attr]

    @pytest.mark.parametrize("kind", BF16.itemsizes)
    def test_flipped_bit_in_any_segment_of_a_piece_is_an_error(self, tmp_path: Path, kind: StateKind) -> None:
        """Each piece contains two states, one after the other."""
        with running(IoBench(tmp_path, io=threads(1, piece_nbytes=4 << 20))) as bench:
            bench.write(KEYS[:1])
            bench.wait_done(1)
            flip_at(bench, GEOMETRY.region_offset(kind) + 12345, extent=0)
            bench.read(KEYS[:1])
            assert f"extent 0 ({kind} of block 0, chunk 0, step 0)" in str(bench.next().error)

    def test_without_checksums_a_flipped_bit_is_read(self, tmp_path: Path) -> None:
        """The benchmarks measure the cost of checksums."""
        with running(IoBench(tmp_path, checksums=False)) as bench:
            content = bench.fill(1)
            bench.write(KEYS[:1])
            bench.wait_done(1)
            flip_at(bench, 12345, extent=0)
            bench.read(KEYS[:1])
            bench.wait_done(1)
            assert bench.content() != content


@pytest.mark.parametrize("depth", [1, 3, 16])
def test_io_uring_moves_the_same_bytes(tmp_path: Path, depth: int) -> None:
    if (refusal := uring_refusal()) is not None:
        pytest.skip(refusal)
    io = IoSettings(backend=Backend.URING, num_threads=2, depth=depth, piece_nbytes=1 << 20)
    with running(IoBench(tmp_path, io=io)) as bench:
        content = bench.fill(1)
        bench.write_all()
        bench.fill(2)
        bench.read(KEYS)
        bench.wait_done()
        assert bench.content() == content
        bench.commit(0)
        bench.wait_done(1)


def flip_at(bench: IoBench, offset: int, *, extent: int) -> None:
    """Flips a bit in an extent on the SSD."""
    with closing(Volume.open(bench.directory, direct=False)) as volume:
        start = volume.allocation(JOB).extent_offsets(GEOMETRY.demand)[extent]
    flip(volume_file(bench.directory), start + offset)
