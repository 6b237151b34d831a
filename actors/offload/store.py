"""The store of offloaded layers' states on SSDs, with the host memory for transfers, in one process."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from windlass.actors.job import SCHEDULER, calibration_of, ssd_name
from windlass.actors.messages import ActorFailed, ChunkIoDone, Message, ReadChunks, WriteChunks
from windlass.actors.offload.errors import OffloadFailedError
from windlass.actors.ssd import SsdServer, chunk_io
from windlass.storage.files import lock, open_lock_file, try_lock
from windlass.storage.ids import (
    ActorName,
    Attempt,
    ChunkKey,
    CorrelationId,
    Formats,
    JobId,
    Rank,
    Span,
    SsdIndex,
    StateKind,
    Step,
)
from windlass.storage.memory import Arena, arena_path, remove_leftovers
from windlass.storage.ssd import Calibration, Volume, stripe_weights
from windlass.storage.store import StoreGeometry, TensorStore

_CLIENT = ActorName("offload")
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
        deadline_s: float,
        direct_io: bool,
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Reserves the space on the SSDs and in memory. `on_failure` is called from threads of the SSD servers.

        Raises:
            InsufficientSpaceError: there is too little space. Nothing stays reserved.
        """
        self.formats = formats
        self.chunk_numel = chunk_numel
        self._deadline_s = deadline_s
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._correlation = 0
        self._open: dict[CorrelationId, Callable[[], None]] = {}
        self._job = JobId(f"{_PREFIX}{os.getpid()}-{time.time_ns():x}")
        remove_leftovers(arena_dir)
        calibrations = _survey(ssd_dirs, direct_io)
        weights = stripe_weights([calibration.mixed_bytes_per_s for calibration in calibrations])
        self._locks: list[tuple[Path, int]] = []
        self._servers: list[SsdServer] = []
        self._arena = Arena.create(arena_path(arena_dir, self._job, _ATTEMPT), arena_nbytes)
        self.memory = torch.frombuffer(self._arena.buffer(Span(0, arena_nbytes)), dtype=torch.uint8)
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
                server = SsdServer(
                    ssd_name(i),
                    directory,
                    geometry,
                    self._arena.path,
                    self._send,
                    io=calibrations[i].io,
                    direct=direct_io,
                )
                server.setup()
                self._servers.append(server)
                server.resume_from(None)
        except BaseException:
            self.close()
            raise

    @property
    def bytes_read(self) -> int:
        """The bytes read from the SSDs so far."""
        return sum(server.bytes_read for server in self._servers)

    @property
    def bytes_written(self) -> int:
        """The bytes written to the SSDs so far."""
        return sum(server.bytes_written for server in self._servers)

    def read(
        self, key: ChunkKey, numel: int, step: Step, offsets: Mapping[StateKind, int], priority: tuple[int, int],
        on_done: Callable[[], None],
    ) -> None:  # fmt: skip
        """Requests states of a chunk, as of `step`, at `offsets` of the memory. Smaller priorities go first.

        `on_done` is called from another thread.
        """
        self._request(ReadChunks, key, numel, step, offsets, priority, on_done)

    def write(
        self, key: ChunkKey, numel: int, step: Step, offsets: Mapping[StateKind, int], priority: tuple[int, int],
        on_done: Callable[[], None],
    ) -> None:  # fmt: skip
        """Requests the write of a chunk's states as those of `step`.

        The memory may be reused once `on_done` is called, from another thread.
        """
        self._request(WriteChunks, key, numel, step, offsets, priority, on_done)

    def close(self) -> None:
        """Finishes all transfers and releases the space. No tensor of the memory may be used afterwards."""
        for server in self._servers:
            server.stop(delete_store=True)
        self._servers.clear()
        del self.memory
        self._arena.close()
        self._arena.unlink()
        for path, descriptor in self._locks:
            path.unlink(missing_ok=True)
            os.close(descriptor)
        self._locks.clear()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _request(
        self, kind: type[ReadChunks] | type[WriteChunks], key: ChunkKey, numel: int, step: Step,
        offsets: Mapping[StateKind, int], priority: tuple[int, int], on_done: Callable[[], None],
    ) -> None:  # fmt: skip
        with self._lock:
            self._correlation += 1
            correlation = CorrelationId(self._correlation)
            self._open[correlation] = on_done
        request = kind(
            job=self._job,
            step=step,
            correlation=correlation,
            reply_to=_CLIENT,
            priority=priority,
            deadline_s=self._deadline_s,
            items=(chunk_io(key, numel, offsets, self.formats.itemsizes),),
        )
        self._servers[self._geometry.ssd_of(key)].post(request)

    def _send(self, to: ActorName, message: Message) -> None:
        match message:
            case ChunkIoDone():
                with self._lock:
                    on_done = self._open.pop(message.correlation)
                on_done()
            case ActorFailed():
                assert to == SCHEDULER, "failures are sent only to the scheduler"
                self._on_failure(OffloadFailedError(message.error))


def _survey(ssd_dirs: Sequence[Path], direct_io: bool) -> list[Calibration]:
    """Returns the calibration of each SSD, measured now if there is none.

    Also creates missing directories and deletes states that dead processes left.
    """
    calibrations = []
    for directory in ssd_dirs:
        if directory.is_block_device():
            raise ValueError(f"ssd_dirs names {directory}, a raw device; windlass.offload takes directories only")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        volume = Volume.open(directory, direct=direct_io)
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
