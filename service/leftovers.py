"""What a job has on this machine besides its record: model states on the SSDs, an arena, half-written exports."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from windlass.engine.partial_folder import remove_partial_folders
from windlass.service.job_specs import ARENA_DIR
from windlass.service.model_ids import fine_tuned_model_id, model_dir
from windlass.service.settings import Settings
from windlass.storage.arena import remove_leftovers
from windlass.storage.ids import JobId
from windlass.storage.raw_device import is_block_device
from windlass.storage.sql.models import Job
from windlass.storage.store_errors import StoreError
from windlass.storage.tensor_store import TensorStore
from windlass.storage.volume import VOLUME_FILE, Volume
from windlass.storage.volume_format import SUPERBLOCK_MAGIC, SUPERBLOCK_OFFSETS

_LOG = logging.getLogger(__name__)
_Result = TypeVar("_Result")


def output_dir(settings: Settings, job: Job) -> Path:
    """Where a job's model goes; its checkpoints go beside it."""
    model = fine_tuned_model_id(job.model, job.suffix, job.id)
    return model_dir(model, models_dir=settings.models_dir, fine_tuned_dir=settings.fine_tuned_dir)


def jobs_with_states(settings: Settings) -> set[JobId]:
    """Jobs that hold space on an SSD."""
    return {job for allocations in _on_each_volume(settings, Volume.allocations) for job in allocations}


def remove_states(settings: Settings, job: Job) -> None:
    """Free the SSD and disk space of a job that is over and whose processes are gone.

    The runner has done so unless it was killed. What lies on an SSD that is not there now is freed when the next
    dispatcher starts and finds it.
    """
    _on_each_volume(settings, lambda volume: TensorStore.delete(volume, JobId(job.id)))
    target = output_dir(settings, job)
    try:
        remove_partial_folders(target, and_checkpoints=True)
    except OSError as error:
        _LOG.warning("half-written exports to %s could not be removed: %s", target, error)


def remove_arenas() -> None:
    """Free the shared memory of runners that are gone."""
    remove_leftovers(ARENA_DIR)


def _on_each_volume(settings: Settings, act: Callable[[Volume], _Result]) -> list[_Result]:
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
            _LOG.warning("SSD %s is passed over: %s", path, error)
    return results


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
