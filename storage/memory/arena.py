"""Shared memory of exact size, mapped by every actor of a job on a node, and its division into slots."""

import errno
import mmap
import os
import re
import stat
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from windlass.amounts import bytes_text
from windlass.storage.cancellation import CancelToken
from windlass.storage.files import lock, try_lock
from windlass.storage.ids import Attempt, JobId, Span
from windlass.storage.memory.capacity import InsufficientSpaceError, directory_free_nbytes, require_arena_room
from windlass.storage.memory.numa import NumaNode
from windlass.storage.memory.page_allocation import allocate_pages

# Bytes: the page size and O_DIRECT's strictest alignment. Every span and every transfer is a multiple of it.
ALIGNMENT_NBYTES = 4096

# Seconds that a job's start may spend on huge pages. They take 1 to 2 s per GiB if memory is fragmented.
_HUGE_PAGES_BUDGET_S = 20.0

_ARENA_NAME = re.compile(r"windlass-(.+)-\d+-\d+\.arena")
_MADV_POPULATE_READ = 22  # from Linux's mman-common.h; Python has no name for it
_POPULATE_STEP_NBYTES = 256 << 20  # bytes of one system call that fills page tables


def arena_path(directory: Path, job: JobId, attempt: Attempt) -> Path:
    """Returns the path of a job's arena in this process. Its name shows the owner and identifies leftovers."""
    return directory / f"windlass-{job}-{attempt}-{os.getpid()}.arena"


def remove_leftovers(directory: Path) -> list[Path]:
    """Removes this user's arenas whose creator has ended, and returns their paths. Arenas in use stay.

    The creator holds a lock on its arena, and the kernel releases it however the creator ends. Pids are not compared,
    because the kernel reuses them, and those of other containers have no meaning here.
    """
    return [path for path in sorted(directory.glob("windlass-*.arena")) if _remove_if_unlocked(path)]


def arenas_in(directory: Path) -> dict[JobId, int]:
    """Returns the bytes of memory that the arenas of each job use in a directory."""
    nbytes: dict[JobId, int] = {}
    for path in directory.glob("windlass-*.arena"):
        name = _ARENA_NAME.fullmatch(path.name)
        with suppress(FileNotFoundError):  # its job has just ended
            if name is not None:
                job = JobId(name[1])
                nbytes[job] = nbytes.get(job, 0) + path.stat().st_blocks * 512
    return nbytes


class Arena:
    """One shared-memory file. `create` in one process, `open` in the others; both map the same bytes."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        """Internal: use `create` or `open`."""
        self.path = path
        self.nbytes = len(mapping)
        self._mapping: mmap.mmap | None = mapping

    @classmethod
    def create(
        cls,
        path: Path | str,
        nbytes: int,
        *,
        huge_pages: bool = True,
        node: int | None = None,
        check_stop: Callable[[], None] | None = None,
    ) -> "Arena":
        """Creates the file and allocates all of its memory, so that no later access fails for lack of memory.

        It uses huge pages if the kernel can; `huge_pages=False` keeps small pages, for measurements. `node` is the NUMA
        node that the memory should be on, as far as there is room. The creator's page tables stay empty, because it
        hardly touches the bytes. `check_stop` is called again and again meanwhile. An error that it raises ends the
        creation, and the file is removed.

        Raises:
            InsufficientSpaceError: the directory or the memory cannot hold it; the file is removed.
        """
        path = Path(path)
        if nbytes <= 0 or nbytes % ALIGNMENT_NBYTES:
            raise ValueError(f"an arena's size must be a positive multiple of {ALIGNMENT_NBYTES} bytes, not {nbytes}")
        require_arena_room(path.parent, nbytes)
        fd = _create_locked(path)
        try:
            os.truncate(fd, nbytes)
            allocate_pages(
                fd,
                nbytes,
                huge_budget_s=_HUGE_PAGES_BUDGET_S if huge_pages else 0.0,
                node=None if node is None else _node_for_arena(node, path, nbytes),
                check_stop=check_stop,
            )
            os.posix_fallocate(fd, 0, nbytes)  # the pages that are missing: fails now rather than at an access
            mapping = mmap.mmap(fd, nbytes)  # keeps a duplicate of the descriptor, and with it the lock
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                with suppress(OSError):
                    os.truncate(fd, 0)  # frees the pages that were allocated, which would count as used
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
        """Maps an arena that another process created. Fills the page tables, so that transfers have no page faults."""
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
        """The bytes of memory that the kernel has allocated for the file. Raises OSError once it is unlinked."""
        return self.path.stat().st_blocks * 512

    def buffer(self, span: Span) -> memoryview:
        """Returns the bytes of `span`, writable and without a copy. Every process that maps the arena sees them."""
        if self._mapping is None:
            raise ValueError(f"the arena {self.path} is closed")
        stop = span.offset + span.nbytes
        if span.offset < 0 or span.nbytes < 0 or stop > self.nbytes:
            raise ValueError(f"{span} reaches outside the arena {self.path} of {self.nbytes} bytes")
        return memoryview(self._mapping)[span.offset : stop]

    def close(self) -> None:
        """Unmaps the arena. Existing buffers stay valid, and the memory stays mapped until the last one is freed."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            with suppress(BufferError):
                mapping.close()

    def unlink(self) -> None:
        """Removes the file. Its memory is freed once all processes that map it have closed it."""
        self.path.unlink(missing_ok=True)


class SlotMisuse(ValueError):
    """A released span is not a slot of the pool, or is not in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStatistics:
    """The use of a pool at one moment, in bytes."""

    held_nbytes: int  # all slots
    in_use_nbytes: int
    high_water_nbytes: int  # the largest number ever in use at once


class SlotPool:
    """Slots of equal size in a range of an arena. It only does the bookkeeping, and is thread-safe.

    Requests are served in order of arrival, so that small requests do not starve a large one.
    """

    def __init__(
        self, offset: int, slot_nbytes: int, num_slots: int, *, name: str = "slots", token: CancelToken
    ) -> None:
        """`name`: for errors. `token` ends the waits for slots."""
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
        # A stack: first the lowest offset, later the slot that was released last and is most likely in the CPU's cache.
        self._free = [Span(offset + i * slot_nbytes, slot_nbytes) for i in reversed(range(num_slots))]
        self._in_use: set[Span] = set()
        self._high_water = 0
        self._waiting: deque[object] = deque()
        self._token = token
        self._changed = threading.Condition()

    def acquire(self, n: int) -> list[Span]:
        """Acquires `n` slots together. The caller owns them until their release.

        Raises the errors of `CancelToken.wait_for`. None is acquired then.
        """
        if not 0 <= n <= self.num_slots:
            raise ValueError(f"pool {self.name} has {self.num_slots} slots; {n} were requested at once")
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                self._token.wait_for(
                    self._changed,
                    lambda: self._waiting[0] is ticket and len(self._free) >= n,
                    lambda: self._describe_wait(n),
                )
                return self._hand_out(n)
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def try_acquire(self, n: int) -> list[Span]:
        """Acquires `n` slots if they are free and no other request waits; else returns none. Never waits."""
        with self._changed:
            if self._waiting or len(self._free) < n:
                return []
            return self._hand_out(n)

    def drain(self) -> None:
        """Waits until no slot is in use. Raises the errors of `acquire`."""
        self.release(self.acquire(self.num_slots))

    def release(self, spans: Sequence[Span]) -> None:
        """Releases slots: all of them or, on an error, none.

        Raises:
            SlotMisuse: a span is not a slot in use of this pool, or is named twice.
        """
        released: set[Span] = set()
        with self._changed:
            for span in spans:
                if span not in self._in_use or span in released:
                    raise SlotMisuse(f"pool {self.name}: {span} is not a slot in use; released twice, or not ours")
                released.add(span)
            self._in_use -= released
            self._free.extend(spans)
            self._changed.notify_all()

    def _hand_out(self, n: int) -> list[Span]:
        taken = [self._free.pop() for _ in range(n)]
        self._in_use.update(taken)
        self._high_water = max(self._high_water, len(self._in_use))
        return taken

    def _describe_wait(self, n: int) -> str:
        return (
            f"{n} slots of {bytes_text(self.slot_nbytes)} of pool {self.name}: {len(self._in_use)} of "
            f"{self.num_slots} are in use, and their holders are stuck or slow"
        )

    @property
    def statistics(self) -> SlotStatistics:
        """The bytes of all slots, those in use now, and the largest number ever in use."""
        with self._changed:
            return SlotStatistics(
                held_nbytes=self.num_slots * self.slot_nbytes,
                in_use_nbytes=len(self._in_use) * self.slot_nbytes,
                high_water_nbytes=self._high_water * self.slot_nbytes,
            )


def _create_locked(path: Path) -> int:
    """Creates an empty file that only its owner may open. Returns a descriptor that holds the creator's lock."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        lock(fd)  # waits only while `remove_leftovers` checks the file
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # `remove_leftovers` removed it before it was locked


def _node_for_arena(number: int, path: Path, nbytes: int) -> NumaNode:
    """Looks at the NUMA node of an arena that is to be allocated beside those that other jobs create meanwhile.

    The file must have its size, so that of two arenas that are created together at least one counts the other.
    """
    # First, because what another one allocates in between is then counted twice rather than not at all.
    others_nbytes = _unallocated_nbytes(path)
    return NumaNode.for_memory(number, nbytes + others_nbytes)


def _unallocated_nbytes(path: Path) -> int:
    """Returns the bytes that the other arenas in the directory of `path` have yet to allocate."""
    nbytes = 0
    for other in path.parent.glob("windlass-*.arena"):
        with suppress(FileNotFoundError):  # its job has just ended
            if other != path:
                facts = other.stat()
                nbytes += max(0, facts.st_size - facts.st_blocks * 512)
    return nbytes


def _remove_if_unlocked(path: Path) -> bool:
    try:
        facts = path.lstat()
        if not _ARENA_NAME.fullmatch(path.name) or not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            return False
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:  # another process removes leftovers too
        return False
    try:
        if not try_lock(fd) or not os.fstat(fd).st_nlink:  # no link: removed meanwhile, and another may have the name
            return False
        path.unlink()  # under the lock: else a creator could lock the file just before its removal
    finally:
        os.close(fd)
    return True


def _populate(mapping: mmap.mmap) -> None:
    """Fills the page tables. It works in steps, because Python holds the GIL during each system call."""
    for start in range(0, len(mapping), _POPULATE_STEP_NBYTES):
        try:
            mapping.madvise(_MADV_POPULATE_READ, start, min(_POPULATE_STEP_NBYTES, len(mapping) - start))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return  # Linux before 5.14 lacks this; then pages are mapped at their first access
