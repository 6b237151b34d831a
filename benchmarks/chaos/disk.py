"""Disks that `benchmarks.chaos` may fill: small file systems, each in a file."""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_DISK_NBYTES = 1 << 30  # size of a file system that may be filled


def reason_not_to_fill_disks(scratch: Path) -> str | None:
    """Returns the reason why disks cannot be filled on this machine, or None if they can."""
    try:
        with own_disk(scratch / "probe"):
            return None
    except OSError as error:
        return str(error)


@contextlib.contextmanager
def own_disk(mount: Path) -> Iterator[Path]:
    """Mounts a small file system, which may be filled, on a new folder.

    Raises OSError if the machine does not allow it.
    """
    image = mount.with_name(f"{mount.name}.img")
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(_DISK_NBYTES)
    _run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
    _run("mount", "-o", "loop", str(image), str(mount))
    try:
        yield mount
    finally:
        _run("umount", "--lazy", str(mount))
        image.unlink()
        mount.rmdir()


def fill_disk(folder: Path, lasts_s: float, wait: Callable[[float], object] = time.sleep) -> None:
    """Fills the disk of a folder to the last byte, and fills space again that is freed meanwhile."""
    until_s = time.monotonic() + lasts_s
    filler = folder / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            while time.monotonic() < until_s:
                for nbytes in (1 << 20, 4096):
                    with contextlib.suppress(OSError):
                        while True:
                            file.write(bytes(nbytes))
                wait(0.2)
    finally:
        filler.unlink()


def _run(*command: str) -> None:
    program = shutil.which(command[0], path="/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        raise OSError(f"there is no {command[0]}")
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{command[0]}: {done.stderr.strip()}")
