"""Shared memory of exact size, mapped by every actor of a job on a node, and the slots it is cut into."""

import errno
import fcntl
import mmap
import os
import re
import stat
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from windlass.amounts import bytes_text
from windlass.storage.ids import Attempt, JobId, Span
from windlass.storage.memory.capacity import InsufficientSpaceError, directory_free_nbytes, require_arena_room
from windlass.storage.memory.huge_pages import use_huge_pages

# Page size, and the strictest alignment that O_DIRECT asks for: every span and every transfer is a multiple of it.
ALIGNMENT_NBYTES = 4096

# Making room for huge pages takes 1 to 2 s a GiB on a machine with fragmented memory; then a job waits no longer.
_HUGE_PAGES_BUDGET_S = 20.0

_ARENA_NAME = re.compile(r"windlass-(.+)-\d+-\d+\.arena")
_MADV_POPULATE_READ = 22  # of Linux's mman-common.h; Python has no name for it
_POPULATE_STEP_NBYTES = 256 << 20


def arena_path(directory: Path, job: JobId, attempt: Attempt) -> Path:
    """Where this process puts the arena of a job: the name tells people whose it is, and leftovers are known by it."""
    return directory / f"windlass-{job}-{attempt}-{os.getpid()}.arena"


def remove_leftovers(directory: Path) -> list[Path]:
    """Remove this user's arenas whose creator is gone, and say which they were. Those of the living stay.

    The creator holds a lock on its arena, and the kernel lets go of it however the creator ends. So pids need not be
    compared: those of another container mean nothing here, and they are used again.
    """
    return [path for path in sorted(directory.glob("windlass-*.arena")) if _remove_if_unlocked(path)]


def arenas_in(directory: Path) -> dict[JobId, int]:
    """Bytes of memory that the arenas of each job hold there."""
    found: dict[JobId, int] = {}
    for path in directory.glob("windlass-*.arena"):
        name = _ARENA_NAME.fullmatch(path.name)
        with suppress(FileNotFoundError):  # its job has just ended
            if name is not None:
                job = JobId(name[1])
                found[job] = found.get(job, 0) + path.stat().st_blocks * 512
    return found


class Arena:
    """One shared-memory file. `create` in one process, `open` in the others; both map the same bytes."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        """Not for callers: use `create` or `open`."""
        self.path = path
        self.nbytes = len(mapping)
        self._mapping: mmap.mmap | None = mapping

    @classmethod
    def create(cls, path: Path | str, nbytes: int, *, huge_pages: bool = True) -> "Arena":
        """Make the file, all of it backed by memory now, so that nothing fails for lack of room later.

        In huge pages as far as the kernel can; `huge_pages=False` leaves it small ones, to measure the difference.

        The creator hardly touches the bytes, so its page tables stay empty.

        Raises:
            InsufficientSpaceError: the directory or the memory cannot hold it; nothing is left behind.
        """
        path = Path(path)
        if nbytes <= 0 or nbytes % ALIGNMENT_NBYTES:
            raise ValueError(f"an arena's size must be a positive multiple of {ALIGNMENT_NBYTES} bytes, not {nbytes}")
        require_arena_room(path.parent, nbytes)
        fd = _create_locked(path)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            if huge_pages:
                use_huge_pages(fd, nbytes, _HUGE_PAGES_BUDGET_S)
            mapping = mmap.mmap(fd, nbytes)  # keeps a duplicate of the descriptor, and with it the lock
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                free = directory_free_nbytes(path.parent)
                advice = "something else took the room just now: lower the job's host memory budget"
                raise InsufficientSpaceError(
                    "the arena of host buffers", str(path.parent), nbytes, free, advice
                ) from error
            raise
        finally:
            os.close(fd)
        return cls(path, mapping)

    @classmethod
    def open(cls, path: Path | str) -> "Arena":
        """Map an arena that another process created, page tables filled: no transfer and no kernel stops at a page."""
        path = Path(path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            mapping = mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
        _populate(mapping)
        return cls(path, mapping)

    @property
    def held_nbytes(self) -> int:
        """Bytes of memory that the kernel has set aside for the file, whoever maps it. OSError once it is unlinked."""
        return self.path.stat().st_blocks * 512

    def buffer(self, span: Span) -> memoryview:
        """The bytes of `span`: writable, no copy, seen by every process that maps the arena."""
        if self._mapping is None:
            raise ValueError(f"the arena {self.path} is closed")
        stop = span.offset + span.nbytes
        if span.offset < 0 or span.nbytes < 0 or stop > self.nbytes:
            raise ValueError(f"{span} reaches outside the arena {self.path} of {self.nbytes} bytes")
        return memoryview(self._mapping)[span.offset : stop]

    def close(self) -> None:
        """Unmap. Buffers that are still held stay valid, and the memory stays mapped until the last of them goes."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            with suppress(BufferError):
                mapping.close()

    def unlink(self) -> None:
        """Remove the file; processes that map it keep their bytes. Its memory is free once all have closed."""
        self.path.unlink(missing_ok=True)


class SlotTimeout(TimeoutError):
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
                        f"pool {self.name}: {n} slots of {bytes_text(self.slot_nbytes)} did not come free within "
                        f"{deadline_s} s; {len(self._in_use)} of {self.num_slots} are in use. Whoever holds them is "
                        "stuck, or the deadline is too short for this machine"
                    )
                return self._hand_out(n)
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def try_acquire(self, n: int) -> list[Span]:
        """Take `n` slots if they are free and nobody waits for some, else none; never waits."""
        with self._changed:
            if self._closed or self._waiting or len(self._free) < n:
                return []
            return self._hand_out(n)

    def drain(self, deadline_s: float) -> None:
        """Wait until no slot is in use; raises as `acquire`."""
        self.release(self.acquire(self.num_slots, deadline_s))

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

    def _hand_out(self, n: int) -> list[Span]:
        taken = [self._free.pop() for _ in range(n)]
        self._in_use.update(taken)
        self._high_water = max(self._high_water, len(self._in_use))
        return taken

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


def _create_locked(path: Path) -> int:
    """A new, empty file that only its owner may open; returns a descriptor that holds the creator's lock."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)  # waits only while `remove_leftovers` looks at the file
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # it was taken for a leftover before it was locked


def _remove_if_unlocked(path: Path) -> bool:
    try:
        facts = path.lstat()
        if not _ARENA_NAME.fullmatch(path.name) or not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            return False
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:  # another process clears up too
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(fd).st_nlink:  # removed meanwhile, and the name may be another's by now
            return False
        path.unlink()  # under the lock, so that no creator takes it at this moment
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _populate(mapping: mmap.mmap) -> None:
    """Fill the page tables, in steps: Python holds its lock during each."""
    for start in range(0, len(mapping), _POPULATE_STEP_NBYTES):
        try:
            mapping.madvise(_MADV_POPULATE_READ, start, min(_POPULATE_STEP_NBYTES, len(mapping) - start))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return  # Linux before 5.14: the pages come in as they are touched
