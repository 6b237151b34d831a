"""The manifest of a commit: the places of one step's states on one SSD, and their checksums."""

import sys
from array import array

import xxhash

from windlass.storage.ids import StateKind
from windlass.storage.integrity import GRANULE_NBYTES, RECORD_NBYTES
from windlass.storage.store.format import CommitRecord, StoreGeometry, pack_commit

_NO_EXTENT = (1 << 64) - 1

assert sys.byteorder == "little", "the store's format is little-endian, and so must the machine be"


class Manifest:
    """The extent of every chunk on an SSD, the bytes written of each state, and a checksum for each started granule."""

    def __init__(self, geometry: StoreGeometry) -> None:
        self._geometry = geometry
        num_chunks, kinds = geometry.num_local_chunks, geometry.kinds
        granules = [-(-geometry.region_nbytes(kind) // GRANULE_NBYTES) for kind in kinds]
        self._kind_index = {kind: i for i, kind in enumerate(kinds)}
        self._num_kinds = len(kinds)
        # Cached, because every transfer needs it. A gradient and its checksums use the places of the states.
        self._first_granule = {kind: sum(granules[:i]) for i, kind in enumerate(kinds)} | {StateKind.GRAD: 0}
        self._granules_per_extent = sum(granules)
        self._extents = array("Q", [_NO_EXTENT]) * num_chunks
        self._nbytes = array("Q", [0]) * (num_chunks * self._num_kinds)
        self._digests = array("Q", [0]) * (num_chunks * self._granules_per_extent)

    def extent(self, chunk: int) -> int | None:
        """Returns the extent of a chunk, None if it has none."""
        extent = self._extents[chunk]
        return None if extent == _NO_EXTENT else extent

    def extents(self) -> set[int]:
        """Returns all extents in use."""
        return set(self._extents) - {_NO_EXTENT}

    def place(self, chunk: int, extent: int) -> None:
        """Sets the extent of a chunk."""
        self._extents[chunk] = extent

    def clear(self, chunk: int) -> None:
        """Clears the bytes and checksums of a chunk, but keeps its extent."""
        first, num_kinds = chunk * self._num_kinds, self._num_kinds
        self._nbytes[first : first + num_kinds] = array("Q", [0]) * num_kinds
        self.note(chunk, StateKind.GRAD, 0, [0] * self._granules_per_extent)

    def nbytes(self, chunk: int, kind: StateKind) -> int:
        """Returns the bytes of a state whose writing was announced by `expect`; 0 for kinds that are not stored."""
        index = self._kind_index.get(kind)
        return 0 if index is None else self._nbytes[chunk * self._num_kinds + index]

    def expect(self, chunk: int, kind: StateKind, nbytes: int) -> None:
        """Announces the writing of a state's bytes, and clears its checksums."""
        self._nbytes[chunk * self._num_kinds + self._kind_index[kind]] = nbytes
        self.note(chunk, kind, 0, [0] * -(-nbytes // GRANULE_NBYTES))

    def note(self, chunk: int, kind: StateKind, granule: int, digests: list[int]) -> None:
        """Stores the checksums of written granules, from the `granule`th on."""
        first = self._digest_index(chunk, kind, granule)
        self._digests[first : first + len(digests)] = array("Q", digests)

    def digests(self, chunk: int, kind: StateKind, granule: int, count: int) -> list[int]:
        """Returns the checksums of granules from the `granule`th on; 0 for unwritten ones."""
        first = self._digest_index(chunk, kind, granule)
        return self._digests[first : first + count].tolist()

    def missing(self) -> tuple[int, StateKind] | None:
        """Returns the first chunk and state that is not completely written, None if all are."""
        for chunk in range(len(self._extents)):
            for kind in self._geometry.kinds:
                nbytes = self.nbytes(chunk, kind)
                if nbytes == 0 or 0 in self.digests(chunk, kind, 0, -(-nbytes // GRANULE_NBYTES)):
                    return chunk, kind
        return None

    def pack(self, record: CommitRecord, nonce: str) -> tuple[bytes, int]:
        """Returns the manifest's bytes and their digest. `record`: the commit of the manifest."""
        body = self._extents.tobytes() + self._nbytes.tobytes() + self._digests.tobytes()
        raw = (pack_commit(record, nonce) + body).ljust(self._geometry.manifest_nbytes, b"\0")
        return raw, xxhash.xxh3_64_intdigest(raw)

    @classmethod
    def unpack(cls, raw: bytes, geometry: StoreGeometry) -> "Manifest":
        """Reads a manifest. The caller has checked its digest."""
        step_map = cls(geometry)
        at = RECORD_NBYTES
        for numbers in (step_map._extents, step_map._nbytes, step_map._digests):
            nbytes = 8 * len(numbers)
            numbers[:] = array("Q", raw[at : at + nbytes])
            at += nbytes
        return step_map

    def _digest_index(self, chunk: int, kind: StateKind, granule: int) -> int:
        return chunk * self._granules_per_extent + self._first_granule[kind] + granule
