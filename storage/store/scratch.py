"""A job's scratch space on one SSD: slots of equal size for bytes that only the attempt that wrote them may read.

Scratch is never part of a commit. The volume's allocation table lists its units. Checksums are only in memory, so data
of earlier attempts cannot be read.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from windlass.storage.integrity import GRANULE_NBYTES, StepNotAllowed
from windlass.storage.memory import ALIGNMENT_NBYTES
from windlass.storage.ssd import Demand
from windlass.storage.store.regions import Region


def scratch_demand(slot_nbytes: int, num_slots: int) -> Demand:
    """Returns the space that the slots need on an SSD."""
    return Demand(head_nbytes=0, extent_nbytes=slot_nbytes, num_extents=num_slots)


@dataclass(frozen=True, slots=True)
class ScratchRegion(Region):
    """The first bytes of a slot."""

    slot: int
    digests: "array[int]"  # checksums of the whole scratch
    first_digest: int  # index of this slot's first checksum

    def __str__(self) -> str:
        return f"{self.store}, scratch slot {self.slot} (swapped activations)"

    def keep_digests(self, granule: int, digests: list[int]) -> None:
        at = self.first_digest + granule
        self.digests[at : at + len(digests)] = array("Q", digests)

    def kept_digests(self, granule: int, count: int) -> list[int]:
        at = self.first_digest + granule
        return self.digests[at : at + count].tolist()


class Scratch:
    """The scratch slots of a job. The caller assigns the slots. Threads may use different slots at the same time."""

    def __init__(
        self, store: str, slot_nbytes: int, offsets: Sequence[int], *, check_writable: Callable[[], object]
    ) -> None:
        """`store`: the SSD and the job, for messages. `offsets`: of the slots on the SSD.

        `check_writable`: raises an error if this attempt may not write.
        """
        if slot_nbytes <= 0 or slot_nbytes % ALIGNMENT_NBYTES:
            raise ValueError(f"a slot must be a positive multiple of {ALIGNMENT_NBYTES} bytes, not {slot_nbytes}")
        self.slot_nbytes = slot_nbytes
        self._store = store
        self._offsets = offsets
        self._check_writable = check_writable
        self._digests_per_slot = -(-slot_nbytes // GRANULE_NBYTES)
        self._digests = array("Q", [0]) * (len(offsets) * self._digests_per_slot)
        self._written = array("Q", [0]) * len(offsets)  # bytes of each slot

    def regions_to_write(self, slots: Sequence[int], nbytes: int) -> Sequence[Region]:
        """Returns the regions for writing `nbytes` to `slots` in order; the last may be partly filled.

        The previous contents of the slots are lost.

        Raises:
            StaleAttempt: a newer attempt has opened the store.
        """
        self._check_writable()
        regions = self._regions(slots, nbytes)
        for region in regions:
            self._written[region.slot] = region.nbytes
            region.keep_digests(0, [0] * self._digests_per_slot)
        return regions

    def regions_to_read(self, slots: Sequence[int], nbytes: int) -> Sequence[Region]:
        """Returns the regions for reading the bytes that were written to `slots`, with the same number of bytes.

        Raises:
            StepNotAllowed: this attempt has written another number of bytes there, or nothing.
        """
        regions = self._regions(slots, nbytes)
        for region in regions:
            if region.nbytes != self._written[region.slot]:
                raise StepNotAllowed(
                    f"{region}: cannot read {region.nbytes} bytes: {self._written[region.slot]} were written there"
                )
        return regions

    def _regions(self, slots: Sequence[int], nbytes: int) -> list[ScratchRegion]:
        size, num = self.slot_nbytes, len(slots)
        if not (num - 1) * size < nbytes <= num * size or nbytes % ALIGNMENT_NBYTES:
            raise ValueError(
                f"{self._store}: {nbytes} bytes do not fill {num} slots of {size} bytes, or are no multiple of "
                f"{ALIGNMENT_NBYTES}"
            )
        if not all(0 <= slot < len(self._offsets) for slot in slots):
            raise ValueError(f"{self._store}: slots {slots} are not all of the {len(self._offsets)} of its scratch")
        return [
            ScratchRegion(
                self._store,
                self._offsets[slot],
                min(size, nbytes - i * size),
                slot,
                self._digests,
                slot * self._digests_per_slot,
            )
            for i, slot in enumerate(slots)
        ]
