"""Allocates the space of one SSD to jobs, atomically and with a lock across processes."""

import errno
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from windlass.storage.files import sync_path
from windlass.storage.ids import JobId
from windlass.storage.integrity import (
    RECORD_NBYTES,
    StoreCorrupt,
    StoreError,
    StoreExists,
    StoreIoError,
    StoreMissing,
    is_intact,
)
from windlass.storage.memory import InsufficientSpaceError, directory_free_nbytes
from windlass.storage.ssd import volume_format as layout
from windlass.storage.ssd.device import SsdDevice
from windlass.storage.ssd.raw_device import (
    device_nbytes,
    is_block_device,
    require_not_in_use,
    require_usable,
)
from windlass.storage.ssd.volume_format import UNIT_NBYTES, Allocation, AllocationTable, Demand, UnitRange

VOLUME_FILE = "windlass.volume"


def has_volume(path: Path) -> bool:
    """Returns whether an SSD holds a volume. Opening a volume would create one in an empty directory or device."""
    try:
        fd = os.open(path if is_block_device(path) else path / VOLUME_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.is_dir():
            return False
        raise
    try:
        magic = layout.SUPERBLOCK_MAGIC
        return any(os.pread(fd, len(magic), offset) == magic for offset in layout.SUPERBLOCK_OFFSETS)
    finally:
        os.close(fd)


class Volume:
    """The space of one SSD and the jobs that use it. Safe for concurrent threads and processes."""

    def __init__(self, path: Path, device: SsdDevice) -> None:
        """Internal: use `open`."""
        self.path = path  # the directory or the raw device
        self.device = device

    @classmethod
    def open(
        cls, path: Path | str, *, direct: bool = True, make_device: Callable[..., SsdDevice] = SsdDevice
    ) -> "Volume":
        """Opens the volume of an SSD directory or of a raw device, and creates it if there is none.

        Raises:
            DeviceRefused: a raw device holds other data, or is in use.
            DirectIoRefused: the file system has no O_DIRECT.
            StoreCorrupt: the volume is damaged, or of another version.
            StoreIoError: the SSD failed to read or write. All other methods may raise it too.
        """
        path = Path(path)
        is_raw = is_block_device(path)
        if not is_raw and not path.is_dir():
            raise ValueError(
                f"SSD path {path} is neither a directory nor a block device; create it, or correct the setting"
            )
        file = path if is_raw else path / VOLUME_FILE
        if not is_raw:
            os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        device = make_device(file, is_raw=is_raw, direct=direct)
        try:
            volume = cls(path, device)
            with volume._as_store_error("open the volume"), device.lock():
                if is_raw:
                    require_not_in_use(path)
                    if not volume._has_first_superblock():
                        # The device may have become a partition table or swap space since it was a volume.
                        require_usable(path)
                if volume._is_new():
                    volume._format()
                volume._check_superblock()
        except BaseException:
            device.close()
            raise
        return volume

    def close(self) -> None:
        """Closes the device."""
        self.device.close()

    # --- allocations --------------------------------------------------------------------------------------------------

    def allocations(self) -> dict[JobId, Allocation]:
        """Returns the allocations of all jobs."""
        with self._locked_table("read the allocation table") as table:
            return dict(table.allocations)

    def allocation(self, job: JobId) -> Allocation:
        """Returns a job's allocation. Raises StoreMissing if it has none."""
        with self._locked_table("read the allocation table") as table:
            return self._require_allocation(table, job)

    def held_nbytes(self, job: JobId) -> int:
        """Returns the bytes that a job's space uses on the SSD, by the file system if it can say, else by the table.

        Raises:
            StoreMissing: the job has no space here.
        """
        taken = self.allocation(job).taken
        with self._as_store_error(f"look how much space job {job} takes"):
            backed = [self.device.backed_nbytes(part.start * UNIT_NBYTES, part.count * UNIT_NBYTES) for part in taken]
        known = [nbytes for nbytes in backed if nbytes is not None]
        return sum(known) if len(known) == len(taken) else sum(part.count for part in taken) * UNIT_NBYTES

    def reserve(self, job: JobId, demand: Demand) -> Allocation:
        """Reserves a job's space and allocates it on the disk. It is not ready until `set_up`.

        Raises:
            StoreExists: the job already has space here.
            InsufficientSpaceError: the space does not fit; nothing was reserved.
        """
        with self._locked_table(f"reserve space for job {job}") as table:
            if job in table.allocations:
                raise StoreExists(f"{self.path} already holds states of job {job}; open them, or delete them")
            ranges = self._take(table, _states_of(job), demand)
            allocation = Allocation(job=job, nonce=secrets.token_hex(8), ranges=tuple(ranges), is_ready=False)
            self._write_table(table.with_allocation(allocation))
            return allocation

    def reserve_scratch(self, job: JobId, demand: Demand, *, nonce: str) -> Allocation:
        """Replaces the scratch of the job's space with that nonce. Keeps the old scratch if its size is the same.

        Raises:
            StoreMissing: the job has no space with that nonce.
            InsufficientSpaceError: the scratch does not fit; the job has none afterwards.
        """
        with self._locked_table(f"reserve scratch for job {job}") as table:
            allocation = self._require_allocation(table, job)
            if allocation.nonce != nonce:
                raise StoreMissing(f"{self.path}: the space of job {job} was freed and reserved again")
            num_units = sum(part.count for part in allocation.scratch)
            num_extents = len(allocation.scratch_offsets(demand))
            if num_units == demand.nbytes // UNIT_NBYTES and num_extents >= demand.num_extents:
                return allocation
            if allocation.scratch:
                # Removed first, so that `_take` can return its disk space and use it for the new scratch.
                allocation = replace(allocation, scratch=())
                table = table.with_allocation(allocation)
                self._write_table(table)
            if demand.num_extents == 0:
                self._give_back(table)
                return allocation
            scratch = self._take(table, f"the swapped activations of job {job}", demand)
            allocation = replace(allocation, scratch=tuple(scratch))
            self._write_table(table.with_allocation(allocation))
            return allocation

    def set_up(self, allocation: Allocation, records: Sequence[tuple[int, bytes]]) -> Allocation:
        """Writes and syncs a job's own records, each at its offset in the head, and marks the space as ready.

        Raises:
            StoreMissing: the space was freed meanwhile; nothing was written.
        """
        with self._locked_table(f"set up job {allocation.job}") as table:
            if self._require_allocation(table, allocation.job) != allocation:
                raise StoreMissing(f"{self.path}: what was reserved for job {allocation.job} was freed meanwhile")
            self._write_head(allocation, records)
            allocation = replace(allocation, is_ready=True)
            self._write_table(table.with_allocation(allocation))
            return allocation

    def free(self, job: JobId, *, nonce: str | None = None, records: Sequence[tuple[int, bytes]] = ()) -> None:
        """Frees a job's space and its disk space. Does nothing if the job has none.

        `nonce`: frees only the space with that nonce, not a newer one of the job. `records`: are written to its head
        and synced before the space can be reserved again. If the process dies meanwhile, the space is not ready.
        """
        with self._locked_table(f"free the space of job {job}") as table:
            allocation = table.allocations.get(job)
            if allocation is not None and nonce in (None, allocation.nonce):
                if records:
                    table = table.with_allocation(replace(allocation, is_ready=False))
                    self._write_table(table)
                    self._write_head(allocation, records)
                table = table.without(job)
                self._write_table(table)
            self._give_back(table)

    def require_room(self, what: str, nbytes: int) -> None:
        """Checks that `nbytes` can be reserved now.

        Raises:
            InsufficientSpaceError: with the bytes needed and free.
        """
        free = self.free_nbytes()
        if nbytes > free:
            raise self._no_room(what, nbytes, free)

    def free_nbytes(self) -> int:
        """Returns the bytes that can still be reserved. Other writers to the same file system may reduce them."""
        with self._locked_table("look for free space") as table:
            if self.device.is_raw:
                return sum(gap.count for gap in table.gaps(self._capacity())) * UNIT_NBYTES
            self._give_back(table)
            return directory_free_nbytes(self.path)

    # --- calibration --------------------------------------------------------------------------------------------------

    def calibration(self) -> dict[str, object] | None:
        """Returns this SSD's stored calibration, None if it is missing or damaged and must be measured again."""
        with self._as_store_error("read what was measured"):
            raw = self.device.read_records(layout.CALIBRATION_OFFSET, RECORD_NBYTES)
        return layout.unpack_json(raw) if is_intact(raw, layout.CALIBRATION_MAGIC) else None

    def keep_calibration(self, facts: dict[str, object]) -> None:
        """Stores a calibration."""
        with self._as_store_error("keep what was measured"):
            self.device.write_records(layout.CALIBRATION_OFFSET, layout.pack_json(layout.CALIBRATION_MAGIC, facts))
            self.device.sync()

    # --- private ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _as_store_error(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreIoError(f"SSD {self.path}: could not {verb}: {error}; check the disk") from error

    @contextmanager
    def _locked_table(self, verb: str) -> Iterator[AllocationTable]:
        """Yields the table under the volume's lock, which excludes all other threads and processes."""
        with self._as_store_error(verb), self.device.lock():
            yield self._read_table()

    def _write_head(self, allocation: Allocation, records: Sequence[tuple[int, bytes]]) -> None:
        for offset, raw in records:
            self.device.write_records(allocation.head_offset + offset, raw)
        self.device.sync()

    def _take(self, table: AllocationTable, what: str, demand: Demand) -> list[UnitRange]:
        """Returns free ranges with allocated disk space. The caller must add them to the table."""
        capacity = self._capacity() if self.device.is_raw else None
        ranges = table.find_free(demand, capacity)
        if ranges is None:
            free = sum(gap.count for gap in table.gaps(capacity or 0)) * UNIT_NBYTES
            raise self._no_room(what, demand.nbytes, free)
        if capacity is None:
            self._give_back(table)
            if demand.nbytes > (free := directory_free_nbytes(self.path)):
                raise self._no_room(what, demand.nbytes, free)
        try:
            for each in ranges:
                self.device.allocate(each.start * UNIT_NBYTES, each.count * UNIT_NBYTES)
        except OSError as error:
            self._give_back(table)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._no_room(what, demand.nbytes, directory_free_nbytes(self.path)) from error
            raise
        return ranges

    def _no_room(self, what: str, nbytes: int, free_nbytes: int) -> InsufficientSpaceError:
        advice = (
            "delete jobs that use this device, or add another SSD"
            if self.device.is_raw
            else "delete files there, or choose a directory on a larger disk"
        )
        return InsufficientSpaceError(what, str(self.path), nbytes, free_nbytes, advice)

    def _give_back(self, table: AllocationTable) -> None:
        """Returns space that no job has to the file system, including leftovers of killed processes."""
        for gap in table.gaps(table.stop):
            self.device.discard(gap.start * UNIT_NBYTES, gap.count * UNIT_NBYTES)
        self.device.truncate(table.stop * UNIT_NBYTES)

    def _capacity(self) -> int:
        return device_nbytes(self.path) // UNIT_NBYTES

    def _require_allocation(self, table: AllocationTable, job: JobId) -> Allocation:
        allocation = table.allocations.get(job)
        if allocation is None:
            raise StoreMissing(f"{self.path} holds no states of job {job}")
        return allocation

    def _read_tables(self) -> dict[int, AllocationTable]:
        """Returns the intact copies of the table by their offset."""
        raws = {offset: self.device.read_records(offset, layout.TABLE_NBYTES) for offset in layout.TABLE_OFFSETS}
        return {offset: layout.unpack_table(raw) for offset, raw in raws.items() if is_intact(raw, layout.TABLE_MAGIC)}

    def _read_table(self) -> AllocationTable:
        tables = self._read_tables().values()
        if not tables:
            raise StoreCorrupt(
                f"both copies of the allocation table of {self.path} are damaged: which job's states lie where is "
                f"unknown; check the disk, and {self._start_anew}"
            )
        return max(tables, key=lambda table: table.sequence)

    def _write_table(self, table: AllocationTable) -> None:
        try:
            raw = layout.pack_table(table)
        except ValueError as error:
            raise StoreError(f"{self.path} has no room in the table for another job: delete some ({error})") from error
        sequences = {offset: copy.sequence for offset, copy in self._read_tables().items()}
        # The damaged or older copy first, because a torn write must not destroy the only intact one.
        for offset in sorted(layout.TABLE_OFFSETS, key=lambda offset: sequences.get(offset, -1)):
            self.device.write_records(offset, raw)
            self.device.sync()

    @property
    def _start_anew(self) -> str:
        if self.device.is_raw:
            return f"to start anew put zeros over its first {layout.HEADER_UNITS} MiB"
        return f"to start anew remove its file {VOLUME_FILE}"

    def _has_first_superblock(self) -> bool:
        raw = self.device.read_records(layout.SUPERBLOCK_OFFSETS[0], RECORD_NBYTES)
        return is_intact(raw, layout.SUPERBLOCK_MAGIC)

    def _is_new(self) -> bool:
        """Checks whether there never was a complete volume: no first superblock, which is written last, and no jobs.

        A raw device with any trace of a volume is not new. An error for the administrator is better than lost data.
        """
        raws = [self.device.read_records(offset, RECORD_NBYTES) for offset in layout.SUPERBLOCK_OFFSETS]
        if any(table.sequence > 0 for table in self._read_tables().values()):
            return False
        if self.device.is_raw:
            return not any(raw.startswith(layout.SUPERBLOCK_MAGIC) for raw in raws)
        return not raws[0].strip(b"\0") and not is_intact(raws[1], layout.SUPERBLOCK_MAGIC)

    def _format(self) -> None:
        device, nbytes = self.device, layout.HEADER_UNITS * UNIT_NBYTES
        try:
            device.allocate(0, nbytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._no_room("a new volume", nbytes, directory_free_nbytes(self.path)) from error
            raise
        table = layout.pack_table(AllocationTable())
        for offset in layout.TABLE_OFFSETS:
            device.write_records(offset, table)
        device.write_records(layout.CALIBRATION_OFFSET, bytes(RECORD_NBYTES))
        device.sync()
        superblock = layout.pack_json(layout.SUPERBLOCK_MAGIC, {"version": layout.VERSION})
        for offset in reversed(layout.SUPERBLOCK_OFFSETS):
            device.write_records(offset, superblock)
            device.sync()
        if not device.is_raw:
            sync_path(self.path)

    def _check_superblock(self) -> None:
        for offset in layout.SUPERBLOCK_OFFSETS:
            raw = self.device.read_records(offset, RECORD_NBYTES)
            if is_intact(raw, layout.SUPERBLOCK_MAGIC):
                version = layout.unpack_json(raw)["version"]
                if version != layout.VERSION:
                    raise StoreCorrupt(
                        f"{self.path} has format version {version}; this windlass reads version {layout.VERSION}"
                    )
                return
        raise StoreCorrupt(
            f"{self.path} is not a windlass volume, or both of its superblocks are damaged; check the disk, and "
            f"{self._start_anew}"
        )


def _states_of(job: JobId) -> str:
    return f"the model states of job {job}"
