"""What a job has on this machine besides its record: model states on the SSDs, an arena, half-written exports."""

import logging
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from windlass.engine.checkpoint import remove_partial_folders
from windlass.service.installation import Settings
from windlass.service.jobs import ARENA_DIR
from windlass.service.validation import fine_tuned_model_id, model_dir
from windlass.storage.ids import JobId
from windlass.storage.integrity import StoreError, StoreMissing
from windlass.storage.memory import remove_leftovers
from windlass.storage.sql import Job
from windlass.storage.ssd import SUPERBLOCK_MAGIC, SUPERBLOCK_OFFSETS, VOLUME_FILE, Volume, is_block_device
from windlass.storage.store import TensorStore, last_attempt

_LOG = logging.getLogger(__name__)
_Result = TypeVar("_Result")


def output_dir(settings: Settings, job: Job) -> Path:
    """Where a job's model goes; its checkpoints go beside it."""
    model = fine_tuned_model_id(job.model, job.suffix, job.id)
    return model_dir(model, models_dir=settings.models_dir, fine_tuned_dir=settings.fine_tuned_dir)


def jobs_with_states(settings: Settings) -> set[JobId]:
    """Jobs that hold space on an SSD."""
    return {job for allocations in _on_each_volume(settings, Volume.allocations) for job in allocations}


def states_nbytes(settings: Settings) -> dict[str, int]:
    """What the states of each job occupy on all SSDs that are there, in bytes."""
    totals: Counter[str] = Counter()
    for held in _on_each_volume(settings, _held_nbytes, level=logging.DEBUG):  # whoever asks may not be where they are
        totals.update(held)
    return dict(totals)


def last_attempts(settings: Settings) -> dict[str, int]:
    """The last attempt at each job whose states lie on SSDs that are there, as the states know."""
    found: dict[str, int] = {}
    for known in _on_each_volume(
        settings, lambda volume: {job: last_attempt(volume, job) for job in volume.allocations()}
    ):
        for job, attempt in known.items():
            found[job] = max(found.get(job, 0), attempt or 0)
    return found


def remove_states(settings: Settings, job: Job) -> None:
    """Free the SSD and disk space of a job that is over and whose processes are gone.

    The runner has done so unless it was killed. What lies on an SSD that is not there now is freed when the next
    dispatcher starts and finds it.
    """
    free_space(settings, JobId(job.id), output_dir(settings, job))


def free_space(settings: Settings, job: JobId, target: Path) -> None:
    """The same of a job of which no more is known. `target`: where its model goes."""
    free_states(settings, job)
    try:
        remove_partial_folders(target, and_checkpoints=True)
    except OSError as error:
        _LOG.warning("half-written exports to %s could not be removed: %s", target, error)


def free_states(settings: Settings, job: JobId) -> None:
    """Free what a job holds on SSDs that are there."""
    _on_each_volume(settings, lambda volume: TensorStore.delete(volume, job))


def remove_arenas() -> None:
    """Free the shared memory of runners that are gone."""
    remove_leftovers(ARENA_DIR)


def _on_each_volume(
    settings: Settings, act: Callable[[Volume], _Result], *, level: int = logging.WARNING
) -> list[_Result]:
    """What `act` gives for every SSD that can be opened; the others are logged. Makes no volume where there is none."""
    results: list[_Result] = []
    for path in settings.ssd_dirs:
        try:
            if not has_volume(path):
                continue
            # No states are moved from here, so it does not matter whether the file system takes O_DIRECT.
            volume = Volume.open(path, direct=False)
            try:
                results.append(act(volume))
            finally:
                volume.close()
        except (OSError, StoreError, ValueError) as error:
            _LOG.log(level, "SSD %s is passed over: %s", path, error)
    return results


def _held_nbytes(volume: Volume) -> dict[str, int]:
    held: dict[str, int] = {}
    for job in volume.allocations():
        with suppress(StoreMissing):  # freed meanwhile
            held[job] = volume.held_nbytes(job)
    return held


def has_volume(path: Path) -> bool:
    """Whether an SSD carries a trace of a volume: opening would make one of a blank directory or device."""
    try:
        fd = os.open(path if is_block_device(path) else path / VOLUME_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.is_dir():
            return False
        raise
    try:
        return any(os.pread(fd, len(SUPERBLOCK_MAGIC), offset) == SUPERBLOCK_MAGIC for offset in SUPERBLOCK_OFFSETS)
    finally:
        os.close(fd)
