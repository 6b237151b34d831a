"""How an SSD is shared by jobs: superblock, allocation table, units. Arithmetic and bytes; no files here.

docs/store-format.md describes the same for people.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from windlass.storage.ids import JobId
from windlass.storage.integrity import RECORD_NBYTES, seal

VERSION = 4
# What is handed out at once.
UNIT_NBYTES = 1 << 20
HEADER_UNITS = 3

# Everything is there twice, one written after the other with a sync between: a flipped bit or torn page loses nothing.
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
    """What a job asks for: a head in one piece, and extents, each in one piece."""

    head_nbytes: int
    extent_nbytes: int
    num_extents: int

    @property
    def nbytes(self) -> int:
        """Bytes in all, whole units."""
        return units_of(self.head_nbytes + self.num_extents * self.extent_nbytes) * UNIT_NBYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What one job has of one SSD."""

    job: JobId
    # Random: records that an earlier owner of these units left behind do not carry it.
    nonce: str
    ranges: tuple[UnitRange, ...]
    is_ready: bool  # the job's own records are in place
    scratch: tuple[UnitRange, ...] = ()  # apart from `ranges`: for what a restart does not need

    @property
    def head_offset(self) -> int:
        """Where on the SSD the job's head begins."""
        return self.ranges[0].start * UNIT_NBYTES

    @property
    def taken(self) -> tuple[UnitRange, ...]:
        """All that nobody else may have."""
        return (*self.ranges, *self.scratch)

    def extent_offsets(self, demand: Demand) -> list[int]:
        """Where on the SSD each extent begins, in the order of the ranges; at least as many as were asked for."""
        return _extent_offsets(self.ranges, demand)

    def scratch_offsets(self, demand: Demand) -> list[int]:
        """Where on the SSD each extent of the scratch begins; as many as fit, if it was made for another demand."""
        return _extent_offsets(self.scratch, demand)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationTable:
    """Who has which units of a volume. Changing it gives a new one, a sequence number later."""

    sequence: int = 0
    allocations: dict[JobId, Allocation] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        """The unit after the last one in use."""
        return max((part.stop for each in self.allocations.values() for part in each.taken), default=HEADER_UNITS)

    def gaps(self, stop: int) -> list[UnitRange]:
        """What is free below unit `stop`, in order."""
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
        """Free ranges for a demand: the smallest that holds it all, else several; None if there is too little.

        `capacity`: units of the volume; None where it can grow.
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
        """The table with a job's allocation put in, or put in the place of its earlier one."""
        allocations = {**self.allocations, allocation.job: allocation}
        return replace(self, sequence=self.sequence + 1, allocations=allocations)

    def without(self, job: JobId) -> "AllocationTable":
        """The table without a job."""
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
    """A demand's head at the start of the first gap, its extents in that and the next; None if they don't fit."""
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
    """Units that hold `nbytes`."""
    return -(-nbytes // UNIT_NBYTES)


def pack_json(magic: bytes, facts: object, nbytes: int = RECORD_NBYTES) -> bytes:
    """A record that holds JSON."""
    text = json.dumps(facts, separators=(",", ":")).encode()
    return seal(_HEAD.pack(magic, len(text)) + text, nbytes)


def unpack_json(raw: bytes) -> dict[str, object]:
    """The JSON of an intact record."""
    _, nbytes = _HEAD.unpack_from(raw)
    facts: dict[str, object] = json.loads(raw[_HEAD.size : _HEAD.size + nbytes])
    return facts


def pack_table(table: AllocationTable) -> bytes:
    """The table's bytes. Raises ValueError when it has outgrown its place."""
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
    """The table of an intact record."""
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
