"""An SSD server: its transfers, their order, and its reports of failures."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.actors.ssd_bench import (
    CHUNK_NBYTES,
    GEOMETRY,
    GRADIENT_NBYTES,
    JOB,
    KEYS,
    WAIT_S,
    WORKER,
    Bench,
    commit_of,
    fail,
    failure_of,
    running,
)
from tests.support.storage.stores import BF16, flip, volume_file
from windlass.actors.messages import (
    ActorFailed,
    ChunkIoDone,
    LoadModel,
    StoreCommitted,
)
from windlass.storage.ids import (
    JobId,
    StateKind,
    Step,
)
from windlass.storage.io.engines import Backend, IoSettings, uring_refusal
from windlass.storage.ssd.volume import Volume


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with running(Bench(tmp_path)) as bench:
        yield bench


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
        meeting = threading.Barrier(4)  # passes only if four threads are inside the system call at the same time
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
        assert "cannot read 1048576 bytes of the grad of block 0, chunk 0 as step 1" in failure_of(bench.next()).error
        bench.write(KEYS[:1], step=2, gradient=True)
        assert "cannot write the gradient of block 0, chunk 0, step 2" in failure_of(bench.next()).error
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
        assert "extent 0 (grad of block 0, chunk 0, step 0): the bytes" in failure_of(bench.next()).error


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


class TestFailures:
    def test_one_failure_per_chunk_with_the_facts_and_the_server_lives_on(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench.write_all()
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fail)
            bench.read([KEYS[4]], step=0)
            failure = failure_of(bench.next())
        for fact in (str(bench.directory), "ftjob-1", "extent ", "block 1, chunk 1", "Input/output error"):
            assert fact in failure.error
        assert "Traceback" in failure.detail
        bench.read([KEYS[1]], id=5)
        answer = bench.next()[1]  # and nothing of the failed chunk comes before it
        assert isinstance(answer, ChunkIoDone)
        assert answer.correlation == 5
        assert bench.server.bytes_read == CHUNK_NBYTES

    def test_message_of_another_job_or_kind(self, bench: Bench) -> None:
        bench.server.post(LoadModel(job=JOB, step=Step(0)))
        assert "does not accept LoadModel" in failure_of(bench.next()).error
        bench.server.post(commit_of(0, job=JobId("ftjob-2")))
        assert "of job ftjob-2" in failure_of(bench.next()).error
        assert bench.last_step() is None


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

    @pytest.mark.parametrize("kind", BF16.itemsizes)
    def test_flipped_bit_in_any_segment_of_a_piece_is_an_error(self, tmp_path: Path, kind: StateKind) -> None:
        """Each piece contains two states, one after the other."""
        bench = Bench(tmp_path, io=IoSettings(backend=Backend.THREADS, num_threads=1, depth=1, piece_nbytes=4 << 20))
        with running(bench):
            bench.write(KEYS[:1])
            bench.wait_done(1)
            with closing(Volume.open(bench.directory, direct=False)) as volume:
                extent_offset = volume.allocation(JOB).extent_offsets(GEOMETRY.demand)[0]
            flip(volume_file(bench.directory), extent_offset + GEOMETRY.region_offset(kind) + 12345)
            bench.read(KEYS[:1])
            assert f"extent 0 ({kind} of block 0, chunk 0, step 0)" in failure_of(bench.next()).error


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
