"""A job's scratch on one SSD: slots of one size for bytes that are read again by the attempt that wrote them, or never.

Nothing of it is in a commit. Which units are a job's scratch stands in the volume's allocation table; checksums are in
memory only, so what an earlier attempt has left cannot be read.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from windlass.storage.integrity import GRANULE_NBYTES, StepNotAllowed
from windlass.storage.memory import ALIGNMENT_NBYTES
from windlass.storage.ssd import Demand
from windlass.storage.store.regions import Region


def scratch_demand(slot_nbytes: int, num_slots: int) -> Demand:
    """What an SSD must have room for."""
    return Demand(head_nbytes=0, extent_nbytes=slot_nbytes, num_extents=num_slots)


@dataclass(frozen=True, slots=True)
class ScratchRegion(Region):
    """The first bytes of a slot."""

    slot: int
    digests: "array[int]"  # of the whole scratch
    first_digest: int  # of this slot

    def __str__(self) -> str:
        return f"{self.store}, scratch slot {self.slot} (swapped activations)"

    def keep_digests(self, granule: int, digests: list[int]) -> None:
        at = self.first_digest + granule
        self.digests[at : at + len(digests)] = array("Q", digests)

    def kept_digests(self, granule: int, count: int) -> list[int]:
        at = self.first_digest + granule
        return self.digests[at : at + count].tolist()


class Scratch:
    """Who may use which slot is its caller's to know. Safe from many threads, as long as they use different slots."""

    def __init__(
        self, store: str, slot_nbytes: int, offsets: Sequence[int], *, check_writable: Callable[[], object]
    ) -> None:
        """`store`: the SSD and the job, for people; `offsets` of the slots, on the SSD; `check_writable` raises."""
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
        """Where to write `nbytes`, which fill `slots` in their order, but for the last. What was there is gone.

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
        """Where to read what was written there, the same number of bytes.

        Raises:
            StepNotAllowed: this attempt has written something else there, or nothing.
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
