"""The layout of a job's space in a volume: superblock, fence, commit journal, manifests, then the extents.

This module handles arithmetic and bytes, and no files. docs/store-format.md describes the format.
"""

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate

from windlass.storage.ids import (
    FIRST_EPOCH,
    Attempt,
    ChunkKey,
    Formats,
    JobId,
    LayoutEpoch,
    Precision,
    Rank,
    SsdIndex,
    StateKind,
    StatePrecision,
    Step,
)
from windlass.storage.integrity import GRANULE_NBYTES, RECORD_NBYTES, StoreCorrupt, is_intact, seal
from windlass.storage.memory import ALIGNMENT_NBYTES
from windlass.storage.ssd import Demand

# Extents of each chunk: the next step is written while the last committed one is kept.
NUM_GENERATIONS = 2
# Elements: chunk_numel is a multiple of this, so that regions of 2 or 4 bytes an element are aligned.
CHUNK_NUMEL_UNIT = ALIGNMENT_NBYTES // 2

SUPERBLOCK_OFFSET = 0
SUPERBLOCK_NBYTES = 65536
# Each record is written twice, so that one damaged copy loses no acknowledged data.
FENCE_OFFSETS = (SUPERBLOCK_NBYTES, SUPERBLOCK_NBYTES + RECORD_NBYTES)
NUM_COMMIT_RECORDS = 64
_JOURNAL_NBYTES = NUM_COMMIT_RECORDS * RECORD_NBYTES
JOURNAL_OFFSETS = (FENCE_OFFSETS[1] + RECORD_NBYTES, FENCE_OFFSETS[1] + RECORD_NBYTES + _JOURNAL_NBYTES)
MANIFESTS_OFFSET = 1 << 20
# Places for manifests. Three are in use: those of the last commit, of the commit before it, and of the next one.
NUM_MANIFESTS = 7
TRAINER_STATE_MAX_NBYTES = 3072

# The fence of a store that is being deleted. It is newer than every attempt.
CLOSED = Attempt((1 << 64) - 1)

# All numbers are little-endian. The nonce distinguishes a job's records from those of earlier owners of its space.
_SUPERBLOCK_HEAD = struct.Struct("<8s8sI")  # magic, nonce, nbytes of the JSON that follows
_FENCE_HEAD = struct.Struct("<8s8sQ")  # magic, nonce, attempt
_COMMIT_HEAD = struct.Struct("<8s8sQQQIIQII")
# Follows the room for the trainer's state. Records of older versions have zeros there.
_COMMIT_TAIL = struct.Struct("<QQ")  # the decided step + 1, or 0 if none is known; layout epoch
_SUPERBLOCK_MAGIC = b"WNDLSTOR"
_FENCE_MAGIC = b"WNDLFNCE"
_COMMIT_MAGIC = b"WNDLCMMT"

# Between a job's id and its layout epoch, in the name of a space of a later epoch. No job's id has this character.
_AT_EPOCH = "@"
_FILE_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreGeometry:
    """The parameters that fix the layout of a job's share of one SSD. The SSDs' weights distribute the chunks."""

    job: JobId
    rank: Rank
    attempt: Attempt  # the attempt that created the store
    ssd: SsdIndex
    ssd_weights: tuple[int, ...]  # one for each SSD of the job: a faster one gets more chunks
    formats: Formats
    chunk_numel: int
    chunks_per_block: tuple[int, ...]  # 0: another box has the block
    epoch: LayoutEpoch = FIRST_EPOCH  # in which the chunks were dealt to the SSDs
    _first_ordinals: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _places: tuple[tuple[SsdIndex, int], ...] = field(init=False, repr=False, compare=False)
    _region_offsets: dict[StateKind, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not _FILE_SAFE.fullmatch(self.job):
            raise ValueError(f"job id {self.job!r} must consist of letters, digits, '.', '_' and '-' only")
        if not self.ssd_weights or min(self.ssd_weights) < 1:
            raise ValueError(f"every SSD needs a weight of at least 1, not {self.ssd_weights}")
        if not 0 <= self.ssd < self.num_ssds:
            raise ValueError(f"SSD index {self.ssd} is not one of {self.num_ssds} SSDs")
        if self.epoch < FIRST_EPOCH:
            raise ValueError(f"layout epoch {self.epoch} must be at least {FIRST_EPOCH}")
        if self.rank < 0 or self.attempt < 1:
            raise ValueError(f"rank {self.rank} must be at least 0 and attempt {self.attempt} at least 1")
        if self.chunk_numel <= 0 or self.chunk_numel % CHUNK_NUMEL_UNIT:
            raise ValueError(f"chunk_numel must be a positive multiple of {CHUNK_NUMEL_UNIT}, not {self.chunk_numel}")
        if not any(self.chunks_per_block) or min(self.chunks_per_block) < 0:
            raise ValueError(f"a store has at least one chunk; chunks_per_block is {self.chunks_per_block}")
        object.__setattr__(self, "_first_ordinals", tuple(accumulate(self.chunks_per_block, initial=0)))
        object.__setattr__(self, "_places", _deal(self.num_chunks, self.ssd_weights))
        starts = accumulate((self.region_nbytes(kind) for kind in self.kinds), initial=0)
        object.__setattr__(self, "_region_offsets", dict(zip(self.kinds, starts, strict=False)))

    @property
    def num_ssds(self) -> int:
        """The number of SSDs of the job on this node."""
        return len(self.ssd_weights)

    @property
    def kinds(self) -> tuple[StateKind, ...]:
        """The states of a chunk, in their order in an extent."""
        return tuple(self.formats.itemsizes)

    @property
    def num_chunks(self) -> int:
        """The number of chunks of the model, or of the blocks that this box has."""
        return self._first_ordinals[-1]

    @property
    def num_local_chunks(self) -> int:
        """The number of chunks on this SSD."""
        return sum(ssd == self.ssd for ssd, _ in self._places)

    @property
    def extent_nbytes(self) -> int:
        """The bytes of all states of a chunk."""
        return self.chunk_numel * sum(self.formats.itemsizes.values())

    @property
    def granules_per_extent(self) -> int:
        """The number of checksums of an extent. No checksum covers two states."""
        return sum(-(-self.region_nbytes(kind) // GRANULE_NBYTES) for kind in self.kinds)

    @property
    def manifest_nbytes(self) -> int:
        """The bytes of a manifest: a record, then numbers of 8 bytes for every extent."""
        numbers_per_chunk = 1 + len(self.kinds) + self.granules_per_extent
        nbytes = RECORD_NBYTES + 8 * numbers_per_chunk * self.num_local_chunks
        return -(-nbytes // RECORD_NBYTES) * RECORD_NBYTES

    @property
    def demand(self) -> Demand:
        """The space that the job needs on this SSD."""
        return Demand(
            head_nbytes=MANIFESTS_OFFSET + NUM_MANIFESTS * self.manifest_nbytes,
            extent_nbytes=self.extent_nbytes,
            num_extents=NUM_GENERATIONS * self.num_local_chunks,
        )

    def ordinal(self, key: ChunkKey) -> int:
        """Returns a chunk's index among all chunks of the model."""
        if not 0 <= key.block < len(self.chunks_per_block) or not 0 <= key.chunk < self.chunks_per_block[key.block]:
            raise ValueError(f"{key} is not a chunk of job {self.job}")
        return self._first_ordinals[key.block] + key.chunk

    def ssd_of(self, key: ChunkKey) -> SsdIndex:
        """Returns the SSD of a chunk."""
        return self._places[self.ordinal(key)][0]

    def local_index(self, key: ChunkKey) -> int:
        """Returns a chunk's index among the chunks of this SSD."""
        ssd, index = self._places[self.ordinal(key)]
        if ssd != self.ssd:
            raise ValueError(f"{key} rests on SSD {ssd} of job {self.job}, not on SSD {self.ssd}")
        return index

    def region_nbytes(self, kind: StateKind) -> int:
        """Returns the bytes of one state of a chunk."""
        sizes = self.formats.itemsizes
        if kind not in sizes:
            raise ValueError(f"the store holds no {kind}, only {', '.join(sizes)}")
        return self.chunk_numel * sizes[kind]

    def region_offset(self, kind: StateKind) -> int:
        """Returns the offset of a state in an extent."""
        offset = self._region_offsets.get(kind)
        if offset is None:
            raise ValueError(f"the store holds no {kind}, only {', '.join(self.kinds)}")
        return offset

    def manifest_offset(self, manifest: int) -> int:
        """Returns the offset of a manifest in the job's head."""
        return MANIFESTS_OFFSET + manifest * self.manifest_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """One entry of the journal: the states of `step` are durable on this SSD."""

    sequence: int  # number of the entry; entry n is in place n % NUM_COMMIT_RECORDS
    step: Step
    attempt: Attempt
    rank: Rank
    manifest: int  # index of the manifest with the states' places, below NUM_MANIFESTS
    manifest_digest: int
    trainer_state: str  # JSON
    decided: Step | None = None  # the last decided step when the entry was written; None: none was known
    epoch: LayoutEpoch = FIRST_EPOCH

    @property
    def identity(self) -> tuple[LayoutEpoch, Attempt, Step, str]:
        """The values that must be equal on all SSDs of a job for a common commit. The highest is the newest."""
        return (self.epoch, self.attempt, self.step, self.trainer_state)


def space_name(job: JobId, epoch: LayoutEpoch) -> JobId:
    """Returns the name of a job's space in an SSD's allocation table. Each layout epoch has a space of its own."""
    return job if epoch == FIRST_EPOCH else JobId(f"{job}{_AT_EPOCH}{epoch}")


def owner_of_space(name: JobId) -> tuple[JobId, LayoutEpoch]:
    """Returns the job and the layout epoch of a space."""
    job, _, epoch = name.partition(_AT_EPOCH)
    return JobId(job), LayoutEpoch(int(epoch)) if epoch else FIRST_EPOCH


def pack_superblock(geometry: StoreGeometry, nonce: str) -> bytes:
    """Returns the superblock's bytes."""
    facts = asdict(geometry)
    del facts["_first_ordinals"], facts["_places"], facts["_region_offsets"]
    if geometry.epoch == FIRST_EPOCH:
        del facts["epoch"]  # so that versions that know no epochs can read it
    text = json.dumps(facts, separators=(",", ":")).encode()
    if _SUPERBLOCK_HEAD.size + len(text) + 4 > SUPERBLOCK_NBYTES:
        raise ValueError(f"job {geometry.job}: {len(geometry.chunks_per_block)} blocks are more than a store can note")
    return seal(_SUPERBLOCK_HEAD.pack(_SUPERBLOCK_MAGIC, bytes.fromhex(nonce), len(text)) + text, SUPERBLOCK_NBYTES)


def unpack_superblock(raw: bytes, nonce: str, where: str) -> StoreGeometry:
    """Reads the geometry from a superblock. `where`: the place for the error message.

    Raises:
        StoreCorrupt: the superblock is damaged, or belongs to another job.
    """
    if not is_intact(raw, _SUPERBLOCK_MAGIC + bytes.fromhex(nonce)):
        raise StoreCorrupt(f"{where}: the superblock is damaged (its checksum is wrong); its states cannot be used")
    nbytes = _SUPERBLOCK_HEAD.unpack_from(raw)[2]
    facts = json.loads(raw[_SUPERBLOCK_HEAD.size : _SUPERBLOCK_HEAD.size + nbytes])
    stored, chunks = facts.pop("formats"), tuple(facts.pop("chunks_per_block"))
    formats = Formats(Precision(stored["precision"]), StatePrecision(stored["states"]))
    weights = tuple(facts.pop("ssd_weights"))
    return StoreGeometry(formats=formats, chunks_per_block=chunks, ssd_weights=weights, **facts)


def pack_fence(attempt: Attempt, nonce: str) -> bytes:
    """Returns the bytes of a fence record: attempts older than this one may not write."""
    return seal(_FENCE_HEAD.pack(_FENCE_MAGIC, bytes.fromhex(nonce), attempt))


def unpack_fence(raw: bytes, nonce: str) -> Attempt | None:
    """Reads the attempt of a fence record; None if it is torn, damaged or of another job."""
    if not is_intact(raw, _FENCE_MAGIC + bytes.fromhex(nonce)):
        return None
    return Attempt(_FENCE_HEAD.unpack_from(raw)[2])


def pack_commit(record: CommitRecord, nonce: str) -> bytes:
    """Returns a journal entry's bytes."""
    state = record.trainer_state.encode()
    if len(state) > TRAINER_STATE_MAX_NBYTES:
        raise ValueError(f"the trainer's state takes {len(state)} bytes; a commit holds {TRAINER_STATE_MAX_NBYTES}")
    head = _COMMIT_HEAD.pack(
        _COMMIT_MAGIC,
        bytes.fromhex(nonce),
        record.sequence,
        record.step,
        record.attempt,
        record.rank,
        record.manifest,
        record.manifest_digest,
        0,  # reserved
        len(state),
    )
    decided = 0 if record.decided is None else record.decided + 1
    return seal(head + state.ljust(TRAINER_STATE_MAX_NBYTES, b"\0") + _COMMIT_TAIL.pack(decided, record.epoch))


def unpack_commit(raw: bytes, nonce: str) -> CommitRecord | None:
    """Reads a journal entry; None if it is torn, damaged, of another job, or was never written."""
    if not is_intact(raw, _COMMIT_MAGIC + bytes.fromhex(nonce)):
        return None
    _, _, sequence, step, attempt, rank, manifest, digest, reserved, state_nbytes = _COMMIT_HEAD.unpack_from(raw)
    if reserved:
        return None  # an entry of another format
    at = _COMMIT_HEAD.size
    decided, epoch = _COMMIT_TAIL.unpack_from(raw, at + TRAINER_STATE_MAX_NBYTES)
    return CommitRecord(
        sequence=sequence,
        step=step,
        attempt=attempt,
        rank=rank,
        manifest=manifest,
        manifest_digest=digest,
        trainer_state=raw[at : at + state_nbytes].decode(),
        decided=Step(decided - 1) if decided else None,
        epoch=LayoutEpoch(epoch),
    )


def unpack_journals(copies: Sequence[bytes], nonce: str, where: str) -> list[CommitRecord]:
    """Reads the entries with at least one intact copy, oldest first. `where`: the place for the error message.

    Raises:
        StoreCorrupt: both copies of an entry are damaged. The next entry is exempt, because a crash may have torn it.
    """
    records, damaged = {}, set()
    for place in range(NUM_COMMIT_RECORDS):
        raws = [raw[place * RECORD_NBYTES : (place + 1) * RECORD_NBYTES] for raw in copies]
        entries = [record for raw in raws if (record := unpack_commit(raw, nonce)) is not None]
        found = {each.sequence: each for each in entries if each.sequence % NUM_COMMIT_RECORDS == place}
        records.update(found)
        if not found and any(raw.startswith(_COMMIT_MAGIC + bytes.fromhex(nonce)) for raw in raws):
            damaged.add(place)
    next_place = (max(records) + 1 if records else 0) % NUM_COMMIT_RECORDS
    if damaged - {next_place}:
        raise StoreCorrupt(
            f"{where}: both copies of the journal are damaged in {len(damaged)} of {NUM_COMMIT_RECORDS} places: which "
            "step was committed last is unknown; check the disk, and start again from a checkpoint"
        )
    return [records[sequence] for sequence in sorted(records)]


def _deal(num_chunks: int, weights: Sequence[int]) -> tuple[tuple[SsdIndex, int], ...]:
    """Returns the SSD of every chunk, and its index there, by smooth weighted round robin.

    So any run of consecutive chunks is distributed evenly. In each turn every SSD gains its weight as credit. The one
    with the most credit gets the chunk and pays the sum of the weights.
    Source: nginx, upstream balancing.
    """
    credit, counts, total = [0] * len(weights), [0] * len(weights), sum(weights)
    places = []
    for _ in range(num_chunks):
        credit = [have + weight for have, weight in zip(credit, weights, strict=True)]
        richest = credit.index(max(credit))
        credit[richest] -= total
        places.append((SsdIndex(richest), counts[richest]))
        counts[richest] += 1
    return tuple(places)
