"""The store of offloaded layers' states on SSDs, with the host memory for transfers, in one process."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from windlass.actors.job import aligned, calibration_of
from windlass.actors.offload.errors import CannotOffloadError, OffloadFailedError, OffloadToken
from windlass.engine.device import TensorArena
from windlass.storage.files import lock, open_lock_file, try_lock
from windlass.storage.ids import (
    Attempt,
    ChunkKey,
    Formats,
    JobId,
    Rank,
    Span,
    SsdIndex,
    StateKind,
    Step,
)
from windlass.storage.io_scheduler import IoScheduler, IoTerms
from windlass.storage.memory import Arena, arena_path, remove_leftovers
from windlass.storage.ssd import Calibration, Volume, stripe_weights
from windlass.storage.store import JobSpace, StoreGeometry, TensorStore

_ATTEMPT = Attempt(1)
_PREFIX = "offload-"


class OffloadStore:
    """Reads and writes states of chunks.

    `close` deletes all of them; after a crash, the next use of the SSD does.
    """

    def __init__(
        self,
        ssd_dirs: Sequence[Path],
        *,
        formats: Formats,
        chunk_numel: int,
        chunks_per_block: tuple[int, ...],
        arena_dir: Path,
        arena_nbytes: int,
        node: int | None,
        direct_io: bool,
        token: OffloadToken,
    ) -> None:
        """Reserves the space on the SSDs and in memory. `token` gets the errors of transfers.

        `node` is the NUMA node of the memory; see `Arena.create`.

        Raises:
            InsufficientSpaceError: there is too little space. Nothing stays reserved.
            CannotOffloadError: a directory cannot be used.
        """
        self.formats = formats
        self.chunk_numel = chunk_numel
        self._token = token
        self._job = JobId(f"{_PREFIX}{os.getpid()}-{time.time_ns():x}")
        remove_leftovers(arena_dir)
        calibrations = _survey(ssd_dirs, direct_io)
        weights = stripe_weights([calibration.mixed_bytes_per_s for calibration in calibrations])
        self._locks: list[tuple[Path, int]] = []
        self._spaces: list[JobSpace] = []
        self._schedulers: list[IoScheduler] = []
        self._arena = Arena.create(arena_path(arena_dir, self._job, _ATTEMPT), arena_nbytes, node=node)
        self.arena = TensorArena.of(self._arena)
        self._io_arena = Arena.open(self._arena.path)  # a mapping with full page tables, which no GPU has pinned
        try:
            for i, directory in enumerate(ssd_dirs):
                self._locks.append(_lock(directory, self._job))
                geometry = StoreGeometry(
                    job=self._job,
                    rank=Rank(0),
                    attempt=_ATTEMPT,
                    ssd=SsdIndex(i),
                    ssd_weights=weights,
                    formats=formats,
                    chunk_numel=chunk_numel,
                    chunks_per_block=chunks_per_block,
                )
                self._geometry = geometry
                space = JobSpace.open(directory, geometry, direct=direct_io)
                self._spaces.append(space)
                space.store.resume_from(None)
                scheduler = IoScheduler.start(f"{_PREFIX}{i}", space, self._io_arena, token, calibrations[i].io)
                self._schedulers.append(scheduler)
        except BaseException:
            self.close()
            raise

    @property
    def bytes_read(self) -> int:
        """The bytes read from the SSDs so far."""
        return sum(scheduler.bytes_read for scheduler in self._schedulers)

    @property
    def bytes_written(self) -> int:
        """The bytes written to the SSDs so far."""
        return sum(scheduler.bytes_written for scheduler in self._schedulers)

    def describe_pending(self) -> str:
        """Describes the transfers that are not done, by the oldest one of each SSD; "" if there are none."""
        return "; ".join(filter(None, (scheduler.describe_open() for scheduler in self._schedulers)))

    def read(
        self, key: ChunkKey, numel: int, step: Step, offsets: Mapping[StateKind, int], priority: tuple[int, int],
        on_done: Callable[[], None],
    ) -> None:  # fmt: skip
        """Requests states of a chunk, as of `step`, at `offsets` of the memory. Smaller priorities go first.

        `on_done` is called from another thread.
        """
        self._scheduler_of(key).read(key, step, self._parts(numel, offsets), self._terms(priority, on_done))

    def write(
        self, key: ChunkKey, numel: int, step: Step, offsets: Mapping[StateKind, int], priority: tuple[int, int],
        on_done: Callable[[], None],
    ) -> None:  # fmt: skip
        """Requests the write of a chunk's states as those of `step`.

        The memory may be reused once `on_done` is called, from another thread.
        """
        self._scheduler_of(key).write(key, step, self._parts(numel, offsets), self._terms(priority, on_done))

    def close(self) -> None:
        """Finishes all transfers and releases the space. No tensor of the memory may be used afterwards."""
        for scheduler in self._schedulers:
            scheduler.close()
        for space in self._spaces:
            space.close(delete=True)
        self._spaces.clear()
        self.arena.release()
        self._io_arena.close()
        self._arena.close()
        self._arena.unlink()
        for path, descriptor in self._locks:
            path.unlink(missing_ok=True)
            os.close(descriptor)
        self._locks.clear()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _scheduler_of(self, key: ChunkKey) -> IoScheduler:
        return self._schedulers[self._geometry.ssd_of(key)]

    def _parts(self, numel: int, offsets: Mapping[StateKind, int]) -> list[tuple[StateKind, Span]]:
        sizes = self.formats.itemsizes
        return [(kind, Span(offset, aligned(numel * sizes[kind]))) for kind, offset in offsets.items()]

    def _terms(self, priority: tuple[int, int], on_done: Callable[[], None]) -> IoTerms:
        return IoTerms(
            priority=priority,
            on_done=lambda _: on_done(),
            on_failed=self._fail,
        )

    def _fail(self, error: Exception) -> None:
        # Only the text, because the frames of the error's traceback hold buffers of the arena.
        self._token.fail(OffloadFailedError(f"{type(error).__name__}: {error}"))


def _survey(ssd_dirs: Sequence[Path], direct_io: bool) -> list[Calibration]:
    """Returns the calibration of each SSD, measured now if there is none.

    Also creates missing directories and deletes states that dead processes left.
    """
    calibrations = []
    for directory in ssd_dirs:
        if directory.is_block_device():
            raise ValueError(f"ssd_dirs names {directory}, a raw device; windlass.offload takes directories only")
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            volume = Volume.open(directory, direct=direct_io)
        except OSError as error:
            raise CannotOffloadError(f"ssd_dirs names {directory}, which cannot be used: {error.strerror}") from error
        try:
            calibrations.append(calibration_of(volume))
            _delete_leftovers(directory, volume)
        finally:
            volume.close()
    return calibrations


# A process that offloads to a directory locks a file there. The kernel releases the lock when the process ends.


def _lock_path(directory: Path, job: str) -> Path:
    return directory / f"windlass-{job}.lock"


def _lock(directory: Path, job: JobId) -> tuple[Path, int]:
    path = _lock_path(directory, job)
    descriptor = open_lock_file(path)
    lock(descriptor)
    return path, descriptor


def _delete_leftovers(directory: Path, volume: Volume) -> None:
    """Deletes states that dead processes left. A missing lock file means that their deletion had already begun."""
    for job in volume.allocations():
        if not job.startswith(_PREFIX):
            continue
        path = _lock_path(directory, job)
        descriptor = open_lock_file(path)
        try:
            if try_lock(descriptor):
                TensorStore.delete(volume, job)
                path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
