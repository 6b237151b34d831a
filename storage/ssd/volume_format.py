"""The format of a volume, which jobs share: superblock, allocation table, units.

This module handles arithmetic and bytes, and no files. docs/store-format.md describes the format.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from windlass.storage.ids import JobId
from windlass.storage.integrity import RECORD_NBYTES, seal

VERSION = 4
UNIT_NBYTES = 1 << 20  # bytes of a unit, the granularity of allocations
HEADER_UNITS = 3  # units at the start that no job gets

# Superblock and table have two copies, written one after the other with a sync between, so that a flipped bit or a torn
# page loses nothing.
SUPERBLOCK_OFFSETS = (0, RECORD_NBYTES)
CALIBRATION_OFFSET = 16 * RECORD_NBYTES
TABLE_NBYTES = UNIT_NBYTES
TABLE_OFFSETS = (UNIT_NBYTES, 2 * UNIT_NBYTES)

SUPERBLOCK_MAGIC = b"WNDLVOLU"
CALIBRATION_MAGIC = b"WNDLCALI"
TABLE_MAGIC = b"WNDLTABL"

_HEAD = struct.Struct("<8sI")  # magic, nbytes of the JSON that follows


@dataclass(frozen=True, slots=True)
class UnitRange:
    """Units `start` to `start + count - 1` of a volume."""

    start: int
    count: int

    @property
    def stop(self) -> int:
        """The unit after the last."""
        return self.start + self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A request for space: a contiguous head, and contiguous extents."""

    head_nbytes: int
    extent_nbytes: int
    num_extents: int

    @property
    def nbytes(self) -> int:
        """The total bytes, rounded up to whole units."""
        return units_of(self.head_nbytes + self.num_extents * self.extent_nbytes) * UNIT_NBYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The space of one job on one SSD."""

    job: JobId
    # Random, so that records of earlier owners of these units are recognized.
    nonce: str
    ranges: tuple[UnitRange, ...]
    is_ready: bool  # the job's own records are written
    scratch: tuple[UnitRange, ...] = ()  # not in `ranges`: for data that a restart does not need

    @property
    def head_offset(self) -> int:
        """The offset of the job's head on the SSD."""
        return self.ranges[0].start * UNIT_NBYTES

    @property
    def taken(self) -> tuple[UnitRange, ...]:
        """All units of the job, scratch included."""
        return (*self.ranges, *self.scratch)

    def extent_offsets(self, demand: Demand) -> list[int]:
        """Returns the offset of each extent on the SSD, in the order of the ranges; at least as many as requested."""
        return _extent_offsets(self.ranges, demand)

    def scratch_offsets(self, demand: Demand) -> list[int]:
        """Returns the offset of each scratch extent on the SSD. With another demand's size, as many as fit."""
        return _extent_offsets(self.scratch, demand)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationTable:
    """The units of each job in a volume. A change returns a new table with the next sequence number."""

    sequence: int = 0
    allocations: dict[JobId, Allocation] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        """The unit after the last one in use."""
        return max((part.stop for each in self.allocations.values() for part in each.taken), default=HEADER_UNITS)

    def gaps(self, stop: int) -> list[UnitRange]:
        """Lists the free ranges below unit `stop`, in order."""
        gaps, at = [], HEADER_UNITS
        for taken in sorted(
            (part for each in self.allocations.values() for part in each.taken), key=lambda part: part.start
        ):
            if taken.start > at:
                gaps.append(UnitRange(at, taken.start - at))
            at = taken.stop
        if stop > at:
            gaps.append(UnitRange(at, stop - at))
        return gaps

    def find_free(self, demand: Demand, capacity: int | None) -> list[UnitRange] | None:
        """Finds free ranges for a demand: the smallest that holds all of it, else several; None if space is too small.

        `capacity`: units of the volume; None if the volume can grow.
        """
        count = demand.nbytes // UNIT_NBYTES
        gaps = self.gaps(self.stop if capacity is None else capacity)
        if fitting := [gap for gap in gaps if gap.count >= count]:
            return [UnitRange(min(fitting, key=lambda gap: gap.count).start, count)]
        if capacity is None:
            return [UnitRange(self.stop, count)]
        gaps.sort(key=lambda gap: -gap.count)
        for i, home in enumerate(gaps):
            found = _lay_out(demand, [home, *gaps[:i], *gaps[i + 1 :]])
            if found is not None or demand.head_nbytes == 0:
                return found
        return None

    def with_allocation(self, allocation: Allocation) -> "AllocationTable":
        """Returns the table with a job's allocation added or replaced."""
        allocations = {**self.allocations, allocation.job: allocation}
        return replace(self, sequence=self.sequence + 1, allocations=allocations)

    def without(self, job: JobId) -> "AllocationTable":
        """Returns the table without a job."""
        allocations = {name: each for name, each in self.allocations.items() if name != job}
        return replace(self, sequence=self.sequence + 1, allocations=allocations)


def _extent_offsets(ranges: Sequence[UnitRange], demand: Demand) -> list[int]:
    offsets: list[int] = []
    for i, each in enumerate(ranges):
        head = demand.head_nbytes if i == 0 else 0
        start, stop = each.start * UNIT_NBYTES + head, each.stop * UNIT_NBYTES
        offsets.extend(range(start, stop - demand.extent_nbytes + 1, demand.extent_nbytes))
    return offsets


def _lay_out(demand: Demand, gaps: Sequence[UnitRange]) -> list[UnitRange] | None:
    """Places a demand's head at the start of the first gap, and its extents in all gaps; None if they don't fit."""
    found, head, num_missing = [], demand.head_nbytes, demand.num_extents
    for gap in gaps:
        room = gap.count * UNIT_NBYTES - head
        num = min(num_missing, room // demand.extent_nbytes)
        if num < 0:
            return None
        if head or num:
            found.append(UnitRange(gap.start, units_of(head + num * demand.extent_nbytes)))
        head, num_missing = 0, num_missing - num
        if num_missing == 0:
            return found
    return None


def units_of(nbytes: int) -> int:
    """Returns the number of units for `nbytes`."""
    return -(-nbytes // UNIT_NBYTES)


def pack_json(magic: bytes, facts: object, nbytes: int = RECORD_NBYTES) -> bytes:
    """Returns the bytes of a record that holds JSON."""
    text = json.dumps(facts, separators=(",", ":")).encode()
    return seal(_HEAD.pack(magic, len(text)) + text, nbytes)


def unpack_json(raw: bytes) -> dict[str, object]:
    """Reads the JSON of an intact record."""
    _, nbytes = _HEAD.unpack_from(raw)
    facts: dict[str, object] = json.loads(raw[_HEAD.size : _HEAD.size + nbytes])
    return facts


def pack_table(table: AllocationTable) -> bytes:
    """Returns the table's bytes. Raises ValueError if they exceed the table's place."""
    jobs = {
        job: {
            "nonce": each.nonce,
            "ready": each.is_ready,
            "ranges": [[part.start, part.count] for part in each.ranges],
            "scratch": [[part.start, part.count] for part in each.scratch],
        }
        for job, each in table.allocations.items()
    }
    return pack_json(TABLE_MAGIC, {"sequence": table.sequence, "jobs": jobs}, TABLE_NBYTES)


def unpack_table(raw: bytes) -> AllocationTable:
    """Reads the table of an intact record."""
    facts = unpack_json(raw)
    jobs: dict[str, dict[str, object]] = facts["jobs"]  # type: ignore[assignment]
    allocations = {JobId(job): _allocation(JobId(job), each) for job, each in jobs.items()}
    return AllocationTable(sequence=int(facts["sequence"]), allocations=allocations)  # type: ignore[call-overload]


def _allocation(job: JobId, facts: dict[str, object]) -> Allocation:
    ranges: Sequence[Sequence[int]] = facts["ranges"]  # type: ignore[assignment]
    scratch: Sequence[Sequence[int]] = facts["scratch"]  # type: ignore[assignment]
    return Allocation(
        job=job,
        nonce=str(facts["nonce"]),
        ranges=tuple(UnitRange(*each) for each in ranges),
        is_ready=bool(facts["ready"]),
        scratch=tuple(UnitRange(*each) for each in scratch),
    )
