"""A disk that loses power at a given operation. Unsynced writes may then be complete, torn or missing."""

import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass.storage.ssd.device import SsdDevice
from windlass.storage.ssd.volume import VOLUME_FILE, Volume

# Bytes that a disk writes atomically.
SECTOR_NBYTES = 512
_MOST_OPERATIONS = 20


class PowerLoss(Exception):
    """The machine is off: no later operation happens."""


@dataclass(slots=True)
class Power:
    """Counts the operations of disks and turns off before operation `off_at`. Several disks may share one."""

    off_at: int | None = None
    num_operations: int = 0
    is_off: bool = False

    def spend(self) -> None:
        """Counts one more operation; raises PowerLoss if the power is off."""
        if self.num_operations == self.off_at:
            self.is_off = True
        if self.is_off:
            raise PowerLoss
        self.num_operations += 1


@dataclass(slots=True)
class Disk:
    """The durable state: the bytes as of the last sync, and all later writes, in order."""

    power: Power
    durable: bytearray = field(default_factory=bytearray)
    unsynced: list[tuple[int, bytes]] = field(default_factory=list)

    def image(self, writes: Iterable[tuple[int, bytes]]) -> bytes:
        """The bytes of the disk if exactly these unsynced writes arrived, in this order."""
        content = bytearray(self.durable)
        for offset, raw in writes:
            _put(content, offset, raw)
        return bytes(content)

    def outcomes(self, seed: int, num_random: int) -> Iterator[bytes]:
        """Images that a power loss now may leave: no write, all, only the last, torn and reordered subsets."""
        yield self.image([])
        if not self.unsynced:
            return
        yield self.image(self.unsynced)
        yield self.image(self.unsynced[-1:])
        yield self.image(self.unsynced[:-1])
        chance = random.Random(seed)
        for _ in range(num_random):
            survivors = [_torn(chance, *write) for write in self.unsynced if chance.random() < 0.6]
            arrived = [sector for write in survivors for sector in write]
            chance.shuffle(arrived)
            yield self.image(arrived)


class FaultyDevice(SsdDevice):
    """The real file, together with its durable part. All devices of one path share `disk`."""

    disk: Disk  # set by `factory`

    def write(self, offset: int, buffer: memoryview) -> int:
        self.disk.power.spend()
        moved = super().write(offset, buffer)
        self.disk.unsynced.append((offset, bytes(buffer[:moved])))
        return moved

    def write_records(self, offset: int, raw: bytes) -> None:
        self.disk.power.spend()
        super().write_records(offset, raw)
        self.disk.unsynced.append((offset, raw))

    def sync(self) -> None:
        """Marks all writes as durable. The real disk is not synced, because no test waits for it."""
        self.disk.power.spend()
        for offset, raw in self.disk.unsynced:
            _put(self.disk.durable, offset, raw)
        self.disk.unsynced.clear()

    def allocate(self, offset: int, nbytes: int) -> None:
        self.disk.power.spend()
        super().allocate(offset, nbytes)
        # A file system's journal makes this durable at once; the bytes are zeros until written.
        self.disk.durable.extend(bytes(max(0, offset + nbytes - len(self.disk.durable))))


def factory(disk: Disk) -> Any:
    """The `make_device` argument of `Volume.open` for this disk."""

    def make(path: Path, *, is_raw: bool = False, direct: bool = True) -> FaultyDevice:
        device = FaultyDevice(path, is_raw=is_raw, direct=direct)
        device.disk = disk
        return device

    return make


def power_losses(
    directory: Path, act: Callable[[Volume], object], *, image: bytes = b"", num_random: int = 12
) -> Iterator[bool]:
    """Cuts the power before each operation of opening an SSD directory's volume, which was `image`, and of `act`.

    For each file that may be left, puts it in place and yields whether `act` had finished.
    """
    file = directory / VOLUME_FILE
    for off_at in range(_MOST_OPERATIONS):
        disk, is_done = Disk(Power(off_at=off_at), bytearray(image)), True
        file.unlink(missing_ok=True)
        if image:
            write_image(file, image)
        try:
            volume = Volume.open(directory, direct=False, make_device=factory(disk))
            try:
                act(volume)
            finally:
                volume.close()
        except PowerLoss:
            is_done = False
        for outcome in disk.outcomes(off_at, num_random):
            write_image(file, outcome)
            yield is_done
        if is_done:
            return
    raise AssertionError(f"not done after {_MOST_OPERATIONS} operations")


def write_image(path: Path, image: bytes) -> None:
    """Puts a disk's surviving bytes into a sparse file."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.ftruncate(fd, len(image))
        zeros = bytes(1 << 16)
        for start in range(0, len(image), len(zeros)):
            part = image[start : start + len(zeros)]
            if part != zeros[: len(part)]:
                os.pwrite(fd, part, start)
    finally:
        os.close(fd)


def _put(content: bytearray, offset: int, raw: bytes) -> None:
    if len(content) < offset + len(raw):
        content.extend(bytes(offset + len(raw) - len(content)))
    content[offset : offset + len(raw)] = raw


def _torn(chance: random.Random, offset: int, raw: bytes) -> list[tuple[int, bytes]]:
    """The sectors of a write that arrived: all, a prefix, or any subset."""
    sectors = [(offset + at, raw[at : at + SECTOR_NBYTES]) for at in range(0, len(raw), SECTOR_NBYTES)]
    match chance.randrange(3):
        case 0:
            return sectors
        case 1:
            return sectors[: chance.randrange(len(sectors) + 1)]
        case _:
            return [sector for sector in sectors if chance.random() < 0.5]
