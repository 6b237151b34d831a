"""The few bytes by which other programs recognize a partition table, a RAID or an LVM volume on a disk."""

import os
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

SECTOR_NBYTES = 512
IMAGE_NBYTES = 64 << 20  # enough for every mkfs


def write_at(path: Path, offset: int, content: bytes) -> None:
    """Overwrites some bytes of an image or a device without changing its size."""
    fd = os.open(path, os.O_WRONLY)
    try:
        assert os.pwrite(fd, content, offset) == len(content)
        os.fsync(fd)
    finally:
        os.close(fd)


def write_mbr(path: Path, *, kind: int = 0x83, num_sectors: int = 32768) -> None:
    """Writes a partition table with one partition that begins at 1 MiB."""
    entry = struct.pack("<B3sB3sII", 0, b"\0\0\0", kind, b"\0\0\0", 2048, num_sectors)
    write_at(path, 446, entry.ljust(64, b"\0") + b"\x55\xaa")


def write_gpt(path: Path) -> None:
    """Writes an empty table: protective MBR, both headers, both arrays of entries. Source: UEFI specification, 5.3."""
    last = IMAGE_NBYTES // SECTOR_NBYTES - 1
    write_at(
        path, 446, struct.pack("<B3sB3sII", 0, b"\0\2\0", 0xEE, b"\xff" * 3, 1, last).ljust(64, b"\0") + b"\x55\xaa"
    )
    entries = bytes(128 * 128)
    for here, other, array in ((1, last, 2), (last, 1, last - 32)):
        header = bytearray(
            struct.pack(
                "<8sIIIIQQQQ16sQIII",
                b"EFI PART",
                0x10000,
                92,
                0,
                0,
                here,
                other,
                34,
                last - 33,
                bytes(range(16)),
                array,
                128,
                128,
                zlib.crc32(entries),
            )
        )
        struct.pack_into("<I", header, 16, zlib.crc32(header))
        write_at(path, here * SECTOR_NBYTES, bytes(header))
        write_at(path, array * SECTOR_NBYTES, entries)


def write_lvm(path: Path) -> None:
    """Writes the label of a physical volume into sector 1. Source: LVM2's lib/format_text/layout.h."""
    rest = struct.pack("<I8s32sQ", 32, b"LVM2 001", b"a" * 32, IMAGE_NBYTES).ljust(SECTOR_NBYTES - 20, b"\0")
    crc = zlib.crc32(rest, 0xF597A6CF ^ 0xFFFFFFFF) ^ 0xFFFFFFFF
    write_at(path, SECTOR_NBYTES, struct.pack("<8sQI", b"LABELONE", 1, crc) + rest)


def write_md(path: Path) -> None:
    """Writes a superblock of version 1.2 at 4 KiB. Source: Linux's include/uapi/linux/raid/md_p.h."""
    block = bytearray(256)
    struct.pack_into("<II", block, 0, 0xA92B4EFC, 1)
    block[16:32] = bytes(range(1, 17))  # the array's UUID
    struct.pack_into("<QQQ", block, 128, 2048, 120000, 4096 // SECTOR_NBYTES)  # data offset and size, own place
    total = sum(struct.unpack("<64I", block))
    struct.pack_into("<I", block, 216, ((total & 0xFFFFFFFF) + (total >> 32)) & 0xFFFFFFFF)
    write_at(path, 4096, bytes(block))


def write_luks(path: Path) -> None:
    """Writes the start of a LUKS 1 header."""
    write_at(path, 0, struct.pack(">6sH", b"LUKS\xba\xbe", 1).ljust(592, b"\0"))


def format_with(tool: str, path: Path) -> None:
    """Runs mkfs.ext4 or a similar tool; skips the test if it is not installed."""
    program = shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))
    if program is None:
        pytest.skip(f"{tool} is not installed")
    quiet = {"mkfs.ext4": ["-q", "-F"], "mkfs.xfs": ["-q", "-f"]}
    done = subprocess.run([program, *quiet.get(tool, []), str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
