"""Helpers for tests of the tensor store: small jobs, their bytes, and SSDs that do not wait for a disk."""

import mmap
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.storage.direct_store import DirectStore
from windlass.storage.ids import (
    Attempt,
    BlockIndex,
    ChunkIndex,
    ChunkKey,
    Formats,
    JobId,
    Precision,
    Rank,
    SsdIndex,
    StateKind,
    StatePrecision,
)
from windlass.storage.ids import Step as StepId
from windlass.storage.ssd.device import SsdDevice
from windlass.storage.ssd.volume import VOLUME_FILE, Volume
from windlass.storage.store.format import CommitRecord, StoreGeometry

FP32 = Formats(Precision.FP32, StatePrecision.FP32)
BF16 = Formats(Precision.BF16, StatePrecision.FP32)
JOB, OTHER = JobId("ftjob-1"), JobId("ftjob-2")
# Bytes that a file system may add to a fragmented file for its index of extents.
FILE_INDEX_NBYTES = 4096


class QuickDevice(SsdDevice):
    """A device that never waits for the disk, because these tests lose no power."""

    def sync(self) -> None:
        pass


def make_geometry(job: JobId = JOB, **changes: Any) -> StoreGeometry:
    """A geometry of three chunks of 28 KiB on one SSD, unless changed."""
    facts: dict[str, Any] = {
        "job": job,
        "rank": Rank(0),
        "attempt": Attempt(1),
        "ssd": SsdIndex(0),
        "ssd_weights": (1,),
        "formats": BF16,
        "chunk_numel": 2048,
        "chunks_per_block": (2, 1),
    }
    return StoreGeometry(**{**facts, **changes})


# Extents of 448 KiB: the rest of the last unit holds none or two of them, never the three of a whole step.
LARGE = make_geometry(chunk_numel=32768)


def open_volume(path: Path, *, direct: bool = False, make_device: Callable[..., SsdDevice] = QuickDevice) -> Volume:
    """The volume of an SSD directory, made if there is none."""
    return Volume.open(path, direct=direct, make_device=make_device)


def new_store(volume: Volume, geometry: StoreGeometry | None = None) -> DirectStore:
    """A new store of a job, ready for its first step."""
    store = DirectStore.create(volume, make_geometry() if geometry is None else geometry)
    store.resume_from(None)
    return store


def resume(volume: Volume, attempt: int, job: JobId = JOB) -> DirectStore:
    """The store of a job of one SSD as a new attempt finds it."""
    store = DirectStore.open(volume, job, Attempt(attempt))
    store.resume_from(store.commits()[-1] if store.commits() else None)
    return store


def states(geometry: StoreGeometry) -> Iterator[tuple[ChunkKey, StateKind]]:
    """Every chunk and state kind on a geometry's SSD."""
    for block, num in enumerate(geometry.chunks_per_block):
        for chunk in range(num):
            key = ChunkKey(BlockIndex(block), ChunkIndex(chunk))
            if geometry.ssd_of(key) == geometry.ssd:
                yield from ((key, kind) for kind in geometry.kinds)


def content(geometry: StoreGeometry, key: ChunkKey, kind: StateKind, step: int, attempt: int = 1) -> bytes:
    """Bytes that depend on job, chunk, kind, step and attempt."""
    seed = f"{geometry.job} {key} {kind} {step} {attempt}"
    return random.Random(seed).randbytes(geometry.region_nbytes(kind))


def page_aligned(raw: bytes) -> memoryview:
    """A page-aligned copy, as O_DIRECT needs it."""
    buffer = memoryview(mmap.mmap(-1, len(raw)))
    buffer[:] = raw
    return buffer


def fill(store: DirectStore, step: int) -> None:
    """Writes all states of a step."""
    for key, kind in states(store.geometry):
        raw = content(store.geometry, key, kind, step, store.attempt)
        store.write(key, kind, StepId(step), page_aligned(raw))


def commit(store: DirectStore, step: int, states_step: int | None = None) -> CommitRecord:
    """Writes a step and commits it; with `states_step`, only commits it, with the states of that step."""
    if states_step is None:
        fill(store, step)
    of = None if states_step is None else StepId(states_step)
    store.commit(StepId(step), store.attempt, f'{{"step": {step}}}', states_step=of)
    record = store.last_commit()
    assert record is not None
    return record


def gradient(geometry: StoreGeometry, key: ChunkKey, step: int, nbytes: int | None = None) -> bytes:
    """Bytes that depend on job, chunk and step. By default as many as an fp32 gradient has."""
    return random.Random(f"{geometry.job} {key} gradient {step}").randbytes(nbytes or 4 * geometry.chunk_numel)


def check_gradient(store: DirectStore, key: ChunkKey, step: int, nbytes: int | None = None) -> None:
    """Checks that a chunk's gradient is the one that `gradient` made."""
    expected = gradient(store.geometry, key, step, nbytes)
    found = page_aligned(bytes(len(expected)))
    store.read(key, StateKind.GRAD, StepId(step), found)
    assert found == expected, (key, step)


def keys(geometry: StoreGeometry) -> list[ChunkKey]:
    """All chunks of a geometry's SSD."""
    return list(dict.fromkeys(key for key, _ in states(geometry)))


def check(store: DirectStore, step: int, attempt: int = 1, written_as: int | None = None) -> None:
    """Checks that all states of `step` are those that `attempt` wrote, as that step or as `written_as`."""
    for key, kind in states(store.geometry):
        expected = content(store.geometry, key, kind, step if written_as is None else written_as, attempt)
        found = page_aligned(bytes(len(expected)))
        store.read(key, kind, StepId(step), found)
        assert found == expected, (key, kind, step)


def flip(file: Path, offset: int, bit: int = 0) -> None:
    """Flips one bit of a file."""
    fd = os.open(file, os.O_RDWR)
    try:
        os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ 1 << bit]), offset)
    finally:
        os.close(fd)


def volume_file(directory: Path) -> Path:
    """The file that holds an SSD directory's bytes."""
    return directory / VOLUME_FILE


def used_nbytes(file: Path) -> int:
    """Bytes that a file occupies on its file system."""
    return file.stat().st_blocks * 512


def make_record(sequence: int, step: int, attempt: int = 1, state: str = "{}") -> CommitRecord:
    """Returns an entry of the commit journal."""
    return CommitRecord(
        sequence=sequence,
        step=StepId(step),
        attempt=Attempt(attempt),
        rank=Rank(1),
        manifest=sequence % 7,
        manifest_digest=(1 << 64) - 1 - sequence,
        trainer_state=state,
    )
