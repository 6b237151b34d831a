"""A job's space on one SSD: the store of its states, and its scratch."""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from windlass.storage.ids import JobId, LayoutEpoch
from windlass.storage.integrity import StoreError, StoreMissing
from windlass.storage.ssd import Volume, has_volume
from windlass.storage.store.format import StoreGeometry, space_name
from windlass.storage.store.recovery import StoreJournal
from windlass.storage.store.scratch import Scratch
from windlass.storage.store.tensor_store import TensorStore, spaces_in, stored_commits, stored_geometry

_SLOT_NBYTES = 1 << 20  # of scratch, where the caller says nothing else


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
        scratch_slot_nbytes: int = _SLOT_NBYTES,
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

    @classmethod
    def create(cls, path: Path | str, geometry: StoreGeometry, *, direct: bool = True) -> Self:
        """Creates a job's store of a new layout epoch, beside those of other epochs. See `open`.

        Raises:
            StoreExists: the job has a store of that epoch.
        """
        volume = Volume.open(path, direct=direct)
        try:
            store = TensorStore.create(volume, geometry)
            return cls(volume, store, store.reserve_scratch(_SLOT_NBYTES, 0))
        except BaseException:
            volume.close()
            raise

    def journal(self) -> StoreJournal:
        """Returns the job's commits on this SSD."""
        return StoreJournal(f"SSD {self.volume.path}", tuple(self.store.commits()))

    def held_nbytes(self) -> int:
        """Returns the bytes of the SSD that the job has. Raises StoreError."""
        return self.volume.held_nbytes(space_name(self.store.geometry.job, self.store.geometry.epoch))

    def free_other_epochs(self) -> None:
        """Frees the job's stores of other layout epochs on this SSD: of a move that was given up, or already ended.

        The caller has decided that the job goes on with this one. Older attempts cannot write to the others any more.
        """
        job, epoch = self.store.geometry.job, self.store.geometry.epoch
        for other in spaces_in(self.volume).get(job, {}).keys() - {epoch}:
            TensorStore.delete(self.volume, job, other)

    def close(self, *, delete: bool = False) -> None:
        """Closes the SSD. No transfer may be in flight. With `delete`, all space of the job becomes free."""
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
        return StoreJournal(where, tuple(stored_commits(volume, geometry.job, geometry.epoch)))


def read_space(
    path: Path | str, job: JobId, epoch: LayoutEpoch, *, direct: bool = True
) -> tuple[StoreGeometry, StoreJournal] | None:
    """Returns the layout and the commits of a job's store of an epoch; None: it is not there. It writes nothing.

    Raises:
        StoreError: the store is damaged.
    """
    if not _may_have_space(path):
        return None
    with contextlib.closing(Volume.open(path, direct=direct)) as volume:
        geometry = stored_geometry(volume, job, epoch)
        if geometry is None:
            return None
        return geometry, StoreJournal(f"SSD {path}", tuple(stored_commits(volume, job, epoch)))


def delete_space(path: Path | str, job: JobId, epoch: LayoutEpoch) -> None:
    """Frees the space of a job's store of an epoch. Does nothing if it is not there."""
    if _may_have_space(path):
        with contextlib.closing(Volume.open(path, direct=False)) as volume:
            TensorStore.delete(volume, job, epoch)


def _may_have_space(path: Path | str) -> bool:
    """Returns whether an SSD is there and has a volume."""
    return Path(path).exists() and has_volume(Path(path))


def _create_or_open(volume: Volume, wanted: StoreGeometry) -> TensorStore:
    _require_geometry(volume, wanted)
    try:
        return TensorStore.open(volume, wanted.job, wanted.attempt, wanted.epoch)
    except StoreMissing:
        return TensorStore.create(volume, wanted)


def _require_geometry(volume: Volume, wanted: StoreGeometry) -> None:
    """Raises StoreError if an SSD has a store of the job with another geometry. A missing one is made."""
    found = stored_geometry(volume, wanted.job, wanted.epoch)
    epochs = {epoch for epoch, space in spaces_in(volume).get(wanted.job, {}).items() if space.is_ready}
    if (found is None and not epochs) or (found is not None and replace(found, attempt=wanted.attempt) == wanted):
        return
    name = f"SSD {volume.path}, job {wanted.job}"
    if found is None:
        raise StoreError(
            f"{name}: the states are of layout epoch {max(epochs)}, and the job's chunks were dealt to its SSDs "
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
