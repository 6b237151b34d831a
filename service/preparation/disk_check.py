"""A check that the models of a job will fit on the home's disk, made before the job trains."""

from collections.abc import Sequence
from pathlib import Path

from windlass.amounts import bytes_text
from windlass.engine.training_config import FinalModel
from windlass.service.installation import Settings
from windlass.service.preparation.pipeline import PreparationError
from windlass.service.validation import JobSettings, WindlassSettings
from windlass.storage.ids import Formats, Precision
from windlass.storage.memory import directory_free_nbytes
from windlass.storage.sql import Job


def check_model_room(settings: Settings, job: Job, *, num_params: int, total_steps: int) -> str | None:
    """Returns a warning if the job's checkpoints may not fit on the disk, or None if all fits.

    It compares with the space that is free now. Future models of other jobs are not counted.

    Raises:
        PreparationError: the job's model alone does not fit.
    """
    asked = JobSettings.from_row(job.method, job.windlass, job.seed).windlass
    folder = settings.fine_tuned_dir
    model_nbytes = num_params * (4 if asked.precision is Precision.FP32 else 2)
    states_nbytes = int(2 * num_params * _itemsize(asked) * _share_beside(folder, settings.ssd_dirs))
    free_nbytes = directory_free_nbytes(folder)
    beside = f", beside {bytes_text(states_nbytes)} of states on the same disk" if states_nbytes else ""
    if model_nbytes + states_nbytes > free_nbytes:
        raise PreparationError(
            "does_not_fit",
            f"the model that the job makes takes {bytes_text(model_nbytes)}{beside}; {bytes_text(free_nbytes)} are "
            f"free where it would lie, in {folder}. Delete jobs, models and files, or move the home to a larger disk",
        )
    num_kept = _num_checkpoints(asked, total_steps)
    if num_kept and (1 + num_kept) * model_nbytes + states_nbytes > free_nbytes:
        return (
            f"the model and up to {num_kept} checkpoints take {bytes_text((1 + num_kept) * model_nbytes)}{beside}; "
            f"{bytes_text(free_nbytes)} are free where they would lie, in {folder}. The job waits where there is no "
            "room: delete jobs, models and checkpoints in time, or submit it again with keep_checkpoints"
        )
    return None


def _num_checkpoints(asked: WindlassSettings, total_steps: int) -> int:
    """Returns the maximum number of checkpoints kept at once, besides the model.

    Those saved by minutes count only if limited.
    """
    by_steps = (total_steps - 1) // asked.checkpoint_every if asked.checkpoint_every else 0
    if asked.keep_checkpoints is not None:
        by_steps = asked.keep_checkpoints if asked.checkpoint_minutes else min(by_steps, asked.keep_checkpoints)
    return by_steps + (asked.keep_best or asked.final_model is FinalModel.BEST)


def _itemsize(asked: WindlassSettings) -> int:
    return sum(Formats(asked.precision, asked.state_precision).itemsizes.values())


def _share_beside(folder: Path, ssd_dirs: Sequence[Path]) -> float:
    """Returns the share of the states that lies on the same disk as the folder."""
    disk = folder.stat().st_dev
    beside = [path for path in ssd_dirs if path.is_dir() and path.stat().st_dev == disk]
    return len(beside) / len(ssd_dirs) if ssd_dirs else 0.0
