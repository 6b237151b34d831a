import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.power_cut import PowerCut
from tests.support.storage.faulty_device import power_losses
from tests.support.storage.stores import JOB, OTHER, QuickDevice, flip, open_volume, used_nbytes, volume_file
from windlass.storage.ids import JobId
from windlass.storage.integrity.errors import StoreCorrupt, StoreError, StoreExists, StoreIoError, StoreMissing
from windlass.storage.integrity.records import RECORD_NBYTES
from windlass.storage.memory.capacity import InsufficientSpaceError
from windlass.storage.ssd import volume as volume_module
from windlass.storage.ssd import volume_format as layout
from windlass.storage.ssd.raw_device import DeviceRefused
from windlass.storage.ssd.volume import Volume
from windlass.storage.ssd.volume_format import UNIT_NBYTES, Demand

EMPTY_NBYTES = layout.HEADER_UNITS * UNIT_NBYTES
DEMAND = Demand(head_nbytes=UNIT_NBYTES, extent_nbytes=UNIT_NBYTES, num_extents=3)


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    volume = open_volume(tmp_path)
    yield volume
    volume.close()


class FailingDevice(QuickDevice):
    """Raises the error that `errors` holds for a method's name."""

    errors: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.errors = {}

    def _try(self, name: str) -> None:
        if name in self.errors:
            raise OSError(self.errors[name], os.strerror(self.errors[name]))

    def allocate(self, offset: int, nbytes: int) -> None:
        super().allocate(offset, nbytes // 2 if "allocate" in self.errors else nbytes)
        self._try("allocate")

    def read_records(self, offset: int, nbytes: int) -> bytes:
        self._try("read_records")
        return super().read_records(offset, nbytes)

    def write_records(self, offset: int, raw: bytes) -> None:
        self._try("write_records")
        super().write_records(offset, raw)

    def sync(self) -> None:
        self._try("sync")


class TestOpen:
    def test_makes_a_private_volume_once(self, tmp_path: Path, direct: bool) -> None:
        volume = Volume.open(tmp_path, direct=direct)
        facts = volume_file(tmp_path).stat()
        assert facts.st_mode & 0o777 == 0o600
        assert facts.st_size == EMPTY_NBYTES <= used_nbytes(volume_file(tmp_path))
        assert list(tmp_path.iterdir()) == [volume_file(tmp_path)]
        allocation = volume.reserve(JOB, DEMAND)
        volume.close()
        again = Volume.open(tmp_path, direct=direct)
        assert again.allocations() == {JOB: allocation}
        again.close()

    def test_power_loss_once_it_is_made_leaves_its_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        cut = PowerCut(tmp_path, monkeypatch)
        open_volume(tmp_path).close()
        assert volume_file(tmp_path).name in cut.left()

    def test_place_that_does_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=f"{tmp_path}/none is neither a directory nor a block device"):
            open_volume(tmp_path / "none")

    @pytest.mark.parametrize("version", [layout.VERSION - 1, layout.VERSION + 1])
    def test_other_version_is_refused(self, tmp_path: Path, version: int) -> None:
        open_volume(tmp_path).close()
        for offset in layout.SUPERBLOCK_OFFSETS:
            raw = layout.pack_json(layout.SUPERBLOCK_MAGIC, {"version": version})
            _overwrite(volume_file(tmp_path), offset, raw)
        with pytest.raises(StoreCorrupt, match=f"{tmp_path} has format version {version}; this windlass"):
            open_volume(tmp_path)

    def test_foreign_file_is_left_alone(self, tmp_path: Path) -> None:
        volume_file(tmp_path).write_bytes(b"precious" * 1000)
        with pytest.raises(StoreCorrupt, match="is not a windlass volume"):
            open_volume(tmp_path)
        assert volume_file(tmp_path).read_bytes() == b"precious" * 1000

    def test_blank_start_over_a_table_with_jobs_is_not_a_new_volume(self, volume: Volume, tmp_path: Path) -> None:
        volume.reserve(JOB, DEMAND)
        _overwrite(volume_file(tmp_path), 0, bytes(UNIT_NBYTES))
        with pytest.raises(StoreCorrupt, match=r"both of its superblocks .*remove its file windlass\.volume"):
            open_volume(tmp_path)

    def test_blank_first_superblock_keeps_what_was_measured(self, volume: Volume, tmp_path: Path) -> None:
        """The second superblock shows that the volume is not new."""
        volume.keep_calibration({"read_bytes_per_s": 3.5e9})
        _overwrite(volume_file(tmp_path), layout.SUPERBLOCK_OFFSETS[0], bytes(RECORD_NBYTES))
        again = open_volume(tmp_path)
        assert again.calibration() == {"read_bytes_per_s": 3.5e9}
        again.close()

    def test_two_processes_that_make_it_at_once_wait_for_each_other(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        formats, is_free = Volume._format, []

        def look_who_waits(volume: Volume) -> None:
            with volume.device.path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    is_free.append(True)
                except BlockingIOError:
                    is_free.append(False)
            formats(volume)

        monkeypatch.setattr(Volume, "_format", look_who_waits)
        open_volume(tmp_path).close()
        assert is_free == [False]

    def test_device_that_was_a_volume_before_has_no_calibration(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The device may hold the image of another disk; its superblocks and tables were cleared."""
        open_volume(tmp_path).close()
        disk = tmp_path / "disk"
        disk.write_bytes(bytes(EMPTY_NBYTES))
        _overwrite(disk, layout.CALIBRATION_OFFSET, layout.pack_json(layout.CALIBRATION_MAGIC, {"old": 1}))
        monkeypatch.setattr(volume_module, "is_block_device", lambda path: True)
        for name in ("require_not_in_use", "require_usable"):
            monkeypatch.setattr(volume_module, name, lambda path: None)
        volume = open_volume(disk)
        assert volume.calibration() is None
        volume.close()

    def test_failures_leave_no_descriptor(self, tmp_path: Path) -> None:
        volume_file(tmp_path).write_bytes(b"x")
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(StoreCorrupt):
            open_volume(tmp_path)
        assert len(list(Path("/proc/self/fd").iterdir())) == before

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    def test_full_disk(self, tmp_path: Path, code: int) -> None:
        class Full(QuickDevice):
            def allocate(self, offset: int, nbytes: int) -> None:
                raise OSError(code, os.strerror(code))

        with pytest.raises(InsufficientSpaceError, match=f"{tmp_path} for a new volume"):
            open_volume(tmp_path, make_device=Full)
        open_volume(tmp_path).close()

    def test_power_loss_while_what_was_measured_is_kept(self, tmp_path: Path) -> None:
        open_volume(tmp_path).close()
        image = volume_file(tmp_path).read_bytes()
        for is_done in power_losses(tmp_path, lambda volume: volume.keep_calibration({"new": 1}), image=image):
            volume = open_volume(tmp_path)
            assert volume.calibration() in ([{"new": 1}] if is_done else [None, {"new": 1}])
            volume.close()

    def test_power_loss_while_it_is_made(self, tmp_path: Path) -> None:
        """The remains are completed or made anew."""
        for _ in power_losses(tmp_path, lambda volume: None):
            volume = open_volume(tmp_path)
            volume.reserve(JOB, DEMAND)
            volume.close()


class TestDamage:
    """All records exist twice: one damaged copy changes nothing, two are an error and never a new start."""

    @pytest.mark.parametrize("copies", [(0,), (1,), (0, 1)])
    @pytest.mark.parametrize(
        ("offsets", "nbytes", "text"),
        [
            (layout.SUPERBLOCK_OFFSETS, RECORD_NBYTES, "both of its superblocks are damaged"),
            (layout.TABLE_OFFSETS, layout.TABLE_NBYTES, "both copies of the allocation table of .* are damaged"),
        ],
    )
    @pytest.mark.parametrize("at", [0, 9, 30, -1])
    def test_flipped_bits(
        self, tmp_path: Path, copies: tuple[int, ...], offsets: tuple[int, int], nbytes: int, text: str, at: int
    ) -> None:
        volume = open_volume(tmp_path)
        allocation = volume.reserve(JOB, DEMAND)
        volume.close()
        for copy in copies:
            flip(volume_file(tmp_path), offsets[copy] + at % nbytes)
        if len(copies) == 2:
            with pytest.raises(StoreCorrupt, match=text) as caught:
                open_volume(tmp_path).allocations()
            assert str(tmp_path) in str(caught.value)
            return
        volume = open_volume(tmp_path)
        assert volume.allocations() == {JOB: allocation}
        other = volume.reserve(OTHER, DEMAND)
        volume.close()
        assert open_volume(tmp_path).allocations() == {JOB: allocation, OTHER: other}

    @pytest.mark.parametrize("copy", [0, 1])
    def test_power_loss_while_the_only_good_table_is_replaced(self, tmp_path: Path, copy: int) -> None:
        volume = open_volume(tmp_path)
        allocation = volume.reserve(JOB, DEMAND)
        volume.close()
        flip(volume_file(tmp_path), layout.TABLE_OFFSETS[copy] + 50)
        damaged = volume_file(tmp_path).read_bytes()
        for is_done in power_losses(tmp_path, lambda volume: volume.reserve(OTHER, DEMAND), image=damaged):
            volume = open_volume(tmp_path)
            found = volume.allocations()
            volume.close()
            assert found[JOB] == allocation
            assert OTHER in found or not is_done


class TestAllocations:
    @settings(max_examples=25, deadline=None)
    @given(seeds=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(1, 40)), max_size=14))
    def test_disk_space_is_what_the_jobs_have(self, seeds: list[tuple[int, int, int]]) -> None:
        """Reserved, given scratch and freed at random, on real files."""
        with tempfile.TemporaryDirectory() as name:
            volume, file = open_volume(Path(name)), volume_file(Path(name))
            for number, action, size in seeds:
                job = JobId(f"job-{number}")
                demand = Demand(head_nbytes=size * 4096, extent_nbytes=size * 65536, num_extents=size % 7)
                if job not in volume.allocations():
                    volume.reserve(job, demand)
                elif action < 3:
                    scratch = replace(demand, head_nbytes=0)
                    volume.reserve_scratch(job, scratch, nonce=volume.allocation(job).nonce)
                    assert len(volume.allocation(job).scratch_offsets(scratch)) >= scratch.num_extents
                else:
                    volume.free(job)
                table = layout.AllocationTable(allocations=volume.allocations())
                held = sum(each.count for one in table.allocations.values() for each in one.taken) * UNIT_NBYTES
                assert file.stat().st_size == table.stop * UNIT_NBYTES
                # The file system's own metadata of the file may count as its blocks.
                assert EMPTY_NBYTES + held <= used_nbytes(file) <= EMPTY_NBYTES + held + UNIT_NBYTES // 2
            for job in volume.allocations():
                volume.free(job)
            assert file.stat().st_size == EMPTY_NBYTES
            volume.close()

    @pytest.mark.parametrize("copy", [0, 1])
    def test_newer_of_two_tables_counts(self, volume: Volume, tmp_path: Path, copy: int) -> None:
        """The machine lost power between the two writes."""
        offset = layout.TABLE_OFFSETS[copy]
        older = volume.device.read_records(offset, layout.TABLE_NBYTES)
        allocation = volume.reserve(JOB, DEMAND)
        _overwrite(volume_file(tmp_path), offset, older)
        assert volume.allocations() == {JOB: allocation}

    def test_space_whose_old_owner_could_not_be_told_stays_its_own(
        self, volume: Volume, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An attempt that is still alive would write to space that belongs to another job by then."""
        volume.reserve(JOB, DEMAND)

        def fail(*_: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(volume, "_write_head", fail)
            with pytest.raises(StoreIoError, match=f"could not free the space of job {JOB}"):
                volume.free(JOB, records=[(0, bytes(RECORD_NBYTES))])
        assert not volume.allocation(JOB).is_ready
        volume.free(JOB)
        assert volume.allocations() == {}

    def test_second_reservation_and_missing_job(self, volume: Volume, tmp_path: Path) -> None:
        volume.reserve(JOB, DEMAND)
        with pytest.raises(StoreExists, match=f"{tmp_path} already holds states of job ftjob-1; open them, or delete"):
            volume.reserve(JOB, DEMAND)
        with pytest.raises(StoreMissing, match=f"{tmp_path} holds no states of job ftjob-2"):
            volume.allocation(OTHER)
        volume.free(OTHER)
        assert list(volume.allocations()) == [JOB]

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    def test_disk_that_fills_up_meanwhile_gives_everything_back(self, tmp_path: Path, code: int) -> None:
        volume = open_volume(tmp_path, make_device=FailingDevice)
        held = volume.reserve(JOB, DEMAND)
        before = volume_file(tmp_path).stat().st_size
        volume.device.errors["allocate"] = code
        with pytest.raises(
            InsufficientSpaceError, match=r"model states of job ftjob-2: .* needed, .* free; delete files there"
        ):
            volume.reserve(OTHER, DEMAND)
        assert volume.allocations() == {JOB: held}
        assert volume_file(tmp_path).stat().st_size == before
        volume.close()

    def test_too_small_disk_is_refused_before_anything_is_taken(
        self, volume: Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(volume_module, "directory_free_nbytes", lambda path: DEMAND.nbytes - 1)
        for refused in (lambda: volume.reserve(JOB, DEMAND), lambda: volume.require_room("all", DEMAND.nbytes)):
            with pytest.raises(InsufficientSpaceError, match=r"4.00 MiB needed, 1 bytes more than the 4.00 MiB free"):
                refused()
        assert volume.allocations() == {}
        assert volume_file(tmp_path).stat().st_size == EMPTY_NBYTES
        volume.require_room("less", DEMAND.nbytes - 1)

    def test_what_a_killed_process_took_counts_as_free(self, volume: Volume, tmp_path: Path) -> None:
        """The process dies between taking the space and recording it in the table."""
        volume.reserve(JOB, DEMAND)
        taken = volume_file(tmp_path).stat().st_size
        for use in (volume.free_nbytes, lambda: volume.reserve(OTHER, DEMAND), lambda: volume.free(OTHER)):
            volume.device.allocate(taken + 8 * UNIT_NBYTES, 64 * UNIT_NBYTES)
            use()
            assert used_nbytes(volume_file(tmp_path)) < taken + 8 * UNIT_NBYTES

    def test_space_freed_meanwhile_is_not_set_up(self, volume: Volume) -> None:
        """Two attempts make a store at once: the slower one must not overwrite the other's records."""
        mine = volume.reserve(JOB, DEMAND)
        volume.free(JOB)
        theirs = volume.set_up(volume.reserve(JOB, DEMAND), [(0, b"theirs")])
        assert theirs.head_offset == mine.head_offset
        with pytest.raises(StoreMissing, match="what was reserved for job ftjob-1 was freed meanwhile"):
            volume.set_up(mine, [(0, b"mine!!")])
        volume.free(JOB, nonce=mine.nonce, records=[(0, b"mine!!")])
        assert volume.allocations() == {JOB: theirs}
        assert volume.device.read_records(theirs.head_offset, 6) == b"theirs"
        volume.free(JOB, nonce=theirs.nonce)
        assert volume.allocations() == {}

    def test_too_many_jobs(self, volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
        def outgrown(table: layout.AllocationTable) -> bytes:
            raise ValueError("a record of 9 bytes does not fit into 8")

        monkeypatch.setattr(layout, "pack_table", outgrown)
        with pytest.raises(StoreError, match="has no room in the table for another job: delete some"):
            volume.reserve(JOB, DEMAND)
        monkeypatch.undo()
        assert volume.allocations() == {}

    @pytest.mark.parametrize("method", ["read_records", "write_records", "sync", "allocate"])
    def test_failing_disk_is_named(self, tmp_path: Path, method: str) -> None:
        volume = open_volume(tmp_path, make_device=FailingDevice)
        volume.device.errors[method] = errno.EIO
        with pytest.raises(StoreIoError) as caught:
            volume.reserve(JOB, DEMAND)
        assert f"SSD {tmp_path}: could not reserve space for job ftjob-1: [Errno 5]" in str(caught.value)
        del volume.device.errors[method]
        volume.free(JOB)
        volume.reserve(JOB, DEMAND)
        volume.close()


class TestCalibration:
    def test_is_kept_until_damaged(self, volume: Volume, tmp_path: Path) -> None:
        assert volume.calibration() is None
        volume.keep_calibration({"read_bytes_per_s": 3.5e9})
        volume.reserve(JOB, DEMAND)
        again = open_volume(tmp_path)
        assert again.calibration() == {"read_bytes_per_s": 3.5e9}
        flip(volume_file(tmp_path), layout.CALIBRATION_OFFSET + 20)
        assert again.calibration() is None
        assert list(again.allocations()) == [JOB]
        again.close()


class TestRawDevice:
    """On a file that is treated as a device: its size is fixed, and its content counts."""

    @pytest.fixture
    def raw(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Volume]:
        asked: list[str] = []
        monkeypatch.setattr(volume_module, "is_block_device", lambda path: True)
        monkeypatch.setattr(volume_module, "require_not_in_use", lambda path: asked.append("not in use"))
        monkeypatch.setattr(volume_module, "require_usable", lambda path: asked.append("usable"))

        def make(num_units: int = 16, *, asks: list[str] | None = None) -> Volume:
            path = tmp_path / "disk"
            path.touch()
            os.truncate(path, num_units * UNIT_NBYTES)
            asked.clear()
            volume = open_volume(path)
            assert asks is None or asked == asks
            return volume

        return make

    def test_signatures_are_looked_for_unless_it_is_a_whole_volume(self, raw: Callable[..., Volume]) -> None:
        volume = raw(asks=["not in use", "usable"])
        assert list(raw(asks=["not in use"]).allocations()) == []
        flip(volume.path, layout.SUPERBLOCK_OFFSETS[0] + 510)  # the place of an MBR's mark
        assert list(raw(asks=["not in use", "usable"]).allocations()) == []

    def test_refused_device_is_not_changed(
        self, raw: Callable[..., Volume], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(path: Path) -> None:
            raise DeviceRefused(f"{path} cannot be used")

        monkeypatch.setattr(volume_module, "require_usable", refuse)
        with pytest.raises(DeviceRefused):
            raw()
        assert not (tmp_path / "disk").read_bytes().strip(b"\0")

    @pytest.mark.parametrize("offset", [*layout.SUPERBLOCK_OFFSETS, *layout.TABLE_OFFSETS])
    def test_trace_of_a_volume_is_not_written_over(self, raw: Callable[..., Volume], offset: int) -> None:
        volume = raw()
        volume.reserve(JOB, DEMAND)
        blank = bytes(UNIT_NBYTES)
        whole = volume.path.read_bytes()
        for start in range(0, EMPTY_NBYTES, UNIT_NBYTES):
            _overwrite(volume.path, start, blank)
        _overwrite(
            volume.path, offset, whole[offset : offset + (RECORD_NBYTES if offset < UNIT_NBYTES else UNIT_NBYTES)]
        )
        if offset < UNIT_NBYTES:  # the superblock only: a volume whose tables are lost
            flip(volume.path, offset + 100)
        with pytest.raises(StoreCorrupt, match=r"superblocks are damaged.*put zeros over its first 3 MiB"):
            raw()

    def test_space_is_shared_out_in_pieces_and_no_further(self, raw: Callable[..., Volume]) -> None:
        volume = raw(16)
        assert volume.free_nbytes() == 13 * UNIT_NBYTES
        for i in range(3):
            volume.reserve(JobId(f"job-{i}"), replace(DEMAND, num_extents=2))
        volume.free(JobId("job-1"))
        assert volume.free_nbytes() == 7 * UNIT_NBYTES
        allocation = volume.reserve(JOB, replace(DEMAND, num_extents=6))
        assert [(each.start, each.count) for each in allocation.ranges] == [(12, 4), (6, 3)]
        assert volume.free_nbytes() == 0
        with pytest.raises(InsufficientSpaceError, match=r"4.00 MiB more than the 0 bytes free.* use this device"):
            volume.reserve(OTHER, DEMAND)
        assert volume.path.stat().st_size == 16 * UNIT_NBYTES
        volume.close()

    def test_scratch_may_lie_in_pieces(self, raw: Callable[..., Volume]) -> None:
        volume = raw(16)
        mine = volume.reserve(JOB, replace(DEMAND, num_extents=1))
        for i in range(3):
            volume.reserve(JobId(f"job-{i}"), replace(DEMAND, num_extents=2))
        volume.free(JobId("job-1"))
        for num_slots, expected in ((4, [(8, 3), (14, 1)]), (1, [(14, 1)]), (5, [(8, 3), (14, 2)])):
            scratch = Demand(head_nbytes=0, extent_nbytes=UNIT_NBYTES, num_extents=num_slots)
            found = volume.reserve_scratch(JOB, scratch, nonce=mine.nonce)
            assert [(each.start, each.count) for each in found.scratch] == expected
            assert found.scratch_offsets(scratch) == [
                unit * UNIT_NBYTES for start, count in expected for unit in range(start, start + count)
            ]
            assert volume.free_nbytes() == (5 - num_slots) * UNIT_NBYTES
        with pytest.raises(InsufficientSpaceError, match="swapped activations of job ftjob-1"):
            volume.reserve_scratch(JOB, replace(scratch, num_extents=6), nonce=mine.nonce)
        assert volume.allocation(JOB) == mine
        volume.close()


def _overwrite(file: Path, offset: int, raw: bytes) -> None:
    fd = os.open(file, os.O_RDWR)
    try:
        os.pwrite(fd, raw, offset)
    finally:
        os.close(fd)


class TestHeldSpace:
    def test_held_space_is_that_of_the_job_only(self, volume: Volume) -> None:
        volume.reserve(OTHER, DEMAND)
        allocation = volume.reserve(JOB, DEMAND)
        assert volume.held_nbytes(JOB) == DEMAND.nbytes
        volume.reserve_scratch(
            JOB, Demand(head_nbytes=0, extent_nbytes=UNIT_NBYTES, num_extents=2), nonce=allocation.nonce
        )
        assert volume.held_nbytes(JOB) == DEMAND.nbytes + 2 * UNIT_NBYTES

    def test_space_freed_by_file_system_does_not_count_as_held(self, volume: Volume) -> None:
        allocation = volume.reserve(JOB, DEMAND)
        if volume.device.backed_nbytes(allocation.head_offset, UNIT_NBYTES) is None:
            pytest.skip("the file system does not tell")
        volume.device.discard(allocation.head_offset, UNIT_NBYTES)
        assert volume.held_nbytes(JOB) == DEMAND.nbytes - UNIT_NBYTES

    def test_held_space_comes_from_table_without_extent_map(
        self, volume: Volume, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        volume.reserve(JOB, DEMAND)
        monkeypatch.setattr(type(volume.device), "backed_nbytes", lambda *_: None)
        assert volume.held_nbytes(JOB) == DEMAND.nbytes

    def test_held_space_of_unknown_job_raises(self, volume: Volume) -> None:
        with pytest.raises(StoreMissing):
            volume.held_nbytes(JOB)
