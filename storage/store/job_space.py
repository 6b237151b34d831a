"""A job's space on one SSD: the store of its states, and its scratch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from windlass.storage.integrity import StoreError, StoreMissing
from windlass.storage.ssd import Volume
from windlass.storage.store.format import CommitRecord, StoreGeometry
from windlass.storage.store.scratch import Scratch
from windlass.storage.store.tensor_store import TensorStore


@dataclass(frozen=True, slots=True)
class JobSpace:
    """A job's space on one SSD, open for one attempt."""

    volume: Volume
    store: TensorStore
    scratch: Scratch

    @classmethod
    def open(
        cls,
        path: Path | str,
        geometry: StoreGeometry,
        *,
        direct: bool = True,
        scratch_slot_nbytes: int = 1 << 20,
        num_scratch_slots: int = 0,
    ) -> Self:
        """Creates or opens a job's store, and reserves its scratch for this attempt.

        The caller must call `resume_from` of the store before any transfer. `path` is an SSD directory or a raw
        device. `direct=False` is for file systems without O_DIRECT.

        Raises:
            StoreError: the store on the SSD was made for another geometry, damaged, or taken by a newer attempt.
            InsufficientSpaceError: the SSD is too full for the model states, or for the scratch.
        """
        volume = Volume.open(path, direct=direct)
        try:
            store = _create_or_open(volume, geometry)
            return cls(volume, store, store.reserve_scratch(scratch_slot_nbytes, num_scratch_slots))
        except BaseException:
            volume.close()
            raise

    def commits(self) -> list[CommitRecord]:
        """Returns the commit records of this SSD, oldest first."""
        return self.store.commits()

    def held_nbytes(self) -> int:
        """Returns the bytes of the SSD that the job has. Raises StoreError."""
        return self.volume.held_nbytes(self.store.geometry.job)

    def close(self, *, delete: bool = False) -> None:
        """Closes the SSD. No transfer may be in flight. With `delete`, the job's space becomes free."""
        if delete:
            TensorStore.delete(self.volume, self.store.geometry.job)
        self.volume.close()


def _create_or_open(volume: Volume, wanted: StoreGeometry) -> TensorStore:
    try:
        store = TensorStore.open(volume, wanted.job, wanted.attempt)
    except StoreMissing:
        return TensorStore.create(volume, wanted)
    found = store.geometry
    if replace(found, attempt=wanted.attempt) != wanted:
        names = ("ssd", "ssd_weights", "rank", "formats", "chunk_numel", "chunks_per_block")
        differences = "; ".join(
            f"{name} {getattr(found, name)}, now {getattr(wanted, name)}"
            for name in names
            if getattr(found, name) != getattr(wanted, name)
        )
        raise StoreError(
            f"{store.name}: the states were laid out for other settings ({differences}); a job's model and SSDs "
            "can't change while it lives: restore the settings, or submit the job again"
        )
    return store
