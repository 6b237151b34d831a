"""An SSD server from start to end: its refusals, its reports of time, and SSDs that hang."""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.actors.ssd_bench import (
    CHUNK_NBYTES,
    GEOMETRY,
    GRADIENT_NBYTES,
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
    FailureKind,
    SpanKind,
    SpansReported,
    StoreCommitted,
)
from windlass.storage.ids import (
    Attempt,
)
from windlass.storage.integrity.errors import StaleAttempt, StoreError
from windlass.storage.ssd.volume import Volume
from windlass.storage.store.regions import StateRegion


def holds_states(directory: Path) -> bool:
    volume = Volume.open(directory, direct=False)
    try:
        return JOB in volume.allocations()
    finally:
        volume.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with running(Bench(tmp_path)) as bench:
        yield bench


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

    def test_spans_without_commits_are_reported_at_intervals(self, bench: Bench) -> None:
        bench.write_all()
        while not bench.spans:
            to, message = bench.sent.get(timeout=WAIT_S)
            assert to == "scheduler"
            assert isinstance(message, SpansReported)
            bench.spans += message.spans
        assert sorted((span.block, span.chunk) for span in bench.spans) == [(key.block, key.chunk) for key in KEYS]

    def test_a_chunk_that_failed_has_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bench = Bench(tmp_path)
        bench.setup()
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

    def test_server_resumes_from_last_common_commit(self, tmp_path: Path) -> None:
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
        assert {"cannot read" in failure_of(bench.next()).error for _ in KEYS} == {True}
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


class TestDeadlines:
    def test_a_hanging_ssd_is_named_and_its_slot_is_never_given_back(self, tmp_path: Path, hang: Hang) -> None:
        bench = Bench(tmp_path, num_threads=2)
        bench.setup()
        bench.write_all()
        entered, released = hang("preadv")
        bench.read([KEYS[1]], deadline_s=0.05)
        assert entered.wait(WAIT_S)
        failure = failure_of(bench.next())
        for fact in (str(tmp_path), "ftjob-1", "block 0, chunk 1", "within 0.05 s", "slow or hangs"):
            assert fact in failure.error
        bench.fill(9)
        released.set()
        bench.server.stop()
        assert bench.is_silent()  # it arrived and was not reported: the slot still belonged to the server

    def test_broken_thread_of_server_is_reported(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        """Otherwise its chunks would be waited for until their timeout, and a working SSD be blamed."""

        def breaks(region: StateRegion, *_: object) -> None:
            raise RuntimeError("a defect")

        monkeypatch.setattr(StateRegion, "note_written", breaks)
        bench.write(KEYS[:1])
        failure = failure_of(bench.next())
        assert failure.kind is FailureKind.UNFORESEEN
        assert failure.error == "RuntimeError: a defect (at write chunks of step 0, block 0)"

    def test_stop_delayed_by_hanging_ssd_reports_it(self, tmp_path: Path, hang: Hang) -> None:
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

    def test_full_queue_blocks_sender_and_hanging_ssd_is_named(self, tmp_path: Path, hang: Hang) -> None:
        bench = Bench(tmp_path, max_open_chunks=2)
        bench.setup()
        bench.write_all()
        _, released = hang("preadv")
        bench.read(KEYS[:2], id=1)
        bench.read(KEYS[2:3], id=2, deadline_s=0.05)
        assert "left 2 chunks waiting for 0.05 s" in failure_of(bench.next()).error
        waiting = threading.Thread(target=bench.read, args=(KEYS[3:4],), kwargs={"id": 3})
        waiting.start()
        released.set()
        waiting.join(WAIT_S)
        done = [bench.next()[1] for _ in range(3)]
        assert sorted(each.correlation for each in done if isinstance(each, ChunkIoDone)) == [1, 1, 3]
        bench.server.stop()
