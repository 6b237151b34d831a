import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.disk_images import (
    IMAGE_NBYTES,
    format_with,
    write_at,
    write_gpt,
    write_luks,
    write_lvm,
    write_mbr,
    write_md,
)
from windlass.storage.integrity.errors import StoreError
from windlass.storage.ssd import raw_device
from windlass.storage.ssd.raw_device import (
    DeviceRefused,
    device_nbytes,
    is_block_device,
    logical_block_nbytes,
    require_not_in_use,
    require_usable,
    signatures,
    use_of,
)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    with path.open("wb") as file:
        file.truncate(IMAGE_NBYTES)
    return path


@pytest.fixture
def fake_wipefs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a shell script named wipefs first on the search path."""

    def make(script: str) -> None:
        program = tmp_path / "bin" / "wipefs"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")

    return make


class TestSignatures:
    @pytest.fixture(autouse=True)
    def _has_wipefs(self) -> None:
        if shutil.which("wipefs", path="/usr/sbin:/sbin:/usr/bin:/bin") is None:
            pytest.skip("wipefs of util-linux is not installed")

    @pytest.mark.parametrize(
        ("write", "expected"),
        [
            (write_mbr, ["an MBR partition table"]),
            (write_gpt, ["a GPT partition table", "a partition table (PMBR)"]),
            (write_lvm, ["an LVM physical volume"]),
            (write_md, ["a member of a RAID (linux_raid_member)"]),
            (write_luks, ["an encrypted volume (crypto_LUKS)"]),
        ],
    )
    def test_written_bytes_are_known(self, image: Path, write: Callable[[Path], None], expected: list[str]) -> None:
        write(image)
        assert signatures(image) == expected

    @pytest.mark.parametrize(
        ("tool", "expected"),
        [("mkfs.ext4", "a file system (ext4)"), ("mkfs.xfs", "a file system (xfs)"), ("mkswap", "swap space")],
    )
    def test_what_other_programs_make_is_known(self, tmp_path: Path, tool: str, expected: str) -> None:
        image = tmp_path / "large"
        with image.open("wb") as file:
            file.truncate(400 << 20)  # sparse; XFS needs 300 MiB
        format_with(tool, image)
        assert signatures(image) == [expected]

    def test_all_of_several_are_named(self, image: Path) -> None:
        format_with("mkfs.ext4", image)
        write_mbr(image)
        assert sorted(signatures(image)) == ["a file system (ext4)", "an MBR partition table"]

    def test_only_the_backup_of_a_partition_table_is_left(self, image: Path) -> None:
        write_gpt(image)
        write_at(image, 0, bytes(1 << 20))
        assert signatures(image) == ["a GPT partition table"]

    def test_a_damaged_superblock_still_counts(self, image: Path) -> None:
        write_md(image)
        write_at(image, 4096 + 216, struct.pack("<I", 12345))  # its checksum
        assert signatures(image) == ["a member of a RAID (linux_raid_member)"]

    def test_blank_and_garbage_carry_nothing(self, image: Path) -> None:
        assert signatures(image) == []
        generator = random.Random(1)
        write_at(image, 0, generator.randbytes(4 << 20))
        write_at(image, IMAGE_NBYTES - (4 << 20), generator.randbytes(4 << 20))
        assert signatures(image) == []


class TestProber:
    def test_is_found_where_the_path_lacks_system_programs(
        self, image: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        if shutil.which("wipefs", path="/usr/sbin:/sbin") is None:
            pytest.skip("wipefs is not in a directory of system programs here")
        monkeypatch.setenv("PATH", str(tmp_path))
        assert signatures(image) == []

    def test_missing_is_a_refusal(self, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "which", lambda name, path: None)
        with pytest.raises(DeviceRefused, match=r"disk cannot be used .*wipefs is missing; install util-linux"):
            signatures(image)

    @pytest.mark.parametrize(
        ("script", "message"),
        [
            ("echo no such luck >&2; exit 3", "ended with code 3: no such luck"),
            ("kill -9 $$", "ended with code -9"),
            ("true", "answered ''"),
            ("echo '{\"signatures\": [{}]}'", "not the JSON expected"),
            ("echo '[]'", "not the JSON expected"),
        ],
    )
    def test_failing_is_a_refusal(
        self, image: Path, fake_wipefs: Callable[[str], None], script: str, message: str
    ) -> None:
        fake_wipefs(script)
        with pytest.raises(DeviceRefused, match=rf"disk cannot .* cannot be found out, as .*{message}"):
            signatures(image)

    def test_hanging_is_a_refusal(
        self, image: Path, fake_wipefs: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(raw_device, "_PROBE_DEADLINE_S", 0.05)
        fake_wipefs("exec sleep 600")
        with pytest.raises(DeviceRefused, match=r"timed out.*see whether the device answers"):
            signatures(image)

    def test_a_kind_of_unknown_use_is_refused_by_its_name(
        self, image: Path, fake_wipefs: Callable[[str], None]
    ) -> None:
        fake_wipefs('echo \'{"signatures": [{"type": "newfs", "usage": null}]}\'')
        assert signatures(image) == ["a signature (newfs)"]


class TestNoDevice:
    @pytest.mark.parametrize("ask", [require_not_in_use, require_usable, logical_block_nbytes])
    def test_is_refused(self, tmp_path: Path, image: Path, ask: Callable[[Path], object]) -> None:
        for path in (tmp_path, image, Path("/dev/null")):
            assert not is_block_device(path)
            with pytest.raises(DeviceRefused, match=f"{path} cannot be used as an SSD: it is no block device"):
                ask(path)
        missing = tmp_path / "missing"
        assert not is_block_device(missing)
        with pytest.raises(DeviceRefused, match=r"No such file or directory.*correct the setting"):
            ask(missing)

    def test_the_error_names_the_link_and_its_target(self, tmp_path: Path, image: Path) -> None:
        link = tmp_path / "link"
        link.symlink_to(image)
        with pytest.raises(StoreError) as caught:
            require_usable(link)
        assert str(caught.value).startswith(f"{link} ({image}) cannot be used as an SSD")
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again)) == (DeviceRefused, str(caught.value))

    def test_the_size_of_a_file_is_what_it_says(self, image: Path) -> None:
        assert device_nbytes(image) == IMAGE_NBYTES


def _member(folder: Path, number: str, *, holders: tuple[str, ...] = (), is_partition: bool = False) -> Path:
    for holder in holders:
        (folder / "holders" / holder).mkdir(parents=True)
    (folder / "holders").mkdir(parents=True, exist_ok=True)
    (folder / "dev").write_text(f"{number}\n")
    (folder / "queue").mkdir()
    if is_partition:
        (folder / "partition").write_text("1\n")
    return folder


MOUNTINFO = r"""22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/root rw
23 22 0:21 / /proc rw,nosuid - proc proc rw
31 22 259:7 /a /mnt/my\040disk rw,relatime shared:9 master:2 - ext4 /dev/absent-2 rw
32 22 0:44 / /data rw - btrfs /dev/null rw
"""
SWAPS = "Filename\tType\tSize\tUsed\tPriority\n/dev/absent partition 1 0 -2\n/swapfile file 1 0 -3\n"


class TestUse:
    def test_a_free_device(self, tmp_path: Path) -> None:
        assert use_of(_member(tmp_path / "nvme0n1", "259:0"), MOUNTINFO, SWAPS) is None
        assert use_of(tmp_path / "nvme0n1", "", "") is None

    def test_a_mount_of_the_device_or_of_a_partition(self, tmp_path: Path) -> None:
        disk = _member(tmp_path / "nvme0n1", "259:7")
        assert use_of(disk, MOUNTINFO, SWAPS) == (
            "nvme0n1 is mounted on /mnt/my disk",
            "unmount it (`umount '/mnt/my disk'`)",
        )
        (disk / "dev").write_text("259:0\n")
        _member(disk / "nvme0n1p2", "259:7", is_partition=True)
        use = use_of(disk, MOUNTINFO, SWAPS)
        assert use is not None
        assert use[0] == "nvme0n1p2 is mounted on /mnt/my disk"

    def test_holders_of_the_device_or_of_a_partition(self, tmp_path: Path) -> None:
        disk = _member(tmp_path / "sda", "8:0", holders=("md0", "dm-3"))
        use = use_of(disk, MOUNTINFO, SWAPS)
        assert use is not None
        assert use[0] == "sda is held by dm-3, md0"
        other = _member(tmp_path / "sdb", "8:16")
        _member(other / "sdb1", "8:17", holders=("dm-0",), is_partition=True)
        use = use_of(other, MOUNTINFO, SWAPS)
        assert use is not None
        assert use[0] == "sdb1 is held by dm-0"

    def test_unused_partitions_are_no_use(self, tmp_path: Path) -> None:
        disk = _member(tmp_path / "sda", "8:0")
        for number in (1, 2):
            _member(disk / f"sda{number}", f"8:{number}", is_partition=True)
        use = use_of(disk, MOUNTINFO, SWAPS)
        assert use is not None
        assert use[0] == "it has partitions (sda1, sda2)"
