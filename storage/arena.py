"""Shared memory of exact size, mapped by every actor of a job on a node, and the slots it is cut into."""

import errno
import fcntl
import mmap
import os
import re
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from windlass.storage.ids import Attempt, JobId, Span
from windlass.storage.room import NotEnoughRoom, directory_free_nbytes, require_arena_room

# Page size, and the strictest alignment that O_DIRECT asks for: every span and every transfer is a multiple of it.
ALIGNMENT_NBYTES = 4096

_ARENA_NAME = re.compile(r"windlass-.+-\d+-(?P<pid>\d+)-(?P<start_ticks>\d+)\.arena")


def arena_path(directory: Path, job: JobId, attempt: Attempt) -> Path:
    """Where this process puts the arena of a job: the name tells the creator, so that leftovers can be found."""
    pid = os.getpid()
    return directory / f"windlass-{job}-{attempt}-{pid}-{_start_ticks(pid)}.arena"


def remove_leftovers(directory: Path) -> list[Path]:
    """Remove this user's arenas whose creator is gone, and say which they were. Those of the living stay."""
    removed = []
    for path in sorted(directory.glob("windlass-*.arena")):
        name = _ARENA_NAME.fullmatch(path.name)
        if name is None or _start_ticks(int(name["pid"])) == int(name["start_ticks"]):
            continue
        with suppress(FileNotFoundError):  # another process may be clearing up too
            if path.stat().st_uid == os.geteuid() and not _is_locked(path):
                path.unlink()
                removed.append(path)
    return removed


class Arena:
    """One shared-memory file. `create` in one process, `open` in the others; both map the same bytes."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self.nbytes = len(mapping)
        self._mapping = mapping

    @classmethod
    def create(cls, path: Path | str, nbytes: int) -> "Arena":
        """Make the file, all of it backed by memory now, so that nothing fails for lack of room later.

        Raises:
            NotEnoughRoom: the directory or the memory cannot hold it; nothing is left behind.
        """
        path = Path(path)
        if nbytes <= 0 or nbytes % ALIGNMENT_NBYTES:
            raise ValueError(f"an arena's size must be a positive multiple of {ALIGNMENT_NBYTES} bytes, not {nbytes}")
        require_arena_room(path.parent, nbytes)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Tells processes that cannot see our pid (another container) that the creator lives. The mapping keeps a
            # duplicate of the descriptor, and with it the lock.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, nbytes)
            mapping = mmap.mmap(fd, nbytes)
        except OSError as error:
            path.unlink()
            if error.errno == errno.ENOSPC:
                free = directory_free_nbytes(path.parent)
                advice = "something else took the room just now: lower the job's host memory budget"
                raise NotEnoughRoom("the arena of host buffers", str(path.parent), nbytes, free, advice) from error
            raise
        finally:
            os.close(fd)
        return cls(path, mapping)

    @classmethod
    def open(cls, path: Path | str) -> "Arena":
        """Map an arena that another process created."""
        path = Path(path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(path, mmap.mmap(fd, os.fstat(fd).st_size))
        finally:
            os.close(fd)

    def buffer(self, span: Span) -> memoryview:
        """The bytes of `span`: writable, no copy, seen by every process that maps the arena."""
        stop = span.offset + span.nbytes
        if span.offset < 0 or span.nbytes < 0 or stop > self.nbytes:
            raise ValueError(f"{span} reaches outside the arena {self.path} of {self.nbytes} bytes")
        return memoryview(self._mapping)[span.offset : stop]

    def close(self) -> None:
        """Unmap. Buffers that are still held stay valid, and the memory stays mapped until the last of them goes."""
        with suppress(BufferError):
            self._mapping.close()

    def unlink(self) -> None:
        """Remove the file; processes that map it keep their bytes. Its memory is free once all have closed."""
        self.path.unlink(missing_ok=True)


class SlotTimeout(RuntimeError):
    """The slots asked for did not come free in time."""


class SlotPoolClosed(RuntimeError):
    """Slots were asked for, or waited for, when their owner was ending."""


class SlotMisuse(ValueError):
    """A span was returned that is not a slot of the pool, or is not in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStatistics:
    """What a pool holds at one moment, in bytes."""

    held_nbytes: int  # all slots
    in_use_nbytes: int
    high_water_nbytes: int  # the most ever in use at once


class SlotPool:
    """Slots of one exact size in a range of an arena: bookkeeping only, and safe for threads.

    Whoever asks first is served first, so that a large request is not starved by small ones.
    """

    def __init__(self, offset: int, slot_nbytes: int, num_slots: int, *, name: str = "slots") -> None:
        if offset < 0 or offset % ALIGNMENT_NBYTES or slot_nbytes <= 0 or slot_nbytes % ALIGNMENT_NBYTES:
            raise ValueError(
                f"pool {name}: offset {offset} and slot size {slot_nbytes} must be multiples of {ALIGNMENT_NBYTES} "
                "bytes, and the size positive"
            )
        if num_slots < 0:
            raise ValueError(f"pool {name}: cannot have {num_slots} slots")
        self.name = name
        self.slot_nbytes = slot_nbytes
        self.num_slots = num_slots
        # Lowest offset on top; later the slot returned last, whose lines are likeliest still in the cache.
        self._free = [Span(offset + i * slot_nbytes, slot_nbytes) for i in reversed(range(num_slots))]
        self._in_use: set[Span] = set()
        self._high_water = 0
        self._waiting: deque[object] = deque()
        self._closed = False
        self._changed = threading.Condition()

    def acquire(self, n: int, deadline_s: float) -> list[Span]:
        """Take `n` slots at once, waiting at most `deadline_s` seconds for them; they are the caller's until released.

        Raises:
            SlotTimeout: fewer than `n` came free in time; none is taken.
            SlotPoolClosed: the pool was closed, before or meanwhile; none is taken.
        """
        if not 0 <= n <= self.num_slots:
            raise ValueError(f"pool {self.name} has {self.num_slots} slots; {n} were asked for at once")
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                served = self._changed.wait_for(
                    lambda: self._closed or (self._waiting[0] is ticket and len(self._free) >= n), timeout=deadline_s
                )
                if self._closed:
                    raise SlotPoolClosed(f"pool {self.name} is closed")
                if not served:
                    raise SlotTimeout(
                        f"pool {self.name}: {n} slots of {self.slot_nbytes} bytes did not come free within "
                        f"{deadline_s} s; {len(self._in_use)} of {self.num_slots} are in use. Whoever holds them is "
                        "stuck, or the deadline is too short for this machine"
                    )
                taken = [self._free.pop() for _ in range(n)]
                self._in_use.update(taken)
                self._high_water = max(self._high_water, len(self._in_use))
                return taken
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def release(self, spans: Sequence[Span]) -> None:
        """Give slots back; all of them or, on an error, none.

        Raises:
            SlotMisuse: one of them is not a slot of this pool in use, or is named twice.
        """
        with self._changed:
            for i, span in enumerate(spans):
                if span not in self._in_use or span in spans[:i]:
                    raise SlotMisuse(f"pool {self.name}: {span} is not a slot in use; released twice, or not ours")
            self._in_use.difference_update(spans)
            self._free.extend(spans)
            self._changed.notify_all()

    def close(self) -> None:
        """Hand out no more slots: who waits for one now is told at once. Slots may still be returned."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def statistics(self) -> SlotStatistics:
        """Bytes held, in use now, and the most ever in use."""
        with self._changed:
            return SlotStatistics(
                held_nbytes=self.num_slots * self.slot_nbytes,
                in_use_nbytes=len(self._in_use) * self.slot_nbytes,
                high_water_nbytes=self._high_water * self.slot_nbytes,
            )


def _start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is no such process or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in parentheses and may hold anything; the state is the third, the start the 22nd.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _is_locked(path: Path) -> bool:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
