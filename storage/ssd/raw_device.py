"""Checks raw block devices: their type, their current use, and contents that must not be overwritten.

Contents are recognized by libblkid through util-linux's `wipefs`. It knows every format that mount and udev know.
"""

import errno
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from windlass.storage.integrity import StoreError

_SYSFS = Path("/sys/dev/block")
MAX_LOGICAL_BLOCK_NBYTES = 4096  # transfers are multiples of 4096 bytes
# Bytes at each end of a device that must be readable, because libblkid treats unreadable bytes as blank. Nearly all
# signatures are in the first or the last MiB.
_ENDS_NBYTES = 4 << 20
_PROBE_DEADLINE_S = 60.0  # timeout of wipefs

_KNOWN = {
    "gpt": "a GPT partition table",
    "dos": "an MBR partition table",
    "LVM2_member": "an LVM physical volume",
    "zfs_member": "a member of a ZFS pool",
    "swap": "swap space",
}
_USAGES = {
    "filesystem": "a file system",
    "partition-table": "a partition table",
    "raid": "a member of a RAID",
    "crypto": "an encrypted volume",
}


class DeviceRefused(StoreError):
    """Windlass may not use a device. The message names the device, the obstacle and what to do."""


def is_block_device(path: Path) -> bool:
    """Checks whether `path`, or the target of its links, is a block device."""
    return path.is_block_device()


def is_device_path(path: Path) -> bool:
    """Checks whether a path denotes a block device, even one that is not plugged in.

    A folder in place of a missing device's node would be in memory, and would prevent the node's return.
    """
    real = Path(os.path.realpath(path))
    return real.is_block_device() or (real.is_relative_to("/dev") and not real.is_relative_to("/dev/shm"))


def device_nbytes(path: Path) -> int:
    """Returns the size of a device in bytes. Raises OSError if it cannot be opened."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.lseek(fd, 0, os.SEEK_END)
    finally:
        os.close(fd)


def logical_block_nbytes(path: Path) -> int:
    """Returns the logical block size of a device in bytes.

    Raises:
        DeviceRefused: not a block device, or a unit larger than 4096 bytes.
    """
    folder = _sysfs_folder(path)
    disk = folder.parent if (folder / "partition").exists() else folder
    nbytes = int((disk / "queue" / "logical_block_size").read_text())
    if nbytes > MAX_LOGICAL_BLOCK_NBYTES:
        raise _refused(path, f"its logical blocks have {nbytes} bytes", "format it to blocks of 4096")
    return nbytes


def require_not_in_use(path: Path) -> None:
    """Refuses a device that is in use by anything but windlass. The caller must exclude other windlass processes.

    Raises:
        DeviceRefused: it is no block device, has partitions, is not writable, or has logical blocks above 4096 bytes.
            Or the device or a partition of it is mounted, swap space, part of another device, or opened exclusively.
    """
    folder = _sysfs_folder(path)
    logical_block_nbytes(path)
    mountinfo = os.fsdecode(Path("/proc/self/mountinfo").read_bytes())
    swaps = os.fsdecode(Path("/proc/swaps").read_bytes()) if Path("/proc/swaps").exists() else ""
    use = use_of(folder, mountinfo, swaps)
    if use is not None:
        raise _refused(path, *use)
    if (folder / "ro").read_text().strip() != "0":
        raise _refused(path, "it is read-only", f"allow writing (`blockdev --setrw {path}`)")
    try:
        # The kernel opens devices exclusively for mounts, swap and RAID, also for other containers.
        os.close(os.open(path, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC))
    except OSError as error:
        if error.errno == errno.EBUSY:
            found = "something uses it that cannot be seen from here, such as a mount in another container"
            raise _refused(path, found, f"end that use (`lsblk {path}` and `fuser -v {path}` may tell)") from error
        found = f"it cannot be opened for reading and writing ({error.strerror})"
        raise _refused(path, found, "give the user of windlass write access to it") from error


def require_usable(path: Path) -> None:
    """Refuses a device that is in use, or that holds anything but a windlass volume.

    Raises:
        DeviceRefused: as in `require_not_in_use`. Or the device has a signature of a file system, a partition table, a
            RAID or the like, or its signatures cannot be read.
    """
    require_not_in_use(path)
    _require_readable_ends(path)
    found = signatures(path)
    if found:
        advice = f"if nothing on it is needed any more, clear it with `wipefs --all {path}`"
        raise _refused(path, f"it holds {' and '.join(found)}", advice)


def signatures(path: Path) -> list[str]:
    """Lists the signatures that libblkid finds on a device or in an image, each kind once: ["a file system (ext4)"].

    Raises:
        DeviceRefused: wipefs is missing, fails or takes too long.
    """
    # An ordinary user's PATH often lacks the directories of system programs, so they are added.
    tool = shutil.which("wipefs", path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))
    if tool is None:
        raise _unknown(path, "the program wipefs is missing", "install util-linux")
    command = [tool, "--no-act", "--json", "--output", "TYPE,USAGE", "--", str(path)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PROBE_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unknown(path, str(error), "see whether the device answers") from error
    advice = "make `wipefs --no-act --json` of util-linux work on it"
    if done.returncode != 0:
        raise _unknown(path, f"wipefs ended with code {done.returncode}: {done.stderr.strip()}", advice)
    try:
        rows = [(str(row["type"]), str(row["usage"])) for row in json.loads(done.stdout)["signatures"]]
    except (ValueError, KeyError, TypeError) as error:
        raise _unknown(path, f"wipefs answered {done.stdout[:200]!r}, not the JSON expected", advice) from error
    return list(dict.fromkeys(_description(kind, usage) for kind, usage in rows))


def use_of(folder: Path, mountinfo: str, swaps: str) -> tuple[str, str] | None:
    """Returns the current use of a device and the advice for ending it; None if the device is unused.

    `folder` is the device's folder in sysfs, `mountinfo` and `swaps` the texts of /proc/self/mountinfo and /proc/swaps.
    """
    partitions = sorted(child for child in folder.iterdir() if (child / "partition").exists())
    members = {(member / "dev").read_text().strip(): member for member in (folder, *partitions)}
    for number, mount_point in _mounts(mountinfo):
        if number in members:
            return (
                f"{members[number].name} is mounted on {mount_point}",
                f"unmount it (`umount {shlex.quote(mount_point)}`)",
            )
    for name in (line.split()[0] for line in swaps.splitlines()[1:]):
        swap = _number_of(name)
        if swap in members:
            return f"{members[swap].name} is in use as swap space", f"switch it off (`swapoff {name}`)"
    for member in members.values():
        if holders := sorted(holder.name for holder in (member / "holders").iterdir()):
            advice = "take that RAID, LVM or encrypted volume apart"
            return f"{member.name} is held by {', '.join(holders)}", advice
    if partitions:
        names = ", ".join(partition.name for partition in partitions)
        return f"it has partitions ({names})", "name an unused partition instead, or delete them"
    return None


def _description(kind: str, usage: str) -> str:
    return _KNOWN.get(kind, f"{_USAGES.get(usage, 'a signature')} ({kind})")


def _mounts(mountinfo: str) -> Iterator[tuple[str, str]]:
    """Yields the device number and mount point of every mount. Format: proc_pid_mountinfo(5)."""
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        mount_point = _unescaped(fields[4])
        yield fields[2], mount_point
        # btrfs and others use a device number of their own, but their source names the device.
        source = _number_of(fields[fields.index("-", 6) + 2])
        if source is not None:
            yield source, mount_point


def _number_of(name: str) -> str | None:
    """Returns the "major:minor" of a block device by its name in the kernel's tables; None for anything else."""
    if not name.startswith("/dev/"):
        return None
    try:
        facts = Path(_unescaped(name)).stat()
    except OSError:
        return None
    return f"{os.major(facts.st_rdev)}:{os.minor(facts.st_rdev)}" if stat.S_ISBLK(facts.st_mode) else None


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _sysfs_folder(path: Path) -> Path:
    try:
        facts = path.stat()
    except OSError as error:
        raise _refused(path, f"it cannot be looked at ({error.strerror})", "correct the setting") from error
    if not stat.S_ISBLK(facts.st_mode):
        raise _refused(path, "it is no block device", "correct the setting")
    folder = _SYSFS / f"{os.major(facts.st_rdev)}:{os.minor(facts.st_rdev)}"
    if not folder.is_dir():
        raise _unknown(path, f"there is no {folder}", "mount sysfs, or remove the stale device node")
    return folder.resolve()


def _require_readable_ends(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        nbytes = os.lseek(fd, 0, os.SEEK_END)
        for start in (0, max(0, nbytes - _ENDS_NBYTES)):
            expected = min(_ENDS_NBYTES, nbytes - start)
            try:
                num_read = len(os.pread(fd, expected, start))
            except OSError as error:
                raise _unreadable(path, start, error.strerror or str(error)) from error
            if num_read < expected:
                raise _unreadable(path, start + num_read, "a short read")
    finally:
        os.close(fd)


def _unreadable(path: Path, offset: int, why: str) -> DeviceRefused:
    return _refused(path, f"it cannot be read at byte {offset} ({why})", "check its health, or replace it")


def _unknown(path: Path, why: str, advice: str) -> DeviceRefused:
    return _refused(path, f"what lies on it cannot be found out, as {why}", advice)


def _refused(path: Path, found: str, advice: str) -> DeviceRefused:
    target = path.resolve()
    name = str(path) if target == path else f"{path} ({target})"
    return DeviceRefused(f"{name} cannot be used as an SSD: {found}; {advice}, or choose another device")
