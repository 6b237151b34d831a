"""Checks of real block devices: files behind loop devices, formatted and used with the usual tools."""

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import MakeLoop, require, run
from tests.support.disk_images import IMAGE_NBYTES, format_with, write_at, write_gpt, write_lvm, write_mbr, write_md
from windlass.storage.ssd.raw_device import (
    DeviceRefused,
    device_nbytes,
    is_block_device,
    logical_block_nbytes,
    require_not_in_use,
    require_usable,
)


@pytest.fixture
def loop(make_loop: MakeLoop) -> Path:
    return make_loop()


class TestFree:
    def test_a_blank_device_passes(self, loop: Path) -> None:
        require_usable(loop)
        require_usable(loop)  # the probe leaves nothing behind

    def test_garbage_without_a_signature_passes(self, loop: Path) -> None:
        generator = random.Random(1)
        write_at(loop, 0, generator.randbytes(4 << 20))
        write_at(loop, IMAGE_NBYTES - (4 << 20), generator.randbytes(4 << 20))
        require_usable(loop)

    def test_one_that_is_open_but_not_claimed_passes(self, loop: Path) -> None:
        fd = os.open(loop, os.O_RDWR)  # opened as the service itself opens it
        try:
            require_usable(loop)
        finally:
            os.close(fd)

    def test_a_link_stands_for_its_device(self, loop: Path, tmp_path: Path) -> None:
        link = tmp_path / "by-id"
        link.symlink_to(loop)
        assert is_block_device(link)
        require_usable(link)
        assert device_nbytes(link) == IMAGE_NBYTES
        write_mbr(loop)
        with pytest.raises(DeviceRefused, match=rf"{link} \({loop}\) cannot .* MBR .*`wipefs --all {link}`"):
            require_usable(link)

    @pytest.mark.parametrize("block_nbytes", [512, 4096])
    def test_sizes(self, make_loop: MakeLoop, block_nbytes: int) -> None:
        device = make_loop("--sector-size", str(block_nbytes), nbytes=IMAGE_NBYTES - 4096)
        assert device_nbytes(device) == IMAGE_NBYTES - 4096
        assert logical_block_nbytes(device) == block_nbytes


class TestSignatures:
    @pytest.mark.parametrize(
        ("write", "found"),
        [
            (write_mbr, "an MBR partition table"),
            (write_gpt, "a GPT partition table"),
            (write_lvm, "an LVM physical volume"),
            (write_md, r"a member of a RAID \(linux_raid_member\)"),
        ],
    )
    def test_written_bytes_are_refused(self, loop: Path, write: Callable[[Path], None], found: str) -> None:
        write(loop)
        self._check(loop, found)

    @pytest.mark.parametrize(
        ("tool", "found"),
        [
            ("mkfs.ext4", r"a file system \(ext4\)"),
            ("mkfs.xfs", r"a file system \(xfs\)"),
            ("mkfs.btrfs", r"a file system \(btrfs\)"),
            ("mkswap", "swap space"),
        ],
    )
    def test_what_other_programs_make_is_refused(self, make_loop: MakeLoop, tool: str, found: str) -> None:
        device = make_loop(nbytes=400 << 20)  # XFS needs at least 300 MiB
        format_with(tool, device)
        self._check(device, found)

    def test_a_wiped_device_passes_again(self, loop: Path) -> None:
        format_with("mkfs.ext4", loop)
        self._check(loop, "ext4")
        assert run("wipefs", "--all", loop).returncode == 0
        require_usable(loop)

    def test_an_unreadable_device_is_not_taken_for_a_blank_one(self, loop: Path, tmp_path: Path) -> None:
        format_with("mkfs.ext4", loop)
        (tmp_path / "disk-0").write_bytes(b"")
        assert run("blockdev", "--flushbufs", loop).returncode == 0
        with pytest.raises(DeviceRefused, match=r"cannot be read at byte 0 .*check its health"):
            require_usable(loop)

    def _check(self, device: Path, found: str) -> None:
        with pytest.raises(DeviceRefused, match=f"{device} cannot .*: it holds .*{found}.*choose another device"):
            require_usable(device)
        require_not_in_use(device)  # foreign content alone does not count as use


class TestInUse:
    @pytest.fixture
    def mounted(self, loop: Path, tmp_path: Path) -> Iterator[Path]:
        format_with("mkfs.ext4", loop)
        point = tmp_path / "a mount"
        point.mkdir()
        require("cannot mount here", "mount", loop, point)
        yield loop
        assert run("umount", point).returncode == 0

    def test_mounted(self, mounted: Path, tmp_path: Path) -> None:
        for ask in (require_not_in_use, require_usable):
            with pytest.raises(DeviceRefused, match=f"{mounted.name} is mounted on {tmp_path}/a mount; unmount it"):
                ask(mounted)
        (tmp_path / "link").symlink_to(mounted)
        with pytest.raises(DeviceRefused, match="is mounted on"):
            require_not_in_use(tmp_path / "link")

    def test_mounted_where_we_cannot_see_it(self, loop: Path, tmp_path: Path) -> None:
        format_with("mkfs.ext4", loop)
        script = 'mount "$0" "$1" && echo mounted && read -r _'
        with subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script, loop, tmp_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as other:
            assert other.stdout is not None
            if other.stdout.readline() != "mounted\n":
                pytest.skip("cannot mount in a namespace here")
            assert str(loop) not in Path("/proc/self/mountinfo").read_text()
            with pytest.raises(DeviceRefused, match="cannot be seen from here"):
                require_not_in_use(loop)
            other.communicate("\n")
        require_not_in_use(loop)

    def test_swap(self, loop: Path) -> None:
        format_with("mkswap", loop)
        require("cannot swap here", "swapon", loop)
        try:
            with pytest.raises(DeviceRefused, match=rf"{loop.name} is in use as swap space; .*`swapoff {loop}`"):
                require_not_in_use(loop)
        finally:
            assert run("swapoff", loop).returncode == 0

    def test_partitions(self, loop: Path, tmp_path: Path) -> None:
        require("cannot add a partition here", "addpart", loop, "1", "2048", "65536")
        partition = Path(f"{loop}p1")
        try:
            with pytest.raises(DeviceRefused, match=rf"it has partitions \({partition.name}\)"):
                require_not_in_use(loop)
            if not partition.exists():
                pytest.skip("device nodes do not appear by themselves here")
            require_usable(partition)
            assert device_nbytes(partition) == 65536 * 512
            assert logical_block_nbytes(partition) == 512
            format_with("mkfs.ext4", partition)
            require("cannot mount here", "mount", partition, tmp_path)
            try:
                for device in (loop, partition):
                    with pytest.raises(DeviceRefused, match=f"{partition.name} is mounted on {tmp_path}; unmount it"):
                        require_not_in_use(device)
            finally:
                assert run("umount", tmp_path).returncode == 0
        finally:
            assert run("delpart", loop, "1").returncode == 0

    def test_a_device_built_upon_it(self, loop: Path) -> None:
        if shutil.which("dmsetup") is None or "device-mapper" not in Path("/proc/devices").read_text():
            pytest.skip("the kernel has no device mapper, or dmsetup is not installed")
        name = f"windlass-test-{os.getpid()}"
        require("cannot map here", "dmsetup", "create", name, "--table", f"0 65536 linear {loop} 0")
        try:
            with pytest.raises(DeviceRefused, match=rf"{loop.name} is held by dm-\d+; take that"):
                require_not_in_use(loop)
        finally:
            assert run("dmsetup", "remove", name).returncode == 0

    def test_claimed_by_a_program(self, loop: Path) -> None:
        fd = os.open(loop, os.O_RDWR | os.O_EXCL)
        try:
            with pytest.raises(DeviceRefused, match=r"something uses it .*fuser -v"):
                require_not_in_use(loop)
        finally:
            os.close(fd)

    def test_without_the_right_to_write(self, loop: Path) -> None:
        mode = loop.stat().st_mode
        loop.chmod(0o600)
        os.seteuid(65534)  # root may open any device
        try:
            with pytest.raises(DeviceRefused, match=r"reading and writing \(Permission denied\); give the user"):
                require_not_in_use(loop)
        finally:
            os.seteuid(0)
            loop.chmod(mode)

    def test_read_only(self, make_loop: MakeLoop) -> None:
        with pytest.raises(DeviceRefused, match="it is read-only; allow writing"):
            require_not_in_use(make_loop("--read-only"))
