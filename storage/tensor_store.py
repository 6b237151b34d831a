"""The model states of a job on one SSD: one preallocated file, read and written past the page cache.

Step t's states go to generation t % 2 of every extent, so writing them never touches the committed step t - 1.
"""

import errno
import fcntl
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from windlass.storage import store_format as layout
from windlass.storage.arena import ALIGNMENT_NBYTES
from windlass.storage.ids import Attempt, ChunkKey, JobId, StateKind, Step
from windlass.storage.room import NotEnoughRoom, directory_free_nbytes, require_disk_room
from windlass.storage.store_format import CommitRecord, StoreCorrupt, StoreError, StoreGeometry


class StoreExists(StoreError):
    """The directory already holds a store of this job."""


class StaleAttempt(StoreError):
    """A newer attempt of the job has taken the store; this one may not change it."""


class StepNotAllowed(StoreError):
    """Reading or writing that step would give, or destroy, states of another one."""


class DirectIoRefused(StoreError):
    """The directory's file system cannot read and write past the page cache."""


class StoreIoError(StoreError):
    """The SSD failed to read, write or sync."""


@dataclass(frozen=True, slots=True)
class Region:
    """Where the bytes of one state of a chunk lie in the file; checked, so that its pieces need no further check."""

    key: ChunkKey
    kind: StateKind
    step: Step
    offset: int
    nbytes: int  # that are to move: a last, partly filled chunk moves less than it could


def store_path(directory: Path | str, job: JobId) -> Path:
    """The file that holds a job's states in an SSD directory."""
    return Path(directory) / f"{job}.store"


class TensorStore:
    """One job's states on one SSD, open for one attempt. Reads and writes are safe from many threads at once."""

    def __init__(self, path: Path, geometry: StoreGeometry, attempt: Attempt, control_fd: int, data_fd: int) -> None:
        """Not for callers: use `create` or `open`."""
        self.path = path
        self.geometry = geometry
        self.attempt = attempt
        # Small records go through the page cache on a descriptor of their own: no aligned buffers, and the fence is
        # read at memory speed before every write. They share no page with the extents.
        self._control_fd = control_fd
        self._data_fd = data_fd
        self._records = _read_journal(control_fd)  # oldest first
        self._failed_sync: str | None = None
        self._lock = threading.Lock()  # one commit at a time

    @classmethod
    def create(cls, directory: Path | str, geometry: StoreGeometry, *, direct: bool = True) -> "TensorStore":
        """Make the store's file at its full size and open it for the attempt of `geometry`.

        Raises:
            NotEnoughRoom: the disk is too small; nothing is left behind.
            StoreExists: there is one already.
            DirectIoRefused: the file system refuses O_DIRECT; nothing is left behind.
        """
        directory = Path(directory)
        path = store_path(directory, geometry.job)
        if not directory.is_dir():
            raise ValueError(f"SSD directory {directory} does not exist; create it, or correct the setting")
        if path.exists():
            raise StoreExists(f"{path} exists; open it, or delete it if the job starts over")
        # Under another name until it is whole: a crash in here leaves nothing that looks like a store.
        unfinished = path.with_suffix(".unfinished")
        unfinished.unlink(missing_ok=True)
        try:
            _write_new_file(unfinished, geometry)
            if direct:
                os.close(_open_direct(unfinished))
            unfinished.rename(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        _sync_directory(directory)
        return cls._load(path, geometry.attempt, direct=direct)

    @classmethod
    def open(cls, directory: Path | str, job: JobId, attempt: Attempt, *, direct: bool = True) -> "TensorStore":
        """Open a job's store for `attempt`, and note it there: from then on older attempts are refused.

        A write of theirs that is in the kernel at this moment still lands: start only when their processes are gone.

        Raises:
            FileNotFoundError: the directory holds no store of this job.
            StoreCorrupt: the file is not a store, or damaged.
            StaleAttempt: a newer attempt has opened it.
        """
        path = store_path(directory, job)
        store = cls._load(path, attempt, direct=direct)
        try:
            if store.geometry.job != job:
                raise StoreCorrupt(f"{path} holds the states of job {store.geometry.job}, not of {job}")
            store._raise_fence()
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def _load(cls, path: Path, attempt: Attempt, *, direct: bool) -> "TensorStore":
        control_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            raw = os.pread(control_fd, layout.SUPERBLOCK_NBYTES, layout.SUPERBLOCK_OFFSET)
            geometry = layout.unpack_superblock(raw, str(path))
            nbytes = os.fstat(control_fd).st_size
            if nbytes != geometry.file_nbytes:
                raise StoreCorrupt(f"{path} has {nbytes} bytes, not the {geometry.file_nbytes} it was made with")
            data_fd = _open_direct(path) if direct else os.dup(control_fd)
        except BaseException:
            os.close(control_fd)
            raise
        return cls(path, geometry, attempt, control_fd, data_fd)

    def read(self, key: ChunkKey, kind: StateKind, step: Step, buffer: memoryview) -> None:
        """Fill `buffer` with the first bytes of a state, as `step` left it.

        The buffer's address and length are multiples of 4096; it may be shorter than the state.
        """
        self.read_piece(self.region_to_read(key, kind, step, buffer.nbytes), 0, buffer)

    def write(self, key: ChunkKey, kind: StateKind, step: Step, buffer: memoryview) -> None:
        """Write `buffer` as the first bytes of a state of `step`; it counts once the step is committed.

        The buffer's address and length are multiples of 4096; it may be shorter than the state.
        """
        self.write_piece(self.region_to_write(key, kind, step, buffer.nbytes), 0, buffer)

    def region_to_read(self, key: ChunkKey, kind: StateKind, step: Step, nbytes: int) -> Region:
        """Where to read, once it is sure that `step`'s states can lie there.

        Raises:
            StepNotAllowed: its generation has been, or may be being, written over.
        """
        last = self.last_commit()
        if last is not None and step not in (last.step, last.step + 1):
            raise StepNotAllowed(
                f"{self.path}: cannot read the states of step {step} when step {last.step} is the last commit; "
                f"only steps {last.step} and {last.step + 1} are held"
            )
        return self._region(key, kind, step, nbytes)

    def region_to_write(self, key: ChunkKey, kind: StateKind, step: Step, nbytes: int) -> Region:
        """Where to write, once it is sure that this destroys nothing.

        Raises:
            StaleAttempt: a newer attempt has opened the store.
            StepNotAllowed: it would write over the last committed states.
        """
        self._check_attempt()
        self._check_follows_commit(step, "write")
        return self._region(key, kind, step, nbytes)

    def read_piece(self, region: Region, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` of a region."""
        done = 0
        while done < buffer.nbytes:
            try:
                moved = os.preadv(self._data_fd, [buffer[done:]], region.offset + start + done)
            except OSError as error:
                raise self._io_error("read", region, error.errno, str(error)) from error
            if moved == 0:
                raise self._io_error("read", region, None, f"the file ends at byte {region.offset + start + done}")
            done += moved

    def write_piece(self, region: Region, start: int, buffer: memoryview) -> None:
        """Write `buffer` at byte `start` of a region."""
        done = 0
        while done < buffer.nbytes:
            try:
                moved = os.pwritev(self._data_fd, [buffer[done:]], region.offset + start + done)
            except OSError as error:
                raise self._io_error("write", region, error.errno, str(error)) from error
            if moved == 0:
                raise self._io_error("write", region, None, "the SSD took no bytes")
            done += moved

    def commit(self, step: Step, attempt: Attempt, trainer_state: str) -> None:
        """Make `step` the state that a restart finds: sync its data, append a record, sync that.

        Every write of the step must have returned. `trainer_state` is JSON of at most 3072 bytes.
        """
        if attempt != self.attempt:
            raise StaleAttempt(f"{self.path} is open for attempt {self.attempt}; attempt {attempt} cannot commit")
        with self._lock:
            self._check_attempt()
            self._check_follows_commit(step, "commit")
            self._append(step, trainer_state, sync_data=True)

    def last_commit(self) -> CommitRecord | None:
        """The highest step committed by the highest attempt that committed any; None before the first commit."""
        return max(self._records, key=lambda record: (record.attempt, record.step), default=None)

    def roll_back(self, step: Step) -> None:
        """Make the commit before the last one the last, for this attempt: another SSD of the job lacks the last one.

        Only right while no write of the step after the last commit has begun, on any SSD: nobody may begin one before
        every SSD of the job has committed.
        """
        with self._lock:
            self._check_attempt()
            last = self.last_commit()
            if last is not None and last.step == step:
                return
            before = [record for record in self._records if record.step == step]
            if last is None or step != last.step - 1 or not before:
                held = "nothing is committed" if last is None else f"step {last.step} is the last commit"
                raise StepNotAllowed(f"{self.path}: cannot go back to step {step}; {held}")
            if last.attempt == self.attempt:
                raise StepNotAllowed(
                    f"{self.path}: attempt {self.attempt} committed step {last.step} itself and cannot undo it"
                )
            state = max(before, key=lambda record: record.attempt).trainer_state
            self._append(step, state, sync_data=False)

    def close(self) -> None:
        """Close the file. No read or write may be running."""
        os.close(self._data_fd)
        os.close(self._control_fd)

    def delete(self) -> None:
        """Remove the store and close it; its disk space is free again."""
        self.path.unlink(missing_ok=True)
        self.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _region(self, key: ChunkKey, kind: StateKind, step: Step, nbytes: int) -> Region:
        full = self.geometry.region_nbytes(kind)
        if not 0 < nbytes <= full or nbytes % ALIGNMENT_NBYTES:
            raise ValueError(
                f"{nbytes} bytes cannot be the {kind} of {key}: a multiple of {ALIGNMENT_NBYTES} up to {full} is needed"
            )
        return Region(key, kind, step, self.geometry.region_offset(key, kind, step), nbytes)

    def _check_follows_commit(self, step: Step, verb: str) -> None:
        last = self.last_commit()
        if last is not None and step != last.step + 1:
            raise StepNotAllowed(
                f"{self.path}: cannot {verb} step {step} when step {last.step} is the last commit; only step "
                f"{last.step + 1} may change, until it is committed"
            )

    def _check_attempt(self) -> None:
        last = self.last_commit()
        seen = max(*self._read_fences(), self.attempt if last is None else last.attempt)
        if seen > self.attempt:
            raise StaleAttempt(f"{self.path}: attempt {seen} has taken over; attempt {self.attempt} may not change it")

    def _read_fences(self) -> list[Attempt]:
        raw = os.pread(self._control_fd, layout.NUM_FENCE_RECORDS * layout.RECORD_NBYTES, layout.FENCE_OFFSET)
        size = layout.RECORD_NBYTES
        fences = [layout.unpack_fence(raw[i * size : (i + 1) * size]) for i in range(layout.NUM_FENCE_RECORDS)]
        # A torn record leaves the other one, and what made the store is known without either.
        return [self.geometry.attempt if fence is None else fence for fence in fences]

    def _raise_fence(self) -> None:
        try:
            fcntl.flock(self._control_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(f"another process is opening {self.path} at this moment; try again") from error
        try:
            self._check_attempt()
            fences = self._read_fences()
            if self.attempt > max(fences):
                older = fences.index(min(fences))
                offset = layout.FENCE_OFFSET + older * layout.RECORD_NBYTES
                _write_all(self._control_fd, layout.pack_fence(self.attempt), offset)
                os.fdatasync(self._control_fd)
        finally:
            fcntl.flock(self._control_fd, fcntl.LOCK_UN)

    def _append(self, step: Step, trainer_state: str, *, sync_data: bool) -> None:
        sequence = self._records[-1].sequence + 1 if self._records else 0
        record = CommitRecord(
            sequence=sequence, step=step, attempt=self.attempt, rank=self.geometry.rank, trainer_state=trainer_state
        )
        raw = layout.pack_commit(record)
        if self._failed_sync is not None:
            raise StoreIoError(f"{self.path}: an earlier sync failed ({self._failed_sync}); nothing can be committed")
        try:
            if sync_data:
                os.fdatasync(self._data_fd)
            place = sequence % layout.NUM_COMMIT_RECORDS
            _write_all(self._control_fd, raw, layout.JOURNAL_OFFSET + place * layout.RECORD_NBYTES)
            os.fdatasync(self._control_fd)
        except OSError as error:
            # The kernel reports a lost write once and calls the next sync a success: never try again.
            self._failed_sync = str(error)
            raise StoreIoError(
                f"SSD directory {self.path.parent}, job {self.geometry.job}: could not sync the commit of step "
                f"{step}: {error}; check the disk"
            ) from error
        self._records = [*self._records[-(layout.NUM_COMMIT_RECORDS - 1) :], record]

    def _io_error(self, verb: str, region: Region, code: int | None, reason: str) -> StoreIoError:
        advice = (
            f"O_DIRECT needs buffers aligned to {ALIGNMENT_NBYTES} bytes" if code == errno.EINVAL else "check the disk"
        )
        return StoreIoError(
            f"SSD directory {self.path.parent}, job {self.geometry.job}: could not {verb} {region.kind} of block "
            f"{region.key.block}, chunk {region.key.chunk}, step {region.step}: {reason}; {advice}"
        )


def _write_new_file(path: Path, geometry: StoreGeometry) -> None:
    what = f"the model states of job {geometry.job} on SSD {geometry.ssd}"
    superblock = layout.pack_superblock(geometry)
    require_disk_room(what, path.parent, geometry.file_nbytes)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, geometry.file_nbytes)
        _write_all(fd, superblock, layout.SUPERBLOCK_OFFSET)
        _write_all(fd, layout.pack_fence(geometry.attempt), layout.FENCE_OFFSET)
        os.fsync(fd)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = directory_free_nbytes(path.parent)
            advice = "something else took the room just now, or a quota is used up; delete files there"
            raise NotEnoughRoom(what, str(path.parent), geometry.file_nbytes, free, advice) from error
        raise
    finally:
        os.close(fd)


def _read_journal(control_fd: int) -> list[CommitRecord]:
    nbytes = layout.NUM_COMMIT_RECORDS * layout.RECORD_NBYTES
    return layout.unpack_journal(os.pread(control_fd, nbytes, layout.JOURNAL_OFFSET))


def _open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise DirectIoRefused(
            f"the file system of {path.parent} refuses O_DIRECT (memory-backed ones do); choose a directory on an SSD "
            "with ext4 or XFS"
        ) from error


def _write_all(fd: int, raw: bytes, offset: int) -> None:
    done = 0
    while done < len(raw):
        done += os.pwrite(fd, raw[done:], offset + done)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
