"""Bytes on an SSD that move in one go, in pieces that begin at whole granules: where they lie, and their checksums."""

import errno
from abc import ABC, abstractmethod
from dataclasses import dataclass

from windlass.storage.ids import ChunkKey, StateKind, Step
from windlass.storage.integrity import GRANULE_NBYTES, StepNotAllowed, StoreCorrupt, StoreIoError, granule_digests
from windlass.storage.memory import ALIGNMENT_NBYTES
from windlass.storage.store.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Region(ABC):
    """A place that was checked once, so that its pieces need no further check."""

    store: str  # the SSD and the job, for people
    offset: int  # on the SSD
    nbytes: int  # that are to move

    @abstractmethod
    def __str__(self) -> str:
        """SSD, job, place and what lies there, for people."""

    @abstractmethod
    def keep_digests(self, granule: int, digests: list[int]) -> None:
        """Note checksums from the `granule`th on."""

    @abstractmethod
    def kept_digests(self, granule: int, count: int) -> list[int]:
        """The checksums noted from the `granule`th on; 0 for what has not been written."""

    def note_written(self, start: int, buffer: memoryview) -> None:
        """Keep the checksums of what is being, or has been, written from `buffer` at byte `start`, a granule's."""
        self.keep_digests(start // GRANULE_NBYTES, granule_digests(buffer))

    def verify(self, start: int, buffer: memoryview) -> None:
        """Compare what was read from byte `start`, a granule's, with what was written.

        Raises:
            StoreCorrupt: it is not the same.
            StepNotAllowed: it has never been written whole.
        """
        found = granule_digests(buffer)
        expected = self.kept_digests(start // GRANULE_NBYTES, len(found))
        if found != expected:
            bad = next(i for i, digest in enumerate(found) if digest != expected[i])
            offset = self.offset + start + bad * GRANULE_NBYTES
            if expected[bad] == 0:
                raise StepNotAllowed(f"{self}: the bytes at offset {offset} of the SSD have not been written yet")
            raise StoreCorrupt(
                f"{self}: the bytes at offset {offset} of the SSD are not those that were written (their checksum is "
                "wrong); the SSD, its cable or the memory is faulty: replace it, and start again from a checkpoint"
            )

    def io_error(self, verb: str, error: Exception) -> StoreIoError:
        """The error of a transfer that failed, with what to do."""
        advice = "check the disk"
        if isinstance(error, OSError) and error.errno == errno.EINVAL:
            advice = f"O_DIRECT needs buffers aligned to {ALIGNMENT_NBYTES} bytes"
        elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
            advice = "the file system has given the space away that was reserved: delete files there"
        return StoreIoError(f"{self}: could not {verb}: {error}; {advice}")


@dataclass(frozen=True, slots=True)
class StateRegion(Region):
    """Of a state of a chunk, or of its gradient. A last, partly filled chunk moves less than it could."""

    key: ChunkKey
    kind: StateKind
    step: Step
    extent: int
    chunk: int  # its place among those of this SSD
    step_map: Manifest  # that has its checksums

    def __str__(self) -> str:
        return (
            f"{self.store}, extent {self.extent} ({self.kind} of block {self.key.block}, chunk {self.key.chunk}, step "
            f"{self.step})"
        )

    def keep_digests(self, granule: int, digests: list[int]) -> None:
        self.step_map.note(self.chunk, self.kind, granule, digests)

    def kept_digests(self, granule: int, count: int) -> list[int]:
        return self.step_map.digests(self.chunk, self.kind, granule, count)
