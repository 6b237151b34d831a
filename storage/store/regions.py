"""Regions of an SSD: the places of transfers, and their checksums. Pieces of a region begin at whole granules."""

import errno
from abc import ABC, abstractmethod
from dataclasses import dataclass

from windlass.storage.ids import ChunkKey, StateKind, Step
from windlass.storage.integrity import GRANULE_NBYTES, StepNotAllowed, StoreCorrupt, StoreIoError, granule_digests
from windlass.storage.memory import ALIGNMENT_NBYTES
from windlass.storage.store.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Region(ABC):
    """A place for a transfer. It is checked once, so its pieces need no further check."""

    store: str  # the SSD and the job, for messages
    offset: int  # on the SSD
    nbytes: int  # to transfer

    @abstractmethod
    def __str__(self) -> str:
        """Describes the SSD, the job, the place and its contents, for messages."""

    @abstractmethod
    def keep_digests(self, granule: int, digests: list[int]) -> None:
        """Stores checksums from the `granule`th on."""

    @abstractmethod
    def kept_digests(self, granule: int, count: int) -> list[int]:
        """Returns the stored checksums from the `granule`th on; 0 for unwritten granules."""

    def note_written(self, start: int, buffer: memoryview) -> None:
        """Stores the checksums of `buffer`, which is written at byte `start`, the start of a granule."""
        self.keep_digests(start // GRANULE_NBYTES, granule_digests(buffer))

    def verify(self, start: int, buffer: memoryview) -> None:
        """Verifies bytes that were read from byte `start`, the start of a granule, by their checksums.

        Raises:
            StoreCorrupt: they are not the bytes that were written.
            StepNotAllowed: they were never completely written.
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
        """Returns the error for a failed transfer, with advice."""
        advice = "check the disk"
        if isinstance(error, OSError) and error.errno == errno.EINVAL:
            advice = f"O_DIRECT needs buffers aligned to {ALIGNMENT_NBYTES} bytes"
        elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
            advice = "the file system has given the space away that was reserved: delete files there"
        return StoreIoError(f"{self}: could not {verb}: {error}; {advice}")


@dataclass(frozen=True, slots=True)
class StateRegion(Region):
    """The region of a chunk's state or gradient. For a block's last chunk it may be smaller than the chunk size."""

    key: ChunkKey
    kind: StateKind
    step: Step
    extent: int
    chunk: int  # its index among the chunks of this SSD
    step_map: Manifest  # holds its checksums

    def __str__(self) -> str:
        return (
            f"{self.store}, extent {self.extent} ({self.kind} of block {self.key.block}, chunk {self.key.chunk}, step "
            f"{self.step})"
        )

    def keep_digests(self, granule: int, digests: list[int]) -> None:
        self.step_map.note(self.chunk, self.kind, granule, digests)

    def kept_digests(self, granule: int, count: int) -> list[int]:
        return self.step_map.digests(self.chunk, self.kind, granule, count)
