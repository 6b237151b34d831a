"""How a store's file is laid out: superblock, fence, commit journal, extents. Arithmetic and bytes; no files here.

docs/store-format.md describes the same for people.
"""

import json
import re
import struct
import zlib
from dataclasses import asdict, dataclass, field
from itertools import accumulate

from windlass.storage.arena import ALIGNMENT_NBYTES
from windlass.storage.ids import STATE_ITEMSIZE, Attempt, ChunkKey, JobId, Precision, Rank, SsdIndex, StateKind, Step

VERSION = 1
NUM_GENERATIONS = 2
# Smallest unit of chunk_numel that makes every region, of 2 or 4 bytes an element, a multiple of the alignment.
CHUNK_NUMEL_UNIT = ALIGNMENT_NBYTES // min(size for sizes in STATE_ITEMSIZE.values() for size in sizes.values())

SUPERBLOCK_OFFSET = 0
SUPERBLOCK_NBYTES = 65536
NUM_FENCE_RECORDS = 2
FENCE_OFFSET = SUPERBLOCK_OFFSET + SUPERBLOCK_NBYTES
NUM_COMMIT_RECORDS = 64
RECORD_NBYTES = ALIGNMENT_NBYTES
JOURNAL_OFFSET = FENCE_OFFSET + NUM_FENCE_RECORDS * RECORD_NBYTES
EXTENTS_OFFSET = 1 << 20
TRAINER_STATE_MAX_NBYTES = 3072

# Little-endian everywhere; the CRC-32 comes last and covers all other bytes of the record, its padding included.
_SUPERBLOCK_HEAD = struct.Struct("<8sII")  # magic, version, nbytes of the JSON that follows
_FENCE_HEAD = struct.Struct("<8sQ")  # magic, attempt
_COMMIT_HEAD = struct.Struct("<8sQQQII")  # magic, sequence, step, attempt, rank, nbytes of the trainer's state
_CRC = struct.Struct("<I")
_SUPERBLOCK_MAGIC = b"WNDLSTOR"
_FENCE_MAGIC = b"WNDLFNCE"
_COMMIT_MAGIC = b"WNDLCMMT"

_FILE_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class StoreError(RuntimeError):
    """A tensor store cannot do what was asked; the text says which store and why."""


class StoreCorrupt(StoreError):
    """The file is not what was written there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreGeometry:
    """What fixes the layout of one SSD's share of a job: chunk g of the whole model is extent g // n of SSD g % n."""

    job: JobId
    rank: Rank
    attempt: Attempt  # that created the store
    ssd: SsdIndex
    num_ssds: int
    precision: Precision
    chunk_numel: int
    chunks_per_block: tuple[int, ...]
    _first_ordinals: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not _FILE_SAFE.fullmatch(self.job):
            raise ValueError(f"job id {self.job!r} cannot name a file: letters, digits, '.', '_' and '-' only")
        if not 0 <= self.ssd < self.num_ssds:
            raise ValueError(f"SSD index {self.ssd} is not one of {self.num_ssds} SSDs")
        if self.rank < 0 or self.attempt < 1:
            raise ValueError(f"rank {self.rank} must be at least 0 and attempt {self.attempt} at least 1")
        if self.chunk_numel <= 0 or self.chunk_numel % CHUNK_NUMEL_UNIT:
            raise ValueError(f"chunk_numel must be a positive multiple of {CHUNK_NUMEL_UNIT}, not {self.chunk_numel}")
        if not self.chunks_per_block or min(self.chunks_per_block) < 1:
            raise ValueError(f"every block has at least one chunk; chunks_per_block is {self.chunks_per_block}")
        object.__setattr__(self, "_first_ordinals", tuple(accumulate(self.chunks_per_block, initial=0)))

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole model."""
        return self._first_ordinals[-1]

    @property
    def num_extents(self) -> int:
        """Chunks that rest on this SSD."""
        return max(0, -(-(self.num_chunks - self.ssd) // self.num_ssds))

    @property
    def extent_nbytes(self) -> int:
        """Bytes of all states of a chunk."""
        return self.chunk_numel * sum(STATE_ITEMSIZE[self.precision].values())

    @property
    def file_nbytes(self) -> int:
        """Bytes of the whole file, both generations included."""
        return EXTENTS_OFFSET + NUM_GENERATIONS * self.num_extents * self.extent_nbytes

    def ordinal(self, key: ChunkKey) -> int:
        """A chunk's place among all chunks of the model."""
        if not 0 <= key.block < len(self.chunks_per_block) or not 0 <= key.chunk < self.chunks_per_block[key.block]:
            raise ValueError(f"{key} is not a chunk of job {self.job}")
        return self._first_ordinals[key.block] + key.chunk

    def ssd_of(self, key: ChunkKey) -> SsdIndex:
        """The SSD that a chunk rests on."""
        return SsdIndex(self.ordinal(key) % self.num_ssds)

    def region_nbytes(self, kind: StateKind) -> int:
        """Bytes of one state of a chunk."""
        sizes = STATE_ITEMSIZE[self.precision]
        if kind not in sizes:
            raise ValueError(f"a {self.precision} store holds no {kind}, only {', '.join(sizes)}")
        return self.chunk_numel * sizes[kind]

    def region_offset(self, key: ChunkKey, kind: StateKind, step: Step) -> int:
        """Where in the file the `kind` of a chunk lies, as `step` leaves it."""
        if self.ssd_of(key) != self.ssd:
            raise ValueError(f"{key} rests on SSD {self.ssd_of(key)} of job {self.job}, not on SSD {self.ssd}")
        generation = step % NUM_GENERATIONS
        extent = generation * self.num_extents + self.ordinal(key) // self.num_ssds
        offset = EXTENTS_OFFSET + extent * self.extent_nbytes
        for stored in STATE_ITEMSIZE[self.precision]:
            if stored == kind:
                return offset
            offset += self.region_nbytes(stored)
        raise ValueError(f"a {self.precision} store holds no {kind}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """One entry of the journal: the states of `step` are safe on this SSD."""

    sequence: int  # counts the entries; entry n lies in place n % NUM_COMMIT_RECORDS
    step: Step
    attempt: Attempt
    rank: Rank
    trainer_state: str  # JSON


def pack_superblock(geometry: StoreGeometry) -> bytes:
    """The superblock's bytes."""
    facts = asdict(geometry)
    del facts["_first_ordinals"]
    text = json.dumps(facts, separators=(",", ":")).encode()
    if _SUPERBLOCK_HEAD.size + len(text) + _CRC.size > SUPERBLOCK_NBYTES:
        raise ValueError(f"job {geometry.job}: {len(geometry.chunks_per_block)} blocks are more than a store can note")
    return _seal(_SUPERBLOCK_HEAD.pack(_SUPERBLOCK_MAGIC, VERSION, len(text)) + text, SUPERBLOCK_NBYTES)


def unpack_superblock(raw: bytes, path: str) -> StoreGeometry:
    """The geometry that a superblock tells; `path` is for the error.

    Raises:
        StoreCorrupt: not a superblock, damaged, or of another version.
    """
    if len(raw) < SUPERBLOCK_NBYTES or not raw.startswith(_SUPERBLOCK_MAGIC):
        raise StoreCorrupt(f"{path} is not a windlass tensor store; remove it, or choose another SSD directory")
    if not _is_intact(raw):
        raise StoreCorrupt(f"the superblock of {path} is damaged (its checksum is wrong); its states cannot be used")
    _, version, nbytes = _SUPERBLOCK_HEAD.unpack_from(raw)
    if version != VERSION:
        raise StoreCorrupt(f"{path} has format version {version}; this windlass reads version {VERSION}")
    facts = json.loads(raw[_SUPERBLOCK_HEAD.size : _SUPERBLOCK_HEAD.size + nbytes])
    precision, chunks = Precision(facts.pop("precision")), tuple(facts.pop("chunks_per_block"))
    return StoreGeometry(precision=precision, chunks_per_block=chunks, **facts)


def pack_fence(attempt: Attempt) -> bytes:
    """A fence record: attempts older than this one may not write."""
    return _seal(_FENCE_HEAD.pack(_FENCE_MAGIC, attempt), RECORD_NBYTES)


def unpack_fence(raw: bytes) -> Attempt | None:
    """The attempt of a fence record; None where it was torn, damaged or never written."""
    if not raw.startswith(_FENCE_MAGIC) or not _is_intact(raw):
        return None
    return Attempt(_FENCE_HEAD.unpack_from(raw)[1])


def pack_commit(record: CommitRecord) -> bytes:
    """A journal entry's bytes."""
    state = record.trainer_state.encode()
    if len(state) > TRAINER_STATE_MAX_NBYTES:
        raise ValueError(f"the trainer's state takes {len(state)} bytes; a commit holds {TRAINER_STATE_MAX_NBYTES}")
    numbers = (record.sequence, record.step, record.attempt, record.rank, len(state))
    return _seal(_COMMIT_HEAD.pack(_COMMIT_MAGIC, *numbers) + state, RECORD_NBYTES)


def unpack_journal(raw: bytes) -> list[CommitRecord]:
    """The intact entries of a journal, oldest first; torn and damaged ones are left out."""
    records = []
    for place in range(NUM_COMMIT_RECORDS):
        entry = raw[place * RECORD_NBYTES : (place + 1) * RECORD_NBYTES]
        if len(entry) < RECORD_NBYTES or not entry.startswith(_COMMIT_MAGIC) or not _is_intact(entry):
            continue
        _, sequence, step, attempt, rank, nbytes = _COMMIT_HEAD.unpack_from(entry)
        state = entry[_COMMIT_HEAD.size : _COMMIT_HEAD.size + nbytes].decode()
        if sequence % NUM_COMMIT_RECORDS == place:
            records.append(CommitRecord(sequence=sequence, step=step, attempt=attempt, rank=rank, trainer_state=state))
    return sorted(records, key=lambda record: record.sequence)


def _seal(payload: bytes, nbytes: int) -> bytes:
    body = payload.ljust(nbytes - _CRC.size, b"\0")
    return body + _CRC.pack(zlib.crc32(body))


def _is_intact(raw: bytes) -> bool:
    return _CRC.pack(zlib.crc32(raw[: -_CRC.size])) == raw[-_CRC.size :]
