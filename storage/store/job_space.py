"""A job's space on one SSD: the store of its states, and its scratch."""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from windlass.storage.integrity import StoreError, StoreMissing
from windlass.storage.ssd import Volume, has_volume
from windlass.storage.store.format import StoreGeometry
from windlass.storage.store.recovery import StoreJournal
from windlass.storage.store.scratch import Scratch
from windlass.storage.store.tensor_store import TensorStore, stored_commits, stored_geometry


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

    def journal(self) -> StoreJournal:
        """Returns the job's commits on this SSD."""
        return StoreJournal(f"SSD {self.volume.path}", tuple(self.store.commits()))

    def held_nbytes(self) -> int:
        """Returns the bytes of the SSD that the job has. Raises StoreError."""
        return self.volume.held_nbytes(self.store.geometry.job)

    def close(self, *, delete: bool = False) -> None:
        """Closes the SSD. No transfer may be in flight. With `delete`, the job's space becomes free."""
        if delete:
            TensorStore.delete(self.volume, self.store.geometry.job)
        self.volume.close()


def read_journal(path: Path | str, geometry: StoreGeometry, *, direct: bool = True) -> StoreJournal:
    """Returns a job's commits on an SSD. It writes nothing, so attempts whose SSDs are not all there leave no trace.

    Raises:
        StoreError: the store on the SSD was made for another geometry, or is damaged.
    """
    where = f"SSD {path}"
    if not has_volume(Path(path)):
        return StoreJournal(where, ())
    with contextlib.closing(Volume.open(path, direct=direct)) as volume:
        _require_geometry(volume, geometry)
        return StoreJournal(where, tuple(stored_commits(volume, geometry.job)))


def _create_or_open(volume: Volume, wanted: StoreGeometry) -> TensorStore:
    _require_geometry(volume, wanted)
    try:
        return TensorStore.open(volume, wanted.job, wanted.attempt)
    except StoreMissing:
        return TensorStore.create(volume, wanted)


def _require_geometry(volume: Volume, wanted: StoreGeometry) -> None:
    """Raises StoreError if an SSD has a store of the job with another geometry. A missing one is made."""
    found = stored_geometry(volume, wanted.job)
    if found is None or replace(found, attempt=wanted.attempt) == wanted:
        return
    name = f"SSD {volume.path}, job {wanted.job}"
    if found.epoch != wanted.epoch:
        raise StoreError(
            f"{name}: the states are of layout epoch {found.epoch}, and the job's chunks were dealt to its SSDs "
            f"in epoch {wanted.epoch}: this SSD was away meanwhile, or the job's folder is a copy from another time; "
            "the job cannot use these states"
        )
    names = ("ssd", "ssd_weights", "rank", "formats", "chunk_numel", "chunks_per_block")
    differences = "; ".join(
        f"{field} {getattr(found, field)}, now {getattr(wanted, field)}"
        for field in names
        if getattr(found, field) != getattr(wanted, field)
    )
    raise StoreError(
        f"{name}: the states were laid out for other settings ({differences}); a job's model and SSDs can't change "
        "while it lives: restore the settings, or submit the job again"
    )
