"""Where the states of one step lie on one SSD, and their checksums: what a commit's manifest holds."""

import sys
from array import array

import xxhash

from windlass.storage.ids import StateKind
from windlass.storage.integrity import GRANULE_NBYTES, RECORD_NBYTES
from windlass.storage.store.format import CommitRecord, StoreGeometry, pack_commit

_NO_EXTENT = (1 << 64) - 1

assert sys.byteorder == "little", "the store's format is little-endian, and so must the machine be"


class Manifest:
    """For every chunk of the SSD its extent, the bytes written of each state, and a checksum per started granule."""

    def __init__(self, geometry: StoreGeometry) -> None:
        self._geometry = geometry
        num_chunks, kinds = geometry.num_local_chunks, geometry.kinds
        granules = [-(-geometry.region_nbytes(kind) // GRANULE_NBYTES) for kind in kinds]
        self._kind_index = {kind: i for i, kind in enumerate(kinds)}
        self._num_kinds = len(kinds)
        # Asked for with every piece that moves. A gradient lies where the states will: so do its checksums.
        self._first_granule = {kind: sum(granules[:i]) for i, kind in enumerate(kinds)} | {StateKind.GRAD: 0}
        self._granules_per_extent = sum(granules)
        self._extents = array("Q", [_NO_EXTENT]) * num_chunks
        self._nbytes = array("Q", [0]) * (num_chunks * self._num_kinds)
        self._digests = array("Q", [0]) * (num_chunks * self._granules_per_extent)

    def extent(self, chunk: int) -> int | None:
        """The extent of a chunk; None if none of its states has been given a place."""
        extent = self._extents[chunk]
        return None if extent == _NO_EXTENT else extent

    def extents(self) -> set[int]:
        """All extents in use."""
        return set(self._extents) - {_NO_EXTENT}

    def place(self, chunk: int, extent: int) -> None:
        """Give a chunk its extent."""
        self._extents[chunk] = extent

    def clear(self, chunk: int) -> None:
        """Forget what has been written of a chunk, but not its extent."""
        first, num_kinds = chunk * self._num_kinds, self._num_kinds
        self._nbytes[first : first + num_kinds] = array("Q", [0]) * num_kinds
        self.note(chunk, StateKind.GRAD, 0, [0] * self._granules_per_extent)

    def nbytes(self, chunk: int, kind: StateKind) -> int:
        """Bytes of a state that have been asked to be written; none of what is no state."""
        index = self._kind_index.get(kind)
        return 0 if index is None else self._nbytes[chunk * self._num_kinds + index]

    def expect(self, chunk: int, kind: StateKind, nbytes: int) -> None:
        """A state's bytes are about to be written: no checksum that it had counts any more."""
        self._nbytes[chunk * self._num_kinds + self._kind_index[kind]] = nbytes
        self.note(chunk, kind, 0, [0] * -(-nbytes // GRANULE_NBYTES))

    def note(self, chunk: int, kind: StateKind, granule: int, digests: list[int]) -> None:
        """Checksums of granules that have been written, from the `granule`th on."""
        first = self._digest_index(chunk, kind, granule)
        self._digests[first : first + len(digests)] = array("Q", digests)

    def digests(self, chunk: int, kind: StateKind, granule: int, count: int) -> list[int]:
        """Checksums of granules; 0 for what has not been written."""
        first = self._digest_index(chunk, kind, granule)
        return self._digests[first : first + count].tolist()

    def missing(self) -> tuple[int, StateKind] | None:
        """The first state of a chunk that has not been written whole; None if all have."""
        for chunk in range(len(self._extents)):
            for kind in self._geometry.kinds:
                nbytes = self.nbytes(chunk, kind)
                if nbytes == 0 or 0 in self.digests(chunk, kind, 0, -(-nbytes // GRANULE_NBYTES)):
                    return chunk, kind
        return None

    def pack(self, record: CommitRecord, nonce: str) -> tuple[bytes, int]:
        """The manifest's bytes, and their digest. `record` tells whose manifest it is."""
        body = self._extents.tobytes() + self._nbytes.tobytes() + self._digests.tobytes()
        raw = (pack_commit(record, nonce) + body).ljust(self._geometry.manifest_nbytes, b"\0")
        return raw, xxhash.xxh3_64_intdigest(raw)

    @classmethod
    def unpack(cls, raw: bytes, geometry: StoreGeometry) -> "Manifest":
        """The map of a manifest whose digest is right."""
        step_map = cls(geometry)
        at = RECORD_NBYTES
        for numbers in (step_map._extents, step_map._nbytes, step_map._digests):
            nbytes = 8 * len(numbers)
            numbers[:] = array("Q", raw[at : at + nbytes])
            at += nbytes
        return step_map

    def _digest_index(self, chunk: int, kind: StateKind, granule: int) -> int:
        return chunk * self._granules_per_extent + self._first_granule[kind] + granule
