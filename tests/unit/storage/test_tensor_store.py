import errno
import os
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from windlass.storage import store_format as layout
from windlass.storage.arena import Arena
from windlass.storage.ids import (
    STATE_ITEMSIZE,
    Attempt,
    BlockIndex,
    ChunkIndex,
    ChunkKey,
    JobId,
    Precision,
    Rank,
    Span,
    SsdIndex,
    StateKind,
    Step,
)
from windlass.storage.room import NotEnoughRoom
from windlass.storage.store_format import StoreCorrupt, StoreGeometry
from windlass.storage.tensor_store import (
    DirectIoRefused,
    StaleAttempt,
    StepNotAllowed,
    StoreExists,
    StoreIoError,
    TensorStore,
    store_path,
)

JOB = JobId("ftjob-1")
GEOMETRY = StoreGeometry(
    job=JOB,
    rank=Rank(0),
    attempt=Attempt(1),
    ssd=SsdIndex(0),
    num_ssds=1,
    precision=Precision.BF16,
    chunk_numel=2048,
    chunks_per_block=(2, 1),
)
KEY = ChunkKey(BlockIndex(0), ChunkIndex(1))
Aligned = Callable[[bytes], memoryview]


def _fill(store: TensorStore, step: int, aligned: Aligned) -> None:
    """Write every state of every chunk, each with bytes that tell which it is."""
    for key, kind in _states(store.geometry):
        store.write(key, kind, Step(step), aligned(_content(store.geometry, key, kind, step)))


def _check(store: TensorStore, step: int, aligned: Aligned) -> None:
    for key, kind in _states(store.geometry):
        expected = _content(store.geometry, key, kind, step)
        buffer = aligned(bytes(len(expected)))
        store.read(key, kind, Step(step), buffer)
        assert buffer == expected, (key, kind, step)


def _states(geometry: StoreGeometry) -> list[tuple[ChunkKey, StateKind]]:
    keys = [ChunkKey(BlockIndex(b), ChunkIndex(c)) for b, n in enumerate(geometry.chunks_per_block) for c in range(n)]
    kinds = STATE_ITEMSIZE[geometry.precision]
    return [(key, kind) for key in keys if geometry.ssd_of(key) == geometry.ssd for kind in kinds]


def _content(geometry: StoreGeometry, key: ChunkKey, kind: StateKind, step: int) -> bytes:
    return random.Random(f"{key} {kind} {step}").randbytes(geometry.region_nbytes(kind))


def _corrupt(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0xFF]))


class TestRoundtrip:
    @pytest.mark.parametrize("precision", Precision)
    def test_two_striped_stores_and_an_arena_mapped_twice(
        self, tmp_path: Path, direct: bool, precision: Precision
    ) -> None:
        numel = 4096
        stores = []
        for i in range(2):
            (tmp_path / f"ssd{i}").mkdir()
            geometry = replace(
                GEOMETRY,
                ssd=SsdIndex(i),
                num_ssds=2,
                precision=precision,
                chunk_numel=numel,
                chunks_per_block=(2, 1, 4),
            )
            stores.append(TensorStore.create(tmp_path / f"ssd{i}", geometry, direct=direct))
        written_from = Arena.create(tmp_path / "arena", 4 * numel)
        seen_by_other = Arena.open(tmp_path / "arena")
        all_states = [(store, key, kind) for store in stores for key, kind in _states(store.geometry)]
        assert len(all_states) == 7 * len(STATE_ITEMSIZE[precision])
        for store, key, kind in all_states:
            content = _content(store.geometry, key, kind, 0)
            buffer = written_from.buffer(Span(0, len(content)))
            buffer[:] = content
            store.write(key, kind, Step(0), buffer)
        for store, key, kind in reversed(all_states):
            content = _content(store.geometry, key, kind, 0)
            store.read(key, kind, Step(0), written_from.buffer(Span(0, len(content))))
            assert seen_by_other.buffer(Span(0, len(content))) == content

    def test_partly_filled_chunk(self, tmp_path: Path, direct: bool, aligned: Aligned) -> None:
        store = TensorStore.create(tmp_path, GEOMETRY, direct=direct)
        _fill(store, 0, aligned)
        store.write(KEY, StateKind.MASTER, Step(0), aligned(b"p" * 4096))
        buffer = aligned(bytes(8192))
        store.read(KEY, StateKind.MASTER, Step(0), buffer)
        assert buffer == b"p" * 4096 + _content(GEOMETRY, KEY, StateKind.MASTER, 0)[4096:]
        short = aligned(bytes(4096))
        store.read(KEY, StateKind.MASTER, Step(0), short)
        assert short == b"p" * 4096

    @pytest.mark.parametrize("nbytes", [0, 100, 8192 + 4096])
    def test_wrong_length_is_refused(self, tmp_path: Path, nbytes: int) -> None:
        store = TensorStore.create(tmp_path, GEOMETRY, direct=False)
        with pytest.raises(ValueError, match=f"^{nbytes} bytes cannot be the master .* up to 8192"):
            store.write(KEY, StateKind.MASTER, Step(0), memoryview(bytes(nbytes)))

    def test_states_survive_closing(self, tmp_path: Path, direct: bool, aligned: Aligned) -> None:
        store = TensorStore.create(tmp_path, GEOMETRY, direct=direct)
        _fill(store, 0, aligned)
        store.commit(Step(0), Attempt(1), "{}")
        store.close()
        store = TensorStore.open(tmp_path, JOB, Attempt(2), direct=direct)
        assert store.geometry == GEOMETRY
        _check(store, 0, aligned)


class TestGenerations:
    def test_next_step_leaves_the_committed_one_untouched(self, tmp_path: Path, aligned: Aligned) -> None:
        store = TensorStore.create(tmp_path, GEOMETRY, direct=False)
        _fill(store, 0, aligned)
        store.commit(Step(0), Attempt(1), "{}")
        for step in (1, 2, 3):
            _fill(store, step, aligned)
            _check(store, step, aligned)
            _check(store, step - 1, aligned)
            store.commit(Step(step), Attempt(1), "{}")

    def test_only_the_step_after_the_commit_may_be_written(self, tmp_path: Path, aligned: Aligned) -> None:
        store = TensorStore.create(tmp_path, GEOMETRY, direct=False)
        _fill(store, 0, aligned)
        store.commit(Step(0), Attempt(1), "{}")
        _fill(store, 1, aligned)
        page = aligned(bytes(4096))
        for step in (0, 2, 3):
            with pytest.raises(StepNotAllowed, match=f"cannot write step {step} when step 0 is the last commit"):
                store.write(KEY, StateKind.PARAM, Step(step), page)
        _check(store, 0, aligned)
        store.commit(Step(1), Attempt(1), "{}")
        store.write(KEY, StateKind.PARAM, Step(2), page)

    def test_states_that_may_be_overwritten_are_not_read(self, tmp_path: Path, aligned: Aligned) -> None:
        store = TensorStore.create(tmp_path, GEOMETRY, direct=False)
        for step in (0, 1):
            _fill(store, step, aligned)
            store.commit(Step(step), Attempt(1), "{}")
        for step in (0, 3):
            with pytest.raises(StepNotAllowed, match="only steps 1 and 2 are held"):
                store.read(KEY, StateKind.PARAM, Step(step), aligned(bytes(4096)))
        store.read(KEY, StateKind.PARAM, Step(1), aligned(bytes(4096)))


class TestCommit:
    def test_none_before_the_first(self, tmp_path: Path) -> None:
        assert TensorStore.create(tmp_path, GEOMETRY, direct=False).last_commit() is None

    def test_last_is_found_after_reopening_and_wrapping_round(self, tmp_path: Path) -> None:
        store = TensorStore.create(tmp_path, replace(GEOMETRY, rank=Rank(3)), direct=False)
        last_step = layout.NUM_COMMIT_RECORDS + 5
        for step in range(last_step + 1):
            store.commit(Step(step), Attempt(1), f'{{"step": {step}}}')
        for found in (store, TensorStore.open(tmp_path, JOB, Attempt(1), direct=False)):
            record = found.last_commit()
            assert record is not None
            assert (record.step, record.attempt, record.rank) == (last_step, 1, 3)
            assert record.trainer_state == f'{{"step": {last_step}}}'

    @pytest.mark.parametrize("at", [0, 8, 60, 4095])
    def test_torn_or_corrupt_record_is_ignored(self, tmp_path: Path, aligned: Aligned, at: int) -> None:
        store = TensorStore.create(tmp_path, GEOMETRY, direct=False)
        for step in (0, 1):
            _fill(store, step, aligned)
            store.commit(Step(step), Attempt(1), '{"loss": 2.5}')
        store.close()
        _corrupt(store.path, layout.JOURNAL_OFFSET + layout.RECORD_NBYTES + at)
        store = TensorStore.open(tmp_path, JOB, Attempt(2), direct=False)
        record = store.last_commit()
        assert record is not None
        assert record.step == 0
        _check(store, 0, aligned)
        _fill(store, 1, aligned)
        store.commit(Step(1), Attempt(2), "{}")
        again = TensorStore.open(tmp_path, JOB, Attempt(2), direct=False).last_commit()
        assert again is not None
        assert (again.step, again.attempt) == (1, 2)

    def test_data_is_synced_before_the_record_and_the_record_after(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = TensorStore.create(tmp_path, GEOMETRY, direct=False)
        calls: list[str] = []
        real_sync, real_write = os.fdatasync, os.pwrite

        def sync(fd: int) -> None:
            calls.append("sync")
            real_sync(fd)

        def write(fd: int, raw: bytes, offset: int) -> int:
            calls.append("record")
            return real_write(fd, raw, offset)

        monkeypatch.setattr(os, "fdatasync", sync)
        monkeypatch.setattr(os, "pwrite", write)
        store.commit(Step(0), Attempt(1), "{}")
        assert calls == ["sync", "record", "sync"]

    def test_failed_sync_is_final(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = TensorStore.create(tmp_path, GEOMETRY, direct=False)
        store.commit(Step(0), Attempt(1), "{}")

        def fail(fd: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(StoreIoError, match=r"could not sync the commit of step 1: .*Input/output error"):
                store.commit(Step(1), Attempt(1), "{}")
        with pytest.raises(StoreIoError, match="an earlier sync failed"):
            store.commit(Step(1), Attempt(1), "{}")
        record = store.last_commit()
        assert record is not None
        assert record.step == 0

    def test_steps_are_committed_once_and_in_order(self, tmp_path: Path) -> None:
        store = TensorStore.create(tmp_path, GEOMETRY, direct=False)
        store.commit(Step(0), Attempt(1), "{}")
        for step in (0, 2):
            with pytest.raises(StepNotAllowed, match=f"cannot commit step {step}"):
                store.commit(Step(step), Attempt(1), "{}")


class TestAttempts:
    def test_older_attempt_can_neither_open_write_nor_commit(self, tmp_path: Path, aligned: Aligned) -> None:
        lost = TensorStore.create(tmp_path, GEOMETRY, direct=False)
        _fill(lost, 0, aligned)
        lost.commit(Step(0), Attempt(1), "{}")
        successor = TensorStore.open(tmp_path, JOB, Attempt(3), direct=False)
        with pytest.raises(StaleAttempt, match="attempt 3 has taken over; attempt 1"):
            lost.write(KEY, StateKind.PARAM, Step(1), aligned(bytes(4096)))
        with pytest.raises(StaleAttempt):
            lost.commit(Step(1), Attempt(1), "{}")
        with pytest.raises(StaleAttempt, match="attempt 3 has taken over; attempt 2"):
            TensorStore.open(tmp_path, JOB, Attempt(2), direct=False)
        _fill(successor, 1, aligned)
        successor.commit(Step(1), Attempt(3), "{}")
        _check(successor, 1, aligned)

    def test_commit_for_another_attempt_is_refused(self, tmp_path: Path) -> None:
        store = TensorStore.create(tmp_path, GEOMETRY, direct=False)
        with pytest.raises(StaleAttempt, match="open for attempt 1; attempt 2"):
            store.commit(Step(0), Attempt(2), "{}")

    def test_torn_fence_leaves_the_other_one(self, tmp_path: Path) -> None:
        TensorStore.create(tmp_path, GEOMETRY, direct=False).close()
        path = store_path(tmp_path, JOB)
        for attempt in (2, 3):
            TensorStore.open(tmp_path, JOB, Attempt(attempt), direct=False).close()
        # Attempts 2 and 3 lie in different places: damaging either must leave at least attempt 2's fence.
        pristine = path.read_bytes()
        for place in (0, 1):
            path.write_bytes(pristine)
            _corrupt(path, layout.FENCE_OFFSET + place * layout.RECORD_NBYTES + 20)
            with pytest.raises(StaleAttempt):
                TensorStore.open(tmp_path, JOB, Attempt(1), direct=False)

    def test_highest_attempt_wins_over_a_higher_step(self, tmp_path: Path, aligned: Aligned) -> None:
        store = TensorStore.create(tmp_path, GEOMETRY, direct=False)
        for step in (0, 1, 2):
            _fill(store, step, aligned)
            store.commit(Step(step), Attempt(1), f'{{"step": {step}}}')
        store.close()
        # Another SSD of the job has step 1 only, so the job goes back to it.
        store = TensorStore.open(tmp_path, JOB, Attempt(2), direct=False)
        store.roll_back(Step(1))
        store.close()
        store = TensorStore.open(tmp_path, JOB, Attempt(2), direct=False)
        record = store.last_commit()
        assert record is not None
        assert (record.step, record.attempt, record.trainer_state) == (1, 2, '{"step": 1}')
        _check(store, 1, aligned)
        store.roll_back(Step(1))  # already there: nothing happens
        _fill(store, 2, aligned)
        store.commit(Step(2), Attempt(2), "{}")
        with pytest.raises(StepNotAllowed, match="committed step 2 itself"):
            store.roll_back(Step(1))

    def test_no_way_back_to_states_that_are_gone(self, tmp_path: Path) -> None:
        store = TensorStore.create(tmp_path, GEOMETRY, direct=False)
        with pytest.raises(StepNotAllowed, match="nothing is committed"):
            store.roll_back(Step(0))
        for step in (0, 1, 2):
            store.commit(Step(step), Attempt(1), "{}")
        store = TensorStore.open(tmp_path, JOB, Attempt(2), direct=False)
        with pytest.raises(StepNotAllowed, match="cannot go back to step 0; step 2 is the last"):
            store.roll_back(Step(0))


class TestCreate:
    def test_file_is_private_and_wholly_allocated(self, tmp_path: Path, direct: bool) -> None:
        store = TensorStore.create(tmp_path, GEOMETRY, direct=direct)
        facts = store.path.stat()
        assert store.path == tmp_path / "ftjob-1.store"
        assert facts.st_mode & 0o777 == 0o600
        assert facts.st_size == GEOMETRY.file_nbytes == (1 << 20) + 2 * 3 * 14 * 2048
        assert facts.st_blocks * 512 >= facts.st_size
        assert list(tmp_path.iterdir()) == [store.path]
        store.delete()
        assert list(tmp_path.iterdir()) == []

    def test_too_small_disk_is_refused_before_anything_is_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened: list[str] = []
        real_open = os.open

        def record(path: str, *args: int) -> int:
            opened.append(str(path))
            return real_open(path, *args)

        monkeypatch.setattr(os, "open", record)
        huge = replace(GEOMETRY, chunk_numel=1 << 50)
        with pytest.raises(NotEnoughRoom) as caught:
            TensorStore.create(tmp_path, huge)
        assert caught.value.needed_nbytes == huge.file_nbytes
        assert f"{huge.file_nbytes} bytes" in str(caught.value)
        assert f"{caught.value.free_nbytes} bytes" in str(caught.value)
        assert opened == []
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    def test_disk_full_meanwhile_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        def full(fd: int, offset: int, nbytes: int) -> None:
            os.ftruncate(fd, nbytes // 2)
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(NotEnoughRoom, match="model states of job ftjob-1 on SSD 0"):
            TensorStore.create(tmp_path, GEOMETRY, direct=False)
        assert list(tmp_path.iterdir()) == []

    def test_file_system_without_o_direct_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real_open = os.open

        def refuse(path: str, flags: int, *args: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real_open(path, flags, *args)

        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(DirectIoRefused, match=f"{tmp_path} refuses O_DIRECT"):
            TensorStore.create(tmp_path, GEOMETRY)
        assert list(tmp_path.iterdir()) == []
        TensorStore.create(tmp_path, GEOMETRY, direct=False).close()

    def test_existing_store_is_kept(self, tmp_path: Path, aligned: Aligned) -> None:
        store = TensorStore.create(tmp_path, GEOMETRY, direct=False)
        _fill(store, 0, aligned)
        with pytest.raises(StoreExists, match=r"ftjob-1\.store exists"):
            TensorStore.create(tmp_path, GEOMETRY, direct=False)
        _check(store, 0, aligned)

    def test_what_a_crash_left_unfinished_is_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "ftjob-1.unfinished").write_bytes(b"half")
        store = TensorStore.create(tmp_path, GEOMETRY, direct=False)
        assert list(tmp_path.iterdir()) == [store.path]

    def test_missing_directory_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="ssd9 does not exist"):
            TensorStore.create(tmp_path / "ssd9", GEOMETRY)


class TestOpen:
    def test_missing_store(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"ftjob-1\.store"):
            TensorStore.open(tmp_path, JOB, Attempt(1))

    def test_damaged_cut_and_foreign_files(self, tmp_path: Path) -> None:
        TensorStore.create(tmp_path, GEOMETRY, direct=False).close()
        path = store_path(tmp_path, JOB)
        path.rename(store_path(tmp_path, JobId("ftjob-2")))
        with pytest.raises(StoreCorrupt, match="holds the states of job ftjob-1, not of ftjob-2"):
            TensorStore.open(tmp_path, JobId("ftjob-2"), Attempt(1), direct=False)
        store_path(tmp_path, JobId("ftjob-2")).rename(path)
        os.truncate(path, GEOMETRY.file_nbytes - 4096)
        with pytest.raises(StoreCorrupt, match=f"not the {GEOMETRY.file_nbytes}"):
            TensorStore.open(tmp_path, JOB, Attempt(1), direct=False)
        _corrupt(path, 30)
        with pytest.raises(StoreCorrupt, match="damaged"):
            TensorStore.open(tmp_path, JOB, Attempt(1), direct=False)


class TestIoErrors:
    def test_short_reads_and_writes_are_completed(
        self, tmp_path: Path, aligned: Aligned, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = TensorStore.create(tmp_path, GEOMETRY, direct=False)
        real_read, real_write = os.preadv, os.pwritev
        calls = SimpleNamespace(reads=0, writes=0)

        def short_read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            calls.reads += 1
            return real_read(fd, [buffers[0][:512]], offset)

        def short_write(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            calls.writes += 1
            return real_write(fd, [buffers[0][:1024]], offset)

        monkeypatch.setattr(os, "preadv", short_read)
        monkeypatch.setattr(os, "pwritev", short_write)
        content = random.Random(1).randbytes(8192)
        store.write(KEY, StateKind.MASTER, Step(0), aligned(content))
        buffer = aligned(bytes(8192))
        store.read(KEY, StateKind.MASTER, Step(0), buffer)
        assert buffer == content
        assert (calls.reads, calls.writes) == (16, 8)

    @pytest.mark.parametrize(("verb", "function"), [("read", "preadv"), ("write", "pwritev")])
    def test_error_names_directory_job_chunk_and_kind(
        self, tmp_path: Path, aligned: Aligned, monkeypatch: pytest.MonkeyPatch, verb: str, function: str
    ) -> None:
        store = TensorStore.create(tmp_path, GEOMETRY, direct=False)

        def fail(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, function, fail)
        with pytest.raises(StoreIoError) as caught:
            getattr(store, verb)(KEY, StateKind.EXP_AVG, Step(0), aligned(bytes(4096)))
        text = str(pickle.loads(pickle.dumps(caught.value)))
        for part in (str(tmp_path), "ftjob-1", verb, "exp_avg of block 0, chunk 1, step 0", "Input/output error"):
            assert part in text

    def test_end_of_file_is_an_error_not_a_short_answer(self, tmp_path: Path, aligned: Aligned) -> None:
        store = TensorStore.create(tmp_path, GEOMETRY, direct=False)
        os.truncate(store.path, layout.EXTENTS_OFFSET)
        with pytest.raises(StoreIoError, match=r"could not read param .* the file ends at byte"):
            store.read(KEY, StateKind.PARAM, Step(0), aligned(bytes(4096)))

    def test_disk_that_takes_nothing_is_an_error(
        self, tmp_path: Path, aligned: Aligned, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = TensorStore.create(tmp_path, GEOMETRY, direct=False)
        monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: 0)
        with pytest.raises(StoreIoError, match="took no bytes"):
            store.write(KEY, StateKind.PARAM, Step(0), aligned(bytes(4096)))
