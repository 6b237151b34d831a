"""Checks for enough free memory or disk space before an allocation, so that a job is refused before it begins."""

import errno
import os
from pathlib import Path

import psutil

from windlass.amounts import bytes_text

_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))


class InsufficientSpaceError(RuntimeError):
    """A request does not fit into memory or onto a disk; nothing was allocated."""

    errno = errno.ENOSPC

    def __init__(self, what: str, path: str, needed_nbytes: int, free_nbytes: int, advice: str) -> None:
        super().__init__(what, path, needed_nbytes, free_nbytes, advice)
        self.what = what
        self.path = path
        self.needed_nbytes = needed_nbytes
        self.free_nbytes = free_nbytes
        self.advice = advice

    def __str__(self) -> str:
        return (
            f"not enough room in {self.path} for {self.what}: {bytes_text(self.needed_nbytes)} needed, "
            f"{bytes_text(self.needed_nbytes - self.free_nbytes)} more than the {bytes_text(self.free_nbytes)} free; "
            f"{self.advice}"
        )


class RoomLostError(InsufficientSpaceError):
    """Room that an earlier check found is gone. The caller may retry, because it may come back."""


class DiskFull(InsufficientSpaceError):
    """The file system of `path` has less than `needed_nbytes` free. The caller may retry when space becomes free."""

    @property
    def directory(self) -> str:
        """The directory whose free space was checked."""
        return self.path


def is_out_of_space(error: BaseException | None) -> bool:
    """Checks whether a full disk or a quota caused the error, directly or through its causes. A retry may succeed."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        if getattr(error, "errno", None) in _FULL:
            return True
        seen.add(id(error))
        # Ray wraps an actor's exception. If the wrapped one is raised again from its wrapper, each causes the other.
        error = getattr(error, "cause", None) or error.__cause__
    return False


def may_find_room_later(error: BaseException, attempt: int) -> bool:
    """Checks whether a job should wait for space and retry after this error.

    A first attempt that needs more than the machine has fails at once. It waits if there was enough at first, and a job
    that has already trained waits, too.
    """
    lacks_room = isinstance(error, InsufficientSpaceError) and not isinstance(error, RoomLostError)
    return is_out_of_space(error) and (attempt > 1 or not lacks_room)


def directory_free_nbytes(directory: Path) -> int:
    """Returns the bytes that an ordinary user can still write in the file system of `directory`."""
    facts = os.statvfs(directory)
    return facts.f_bavail * facts.f_frsize


def directory_nbytes(directory: Path) -> int:
    """Returns the size in bytes of the file system of `directory`."""
    facts = os.statvfs(directory)
    return facts.f_blocks * facts.f_frsize


def memory_available_nbytes() -> int:
    """Returns the memory that this process may still allocate: the machine's or its control groups', if less."""
    machine = int(psutil.virtual_memory().available)
    group = cgroup_available_nbytes(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return machine if group is None else min(machine, group)


def cgroup_available_nbytes(membership: Path, root: Path) -> int | None:
    """Returns the bytes that the memory control groups (version 1 or 2) still allow; None without a limit.

    `membership` is the process's cgroup file, `root` the mount point of the control groups.
    """
    if not membership.is_file():
        return None
    available: list[int] = []
    for line in membership.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            available += _levels_available(root, group, names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            available += _levels_available(root / "memory", group, names)
    return min(available, default=None)


def require_disk_room(what: str, directory: Path, nbytes: int) -> None:
    """Checks that `nbytes` fit on the disk of `directory`.

    Raises:
        DiskFull: with the bytes needed and free.
    """
    free = directory_free_nbytes(directory)
    if nbytes > free:
        advice = "delete files there, or choose a directory on a larger disk"
        raise DiskFull(what, str(directory), nbytes, free, advice)


def arena_room_nbytes(directory: Path) -> int:
    """Returns the largest size in bytes of an arena in the shared-memory directory."""
    return min(directory_free_nbytes(directory), memory_available_nbytes())


def require_arena_room(directory: Path, nbytes: int) -> None:
    """Checks that an arena fits into the shared-memory directory and the machine's memory.

    Raises:
        InsufficientSpaceError: with the bytes needed and free.
    """
    what = "the arena of host buffers"
    free = directory_free_nbytes(directory)
    if nbytes > free:
        advice = (
            f"enlarge it (`mount -o remount,size=... {directory}`; for a container, its shm size), or lower the "
            "job's host memory budget, or stop other jobs"
        )
        raise InsufficientSpaceError(what, str(directory), nbytes, free, advice)
    free = memory_available_nbytes()
    if nbytes > free:
        advice = "lower the job's host memory budget, close other programs, or raise the container's memory limit"
        raise InsufficientSpaceError(what, "memory", nbytes, free, advice)


def _levels_available(mount: Path, group: str, names: tuple[str, str, str]) -> list[int]:
    """Lists the free bytes of a group and of the groups above it. Inside a container not all of them are visible."""
    limit_name, usage_name, cache_name = names
    level = mount / group.lstrip("/")
    available = []
    for folder in (level, *level.parents):
        limit_file, usage_file = folder / limit_name, folder / usage_name
        if limit_file.is_file() and usage_file.is_file():
            limit = limit_file.read_text().strip()
            if limit != "max":
                # Clean file cache counts as used, but the kernel frees it on demand.
                used = int(usage_file.read_text()) - _stat_value(folder / "memory.stat", cache_name)
                available.append(max(0, int(limit) - used))
        if folder == mount:
            break
    return available


def _stat_value(stat: Path, name: str) -> int:
    if not stat.is_file():
        return 0
    for line in stat.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
