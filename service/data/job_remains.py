"""A job's data on this machine besides its rows: model states on SSDs, an arena, incomplete exports."""

import logging
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
from windlass.storage.ssd import Volume, has_volume
from windlass.storage.store import TensorStore, last_attempt, spaces_in

_LOG = logging.getLogger(__name__)
_Result = TypeVar("_Result")


def output_dir(settings: Settings, job: Job) -> Path:
    """Returns the folder of a job's model. The job's checkpoints lie beside it."""
    model = fine_tuned_model_id(job.model, job.suffix, job.id)
    return model_dir(model, models_dir=settings.models_dir, fine_tuned_dir=settings.fine_tuned_dir)


def jobs_with_states(settings: Settings) -> set[JobId]:
    """Returns the jobs that hold space on an SSD."""
    return {job for jobs in _on_each_volume(settings, spaces_in) for job in jobs}


def states_nbytes(settings: Settings) -> dict[str, int]:
    """Returns the bytes that each job's states occupy on all SSDs that are present."""
    totals: Counter[str] = Counter()
    # an SSD may be absent; that is no news here, so it is not logged as a warning
    for held in _on_each_volume(settings, _held_nbytes, level=logging.DEBUG):
        totals.update(held)
    return dict(totals)


def last_attempts(settings: Settings) -> dict[str, int]:
    """Returns the last attempt of each job with states on the present SSDs, as the states record it."""
    found: dict[str, int] = {}
    for known in _on_each_volume(
        settings, lambda volume: {job: last_attempt(volume, job) for job in spaces_in(volume)}
    ):
        for job, attempt in known.items():
            found[job] = max(found.get(job, 0), attempt or 0)
    return found


def remove_states(settings: Settings, job: Job) -> None:
    """Frees the SSD and disk space of an ended job whose processes are gone.

    The runner has done so unless it was killed. If an SSD is absent, the next dispatcher that finds it frees the space.
    """
    free_space(settings, JobId(job.id), output_dir(settings, job))


def free_space(settings: Settings, job: JobId, target: Path) -> None:
    """Frees the SSD and disk space of a job whose row is gone. `target`: the folder of its model."""
    free_states(settings, job)
    try:
        remove_partial_folders(target, and_checkpoints=True)
    except OSError as error:
        _LOG.warning("half-written exports to %s could not be removed: %s", target, error)


def free_states(settings: Settings, job: JobId) -> None:
    """Frees a job's states on the present SSDs."""
    _on_each_volume(settings, lambda volume: TensorStore.delete(volume, job))


def remove_arenas() -> None:
    """Frees the shared memory of runners that are gone."""
    remove_leftovers(ARENA_DIR)


def _on_each_volume(
    settings: Settings, act: Callable[[Volume], _Result], *, level: int = logging.WARNING
) -> list[_Result]:
    """Calls `act` for every SSD that can be opened, and returns the results. Other SSDs are logged.

    It never creates a volume.
    """
    results: list[_Result] = []
    for path in settings.ssd_dirs:
        try:
            if not has_volume(path):
                continue
            # No states are read or written here, so O_DIRECT is not needed.
            volume = Volume.open(path, direct=False)
            try:
                results.append(act(volume))
            finally:
                volume.close()
        except (OSError, StoreError, ValueError) as error:
            _LOG.log(level, "SSD %s is passed over: %s", path, error)
    return results


def _held_nbytes(volume: Volume) -> dict[str, int]:
    held: Counter[str] = Counter()
    for job, spaces in spaces_in(volume).items():
        for space in spaces.values():
            with suppress(StoreMissing):  # freed meanwhile
                held[job] += volume.held_nbytes(space.job)
    return held
